"""One option for each of many, worth most together, within a capacity that all share: a multiple-choice knapsack.

Legend: N takers, C options of each, P options of a front. A front is a taker's options by rising usage, each worth more
than all that use less.

    maximise  sum_i value[i, o_i]    subject to    sum_i usage[i, o_i] <= capacity
"""

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

BISECTIONS = 60
MAX_CORE = 8  # takers whose options are combined exactly once the price has settled the others
MAX_COMBINATIONS = 1024  # of a front of several takers together


def choose_within(value: Floats, usage: Floats, capacity: float) -> tuple[Indices, float]:
    """An option per taker, [N], and the price of capacity at which they were chosen: 0 where there is enough for all.

    value, usage: [N, C], usage 0 or more; an option that is none has the value -inf. Where even the thriftiest options
    need more than there is, they are what is chosen.
    At a price each taker decides alone, so the price that fills the capacity is found by bisection, in O(N C) a try.
    What whole options leave over goes to the takers whose next best option costs least, combined exactly: up to
    8 takers the result is optimal, beyond that at most one taker's step below.
    """
    if not len(value):
        return np.zeros(0, dtype=np.int64), 0.0
    kept, front_value, front_usage = _fronts(value, usage)
    rows = np.arange(len(value))
    chosen, price = _by_price(front_value, front_usage, capacity)
    if price > 0:
        chosen = _filled(front_value, front_usage, capacity, chosen, price)
    return kept[rows, chosen], price


def _fronts(value: Floats, usage: Floats) -> tuple[Indices, Floats, Floats]:
    """Every taker's front: its options [N, P] int64, their values and usages [N, P], padded with worthless ones."""
    order = np.argsort(usage, axis=1)  # of equal usage in any order: a price takes the better one
    value, usage = np.take_along_axis(value, order, axis=1), np.take_along_axis(usage, order, axis=1)
    best_before = np.maximum.accumulate(value, axis=1)
    is_better = np.ones(value.shape, dtype=np.bool_)
    is_better[:, 1:] = value[:, 1:] > best_before[:, :-1]
    is_better &= np.isfinite(value)
    is_better[:, 0] |= ~is_better.any(axis=1)
    first = np.argsort(~is_better, axis=1, kind="stable")[:, : int(is_better.sum(axis=1).max())]
    is_kept = np.take_along_axis(is_better, first, axis=1)
    return (
        np.take_along_axis(order, first, axis=1),
        np.where(is_kept, np.take_along_axis(value, first, axis=1), -np.inf),
        np.where(is_kept, np.take_along_axis(usage, first, axis=1), 0.0),
    )


def _by_price(value: Floats, usage: Floats, capacity: float) -> tuple[Indices, float]:
    """What fronts choose at the lowest price at which it fits, and that price."""
    rows = np.arange(len(value))

    def at(price: float) -> Indices:
        return np.argmax(value - price * usage, axis=1)  # the first of equals, which uses least

    def fits(chosen: Indices) -> bool:
        return float(usage[rows, chosen].sum()) <= capacity

    if fits(at(0.0)):
        return at(0.0), 0.0
    low, high = 0.0, _highest_price(value, usage)
    if not fits(at(high)):
        return at(high), math.inf
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(at(middle)) else (middle, high)
    return at(high), high


def _highest_price(value: Floats, usage: Floats) -> float:
    """A price at which every front chooses its thriftiest option."""
    gained, used = value[:, 1:] - value[:, :1], usage[:, 1:] - usage[:, :1]
    rates = np.divide(gained, used, out=np.zeros_like(gained), where=(used > 0) & np.isfinite(gained))
    return 2.0 * float(rates.max(initial=0.0)) + 1.0


def _filled(value: Floats, usage: Floats, capacity: float, chosen: Indices, price: float) -> Indices:
    """The choice with the takers that are nearest to another option combined anew."""
    rows = np.arange(len(value))
    if not math.isfinite(price):
        return chosen
    reduced = value - price * usage
    loss = reduced[rows, chosen][:, None] - reduced
    loss[rows, chosen] = np.inf
    core = np.argsort(loss.min(axis=1), kind="stable")[:MAX_CORE]
    others = np.delete(rows, core)
    left = capacity - float(usage[others, chosen[others]].sum())
    chosen = chosen.copy()
    chosen[core] = _best_combination(value[core], usage[core], left)
    return chosen


def _best_combination(value: Floats, usage: Floats, capacity: float) -> Indices:
    """The best options of a few takers together, by merging their fronts one after the other: [n]."""
    used, gained = np.zeros(1), np.zeros(1)
    picks = np.zeros((1, 0), dtype=np.int64)
    thriftiest = usage[:, 0]
    for i in range(len(value)):
        options = np.flatnonzero(np.isfinite(value[i]))
        all_used = (used[:, None] + usage[i, options]).ravel()
        all_gained = (gained[:, None] + value[i, options]).ravel()
        fitting = np.flatnonzero(all_used <= capacity - thriftiest[i + 1 :].sum() + 1e-12 * abs(capacity))
        order = fitting[np.lexsort((-all_gained[fitting], all_used[fitting]))]
        best_before = np.maximum.accumulate(np.concatenate(([-np.inf], all_gained[order][:-1])))
        order = order[all_gained[order] > best_before]
        if len(order) > MAX_COMBINATIONS:
            order = order[np.linspace(0, len(order) - 1, MAX_COMBINATIONS).round().astype(np.int64)]
        before, option = np.divmod(order, len(options))
        used, gained = all_used[order], all_gained[order]
        picks = np.column_stack((picks[before], options[option]))
    return picks[-1]
