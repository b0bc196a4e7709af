"""Leases: unlimited where nothing is shared, else the best use of what is."""

import itertools
import random

import pytest

from dspark.speculation.fleet import ReplicaReport, allocate_capacity


def report(name: str, *, most: int = 8, gain: float = 0.5, step_s: float = 0.5) -> ReplicaReport:
    return ReplicaReport(name, 1, num_running=2, max_draft_tokens=most, expected_gain=gain, step_s=step_s)


def test_a_replica_that_shares_nothing_decides_alone() -> None:
    assert allocate_capacity([report("a")], None) == {"a": None}


def test_ample_capacity_bounds_nobody() -> None:
    assert allocate_capacity([report("a"), report("b", most=3)], 1000.0) == {"a": 8, "b": 3}


def test_the_higher_gain_goes_first() -> None:
    assert allocate_capacity([report("a", gain=0.2), report("b", gain=0.9)], 20.0) == {"b": 8, "a": 2}


def test_equal_gains_go_by_name() -> None:
    forwards = allocate_capacity([report("a"), report("b")], 16.0)
    assert forwards == allocate_capacity([report("b"), report("a")], 16.0) == {"a": 8, "b": 0}


def test_a_replica_without_a_step_yet_may_make_one() -> None:
    assert allocate_capacity([report("a", step_s=0.0), report("b")], 4.0) == {"a": 8, "b": 2}


def test_nobody_and_nothing() -> None:
    assert allocate_capacity([], 5.0) == {}
    assert allocate_capacity([report("a", most=0)], 5.0) == {"a": 0}


@pytest.mark.parametrize("seed", range(40))
def test_allocation_keeps_to_the_capacity_and_is_best_up_to_rounding(seed: int) -> None:
    rng = random.Random(seed)
    reports = [
        report(name, most=rng.randint(0, 6), gain=rng.random(), step_s=rng.choice([0.25, 0.5, 1.0]))
        for name in "abc"[: rng.randint(1, 3)]
    ]
    available = rng.uniform(0.0, 30.0)
    given = allocate_capacity(reports, available)

    def used(capacities: list[int]) -> float:
        return sum(x / r.step_s for x, r in zip(capacities, reports, strict=True))

    def gained(capacities: list[int]) -> float:
        return sum(r.expected_gain * x / r.step_s for x, r in zip(capacities, reports, strict=True))

    chosen = [given[r.replica_id] or 0 for r in reports]
    every = itertools.product(*(range(r.max_draft_tokens + 1) for r in reports))
    best = max(gained(list(one)) for one in every if used(list(one)) <= available)
    assert used(chosen) <= available
    assert gained(chosen) >= best - max(r.expected_gain / r.step_s for r in reports) - 1e-9
