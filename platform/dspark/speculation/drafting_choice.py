"""Which requests are drafted for in a step, and what is then verified; legend and source as in `prefix_scheduler`.

C sets of requests that are compared at once; S = n ranked slots of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.quick_scheduler import FixedLengths, quick_choice
from dspark.speculation.ranked_step import RankedStep, others_s, rank_slots, smooth_seconds

MAX_SIZES_TRIED = 32
"""Above so many requests the number to draft is searched in two passes, coarse then fine."""
MOST_TURNED = 32
"""Up to so many requests each is also tried the other way round; among more one hardly counts. As in schedule.h."""
DEAR_SLOTS = (8, 4, 2)
"""Prices of a slot beside the curve's own and 0: what the slot brings that is 1/8, 1/4, 1/2 down the ranking."""

Flags = NDArray[np.bool_]
Indices = NDArray[np.int64]


class DraftingChoice(NamedTuple):
    """Per request: whether it is drafted for; how many draft tokens `allocate` would verify by the same survival."""

    drafted: list[bool]
    lengths: list[int]


def choose_drafting(
    expected_survival: Sequence[Sequence[float]],
    curve: CostCurve,
    *,
    prefill_tokens: int = 0,
    context_tokens: int | None = None,
    fixed: FixedLengths | None = None,
    is_free: Sequence[bool] | None = None,
    min_gain: float = 0.0,
    max_drafted: int | None = None,
    capacity: int | None = None,
    floor: int = 0,
    weights: Sequence[float] | None = None,
) -> DraftingChoice:
    """Which requests to draft in this step, maximising (R + sum a) / (T_verify(B) + T_draft(requests drafted)).

    expected_survival: one row per request from past rounds; an empty row is a request that cannot be drafted.
    context_tokens, fixed: as in `allocate`; a request with a fixed length is drafted exactly if that is not 0.
    is_free: per request, whether its draft tokens are there already: it is not drafted and costs no drafting, but its
    slots take their share of the batch.
    A set of requests is judged by the lengths `allocate` would give it: what it would not verify is not worth drafting.
    Requests are tried in falling order of what they are expected to gain at a price per slot, in every number of them
    and at several prices: which one the best step pays is known only with that step. Then each of few requests is
    tried the other way round. Estimates from past rounds say nothing about tokens not yet drawn, so unlike `allocate`
    this may search; ties go to fewer requests.
    min_gain: share by which tokens per second must be expected to rise; below it nothing is drafted.
    max_drafted: most requests to draft for, those with a fixed length included, which come first. capacity, weights: as
    in `allocate`. floor: of the lengths; a set is judged without, since one with fewer slots would be forced to less.
    Above 32 requests not every number is tried, and at further prices only near what is best at the first.
    Raises: ValueError as `allocate` does.
    """
    if not expected_survival:
        return DraftingChoice([], [])
    decided = quick_choice(
        expected_survival,
        curve,
        prefill_tokens=prefill_tokens,
        context_tokens=context_tokens,
        fixed=fixed,
        is_free=is_free,
        min_gain=min_gain,
        max_drafted=max_drafted,
        capacity=capacity,
        floor=floor,
        weights=weights,
        most_tried=MAX_SIZES_TRIED,
    )
    if decided is not None:
        return DraftingChoice(*decided)
    step = rank_slots(expected_survival, fixed, prefill_tokens, weights, context_tokens=context_tokens)
    free = np.zeros(len(expected_survival), dtype=np.bool_) if is_free is None else np.array(is_free, dtype=np.bool_)
    judge = _Judge(step, curve, free, capacity=capacity, floor=floor)
    best = _chosen(judge, min_gain=min_gain, max_drafted=max_drafted)
    return DraftingChoice((best | judge.is_forced).tolist(), judge.lengths(best))


class _Judge:
    """Tokens per second of a step by the set of open requests that are drafted for, at what `allocate` then verifies.

    is_forced: [R], drafted for whatever is decided, since they have a fixed length and no draft tokens yet.
    """

    def __init__(self, step: RankedStep, curve: CostCurve, is_free: Flags, *, capacity: int | None, floor: int) -> None:
        self.step, self.is_free = step, is_free
        self.is_forced: Flags = (step.lengths > 0) & ~is_free
        self.verify_s = smooth_seconds(step, curve)
        self._curve = curve
        num_fixed = int(step.lengths.sum())
        self._most = len(step.slots) if capacity is None else max(0, capacity - num_fixed)
        self._floor = floor - num_fixed
        self._draft_s = np.array(curve.lookup.drafting(len(is_free)))

    def rates(self, sets: Flags) -> NDArray[np.float64]:
        """sets: [C, R] -> [C]."""
        return self._judged(sets, 0)[0]

    def lengths(self, best: Flags) -> list[int]:
        """Draft tokens to verify, fixed lengths included. best: [R]."""
        _, is_admitted = self._judged(best[None], self._floor)
        admitted = np.bincount(self.step.requests[is_admitted[0]], minlength=len(best))
        lengths: list[int] = (self.step.lengths + admitted).tolist()
        return lengths

    def _judged(self, sets: Flags, floor: int) -> tuple[NDArray[np.float64], Flags]:
        """Rates, [C], and which slots are verified, [C, S]: Algorithm 1 as in `num_admitted`, for all sets at once."""
        step, rows = self.step, np.arange(len(sets))
        is_in = sets[:, step.requests] | self.is_free[step.requests]
        before = np.zeros((len(sets), 1), dtype=np.int64)
        count: Indices = np.concatenate((before, np.cumsum(is_in, axis=1)), axis=1)
        tau = np.cumsum(np.concatenate((before + step.tau, np.where(is_in, step.slots, 0.0)), axis=1), axis=1)
        draft_s = self._draft_s[self.is_forced.sum() + sets.sum(axis=1)]
        theta = tau / (self.verify_s[count] + draft_s[:, None])
        most = np.minimum(count[:, -1], self._most)
        is_stop = is_in & (theta[:, 1:] <= theta[:, :-1]) & (count[:, :-1] >= floor)
        first = np.concatenate((is_stop, before == 0), axis=1).argmax(axis=1)  # behind the last slot, if nowhere before
        stop = np.minimum(count[rows, first], most)
        edges = np.array([int(self._curve.padded_tokens(step.tokens + n)) for n in stop.tolist()])
        number = np.minimum(edges - step.tokens, most)[:, None]
        yields = tau[rows, (count <= number).sum(axis=1) - 1]
        seconds = self._curve.smooth_verify_array(edges) + others_s(step, self._curve) + draft_s
        return yields / seconds, is_in & (count[:, 1:] <= number)


