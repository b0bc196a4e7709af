"""Lengths: they pay where they can."""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.prefix_scheduler import PrefixScheduler, best_total
from scheduling_toys import Rows, allocate_slowly, full_search, random_curve, random_rows, smooth_rate, sunk_seconds

allocate = PrefixScheduler().allocate
STEPPED = CostCurve((1, 2, 3), (1.0, 2.0, 2.2))  # the second token costs as much as the first, the third little


# What pays


@pytest.mark.parametrize("seed", range(60))
def test_allocate_equals_the_twin_that_admits_one_slot_at_a_time(seed: int) -> None:
    rng = random.Random(seed)
    survival = random_rows(rng, rng.randint(1, 6), 4)
    curve = random_curve(rng, 30, buckets=rng.choice([(), (2, 4, 8, 16), (3, 7, 20)]))
    fixed = [rng.choice([None, None, rng.randint(0, len(row))]) for row in survival]
    options = {
        "prefill_tokens": rng.choice([0, 5]),
        "draft_s": rng.choice([0.0, 0.25]),
        "floor": rng.choice([0, 0, 3]),
        "fixed": rng.choice([None, fixed]),
        "weights": rng.choice([None, [rng.choice([1.0, 2.0, 8.0]) for _ in survival]]),
    }
    capacity = rng.choice([None, 0, 2, 6])
    fast = allocate(survival, curve, capacity=capacity, **options)
    assert fast == allocate_slowly(survival, curve, capacity=math.inf if capacity is None else capacity, **options)


@pytest.mark.parametrize("seed", range(40))
def test_on_a_convex_curve_allocate_equals_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    survival, curve = random_rows(rng, rng.randint(1, 3), 3), random_curve(rng, 20, convex=True)
    options = {"prefill_tokens": rng.choice([0, 3]), "draft_s": rng.choice([0.0, 0.5])}
    ours = smooth_rate(allocate(survival, curve, **options), survival, curve, **options)
    best = smooth_rate(full_search(survival, curve, **options), survival, curve, **options)
    assert ours == pytest.approx(best, rel=1e-12)


def best_rate(survival: Rows, curve: CostCurve, *, prefill_tokens: int, draft_s: float) -> float:
    """The highest tau / T of all lengths, a few microseconds for each."""
    num_requests = len(survival)
    most = num_requests + prefill_tokens + sum(map(len, survival))
    draft_s -= sunk_seconds(curve, num_requests + prefill_tokens, prefill_tokens)
    seconds = [curve.smooth_verify_seconds(tokens) + draft_s for tokens in range(most + 1)]
    sums = [list(itertools.accumulate(row, initial=0.0)) for row in survival]
    return max(
        (num_requests + sum(row[length] for row, length in zip(sums, lengths, strict=True)))
        / seconds[num_requests + prefill_tokens + sum(lengths)]
        for lengths in itertools.product(*(range(len(row)) for row in sums))
    )


def test_2000_small_cases_equal_brute_force_over_all_lengths_where_theta_has_one_peak() -> None:
    num_admitting = 0
    for seed in range(2000):
        rng = random.Random(seed)
        survival, curve = random_rows(rng, rng.randint(1, 4), 3), random_curve(rng, 24, convex=True)
        options = {"prefill_tokens": rng.choice([0, 0, 5]), "draft_s": rng.choice([0.0, 0.1, 0.5])}
        lengths = allocate(survival, curve, **options)
        assert smooth_rate(lengths, survival, curve, **options) == pytest.approx(
            best_rate(survival, curve, **options), rel=1e-12
        )
        num_admitting += 0 < sum(lengths) < sum(map(len, survival))
    assert num_admitting > 500  # neither end would need a rule


def test_allocate_never_beats_brute_force_and_on_a_curve_with_steps_falls_short_of_it() -> None:
    shortfalls = 0
    for seed in range(60):
        rng = random.Random(seed)
        survival, curve = random_rows(rng, rng.randint(1, 3), 3), random_curve(rng, 20)
        ours = smooth_rate(allocate(survival, curve), survival, curve)
        best = smooth_rate(full_search(survival, curve), survival, curve)
        assert ours <= best * (1 + 1e-12)
        shortfalls += ours < best * (1 - 1e-9)
    assert shortfalls  # or the test above would prove nothing about stopping early


def test_a_slot_that_gains_nothing_stops_the_search() -> None:
    assert allocate([[0.5, 0.5]], CostCurve((1, 2, 3), (1.0, 1.5, 1.5))) == [0]  # though the next one would be free


