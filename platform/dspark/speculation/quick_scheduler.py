"""The scheduler's two searches on a CPU kernel: a step of few milliseconds has no time for them in Python.

Slow twins, which explain the rules and refuse what is not sound: `prefix_scheduler`, `drafting_choice`.
"""

from array import array
from collections.abc import Sequence
from itertools import accumulate, chain

from dspark import native
from dspark.speculation.cost_curve import CostCurve

FixedLengths = Sequence[int | None]


class Step:
    """A step as the kernel reads it. It keeps what the call points to."""

    def __init__(
        self,
        survival: Sequence[Sequence[float]],
        curve: CostCurve,
        *,
        fixed: FixedLengths | None,
        prefill_tokens: int,
        context_tokens: int | None,
        weights: Sequence[float] | None,
    ) -> None:
        num_requests = len(survival)
        self._values = array("d", chain.from_iterable(survival))
        self._offsets = array("i", accumulate(map(len, survival), initial=0))
        self._fixed = array("i", [-1 if length is None else length for length in fixed or [None] * num_requests])
        self._weights = None if weights is None else array("d", weights)
        num_tokens = num_requests + sum(max(0, length) for length in self._fixed) + prefill_tokens
        self._seconds, self._padded = curve.lookup.verifying(num_requests + len(self._values) + prefill_tokens)
        self.call = native.Schedule(
            num_requests=num_requests,
            prefill_tokens=prefill_tokens,
            survival=self._values.buffer_info()[0],
            offsets=self._offsets.buffer_info()[0],
            fixed=self._fixed.buffer_info()[0],
            weights=None if self._weights is None else self._weights.buffer_info()[0],
            verify_s=self._seconds.buffer_info()[0],
            padded=self._padded.buffer_info()[0],
            others_s=other_seconds(curve, num_requests, num_tokens, prefill_tokens, context_tokens),
        )


def other_seconds(
    curve: CostCurve, num_requests: int, num_tokens: int, prefill_tokens: int, context_tokens: int | None
) -> float:
    """What is added to the curve's seconds of a step: for its requests beside the first and for their contexts, less
    for its other tokens.

    num_tokens: all that are sure to be in it, prefill_tokens of them others'.
    """
    sunk_s = 0.0
    if prefill_tokens:
        with_them, without = (curve.smooth_verify_seconds(n) for n in (num_tokens, num_tokens - prefill_tokens))
        sunk_s = with_them - without
    return (num_requests - 1) * curve.request_s + curve.context_seconds(num_requests, context_tokens) - sunk_s


def quick_allocate(
    survival: Sequence[Sequence[float]],
    curve: CostCurve,
    *,
    prefill_tokens: int,
    context_tokens: int | None,
    draft_s: float,
    capacity: int | None,
    floor: int,
    fixed: FixedLengths | None,
    weights: Sequence[float] | None,
) -> list[int] | None:
    """Lengths as `PrefixScheduler.allocate` gives them; None leaves it to that."""
    kernels = native.kernels()
    if kernels is None or not _are_lengths(fixed, len(survival)):
        return None
    step = Step(
        survival, curve, fixed=fixed, prefill_tokens=prefill_tokens, context_tokens=context_tokens, weights=weights
    )
    return kernels.allocate(step.call, draft_s=draft_s, capacity=capacity, floor=floor)


def quick_choice(
    survival: Sequence[Sequence[float]],
    curve: CostCurve,
    *,
    prefill_tokens: int,
    context_tokens: int | None,
    fixed: FixedLengths | None,
    is_free: Sequence[bool] | None,
    min_gain: float,
    max_drafted: int | None,
    capacity: int | None,
    floor: int,
    weights: Sequence[float] | None,
    most_tried: int,
) -> tuple[list[bool], list[int]] | None:
    """Who is drafted and what is verified as `choose_drafting` says; None leaves it to that."""
    kernels = native.kernels()
    if kernels is None or not _are_lengths(fixed, len(survival)):
        return None
    step = Step(
        survival, curve, fixed=fixed, prefill_tokens=prefill_tokens, context_tokens=context_tokens, weights=weights
    )
    free = array("B", bytes(len(survival)) if is_free is None else bytes(is_free))
    draft_s = curve.lookup.drafting(len(survival))
    search = native.Search(
        is_free=free.buffer_info()[0],
        draft_s=draft_s.buffer_info()[0],
        min_gain=min_gain,
        capacity=-1 if capacity is None else max(0, capacity),
        floor=floor,
        max_drafted=-1 if max_drafted is None else max(0, max_drafted),
        most_tried=most_tried,
    )
    return kernels.choose_drafting(step.call, search)


def _are_lengths(fixed: FixedLengths | None, num_requests: int) -> bool:
    return fixed is None or (len(fixed) == num_requests and all(length is None or length >= 0 for length in fixed))
