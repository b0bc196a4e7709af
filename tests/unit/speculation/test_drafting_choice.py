"""Who is drafted for: nearly the best of all sets of requests."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.drafting_choice import choose_drafting
from dspark.speculation.prefix_scheduler import PrefixScheduler
from scheduling_toys import Rows, full_search, random_curve, random_rows, smooth_rate

allocate = PrefixScheduler().allocate
STEPPED = CostCurve((1, 2, 3), (1.0, 2.0, 2.2))  # the second token costs as much as the first, the third little


def drafted_rate(drafted: Sequence[bool], survival: Rows, curve: CostCurve, *, prefill_tokens: int = 0) -> float:
    """Best rate when just these requests are drafted, over all their lengths."""
    rows = [row if is_drafted else [] for row, is_drafted in zip(survival, drafted, strict=True)]
    options = {"prefill_tokens": prefill_tokens, "draft_s": curve.draft_seconds(sum(drafted))}
    return smooth_rate(full_search(rows, curve, **options), rows, curve, **options)


@pytest.mark.parametrize("seed", range(40))
def test_the_requests_drafted_are_the_best_of_all_subsets_or_nearly_so(seed: int) -> None:
    rng = random.Random(seed)
    survival, curve = random_rows(rng, rng.randint(1, 4), 2), random_curve(rng, 16, convex=True)
    prefill_tokens = rng.choice([0, 2])
    every = itertools.product([False, True], repeat=len(survival))
    best = max(drafted_rate(drafted, survival, curve, prefill_tokens=prefill_tokens) for drafted in every)
    drafted = choose_drafting(survival, curve, prefill_tokens=prefill_tokens).drafted
    assert drafted_rate(drafted, survival, curve, prefill_tokens=prefill_tokens) >= 0.98 * best


def test_only_requests_that_pay_for_their_drafting_are_drafted() -> None:
    survival = [[0.1, 0.01], [0.9, 0.8], [], [0.85, 0.7]]
    curve = CostCurve((1, 16), (1.0, 1.3), (1, 2, 3, 4), (0.1, 0.2, 0.3, 0.4))
    assert choose_drafting(survival, curve).drafted == [False, True, False, True]
    assert choose_drafting(survival, CostCurve((1, 16), (1.0, 1.03))).drafted == [True, True, False, True]
    assert choose_drafting(survival, CostCurve((1, 16), (1.0, 1.3), (1,), (9.0,))).drafted == [False] * 4


def test_what_allocate_would_not_verify_is_not_drafted() -> None:
    """The step down to three tokens would pay, but Algorithm 1 stops at the second one and drafting would be lost."""
    survival, curve = [[0.8, 0.72]], CostCurve((1, 2, 3), (1.0, 2.0, 2.2), (1,), (0.01,))
    assert full_search(survival, curve) == [2]
    assert allocate(survival, curve) == [0]
    assert choose_drafting(survival, curve).drafted == [False]


def test_a_request_with_a_fixed_length_is_drafted_exactly_if_that_is_not_zero() -> None:
    survival = [[0.1, 0.01], [0.9, 0.8], [0.9, 0.8]]
    curve = CostCurve((1, 16), (1.0, 1.3), (1, 3), (0.1, 0.3))
    assert choose_drafting(survival, curve, fixed=[2, 0, None]).drafted == [True, False, True]


@pytest.mark.parametrize("seed", range(5))
def test_a_large_batch_searched_in_two_passes_equals_every_number_tried(seed: int, monkeypatch) -> None:
    rng = random.Random(seed)
    survival = random_rows(rng, 150, 5)
    curve = CostCurve((1, 256, 1024), (1.0, 1.2, 4.0), (1, 256), (0.01, rng.choice([0.3, 0.6, 1.2])))
    quick = choose_drafting(survival, curve)
    monkeypatch.setattr("dspark.speculation.drafting_choice.MAX_SIZES_TRIED", 1000)
    assert quick == choose_drafting(survival, curve)


def test_a_gain_below_the_least_one_is_not_drafted_for():
    curve = CostCurve((1, 2, 3), (1.0, 1.2, 1.5))
    expected = [[0.3]]  # 1.3 tokens in 1.2 seconds: 8 % more than 1 in 1
    assert choose_drafting(expected, curve, min_gain=0.08).drafted == [True]
    assert choose_drafting(expected, curve, min_gain=0.09).drafted == [False]
    assert choose_drafting(expected, curve, min_gain=0.5, fixed=[1]).drafted == [True]


@pytest.mark.parametrize("seed", range(40))
def test_what_is_there_already_costs_no_drafting_but_its_place_in_the_batch(seed: int) -> None:
    rng = random.Random(seed)
    survival, curve = random_rows(rng, 4, 2), random_curve(rng, 16, convex=True)
    is_free = [rng.random() < 0.5 for _ in survival]

    def rate(drafted: Sequence[bool]) -> float:
        known = [row if one or free else [] for row, one, free in zip(survival, drafted, is_free, strict=True)]
        options = {"draft_s": curve.draft_seconds(sum(drafted))}
        return smooth_rate(full_search(known, curve, **options), known, curve, **options)

    drafted = choose_drafting(survival, curve, is_free=is_free).drafted
    assert not any(one and free for one, free in zip(drafted, is_free, strict=True))
    every = itertools.product(*[(False,) if free else (False, True) for free in is_free])
    assert rate(drafted) >= 0.97 * max(rate(one) for one in every)


def test_no_more_are_drafted_than_there_are_drafters_for_and_heavy_requests_come_first() -> None:
    survival = [[0.9, 0.8], [0.6, 0.5], [0.8, 0.7]]
    curve = CostCurve((1, 16), (1.0, 1.1))
    assert choose_drafting(survival, curve).drafted == [True, True, True]
    assert choose_drafting(survival, curve, max_drafted=1).drafted == [True, False, False]
    assert choose_drafting(survival, curve, max_drafted=1, weights=[1.0, 9.0, 1.0]).drafted == [False, True, False]
    assert choose_drafting(survival, curve, max_drafted=0).drafted == [False, False, False]
    assert choose_drafting(survival, curve, max_drafted=2, fixed=[None, 1, None]).drafted == [True, True, False]
    assert choose_drafting(survival, curve, max_drafted=1, is_free=[True, False, False]).drafted == [False, False, True]


def test_where_verifying_is_dear_nobody_is_drafted_whatever_the_acceptance() -> None:
    dear = CostCurve((1, 2, 3, 4, 8), (1.0, 2.0, 3.0, 4.0, 8.0), (1, 8), (0.05, 0.1))
    for confidence in (0.7, 0.83):
        row = list(itertools.accumulate([confidence] * 7, lambda a, c: a * c))
        assert choose_drafting([row], dear).drafted == [False]


@pytest.mark.parametrize("seed", range(10))
def test_what_requests_cost_beside_their_tokens_counts_like_a_dearer_step(seed: int) -> None:
    rng = random.Random(seed)
    survival, curve = random_rows(rng, 5, 3), random_curve(rng, 30, convex=True)
    dearer = replace(curve, verify_s=tuple(second + 4 * 0.25 for second in curve.verify_s))
    assert choose_drafting(survival, replace(curve, request_s=0.25)) == choose_drafting(survival, dearer)


def test_nobody_is_drafted_where_nobody_is_or_can_be() -> None:
    assert choose_drafting([], STEPPED) == ([], [])
    assert choose_drafting([[], []], STEPPED).drafted == [False, False]


@pytest.mark.parametrize("seed", range(60))
def test_the_lengths_are_those_that_allocate_gives_to_who_is_chosen(seed: int) -> None:
    rng = random.Random(seed)
    survival = random_rows(rng, rng.randint(1, 40), 5)
    curve = random_curve(rng, 60, buckets=rng.choice([(), (2, 4, 8, 16, 48)]))
    lengths = [rng.choice([None, None, rng.randint(0, len(row))]) for row in survival]
    is_free = [bool(row) and rng.random() < 0.2 for row in survival]
    options = {
        "prefill_tokens": rng.choice([0, 5]),
        "fixed": rng.choice([None, lengths]),
        "capacity": rng.choice([None, 0, 3, 9]),
        "floor": rng.choice([0, 0, 4]),
        "weights": rng.choice([None, [rng.choice([0.5, 1.0, 2.0]) for _ in survival]]),
    }
    max_drafted = rng.choice([None, 0, 2])
    chosen = choose_drafting(survival, curve, is_free=is_free, max_drafted=max_drafted, **options)
    known = [row if one or free else [] for row, one, free in zip(survival, chosen.drafted, is_free, strict=True)]
    draft_s = curve.draft_seconds(sum(chosen.drafted))
    assert chosen.lengths == allocate(known, curve, draft_s=draft_s, **options)


def test_a_floor_is_filled_by_whom_drafting_pays_for_and_keeps_nobody_from_it() -> None:
    """Judged with the floor, two who have four slots to force would look worse than nobody who has none."""
    survival, curve = [[0.9, 0.09], [0.9, 0.09]], CostCurve((1, 2, 3, 4, 5, 6), (0.7, 1.0, 1.3, 1.6, 1.9, 2.2))
    assert choose_drafting(survival, curve).lengths == [1, 1]
    assert choose_drafting(survival, curve, floor=4) == ([True, True], [2, 2])


def test_nobody_is_drafted_for_what_there_is_no_room_to_verify() -> None:
    survival, curve = [[0.9, 0.8], [0.9, 0.8]], CostCurve((1, 16), (1.0, 1.1), (1, 2), (0.01, 0.02))
    assert choose_drafting(survival, curve, capacity=0) == ([False, False], [0, 0])
    assert choose_drafting(survival, curve, capacity=1) == ([True, False], [1, 0])


def allocated_rate(drafted: Sequence[bool], survival: Rows, curve: CostCurve) -> float:
    """Tokens per second when just these are drafted for and Algorithm 1 says what is verified."""
    known = [row if is_drafted else [] for row, is_drafted in zip(survival, drafted, strict=True)]
    draft_s = curve.draft_seconds(sum(drafted))
    lengths = allocate(known, curve, draft_s=draft_s)
    tau = len(survival) + sum(sum(row[:length]) for row, length in zip(survival, lengths, strict=True))
    return tau / (curve.verify_seconds(len(survival) + sum(lengths)) + draft_s)


def shares_of_brute_force(num_cases: int, num_slots: int) -> list[float]:
    """Of the best set's tokens per second, on curves that are convex, jagged or in stairs."""
    shares = []
    for seed in range(num_cases):
        rng = random.Random(seed)
        widths = [rng.randint(1, num_slots) for _ in range(rng.randint(1, 6))]
        confidences = [[rng.uniform(0.1, 0.98) for _ in range(width)] for width in widths]
        survival = [list(itertools.accumulate(row, lambda a, c: a * c)) for row in confidences]
        curve = random_curve(rng, 24, convex=rng.random() < 0.5, buckets=rng.choice([(), (), (2, 4, 8, 16)]))
        every = itertools.product([False, True], repeat=len(survival))
        best = max(allocated_rate(drafted, survival, curve) for drafted in every)
        shares.append(allocated_rate(choose_drafting(survival, curve).drafted, survival, curve) / best)
    return shares


