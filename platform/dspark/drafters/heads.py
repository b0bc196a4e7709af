"""Heads on top of the backbone: the sequential (Markov) heads and the confidence head.

Legend: V target vocabulary, V' draft vocabulary, r Markov rank, d hidden, G block size; x_{k-1} token before slot k.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

from dspark.drafters.config import DrafterConfig


class SequentialHead(Protocol):
    """B_k = W_2 v_k: a bias on slot k's base logits that knows the tokens before it, v_k: [..., r].

    What v_k is made of is the head's own: `step` for one slot after the other, `unroll` for whole blocks at once.
    It computes in the type of its own weights, whatever that of h.
    Previous tokens are target ids; the bias is over draft ids.
    """

    markov_w2: nn.Linear

    def embed(self, previous_ids: Tensor) -> Tensor:
        """W_1[x_{k-1}]: [..., r]; the confidence head is given it too."""
        ...

    def step(self, h: Tensor, embedded: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(v_k, state after slot k). h: [..., d]; embedded, state: [..., r]; the state before slot 0 is None."""
        ...

    def unroll(self, h: Tensor, embedded: Tensor) -> Tensor:
        """v of all slots: [..., G, r]. h: [..., G, d]; embedded: [..., G, r]."""
        ...

    def bias(self, vector: Tensor) -> Tensor:
        """[..., V']. vector: [..., r]."""
        ...


class VanillaMarkovHead(nn.Module):
    """v_k = W_1[x_{k-1}]. Source: DSpark §3.2, eq. 4-5."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)

    def embed(self, previous_ids: Tensor) -> Tensor:
        return self.markov_w1(previous_ids)

    def step(self, h: Tensor, embedded: Tensor, state: Tensor | None) -> tuple[Tensor, None]:
        return embedded, None

    def unroll(self, h: Tensor, embedded: Tensor) -> Tensor:
        return embedded

    def bias(self, vector: Tensor) -> Tensor:
        return self.markov_w2(vector)


class GatedMarkovHead(nn.Module):
    """v_k = sigmoid(W_g [h_k; W_1[x_{k-1}]] + b_g) * W_1[x_{k-1}]. Source: DeepSpec; the paper does not mention it."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def embed(self, previous_ids: Tensor) -> Tensor:
        return self.markov_w1(previous_ids)

    def step(self, h: Tensor, embedded: Tensor, state: Tensor | None) -> tuple[Tensor, None]:
        return self.unroll(h, embedded), None

    def unroll(self, h: Tensor, embedded: Tensor) -> Tensor:
        return torch.sigmoid(self.gate_proj(torch.cat([h.to(embedded.dtype), embedded], dim=-1))) * embedded

    def bias(self, vector: Tensor) -> Tensor:
        return self.markov_w2(vector)


class RNNMarkovHead(nn.Module):
    """v_k = tanh(o), s_k = sigmoid(g) s_{k-1} + (1 - sigmoid(g)) tanh(c), s_0 = 0: remembers its whole block.

    [g; c; o] = W [s_{k-1}; W_1[x_{k-1}]; h_k] + b. Source: DSpark §3.2.
    """

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def embed(self, previous_ids: Tensor) -> Tensor:
        return self.markov_w1(previous_ids)

    def step(self, h: Tensor, embedded: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        state = torch.zeros_like(embedded) if state is None else state
        inputs = torch.cat([state, embedded, h.to(embedded.dtype)], dim=-1)
        gate, candidate, out = self.joint_proj(inputs).chunk(3, dim=-1)
        kept = torch.sigmoid(gate)
        return torch.tanh(out), kept * state + (1.0 - kept) * torch.tanh(candidate)

    def unroll(self, h: Tensor, embedded: Tensor) -> Tensor:
        state, vectors = None, []
        for slot in range(h.shape[-2]):
            vector, state = self.step(h[..., slot, :], embedded[..., slot, :], state)
            vectors.append(vector)
        return torch.stack(vectors, dim=-2)

    def bias(self, vector: Tensor) -> Tensor:
        return self.markov_w2(vector)


AnyMarkovHead = VanillaMarkovHead | GatedMarkovHead | RNNMarkovHead


def build_sequential_head(config: DrafterConfig, draft_rows: int) -> AnyMarkovHead:
    """The untrained head of the config's type. draft_rows: rows of W_2, V' or all of the target's."""
    if config.markov_head_type == "vanilla":
        return VanillaMarkovHead(config.vocab_size, draft_rows, config.markov_rank)
    kind = GatedMarkovHead if config.markov_head_type == "gated" else RNNMarkovHead
    return kind(config.vocab_size, draft_rows, config.markov_rank, config.hidden_size)


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
