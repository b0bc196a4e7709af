"""Heads on top of the backbone: the sequential (Markov) head and the confidence head.

Legend: V target vocabulary, V' draft vocabulary, r Markov rank, d hidden.
"""

import torch
from torch import Tensor, nn


class VanillaMarkovHead(nn.Module):
    """B_k = W_2 W_1[x_{k-1}], added to the base logits. Source: DSpark §3.2, eq. 4-5.

    The previous token is a target id; the bias is over draft ids.
    """

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)

    def embed(self, previous_ids: Tensor) -> Tensor:
        """W_1[x_{k-1}]: [..., r]."""
        return self.markov_w1(previous_ids)

    def bias(self, embedded: Tensor) -> Tensor:
        """[..., V']. embedded: [..., r]."""
        return self.markov_w2(embedded)


class ConfidenceHead(nn.Module):
    """Logit of c_k = P(slot k is accepted | all before it are). Source: DSpark §3.3.

    Input [h_k; W_1[x_{k-1}]], or h_k alone when the Markov part is left out.
    """

    def __init__(self, hidden_size: int, markov_rank: int) -> None:
        super().__init__()
        self.with_markov = markov_rank > 0
        self.proj = nn.Linear(hidden_size + markov_rank, 1)

    def forward(self, h: Tensor, embedded: Tensor | None) -> Tensor:
        """[...] float32 logits. h: [..., d]; embedded: [..., r]."""
        inputs = torch.cat([h, embedded.to(h.dtype)], dim=-1) if self.with_markov and embedded is not None else h
        return self.proj(inputs).squeeze(-1).float()
