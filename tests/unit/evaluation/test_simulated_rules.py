"""The rules of the simulator are those of the engine, row by row."""

import random

import numpy as np
import pytest

from dspark.evaluation.simulated_rules import Costs, admit, best_totals, choose_drafted, threshold_lengths
from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.drafting_choice import choose_drafting
from dspark.speculation.prefix_scheduler import PrefixScheduler, best_total
from scheduling_toys import Rows, random_curve, random_rows, smooth_rate


def table(batches: list[Rows], num_places: int, num_slots: int) -> np.ndarray:
    survival = np.zeros((len(batches), num_places, num_slots))
    for batch, rows in zip(survival, batches, strict=True):
        for place, row in zip(batch, rows, strict=False):
            place[: len(row)] = row
    return survival


def costs_of(curve, batches: list[Rows], prefill: int = 0) -> Costs:
    requests = np.array([float(len(rows)) for rows in batches])
    ones = np.ones(len(batches))
    return Costs(curve, requests + prefill, requests, ones, 0.0 * ones)


@pytest.mark.parametrize("seed", range(40))
def test_admit_equals_the_prefix_scheduler(seed: int) -> None:
    rng = random.Random(seed)
    batches = [random_rows(rng, rng.randint(1, 5), 3) for _ in range(6)]
    curve = random_curve(rng, 30, buckets=rng.choice([(), (2, 4, 8, 16), (3, 7, 20)]))
    weights = [[rng.choice([1.0, 4.0]) for _ in rows] for rows in batches]
    capacity, floor = rng.choice([None, 2, 6]), rng.choice([0, 3])
    places = np.ones((6, 5))
    for row, own in zip(places, weights, strict=True):
        row[: len(own)] = own
    found = admit(
        table(batches, 5, 3),
        places,
        np.array([sum(own) for own in weights]),
        costs_of(curve, batches, prefill=2),
        np.full(6, 0.25),
        capacity=np.full(6, np.inf if capacity is None else capacity),
        floor=np.full(6, float(floor)),
    )
    for row, rows, own in zip(found, batches, weights, strict=True):
        expected = PrefixScheduler().allocate(
            rows, curve, prefill_tokens=2, draft_s=0.25, capacity=capacity, floor=floor, weights=own
        )
        assert row[: len(rows)].tolist() == expected
        assert not row[len(rows) :].any()


def rate_of(drafted: list[bool], rows: Rows, curve: CostCurve) -> float:
    """Tokens per second when these are drafted for."""
    known = [row if is_drafted else [] for row, is_drafted in zip(rows, drafted, strict=True)]
    draft_s = curve.draft_seconds(sum(drafted))
    lengths = PrefixScheduler().allocate(known, curve, draft_s=draft_s)
    return smooth_rate(lengths, rows, curve, draft_s=draft_s)


@pytest.mark.parametrize("seed", range(40))
def test_choosing_whom_to_draft_for_nearly_equals_the_engines_choice(seed: int) -> None:
    rng = random.Random(seed)
    batches = [random_rows(rng, rng.randint(1, 5), 3) for _ in range(6)]
    curve, most = random_curve(rng, 30, convex=True), rng.choice([None, 1, 3])
    min_gain = rng.choice([0.0, 0.12])
    found = choose_drafted(
        table(batches, 5, 3),
        np.ones((6, 5)),
        np.array([float(len(rows)) for rows in batches]),
        costs_of(curve, batches),
        most=np.full(6, np.inf if most is None else most),
        min_gain=min_gain,
    )
    for row, rows in zip(found, batches, strict=True):
        best = choose_drafting(rows, curve, max_drafted=most, min_gain=min_gain).drafted
        drafted = row[: len(rows)].tolist()
        assert sum(drafted) <= (len(rows) if most is None else most)
        assert any(drafted) == any(best)
        assert rate_of(drafted, rows, curve) >= 0.98 * rate_of(best, rows, curve)


@pytest.mark.parametrize("seed", range(20))
def test_the_lagged_total_equals_full_search(seed: int) -> None:
    rng = random.Random(seed)
    batches = [random_rows(rng, 4, 3) for _ in range(4)]
    curve = random_curve(rng, 30, buckets=(2, 4, 8, 16))
    found = best_totals(table(batches, 4, 3), np.ones((4, 4)), np.full(4, 4.0), costs_of(curve, batches), np.zeros(4))
    assert found.tolist() == [best_total(rows, curve) for rows in batches]


def test_a_threshold_cuts_where_survival_falls_below_it() -> None:
    assert threshold_lengths(np.array([[[0.9, 0.5, 0.2], [0.4, 0.4, 0.1]]]), 0.5).tolist() == [[2, 0]]
