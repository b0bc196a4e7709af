"""How many draft tokens of each request a step verifies, and which requests are drafted at all.

Legend: R requests, K slots of a block, a survival = cumulative product of confidences, n slots up for decision.
A step over B = R + sum(lengths) + prefill tokens yields tau = R + sum of a over the verified slots in expectation:
every request costs its anchor and yields the target's own token, whether drafted or not.

Source: DSpark §3.2.2, Alg. 1; ALGORITHMS "scheduling". Theta = tau / (T_verify(B) + T_draft), where T_verify has what
each of R requests costs beside its tokens (`CostCurve.request_s`), and has not what the step's other tokens cost: they
are read whatever is decided, and yield later. A step of many seconds would make any draft token seem cheap.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.quick_scheduler import FixedLengths, other_seconds, quick_allocate, quick_choice

ROUNDING = 1e-6
"""Survival may rise by so much from slot to slot before it counts as no cumulative product."""

MAX_SIZES_TRIED = 32
"""Above so many requests the number to draft is searched in two passes, coarse then fine."""


class PrefixScheduler:
    """Algorithm 1 of the paper with an early stop, which is what keeps sampled output exact.

    Verification is lossless when slot k of a request is admitted on what was known before its token x_k was drawn.
    Its survival a_k is known then: confidence k sees draft tokens before k only. Slots are admitted in falling order
    of a, a tie going to the lower slot, so a request's slot k always comes after its slots before k and before those
    that depend on x_k. Every rule below looks at no slot that ranks behind the one it decides on: the stop compares
    two neighbours in the ranking, the bucket's edge follows from where the stop fell, and floor and capacity are
    numbers known beforehand. The draft tokens might as well be drawn one by one as their slots are admitted, over all
    requests together, so the output of the whole batch is that of independent targets (Appendix A).
    Looking for the best stop in the whole ranking would not be: whether x_k is verified would then depend on x_k.
    """

    def allocate(
        self,
        survival: Sequence[Sequence[float]],
        curve: CostCurve,
        *,
        prefill_tokens: int = 0,
        draft_s: float = 0.0,
        capacity: int | None = None,
        floor: int = 0,
        fixed: FixedLengths | None = None,
        weights: Sequence[float] | None = None,
    ) -> list[int]:
        """Draft tokens to verify per request, raising tau / (T_verify(B) + draft_s) while each next one does.

        survival: one row per request, non-increasing; an empty row is a request that was not drafted, it still costs
        one token. Row entry k may depend on draft tokens before k, never on token k itself (its own draft probability
        is no confidence). The stop follows the curve without its buckets, then the batch is filled to its bucket.
        prefill_tokens: other tokens of the step. draft_s: seconds drafting took or will take.
        capacity, floor: bounds on the sum of lengths, known before the block was drafted; floor slots are admitted by
        rank without asking the curve (the capacity of the lagged form), capacity is never exceeded by a decision.
        fixed: a length that is not up for decision, or None, per request. It counts in B, tau, capacity and floor.
        weights: what a token of each request counts in tau and in the ranking, known beforehand; None: 1 for all.
        Raises: ValueError for a row that is no cumulative product, or a fixed length its row does not have.
        """
        if not survival:
            return []
        decided = quick_allocate(
            survival,
            curve,
            prefill_tokens=prefill_tokens,
            draft_s=draft_s,
            capacity=capacity,
            floor=floor,
            fixed=fixed,
            weights=weights,
        )
        if decided is not None:
            return decided
        step = _rank(survival, fixed, prefill_tokens, weights)
        num_fixed = int(step.lengths.sum())
        slots = step.slots if capacity is None else step.slots[: max(0, capacity - num_fixed)]
        step_s = _smooth_seconds(step, curve) + draft_s
        num_admitted = _num_admitted(slots, step, curve, step_s, floor=floor - num_fixed)
        admitted = np.bincount(step.requests[:num_admitted], minlength=len(survival))
        lengths: list[int] = (step.lengths + admitted).tolist()
        return lengths


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
    step = _rank(expected_survival, fixed, prefill_tokens, weights)
    free = np.zeros(len(expected_survival), dtype=np.bool_) if is_free is None else np.array(is_free, dtype=np.bool_)
    return _chosen(step, curve, free, min_gain=min_gain, max_drafted=max_drafted)


def _chosen(
    step: "_Step", curve: CostCurve, free: NDArray[np.bool_], *, min_gain: float, max_drafted: int | None
) -> list[bool]:
    is_forced = (step.lengths > 0) & ~free
    num_forced = int(is_forced.sum())
    verify_s = _smooth_seconds(step, curve)
    order = _by_gain(step, verify_s)
    order = order[~free[order]]
    place = np.full(len(free), len(free))
    place[order] = np.arange(len(order))
    place[free] = -1
    place_of_slot = place[step.requests]

    def tokens_per_second(num_drafted: int) -> float:
        slots = step.slots[place_of_slot < num_drafted]
        draft_s = curve.draft_seconds(num_forced + num_drafted)
        num_admitted = _num_admitted(slots, step, curve, verify_s + draft_s)
        tau = step.tau + float(slots[:num_admitted].sum())
        return tau / (curve.verify_seconds(step.tokens + num_admitted) + _others_s(step, curve) + draft_s)

    most = len(order) if max_drafted is None else min(len(order), max(0, max_drafted - num_forced))
    num_drafted = _best_size(tokens_per_second, most)
    if tokens_per_second(num_drafted) < (1.0 + min_gain) * tokens_per_second(0):
        num_drafted = 0
    drafted: list[bool] = (((place >= 0) & (place < num_drafted)) | is_forced).tolist()
    return drafted


def best_total(
    survival: Sequence[Sequence[float]], curve: CostCurve, *, prefill_tokens: int = 0, draft_s: float = 0.0
) -> int:
    """Draft tokens of a step, all requests' together, that maximise tau / (T_verify(B) + draft_s): the lower of equals.

    Looks at the whole ranking and at the curve's buckets, so survival must be that of a step which is over.
    The arguments are those of `allocate`, for which the result is floor and capacity at once (the lagged form).
    """
    if not survival:
        return 0
    step = _rank(survival, None, prefill_tokens)
    padded = [curve.padded_tokens(step.tokens + num_slots) for num_slots in range(len(step.slots) + 1)]
    seconds = curve.smooth_verify_array(np.array(padded)) + _others_s(step, curve) + draft_s
    tau = np.cumsum(np.concatenate(([step.tau], step.slots)))
    return int(np.argmax(tau / seconds))


@dataclass(frozen=True)
class _Step:
    """A step before anything is decided, and the slots up for decision in the order of admission.

    tokens: B with the fixed lengths alone, prefill_tokens of them others'; tau: what that yields. lengths: [R] fixed
    lengths, 0 where open. slots: [n] float64 survival times weight, falling and above 0; requests: [n] whose they are.
    """

    tokens: int
    prefill_tokens: int
    tau: float
    lengths: NDArray[np.int64]
    slots: NDArray[np.float64]
    requests: NDArray[np.int64]


def _rank(
    survival: Sequence[Sequence[float]],
    fixed: FixedLengths | None,
    prefill_tokens: int,
    weights: Sequence[float] | None = None,
) -> _Step:
    num_requests = len(survival)
    widths = np.fromiter(map(len, survival), np.int64, num_requests)
    factors = np.ones(num_requests) if weights is None else np.array(weights, dtype=np.float64)
    table = _survival_table(survival, widths) * factors[:, None]
    is_open, lengths = _fixed_lengths(fixed, widths)
    flat = np.where(is_open[:, None], table, 0.0).T.ravel()  # slot by slot: a stable sort keeps ties in that order
    order = np.argsort(-flat, kind="stable")[: np.count_nonzero(flat)]
    fixed_slots = table[np.arange(table.shape[1]) < lengths[:, None]]
    return _Step(
        tokens=num_requests + int(lengths.sum()) + prefill_tokens,
        prefill_tokens=prefill_tokens,
        tau=float(factors.sum() + fixed_slots.sum()),
        lengths=lengths,
        slots=flat[order],
        requests=order % num_requests,
    )


def _smooth_seconds(step: _Step, curve: CostCurve) -> NDArray[np.float64]:
    """Seconds of verifying 0..n slots beside what is fixed, as if there were no buckets: [n + 1]."""
    return curve.smooth_verify_array(step.tokens + np.arange(len(step.slots) + 1)) + _others_s(step, curve)


def _others_s(step: _Step, curve: CostCurve) -> float:
    """Seconds that the requests beside the first add, whatever their lengths, less those of the step's other tokens."""
    return other_seconds(curve, len(step.lengths), step.tokens, step.prefill_tokens)


