"""Accepted length and acceptance by position, counted over the rounds of speculative decoding.

Legend: k = 0..G-1 the slot of a draft token within its proposal.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

DEFINITION = (
    "accepted length (tau) = committed tokens / rounds that had a proposal: accepted draft tokens plus the target's "
    "own bonus or correction token. The token of the prefill is not counted; a stop token inside a block commits only "
    "up to itself. Conditional acceptance at position k = accepted at k / accepted at k-1; survival at k = "
    "accepted at k / rounds (rounds that proposed at least k tokens)."
)


@dataclass(frozen=True)
class Round:
    """One verification; num_accepted is the verdict's, num_committed what is left after a stop token."""

    num_proposed: int
    num_accepted: int
    num_committed: int
    confidence_logits: list[float] | None = None

    @property
    def accepted_bits(self) -> list[int]:
        """1 for each draft token that stood, 0 from the first rejected one on."""
        return [int(k < self.num_accepted) for k in range(self.num_proposed)]


class AcceptanceCounts:
    """Counts of one group of rounds. Groups merge by addition; every figure is a ratio of two sums.

    A slot behind a committed stop token is neither proposed nor accepted: nothing was decided there.
    A round without a proposal is counted apart and enters no ratio.
    """

    def __init__(self) -> None:
        self.rounds = 0
        self.committed_tokens = 0
        self.plain_rounds = 0
        self.plain_committed_tokens = 0
        self.proposed_tokens = 0
        self.after_stop_tokens = 0
        # Rounds whose proposal has a slot k, rounds that came as far as judging it, rounds that accepted it.
        self.proposed: list[int] = []
        self.reached: list[int] = []
        self.accepted: list[int] = []
        # The same over the rounds that carried confidences, with the sums of what was predicted.
        self.confident: list[int] = []
        self.confident_reached: list[int] = []
        self.confidence_sum: list[float] = []
        self.survival_sum: list[float] = []

    def add_round(
        self,
        num_proposed: int,
        num_accepted: int,
        num_committed: int,
        *,
        confidence_logits: Sequence[float] | None = None,
    ) -> None:
        """Count one verification. num_accepted is the verdict's; num_committed what is left after a stop.

        Raises: ValueError when the three do not fit together.
        """
        if not 0 <= num_accepted <= num_proposed or not 1 <= num_committed <= num_accepted + 1:
            raise ValueError(
                f"a round of {num_proposed} proposed, {num_accepted} accepted and {num_committed} committed tokens "
                "cannot be: accepted <= proposed and 1 <= committed <= accepted + 1"
            )
        if num_proposed == 0:
            self.plain_rounds += 1
            self.plain_committed_tokens += num_committed
            return
        stopped_inside = num_committed <= num_accepted
        num_judged = num_committed if stopped_inside else num_proposed
        num_standing = min(num_accepted, num_committed)
        self.rounds += 1
        self.committed_tokens += num_committed
        self.proposed_tokens += num_proposed
        self.after_stop_tokens += num_proposed - num_judged
        self._grow(num_proposed)
        for k in range(num_judged):
            self.proposed[k] += 1
            self.reached[k] += k <= num_standing
            self.accepted[k] += k < num_standing
        if confidence_logits is not None:
            self._add_confidences(confidence_logits, num_judged, num_standing)

    def merge(self, other: "AcceptanceCounts") -> "AcceptanceCounts":
        """The counts of both groups together; neither operand changes."""
        merged = AcceptanceCounts()
        for part in (self, other):
            merged._grow(len(part.proposed))
            for name, value in vars(part).items():
                mine = getattr(merged, name)
                if isinstance(value, list):
                    for k, count in enumerate(value):
                        mine[k] += count
                else:
                    setattr(merged, name, mine + value)
        return merged

    @property
    def accepted_length(self) -> float:
        """tau: committed tokens per round that had a proposal, bonus token included; NaN without such a round."""
        return _ratio(self.committed_tokens, self.rounds)

    @property
    def conditional_acceptance(self) -> list[float]:
        """Acceptance at k among the rounds whose slots before k all stood; NaN where none came so far."""
        return [_ratio(a, n) for a, n in zip(self.accepted, self.reached, strict=True)]

    @property
    def survival(self) -> list[float]:
        """Share of the rounds that proposed slot k in which slots 0..k all stood."""
        return [_ratio(a, n) for a, n in zip(self.accepted, self.proposed, strict=True)]

    @property
    def mean_confidence(self) -> list[float] | None:
        """Predicted conditional acceptance at k over the rounds that judged k; None without a confidence head."""
        if not any(self.confident):
            return None
        return [_ratio(s, n) for s, n in zip(self.confidence_sum, self.confident_reached, strict=True)]

    @property
    def predicted_survival(self) -> list[float] | None:
        """Predicted survival at k: mean product of the confidences of slots 0..k; None without a head."""
        if not any(self.confident):
            return None
        return [_ratio(s, n) for s, n in zip(self.survival_sum, self.confident, strict=True)]

    @property
    def accepted_tokens(self) -> int:
        """Draft tokens that were committed."""
        return sum(self.accepted)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready counts and ratios (None for a ratio without a denominator).

        proposed = accepted + rejected + after_stop, all in draft tokens.
        """
        rejected = self.proposed_tokens - self.accepted_tokens - self.after_stop_tokens
        return {
            "accepted_length": _json(self.accepted_length),
            "rounds": self.rounds,
            "committed_tokens": self.committed_tokens,
            "plain_rounds": self.plain_rounds,
            "plain_committed_tokens": self.plain_committed_tokens,
            "draft_tokens": {
                "proposed": self.proposed_tokens,
                "accepted": self.accepted_tokens,
                "rejected": rejected,
                "after_stop": self.after_stop_tokens,
            },
            "conditional_acceptance": _json(self.conditional_acceptance),
            "survival": _json(self.survival),
            "mean_confidence": _json(self.mean_confidence),
            "predicted_survival": _json(self.predicted_survival),
            "rounds_by_position": {
                "proposed": list(self.proposed),
                "reached": list(self.reached),
                "accepted": list(self.accepted),
            },
        }

    def _add_confidences(self, logits: Sequence[float], num_judged: int, num_standing: int) -> None:
        survival = 1.0
        for k in range(min(num_judged, len(logits))):
            confidence = _sigmoid(logits[k])
            survival *= confidence
            self.confident[k] += 1
            self.survival_sum[k] += survival
            if k <= num_standing:
                self.confident_reached[k] += 1
                self.confidence_sum[k] += confidence

    def _grow(self, num_slots: int) -> None:
        for value in vars(self).values():
            if isinstance(value, list) and len(value) < num_slots:
                value.extend([0] * (num_slots - len(value)))


def bootstrap_interval(
    committed: Sequence[int],
    rounds: Sequence[int],
    *,
    confidence: float = 0.95,
    num_resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float] | None:
    """Percentile interval of sum(committed) / sum(rounds) when whole prompts are drawn with replacement.

    committed, rounds: one number per prompt. None when fewer than two prompts had a round.
    """
    committed_tokens = np.asarray(committed, dtype=np.float64)
    num_rounds = np.asarray(rounds, dtype=np.float64)
    has_rounds = num_rounds > 0
    committed_tokens, num_rounds = committed_tokens[has_rounds], num_rounds[has_rounds]
    if len(num_rounds) < 2:
        return None
    drawn = np.random.default_rng(seed).integers(len(num_rounds), size=(num_resamples, len(num_rounds)))
    ratios = committed_tokens[drawn].sum(axis=1) / num_rounds[drawn].sum(axis=1)
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(ratios, [tail, 1.0 - tail])
    return float(low), float(high)


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


def _sigmoid(logit: float) -> float:
    return 0.5 * (1.0 + math.tanh(0.5 * logit))  # does not overflow


def _json(value: Any) -> Any:
    if isinstance(value, list):
        return [_json(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
