"""How far the scheduler's beliefs held: what it expected of draft tokens and of steps, and what came.

Legend: k = 0, 1, … the slot of a draft token within its proposal.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class PredictedSeconds(NamedTuple):
    """What a cost curve says of a step: as if its contexts were those measured at, what they add, and of drafting."""

    verify_s: float
    context_s: float
    draft_s: float


@dataclass
class ScheduleCounts:
    """Cumulative. budgets: decodes by how many draft tokens they had verified, 0 included.

    judged, expected, stood: of slot k, verifications, the sum of the survival it was admitted with (calibrated and
    corrected for drift), and how often it stood. predicted_s, measured_s: of whole steps, over the steps that the cost
    curve speaks of; predicted_draft_s, draft_s: what drafting has in them, the wait for it included;
    predicted_context_s: what longer contexts than those measured at have in predicted_s.
    """

    budgets: list[int] = field(default_factory=list)
    judged: list[int] = field(default_factory=list)
    expected: list[float] = field(default_factory=list)
    stood: list[int] = field(default_factory=list)
    predicted_s: float = 0.0
    measured_s: float = 0.0
    predicted_draft_s: float = 0.0
    predicted_context_s: float = 0.0
    draft_s: float = 0.0

    def add_budgets(self, lengths: Sequence[int]) -> None:
        """Count a step's decodes by their verify lengths."""
        self.budgets.extend([0] * (max(lengths, default=-1) + 1 - len(self.budgets)))
        for length in lengths:
            self.budgets[length] += 1

    def add_round(self, survival: Sequence[float], num_accepted: int) -> None:
        """Count a verification. survival: of its verified slots, as they were admitted."""
        missing = len(survival) - len(self.judged)
        if missing > 0:
            self.judged += [0] * missing
            self.expected += [0.0] * missing
            self.stood += [0] * missing
        for k, expected in enumerate(survival):
            self.judged[k] += 1
            self.expected[k] += expected
            self.stood[k] += k < num_accepted

    def add_step(self, predicted: PredictedSeconds | None, measured_s: float, draft_s: float) -> None:
        """Count a step. predicted: None where there is no curve."""
        if predicted is not None:
            self.predicted_s += sum(predicted)
            self.predicted_draft_s += predicted.draft_s
            self.predicted_context_s += predicted.context_s
            self.measured_s += measured_s
            self.draft_s += draft_s