@pytest.mark.parametrize(("num_slots", "most_misses", "least_mean"), [(3, 2, 0.9998), (7, 6, 0.9992)])
def test_500_small_cases_equal_brute_force_over_all_sets_or_nearly_so(
    num_slots: int, most_misses: int, least_mean: float, record_property: Callable[[str, object], None]
) -> None:
    shares = shares_of_brute_force(500, num_slots)
    misses = sum(share < 0.98 for share in shares)
    record_property("share_of_brute_force", (sum(shares) / 500, misses, min(shares)))
    assert max(shares) <= 1 + 1e-9
    assert misses <= most_misses
    assert sum(shares) / 500 >= least_mean


@pytest.mark.parametrize("seed", range(10))
def test_long_contexts_count_like_a_dearer_step_and_short_ones_not_at_all(seed: int) -> None:
    rng = random.Random(seed)
    survival, curve = random_rows(rng, 5, 3), random_curve(rng, 30, convex=True)
    by_context = replace(curve, context_s=0.5, context_tokens=100)
    dearer = replace(curve, verify_s=tuple(second + 0.5 for second in curve.verify_s))
    assert choose_drafting(survival, by_context, context_tokens=1500) == choose_drafting(survival, dearer)
    assert choose_drafting(survival, by_context, context_tokens=40) == choose_drafting(survival, curve)
    assert choose_drafting(survival, by_context) == choose_drafting(survival, curve)
