"""The first level of drafting: what the text itself repeats is copied, the drafter is asked about the rest.

Legend: k slot of a copied token.

    every committed token    extend: tells how far the copy of this step was right, used or not, then indexes it
    every step               look_up: what followed the longest suffix that stood before; free, no model is run

Which level a request takes in a step is decided by past tokens alone, so output stays lossless.
Source: prompt lookup decoding; two levels as in ALGORITHMS §2.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dspark.drafters.ngram import NGramConfig, NGramDrafter, NGramState
from dspark.engine.estimates import AcceptanceEstimate, PriorEstimate
from dspark.speculation.proposal import Proposal

LIKELY = 0.5  # survival from which on a copy is verified where no curve says what that costs


class LookupConfig(NGramConfig):
    """What counts as a repetition. Longer matches than for a drafter of its own: below it there is a better one."""

    block_size: int = 15
    min_match: int = 4
    max_match: int = 6


@dataclass
class CopyMemory:
    """Of one request. copied: the copy looked up in this step, [] without a match; estimate: how far copies hold.

    is_used: the step verifies the copy, in place of the drafter's proposal.
    """

    state: NGramState
    estimate: AcceptanceEstimate
    copied: list[int] = field(default_factory=list)
    is_used: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens it was told."""
        return self.state.num_tokens

    def survival(self) -> list[float]:
        """Expected survival of the copied tokens, from how far earlier copies held."""
        return self.estimate.survival(len(self.copied))

    def proposal(self, device: torch.device) -> Proposal:
        """The copy, proposed with certainty."""
        return Proposal(torch.tensor(self.copied, dtype=torch.long, device=device), None, None)


class Lookup:
    """Copies for many requests; what is learnt of how far copies hold starts the next request's estimate."""

    def __init__(self, config: LookupConfig) -> None:
        self.block_size = config.block_size
        self._drafter = NGramDrafter(config)
        self._prior = PriorEstimate()

    def new_memory(self) -> CopyMemory:
        return CopyMemory(self._drafter.new_state(), AcceptanceEstimate(self._prior))

    def look_up(self, memory: CopyMemory, max_tokens: int) -> None:
        """Find this step's copy, at most so many tokens."""
        most = max(0, min(max_tokens, self.block_size))
        memory.copied = self._drafter.copy(memory.state, most)
        memory.is_used = False

    def extend(self, memory: CopyMemory, committed_ids: Sequence[int]) -> None:
        """Take committed tokens in. They judge the copy as verification would, whether it was verified or not."""
        judged = list(zip(memory.copied, committed_ids, strict=False))
        if judged:
            wrong = [k for k, (copied, committed) in enumerate(judged) if copied != committed]
            memory.estimate.update(len(judged), wrong[0] if wrong else len(judged))
        memory.copied = []
        self._drafter.extend_ids(memory.state, committed_ids)


def num_likely(survival: Sequence[float]) -> int:
    """Copied tokens that rather stand than fall. survival: from past rounds, non-increasing."""
    return sum(chance >= LIKELY for chance in survival)
