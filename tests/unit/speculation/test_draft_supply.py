"""What shared drafters offer: their calls' seconds by size, of late, and larger calls than there were."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.draft_supply import LEAST_CALLS, CallSeconds, drafter_of, joined
from dspark.speculation.fleet import DraftSupply
from dspark.speculation.fleet_options import drafting_cost

CURVE = CostCurve((1,), (0.01,), (1, 8, 64), (0.004, 0.006, 0.020))


def cost_of(supply: DraftSupply | None, num_blocks: int) -> float:
    assert supply is not None
    return float(drafting_cost(np.array([num_blocks]), supply.requests, supply.cost)[0])


def noted(calls: CallSeconds, num_blocks: int, seconds: float, number: int = LEAST_CALLS) -> CallSeconds:
    for _ in range(number):
        calls.note(num_blocks, seconds)
    return calls


def truth(num_blocks: int) -> float:
    return 0.004 + 0.001 * num_blocks


@pytest.mark.parametrize("prior", [None, drafter_of(CURVE)], ids=["unknown", "with a curve"])
def test_after_a_quiet_time_calls_grow_to_what_the_drafter_can_do(prior: DraftSupply | None) -> None:
    """A hundred calls a second of 9.1 ms each: five blocks. By blocks per second of single ones it would be one."""
    calls = noted(CallSeconds(prior), 1, truth(1), 500)
    sizes = []
    for _ in range(6):
        sizes.append(max(n for n in range(1, 200) if cost_of(calls.supply(), n) <= 0.0091))
        noted(calls, sizes[-1], truth(sizes[-1]), 10)
    assert sizes[-1] == 5
    assert max(sizes) < 20  # nor is it overrun meanwhile


def test_the_seconds_of_a_call_are_those_of_late() -> None:
    calls = noted(noted(CallSeconds(), 4, 0.005), 4, 0.009, 150)
    assert cost_of(calls.supply(), 4) == pytest.approx(0.009, rel=0.01)
    assert cost_of(noted(calls, 4, 0.004, 150).supply(), 4) == pytest.approx(0.004, rel=0.01)


def test_a_size_that_was_dear_once_is_tried_again() -> None:
    calls = noted(noted(CallSeconds(), 1, 0.005), 16, 0.5, 30)
    assert cost_of(calls.supply(), 16) > 0.4
    assert cost_of(noted(calls, 1, 0.005, 800).supply(), 16) < 0.03


def test_one_call_that_was_held_up_says_little() -> None:
    calls = noted(CallSeconds(), 4, 0.005, 200)
    calls.note(4, 10.0)
    assert cost_of(calls.supply(), 4) < 0.006


def test_a_table_never_falls_and_larger_calls_cost_no_more_than_so_many_small_ones() -> None:
    draw = np.random.default_rng(0)
    for prior in (None, drafter_of(CURVE)):
        calls = CallSeconds(prior)
        for number in range(400):
            size = int(draw.integers(1, 40))
            calls.note(size, truth(size) * float(draw.lognormal(0.0, 0.5)))
            if number >= LEAST_CALLS:
                supply = calls.supply()
                assert supply is not None
                assert all(more > less for less, more in pairwise(supply.requests))
                costs = [cost_of(supply, n) for n in range(1, 100)]
                assert all(more >= less for less, more in pairwise(costs))
                assert costs[98] <= 99 * costs[0]


def test_before_enough_is_known_the_curve_speaks_and_without_one_nobody() -> None:
    assert CallSeconds().supply() is None
    prior = drafter_of(CURVE)
    assert prior == DraftSupply(1.0, CURVE.draft_requests, CURVE.draft_s)
    assert CallSeconds(prior).supply() == prior
    assert drafter_of(None) is None
    assert drafter_of(CostCurve((1,), (0.01,))) is None


def test_sizes_that_were_not_seen_cost_as_the_curve_says_in_proportion() -> None:
    supply = noted(CallSeconds(drafter_of(CURVE)), 8, 0.012).supply()
    assert [cost_of(supply, n) for n in (1, 8, 64)] == pytest.approx([0.008, 0.012, 0.040])


def test_equal_drafters_are_so_many_times_one() -> None:
    one = drafter_of(CURVE)
    assert one is not None
    together = joined([one] * 3, max_load=0.9)
    assert together is not None
    assert together.per_s == pytest.approx(2.7)
    assert [cost_of(together, n) for n in (1, 5, 100)] == pytest.approx([cost_of(one, n) for n in (1, 5, 100)])
    assert joined([]) is None
    assert joined([DraftSupply(0.0)]) is None


def calls_per_s(supply: DraftSupply | None, num_blocks: int) -> float:
    assert supply is not None
    return supply.per_s / cost_of(supply, num_blocks)


@pytest.mark.parametrize(
    "other",
    [
        lambda: DraftSupply(1.0, (1, 4), (0.008, 0.012)),
        lambda: DraftSupply(2.0, (1, 4), (0.016, 0.024)),  # the same one, in another unit
    ],
)
def test_unlike_drafters_share_calls_that_are_dealt_to_them_in_turn(other: Callable[[], DraftSupply]) -> None:
    """Each gets every other call: of 4 ms at one, of 8 ms at the other, both have two seconds a second."""
    one = DraftSupply(1.0, (1, 8), (0.004, 0.006))
    assert calls_per_s(joined([one, other()]), 1) == pytest.approx(2 / ((0.004 + 0.008) / 2))
    assert joined([one, other()]) == joined([other(), one])
    assert calls_per_s(joined([DraftSupply(100.0), DraftSupply(100.0)]), 4) == pytest.approx(50.0)
