"""The cost curve, held to what steps are seen to take.

A curve is measured once, on a machine that does other things later: its seconds drift, and those of some sizes were off
to begin with. What a few tokens more cost, and drafting beside them, decides whether it pays.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from dspark.speculation.cost_curve import CostCurve, isotonic

DECAY = 0.99  # of what was seen of a size, per step of that size: the newest hundred decide
FADE = 0.995  # of what was seen of a size, per step of any: what it knows beyond all sizes' mean does not last
RESTED = 0.98  # of what was seen of drafting, per step without any
FIRST_STEPS = 50.0  # steps as predicted, taken in advance
SIZE_STEPS = 3.0  # steps that all sizes' mean weighs against those of one size
FARTHEST = 8.0  # verifying that took so many times as long, or as short, says nothing about the curve
MOST_SURPRISING = 1.5  # a step moves a mean as if it were off by this at most: what held it up will not last
WORTH_A_CHANGE = 0.02
CHANGE_EVERY = 8  # steps


class CurveCorrection:
    """`curve`: the measured one with seconds as they are now, of drafting and of verifying, size by size."""

    def __init__(self, measured: CostCurve) -> None:
        self.curve = measured
        self._measured = measured
        self._verifying = _Factors(measured.batch_tokens, farthest=FARTHEST)
        self._drafting = _Factors(measured.draft_requests, farthest=math.inf)  # elsewhere it may take any time
        self._num_steps = 0

    def note(
        self,
        *,
        num_tokens: int,
        num_requests: int,
        num_drafted: int,
        draft_s: float,
        verify_s: float,
        context_tokens: int | None = None,
    ) -> bool:
        """Take a step in; whether that has changed `curve`.

        num_tokens: of its batch; context_tokens: of its requests, see `CostCurve.context_seconds`; draft_s: of the
        drafter, 0 where nothing was drafted; verify_s: all the rest of it.
        """
        measured = self._measured
        predicted_s = measured.step_seconds(num_tokens, num_requests=num_requests, context_tokens=context_tokens)
        self._verifying.note(measured.padded_tokens(num_tokens), verify_s, predicted_s)
        if num_drafted and measured.draft_requests:
            self._drafting.note(num_drafted, draft_s, measured.draft_seconds(num_drafted))
        elif not num_drafted:  # or drafting that was slow once would never be tried again
            self._drafting.rest(self._verifying.mean)
        self._num_steps += 1
        if self._num_steps % CHANGE_EVERY or not (self._verifying.has_moved or self._drafting.has_moved):
            return False
        verifying, drafting = self._verifying.settle(), self._drafting.settle()
        self.curve = replace(
            measured,
            verify_s=isotonic([f * seconds for f, seconds in zip(verifying, measured.verify_s, strict=True)]),
            draft_s=isotonic([f * seconds for f, seconds in zip(drafting, measured.draft_s, strict=True)]),
            request_s=self._verifying.mean * measured.request_s,
            context_s=self._verifying.mean * measured.context_s,
        )
        return True


class _Factors:
    """Measured over predicted seconds, of late: of all steps, and of each size of a table beside their mean."""

    def __init__(self, sizes: Sequence[int], *, farthest: float) -> None:
        self._sizes, self._farthest = sizes, farthest
        self._settled = [1.0] * len(sizes)
        self._sum = self._weight = FIRST_STEPS
        self._sums, self._weights = [0.0] * len(sizes), [0.0] * len(sizes)

    @property
    def mean(self) -> float:
        return self._sum / self._weight

    @property
    def now(self) -> list[float]:
        mean = self.mean
        pairs = zip(self._sums, self._weights, strict=True)
        return [(total + SIZE_STEPS * mean) / (weight + SIZE_STEPS) for total, weight in pairs]

    @property
    def has_moved(self) -> bool:
        pairs = zip(self.now, self._settled, strict=True)
        return any(abs(now / settled - 1.0) > WORTH_A_CHANGE for now, settled in pairs)

    def settle(self) -> list[float]:
        self._settled = self.now
        return self._settled

    def note(self, size: float, measured_s: float, predicted_s: float) -> None:
        if not predicted_s / self._farthest < measured_s < predicted_s * self._farthest:
            return
        mean = self.mean
        ratio = min(max(measured_s / predicted_s, mean / MOST_SURPRISING), mean * MOST_SURPRISING)
        self._sum, self._weight = DECAY * self._sum + ratio, DECAY * self._weight + 1.0
        self._sums = [FADE * total for total in self._sums]
        self._weights = [FADE * weight for weight in self._weights]
        for place, share in self._shares(size):
            kept = 1.0 - (1.0 - DECAY) * share
            self._sums[place] = kept * self._sums[place] + share * ratio
            self._weights[place] = kept * self._weights[place] + share

    def rest(self, mean: float) -> None:
        """A step that says nothing: what was seen gives way to another mean."""
        self._sum += (1.0 - RESTED) * (mean * self._weight - self._sum)
        self._sums = [RESTED * total for total in self._sums]
        self._weights = [RESTED * weight for weight in self._weights]

    def _shares(self, size: float) -> list[tuple[int, float]]:
        """The sizes of the table that a step of `size` tells of, and how much each."""
        above = bisect_right(self._sizes, size)
        if above in (0, len(self._sizes)):
            return [(max(0, above - 1), 1.0)]
        low, high = self._sizes[above - 1], self._sizes[above]
        share = (size - low) / (high - low)
        return [(above - 1, 1.0 - share), (above, share)]
