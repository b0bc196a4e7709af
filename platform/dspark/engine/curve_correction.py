"""The cost curve, held to what steps are seen to take.

A curve is measured once, on a machine that does other things later: its shape stays, its seconds drift. Drafting and
verifying drift apart, and that is what decides whether drafting pays.
"""

from dataclasses import replace

from dspark.speculation.cost_curve import CostCurve

DECAY = 0.98  # of what was seen, per step: the newest fifty decide
FIRST_STEPS = 20.0  # steps as predicted, taken in advance
FARTHEST = 8.0  # a step that took so many times as long, or as short, says nothing about the curve
MOST_SURPRISING = 2.0  # a step moves the mean as if it were off by this at most: what held it up will not last
WORTH_A_CHANGE = 0.03


class CurveCorrection:
    """`curve`: the measured one with seconds as they are now, verifying and drafting each by a factor of its own."""

    def __init__(self, measured: CostCurve) -> None:
        self.curve = measured
        self._measured = measured
        self._verifying, self._drafting = _Factor(), _Factor()

    def note(self, *, num_tokens: int, num_requests: int, num_drafted: int, draft_s: float, verify_s: float) -> bool:
        """Take a step in; whether that has changed `curve`.

        num_tokens: of its batch; draft_s: until all was drafted, 0 where nothing was; verify_s: all the rest of it.
        """
        measured = self._measured
        others_s = max(0, num_requests - 1) * measured.request_s
        self._verifying.note(verify_s, measured.verify_seconds(num_tokens) + others_s)
        if num_drafted:
            self._drafting.note(draft_s, measured.draft_seconds(num_drafted))
        if not (self._verifying.has_moved or self._drafting.has_moved):
            return False
        verifying, drafting = self._verifying.settle(), self._drafting.settle()
        self.curve = replace(
            measured,
            verify_s=tuple(verifying * seconds for seconds in measured.verify_s),
            draft_s=tuple(drafting * seconds for seconds in measured.draft_s),
            request_s=verifying * measured.request_s,
        )
        return True


class _Factor:
    """Measured over predicted seconds, of late."""

    def __init__(self) -> None:
        self._settled = 1.0
        self._ratio_sum = self._weight = FIRST_STEPS

    @property
    def now(self) -> float:
        return self._ratio_sum / self._weight

    @property
    def has_moved(self) -> bool:
        return abs(self.now / self._settled - 1.0) > WORTH_A_CHANGE

    def settle(self) -> float:
        self._settled = self.now
        return self._settled

    def note(self, measured_s: float, predicted_s: float) -> None:
        if not predicted_s / FARTHEST < measured_s < predicted_s * FARTHEST:
            return
        now = self.now
        ratio = min(max(measured_s / predicted_s, now / MOST_SURPRISING), now * MOST_SURPRISING)
        self._ratio_sum = DECAY * self._ratio_sum + ratio
        self._weight = DECAY * self._weight + 1.0
