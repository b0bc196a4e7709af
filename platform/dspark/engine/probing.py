"""Whom to draft for although nothing says that it pays: to see whether it would.

A request that is not drafted for teaches nothing, so some are, now and then. That may cost about half a hundredth of
the time, and nothing at all where the best that could be found would not pay: a full batch is left in peace.
"""

from collections.abc import Sequence
from itertools import accumulate, repeat
from operator import is_, mul

from dspark.engine.running import RunningRequest, stored_tokens
from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.drafting_choice import choose_drafting
from dspark.speculation.quick_scheduler import FixedLengths

PROBE_SHARE = 0.0025  # of the time of the steps in which somebody waits to be probed: features are stored before
LEFT_IN_PEACE = 3  # steps of the same requests after one that drafted for none: what is expected of them hardly changes
MOST_PROBED = 2  # at once: a pass of the drafter costs nearly the same for one as for a few
HOPE = 0.9  # conditional acceptance of a request that would be worth finding


class Probing:
    """Saves up the time that probes may take. every: steps after which a request that is not drafted for is due."""

    def __init__(self, *, every: int, length: int) -> None:
        self._every = every
        self._length = length
        self._saved_s = 0.0

    def choose(
        self,
        decoding: Sequence[RunningRequest],
        expected: Sequence[Sequence[float]],
        limits: Sequence[int],
        curve: CostCurve,
        *,
        chosen: Sequence[bool],
        fixed: FixedLengths,
        is_free: Sequence[bool],
        prefill_tokens: int,
        num_steps: int = 1,
    ) -> list[int]:
        """Places of the requests to probe in this step, those that waited longest; mostly none.

        expected, limits: of each request's draft tokens, survival and most. chosen: who is drafted for anyhow.
        num_steps: that this one decides for, those before it in which nobody was looked at included.
        """
        due = [
            place
            for place, running in enumerate(decoding)
            if running.steps_undrafted >= self._every
            and limits[place]
            and fixed[place] is None
            and not (chosen[place] or is_free[place])
        ]
        if not due:
            return []
        due = sorted(due, key=lambda place: -decoding[place].steps_undrafted)[:MOST_PROBED]
        tokens, context = len(decoding) + prefill_tokens, stored_tokens(decoding)
        step_s = curve.step_seconds(tokens, num_requests=len(decoding), context_tokens=context)
        probed_s = curve.verify_seconds(tokens + len(due) * self._length)
        cost_s = curve.draft_seconds(len(due)) + probed_s - curve.verify_seconds(tokens)
        self._saved_s = min(self._saved_s + PROBE_SHARE * num_steps * step_s, cost_s)
        if self._saved_s < cost_s:
            return []
        rows = [*expected]
        for place in due:
            rows[place] = list(accumulate(repeat(HOPE, limits[place]), mul))
        hopeful, _ = choose_drafting(
            rows, curve, prefill_tokens=prefill_tokens, context_tokens=context, fixed=fixed, is_free=is_free
        )
        if not any(hopeful[place] for place in due):
            return []
        self._saved_s = 0.0
        return due


class Idleness:
    """Spares the decision whom to draft for in the steps after one that drafted for nobody."""

    def __init__(self) -> None:
        self.num_spared = 0  # since the last decision
        self._members: list[RunningRequest] = []
        self._left = 0

    def note(self, decoding: Sequence[RunningRequest], *, is_idle: bool) -> None:
        """A decision was made: nobody is drafted for, or somebody is."""
        self.num_spared = 0
        self._members, self._left = list(decoding), LEFT_IN_PEACE if is_idle else 0

    def goes_on(self, decoding: Sequence[RunningRequest], is_free: Sequence[bool]) -> bool:
        """Whether nobody is drafted for in this step either. is_free: per request, whether it has a copy."""
        is_same = len(decoding) == len(self._members) and all(map(is_, decoding, self._members))
        if self._left == 0 or not is_same or any(is_free):
            return False
        self._left -= 1
        self.num_spared += 1
        return True
