"""The learning rate's course; the engine itself is tested where whole runs are."""

import pytest

from dspark.training.zero import warmup_cosine


def test_the_rate_climbs_linearly_and_falls_to_zero():
    factor = warmup_cosine(100, 0.1)
    assert [factor(step) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert factor(10) == pytest.approx(1.0)
    assert factor(55) == pytest.approx(0.5)
    assert factor(100) == pytest.approx(0.0)
    assert factor(1000) == pytest.approx(0.0)


def test_the_rate_never_climbs_after_the_warmup():
    factor = warmup_cosine(50, 0.2)
    rates = [factor(step) for step in range(10, 51)]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_very_short_runs_have_a_rate(steps: int):
    factor = warmup_cosine(steps, 0.0)
    assert factor(0) == 1.0
    assert all(0.0 <= factor(step) <= 1.0 for step in range(steps + 1))