def _num_admitted(
    slots: NDArray[np.float64], step: _Step, curve: CostCurve, step_s: NDArray[np.float64], *, floor: int = 0
) -> int:
    """How many of these ranked slots are verified: to the first that does not raise Theta, then to the bucket's edge.

    step_s: seconds of the step with 0, 1, ... of them, drafting included.
    """
    floor = min(max(floor, 0), len(slots))
    tau = np.cumsum(np.concatenate(([step.tau], slots)))
    theta = tau / step_s[: len(tau)]
    no_gain = np.flatnonzero(theta[floor + 1 :] <= theta[floor:-1])
    stop = floor + int(no_gain[0]) if no_gain.size else len(slots)
    edge = int(curve.padded_tokens(step.tokens + stop))
    return min(edge - step.tokens, len(slots))


def _by_gain(step: _Step, verify_s: NDArray[np.float64]) -> NDArray[np.int64]:
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


def _survival_table(survival: Sequence[Sequence[float]], widths: NDArray[np.int64]) -> NDArray[np.float64]:
    """Rows padded with zeros: [R, K] float64, made exactly non-increasing."""
    table = np.zeros((len(survival), int(widths.max())))
    is_slot = np.arange(table.shape[1]) < widths[:, None]
    table[is_slot] = np.fromiter(chain.from_iterable(survival), np.float64, int(widths.sum()))
    falling = np.minimum.accumulate(table, axis=1)
    is_sound = ((table <= falling + ROUNDING) & (falling >= 0.0) & (table <= 1.0)).all(axis=1)
    if not is_sound.all():
        request = int(is_sound.argmin())
        raise ValueError(
            f"survival of request {request} is {list(survival[request])}; it must lie in 0..1 and never rise from "
            "slot to slot: pass the cumulative product of the confidences"
        )
    return falling


def _fixed_lengths(
    fixed: FixedLengths | None, widths: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Which requests are open to decision, [R], and the lengths of the others, [R], 0 for the open ones."""
    if fixed is None:
        return np.ones(len(widths), dtype=np.bool_), np.zeros(len(widths), dtype=np.int64)
    if len(fixed) != len(widths):
        raise ValueError(f"{len(fixed)} fixed lengths for {len(widths)} requests; give a length or None for each")
    lengths = np.array([0 if length is None else length for length in fixed], dtype=np.int64)
    impossible = (lengths < 0) | (lengths > widths)
    if impossible.any():
        request = int(impossible.argmax())
        raise ValueError(
            f"request {request} has the fixed length {lengths[request]} but survival for {widths[request]} slots; "
            "draft as many slots as are to be verified"
        )
    return np.array([length is None for length in fixed], dtype=np.bool_), lengths
