"""What a drafter hands to verification, and what verification answers."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Proposal:
    """Draft tokens of one request with the very distribution they were drawn from.

    token_ids: [l] int64 target ids. probs: [l, V] float32 over target ids, the tensor that was sampled from;
    None when drafting was greedy (every token is the argmax, its distribution one-hot).
    confidence_logits: [l] float32, or None without a confidence head.
    """

    token_ids: Tensor
    probs: Tensor | None
    confidence_logits: Tensor | None

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.numel())


@dataclass(frozen=True)
class Verdict:
    """num_accepted draft tokens stand; next_id is the target's own token after them."""

    num_accepted: int
    next_id: int

    @property
    def accepted_length(self) -> int:
        """Committed tokens of the round, the bonus or correction token included."""
        return self.num_accepted + 1
