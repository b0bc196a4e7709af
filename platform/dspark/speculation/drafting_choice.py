"""Which requests are drafted for in a step; legend and source as in `prefix_scheduler`."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.quick_scheduler import FixedLengths, quick_choice
from dspark.speculation.ranked_step import RankedStep, num_admitted, others_s, rank_slots, smooth_seconds

MAX_SIZES_TRIED = 32
"""Above so many requests the number to draft is searched in two passes, coarse then fine."""


def choose_drafting(
    expected_survival: Sequence[Sequence[float]],
    curve: CostCurve,
    *,
    prefill_tokens: int = 0,
    fixed: FixedLengths | None = None,
    is_free: Sequence[bool] | None = None,
    min_gain: float = 0.0,
    max_drafted: int | None = None,
    weights: Sequence[float] | None = None,
) -> list[bool]:
    """Which requests to draft in this step, maximising (R + sum a) / (T_verify(B) + T_draft(requests drafted)).

    expected_survival: one row per request from past rounds; an empty row is a request that cannot be drafted.
    fixed: as in `allocate`; a request with a fixed length is drafted exactly if that is not 0.
    is_free: per request, whether its draft tokens are there already: it is not drafted and costs no drafting, but its
    slots take their share of the batch.
    Requests are tried in falling order of what they are expected to gain, and each number of them is judged by the
    lengths `allocate` would give them: what it would not verify is not worth drafting. Estimates from past rounds say
    nothing about tokens not yet drawn, so unlike `allocate` this may search; ties go to fewer requests.
    min_gain: share by which tokens per second must be expected to rise; below it nothing is drafted.
    max_drafted: most requests to draft for, those with a fixed length included, which come first. weights: as in
    `allocate`.
    Above 32 requests not every number is tried. Raises: ValueError as `allocate` does.
    """
    if not expected_survival:
        return []
    decided = quick_choice(
        expected_survival,
        curve,
        prefill_tokens=prefill_tokens,
        fixed=fixed,
        is_free=is_free,
        min_gain=min_gain,
        max_drafted=max_drafted,
        weights=weights,
        most_tried=MAX_SIZES_TRIED,
    )
    if decided is not None:
        return decided
    step = rank_slots(expected_survival, fixed, prefill_tokens, weights)
    free = np.zeros(len(expected_survival), dtype=np.bool_) if is_free is None else np.array(is_free, dtype=np.bool_)
    return _chosen(step, curve, free, min_gain=min_gain, max_drafted=max_drafted)


def _chosen(
    step: RankedStep, curve: CostCurve, free: NDArray[np.bool_], *, min_gain: float, max_drafted: int | None
) -> list[bool]:
    is_forced = (step.lengths > 0) & ~free
    num_forced = int(is_forced.sum())
    verify_s = smooth_seconds(step, curve)
    order = _by_gain(step, verify_s)
    order = order[~free[order]]
    place = np.full(len(free), len(free))
    place[order] = np.arange(len(order))
    place[free] = -1
    place_of_slot = place[step.requests]

    def tokens_per_second(num_drafted: int) -> float:
        slots = step.slots[place_of_slot < num_drafted]
        draft_s = curve.draft_seconds(num_forced + num_drafted)
        number = num_admitted(slots, step, curve, verify_s + draft_s)
        tau = step.tau + float(slots[:number].sum())
        return tau / (curve.verify_seconds(step.tokens + number) + others_s(step, curve) + draft_s)

    most = len(order) if max_drafted is None else min(len(order), max(0, max_drafted - num_forced))
    num_drafted = _best_size(tokens_per_second, most)
    if tokens_per_second(num_drafted) < (1.0 + min_gain) * tokens_per_second(0):
        num_drafted = 0
    drafted: list[bool] = (((place >= 0) & (place < num_drafted)) | is_forced).tolist()
    return drafted


def _by_gain(step: RankedStep, verify_s: NDArray[np.float64]) -> NDArray[np.int64]:
    """Open requests with something to gain, most first. A slot gains its survival less what verifying it costs.

    Its cost in tokens is the time of one more token, over the curve up to the whole batch, times the plain rate.
    """
    num_requests, num_slots = len(step.lengths), len(step.slots)
    price = (verify_s[-1] - verify_s[0]) / max(num_slots, 1) * step.tau / verify_s[0]
    gain = np.bincount(step.requests, np.maximum(step.slots - price, 0.0), num_requests)
    total = np.bincount(step.requests, step.slots, num_requests)
    return np.lexsort((-total, -gain))[: np.count_nonzero(total)]


def _best_size(rate: Callable[[int], float], largest: int) -> int:
    """The number 0..largest of the highest rate, the lower one of equals."""
    stride = max(1, -(-largest // MAX_SIZES_TRIED))
    best = max([*range(0, largest, stride), largest], key=rate)
    if stride == 1:
        return best
    return max(range(max(0, best - stride + 1), min(largest, best + stride - 1) + 1), key=rate)
