"""What a drafter hands to verification, and what verification answers."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Proposal:
    """Draft tokens of one request with the very distribution they were drawn from.

    token_ids: [l] int64 target ids. probs: [l, S] float32, the tensor that was sampled from; None when drafting was
    greedy (every token is the argmax, its distribution one-hot). support: [S] distinct target ids that the columns of
    `probs` stand for, all else having probability 0; None when they are the target's vocabulary (S = V).
    columns: [l] int64, the tokens' places in `support`; None together with it.
    confidence_logits: [l] float32, or None without a confidence head.
    """

    token_ids: Tensor
    probs: Tensor | None
    confidence_logits: Tensor | None
    support: Tensor | None = None
    columns: Tensor | None = None

    @classmethod
    def nothing(cls, device: torch.device) -> "Proposal":
        """No token at all."""
        return cls(torch.empty(0, dtype=torch.long, device=device), None, None)

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.numel())

    def first(self, num_tokens: int) -> "Proposal":
        """The leading tokens of the proposal; what is left out was never proposed."""
        if num_tokens >= self.num_tokens:
            return self
        cut = slice(num_tokens)
        return Proposal(
            token_ids=self.token_ids[cut],
            probs=None if self.probs is None else self.probs[cut],
            confidence_logits=None if self.confidence_logits is None else self.confidence_logits[cut],
            support=self.support,
            columns=None if self.columns is None else self.columns[cut],
        )

    def drawn_probs(self) -> Tensor:
        """[l] float32: the probability each token was drawn with."""
        assert self.probs is not None, "a greedy proposal carries no distribution"
        columns = self.token_ids if self.columns is None else self.columns
        return self.probs.gather(1, columns.unsqueeze(1)).squeeze(1)

    def subtract_from(self, target_row: Tensor, slot: int) -> Tensor:
        """p_t - p_d of a slot over the target's vocabulary: [V]. target_row: [V]."""
        assert self.probs is not None, "a greedy proposal carries no distribution"
        if self.support is None:
            return target_row - self.probs[slot]
        return target_row.index_add(0, self.support, self.probs[slot], alpha=-1)


@dataclass(frozen=True)
class Verdict:
    """num_accepted draft tokens stand; next_id is the target's own token after them."""

    num_accepted: int
    next_id: int

    @property
    def accepted_length(self) -> int:
        """Committed tokens of the round, the bonus or correction token included."""
        return self.num_accepted + 1