def test_lengths_stay_within_their_rows_and_an_impossible_slot_is_never_admitted() -> None:
    survival = [[0.9, 0.5], [], [0.8, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]
    assert allocate(survival, CostCurve((1, 100), (1.0, 1.0001))) == [2, 0, 1, 4]


def test_of_equal_slots_every_requests_first_comes_first() -> None:
    survival = [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
    flat = CostCurve((1,), (1.0,))
    assert allocate(survival, flat, capacity=3) == [1, 1, 1]
    assert allocate(survival, flat, capacity=4) == [2, 1, 1]


@pytest.mark.parametrize("capacity", range(8))
def test_capacity_is_obeyed_and_goes_to_the_likeliest_slots(capacity: int) -> None:
    survival = [[0.9, 0.5, 0.4], [0.8, 0.7, 0.1]]
    order = [0, 1, 1, 0, 0, 1]
    lengths = allocate(survival, CostCurve((1,), (1.0,)), capacity=capacity)
    assert lengths == [order[:capacity].count(0), order[:capacity].count(1)]


def test_a_bucket_is_filled_to_its_edge_and_a_full_one_is_left_alone() -> None:
    dear = CostCurve(tuple(range(1, 9)), tuple(range(1, 9)), buckets=(4, 8))
    plain = CostCurve(dear.batch_tokens, dear.verify_s)
    survival = [[0.5, 0.2], [0.9, 0.6], [0.7, 0.1]]
    assert allocate(survival, plain) == [0, 0, 0]
    assert allocate(survival, dear) == [0, 1, 0]  # 3 anchors leave one place of 4
    assert allocate(survival[:2], dear) == [0, 2]  # two places, both go to the second request
    assert allocate([*survival, [0.8]], dear) == [0, 0, 0, 0]
    assert allocate([[0.9]] * 9, dear) == [0] * 9  # beyond the last bucket nothing is padded
    assert allocate(survival, dear, capacity=0) == [0, 0, 0]


def test_a_fixed_length_counts_in_batch_yield_and_capacity_but_is_not_decided() -> None:
    survival = [[0.9, 0.9, 0.9], [0.8, 0.7, 0.6]]
    curve = CostCurve((2, 3, 4, 8), (1.0, 1.1, 1.2, 9.0))
    assert allocate(survival, curve) == [2, 0]
    assert allocate(survival, curve, fixed=[0, None]) == [0, 2]
    assert allocate(survival, curve, fixed=[1, None]) == [1, 1]  # the fixed one has taken one of the two cheap places
    flat = CostCurve((1,), (1.0,))
    assert allocate(survival, flat, fixed=[3, None], capacity=4) == [3, 1]
    assert allocate(survival, flat, fixed=[3, None], capacity=2) == [3, 0]  # the user's length is not cut


def test_floor_slots_are_admitted_by_rank_where_the_curve_would_stop() -> None:
    survival = [[0.8, 0.72], [0.3, 0.2]]
    dear = CostCurve((1, 2, 3, 4, 5, 6), (1.0, 2.0, 4.0, 8.0, 16.0, 32.0))
    assert allocate(survival, dear) == [0, 0]
    assert allocate(survival, dear, floor=2) == [2, 0]
    assert allocate(survival, dear, floor=9) == [2, 2]
    assert allocate(survival, dear, floor=9, capacity=1) == [1, 0]
    assert allocate(survival, dear, floor=2, fixed=[1, None]) == [1, 1]


def test_where_verifying_is_dear_nothing_is_verified_whatever_the_acceptance() -> None:
    dear = CostCurve((1, 2, 3, 4, 8), (1.0, 2.0, 3.0, 4.0, 8.0), (1, 8), (0.05, 0.1))
    for confidence in (0.7, 0.83):
        row = list(itertools.accumulate([confidence] * 7, lambda a, c: a * c))
        assert allocate([row], dear) == [0]


def test_drafting_time_makes_verifying_more_worth_while() -> None:
    survival, curve = [[0.6, 0.36]], CostCurve((1, 2, 3), (1.0, 1.5, 2.1))
    assert allocate(survival, curve) == [1]
    assert allocate(survival, curve, draft_s=3.0) == [2]  # once paid for, the block is used


def test_lengths_fall_as_requests_crowd_a_processor_that_is_flat_up_to_a_knee() -> None:
    row = list(itertools.accumulate([0.85] * 7, lambda a, c: a * c))
    curve = CostCurve((1, 128, 1024), (1.0, 1.1, 8.0))
    means = [sum(allocate([row] * n, curve)) / n for n in (1, 8, 32, 64, 128, 256)]
    assert means[0] == 7
    assert means[-1] < 3
    assert means == sorted(means, reverse=True)


@pytest.mark.parametrize("seed", range(10))
def test_what_requests_cost_beside_their_tokens_counts_like_a_dearer_step(seed: int) -> None:
    rng = random.Random(seed)
    survival, curve = random_rows(rng, 5, 3), random_curve(rng, 30, convex=True)
    by_request = replace(curve, request_s=0.25)
    dearer = replace(curve, verify_s=tuple(second + 4 * 0.25 for second in curve.verify_s))
    assert allocate(survival, by_request) == allocate(survival, dearer)


@pytest.mark.parametrize(
    ("row", "message"),
    [([0.5, 0.6], "never rise"), ([1.2], r"0\.\.1"), ([-0.1], r"0\.\.1"), ([0.5, math.nan], "request 1")],
)
def test_a_row_that_is_no_cumulative_product_is_refused(row: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        allocate([[0.5], row], STEPPED)


def test_a_rise_by_rounding_is_no_reason_to_admit_the_later_slot_first() -> None:
    survival = [[0.5, 0.5 + 1e-8], [0.5 + 5e-9]]
    assert allocate(survival, CostCurve((1,), (1.0,)), capacity=1) == [0, 1]
    assert allocate(survival, CostCurve((1,), (1.0,)), capacity=2) == [1, 1]


@pytest.mark.parametrize("fixed", [[2], [None, None], [-1]])
def test_a_fixed_length_that_cannot_be_is_refused(fixed: list[int | None]) -> None:
    with pytest.raises(ValueError, match="fixed length"):
        allocate([[0.5]], STEPPED, fixed=fixed)


def test_nobody_and_nothing_drafted_need_no_lengths() -> None:
    assert allocate([], STEPPED) == []
    assert allocate([[], []], STEPPED) == [0, 0]


def staircase(rng: random.Random) -> CostCurve:
    """Shape buckets of a processor: a price for being there, a price per token, and uneven treads."""
    buckets = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160)
    fixed_s, token_s = rng.uniform(0.2, 3.0), rng.uniform(0.002, 0.1)
    uneven = itertools.accumulate(rng.expovariate(1 / (token_s * 4)) for _ in buckets)
    seconds = tuple(fixed_s + token_s * b + u for b, u in zip(buckets, uneven, strict=True))
    return CostCurve(buckets, seconds, buckets=buckets)


def staircase_rate(lengths: Sequence[int], survival: Rows, curve: CostCurve) -> float:
    tau = len(survival) + sum(sum(row[:length]) for row, length in zip(survival, lengths, strict=True))
    return tau / curve.verify_seconds(len(survival) + sum(lengths))


def ranked_search(survival: Rows, curve: CostCurve) -> float:
    """Best rate on the stairs over every number of slots, admitted by rank: nothing does better."""
    slots = sorted((a for row in survival for a in row), reverse=True)
    sums = itertools.accumulate([float(len(survival)), *slots])
    return max(tau / curve.verify_seconds(len(survival) + n) for n, tau in enumerate(sums))


def test_on_stairs_stopping_on_the_smooth_curve_and_filling_keeps_most_of_full_search(record_property) -> None:
    ours, on_the_stairs = [], []
    for seed in range(200):
        rng = random.Random(seed)
        curve = staircase(rng)
        quality = rng.uniform(0.5, 0.95)
        survival = [
            list(itertools.accumulate([min(1.0, rng.gauss(quality, 0.1)) for _ in range(7)], lambda a, c: a * c))
            for _ in range(rng.randint(1, 16))
        ]
        best = ranked_search(survival, curve)
        ours.append(staircase_rate(allocate(survival, curve), survival, curve) / best)
        stairs = CostCurve(tuple(range(1, 161)), tuple(curve.verify_seconds(b) for b in range(1, 161)))
        on_the_stairs.append(staircase_rate(allocate(survival, stairs), survival, curve) / best)
    record_property("ratio_to_full_search", (min(ours), sum(ours) / len(ours), max(ours)))
    assert max(ours) <= 1 + 1e-12
    assert sum(ours) / len(ours) > 0.93
    assert sum(on_the_stairs) < sum(ours)


@pytest.mark.parametrize("seed", range(40))
def test_with_weights_the_weighted_rate_equals_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    survival, curve = random_rows(rng, 3, 3), random_curve(rng, 20, convex=True)
    weights = [rng.choice([1.0, 1.0, 4.0, 16.0]) for _ in survival]

    def rate(lengths: Sequence[int]) -> float:
        pairs = zip(weights, survival, lengths, strict=True)
        return sum(w * (1 + sum(row[:length])) for w, row, length in pairs) / curve.smooth_verify_seconds(
            len(survival) + sum(lengths)
        )

    every = itertools.product(*(range(len(row) + 1) for row in survival))
    assert rate(allocate(survival, curve, weights=weights)) == pytest.approx(max(map(rate, every)), rel=1e-12)


def test_equal_weights_change_nothing_and_a_heavy_request_goes_first() -> None:
    survival = [[0.9, 0.8], [0.5, 0.4]]
    flat = CostCurve((1,), (1.0,))
    assert allocate(survival, flat, capacity=2, weights=[3.0, 3.0]) == allocate(survival, flat, capacity=2) == [2, 0]
    assert allocate(survival, flat, capacity=2, weights=[1.0, 2.0]) == [1, 1]
    assert allocate(survival, flat, capacity=2, weights=[1.0, 9.0]) == [0, 2]


@pytest.mark.parametrize("seed", range(10))
def test_long_contexts_count_like_a_dearer_step_and_short_ones_not_at_all(seed: int) -> None:
    rng = random.Random(seed)
    survival, curve = random_rows(rng, 5, 3), random_curve(rng, 30, convex=True)
    by_context = replace(curve, context_s=0.5, context_tokens=100)
    dearer = replace(curve, verify_s=tuple(second + 0.5 for second in curve.verify_s))
    assert allocate(survival, by_context, context_tokens=1500) == allocate(survival, dearer)
    assert allocate(survival, by_context, context_tokens=40) == allocate(survival, curve)
    assert allocate(survival, by_context) == allocate(survival, curve)
    assert best_total(survival, by_context, context_tokens=1500) == best_total(survival, dearer)