@dataclass(frozen=True)
class _Best:
    """The best set so far, [R], of requests that are open."""

    is_drafted: Flags
    rate: float
    number: int = 0

    def or_of(self, judge: _Judge, sets: Flags) -> "_Best":
        """The best of it and of these, [C, R]: of equals one with the fewest requests, then the first."""
        rates, numbers = judge.rates(sets), sets.sum(axis=1)
        i = np.lexsort((numbers, -rates))[0]
        is_better = rates[i] > self.rate or (rates[i] == self.rate and numbers[i] < self.number)
        return _Best(sets[i], float(rates[i]), int(numbers[i])) if is_better else self


def _chosen(judge: _Judge, *, min_gain: float, max_drafted: int | None) -> Flags:
    """The best set of open requests that was found, [R]."""
    nobody = np.zeros(len(judge.is_free), dtype=np.bool_)
    plain = best = _Best(nobody, float(judge.rates(nobody[None])[0]))
    orders = _orders(judge)
    most = len(orders[0])
    if max_drafted is not None:
        most = min(most, max(0, max_drafted - int(judge.is_forced.sum())))
    stride = max(1, -(-most // MAX_SIZES_TRIED))
    found, low, high = orders[0], 0, most
    for order in orders:
        better = best.or_of(judge, _firsts(order, low, high, stride, nobody))
        found, best = (found, best) if better is best else (order, better)
        if stride > 1 and order is orders[0]:
            low, high = max(0, best.number - stride), min(most, best.number + stride)
    if stride > 1:
        low, high = max(0, best.number - stride + 1), min(most, best.number + stride - 1)
        best = best.or_of(judge, _firsts(found, low, high, 1, nobody))
    best = _turned(judge, best, orders[0], most)
    return nobody if best.rate < (1.0 + min_gain) * plain.rate else best.is_drafted


def _turned(judge: _Judge, best: _Best, order: Indices, most: int) -> _Best:
    """`best` with single requests left out or taken in, as long as that helps; of equal changes the first one."""
    while len(order) <= MOST_TURNED:
        is_in = best.is_drafted[order]
        turning = np.concatenate((order[is_in], order[~is_in][: len(order) if best.number < most else 0]))
        if not len(turning):
            break
        sets = np.repeat(best.is_drafted[None], len(turning), axis=0)
        sets[np.arange(len(turning)), turning] ^= True
        rates = judge.rates(sets)
        i = int(rates.argmax())
        if rates[i] <= best.rate:
            break
        best = _Best(sets[i], float(rates[i]), int(sets[i].sum()))
    return best


def _orders(judge: _Judge) -> list[Indices]:
    """Open requests with something to gain, most first, for each price; the curve's own price comes first.

    A slot gains its survival less its price in tokens. The curve's: the time of one more token, in the mean over all
    slots, times the plain rate.
    """
    step, seconds = judge.step, judge.verify_s
    num_requests, num_slots = len(step.lengths), len(step.slots)
    total = np.bincount(step.requests, step.slots, num_requests)
    prices = [(seconds[-1] - seconds[0]) / max(num_slots, 1) * step.tau / seconds[0]]
    prices += [*(step.slots[num_slots // part] for part in DEAR_SLOTS if num_slots), 0.0]
    orders: list[Indices] = []
    for price in prices:
        gain = np.bincount(step.requests, np.maximum(step.slots - price, 0.0), num_requests)
        order = np.lexsort((-total, -gain))[: np.count_nonzero(total)]
        order = order[~judge.is_free[order]]
        if not any(np.array_equal(order, known) for known in orders):
            orders.append(order)
    return orders


def _firsts(order: Indices, low: int, high: int, stride: int, nobody: Flags) -> Flags:
    """The first low, low + stride, ... and `high` of an order, each as a set: [C, R]."""
    place = np.full(len(nobody), len(nobody))
    place[order] = np.arange(len(order))
    return np.asarray(place < np.array([*range(low, high, stride), high])[:, None])
