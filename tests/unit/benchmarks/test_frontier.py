"""Both axes of the frontier are measured: all users' tokens per second are not a user's times their number."""

from typing import Any

import numpy as np
import pytest

from dspark.evaluation.load_run import Answer, LoadRun

LOADS = (1, 4)


@pytest.fixture
def frontier(script: Any) -> Any:
    return script("frontier")


def answer(tokens: int, seconds: float) -> Answer:
    return Answer(sent_s=10.0, arrived_s=[10.0 + seconds / 2, 10.0 + seconds], num_tokens=tokens)


def run(*answers: Answer, full_load_tokens: int) -> LoadRun:
    return LoadRun(list(answers), seconds=99.0, full_load_s=2.0, full_load_tokens=full_load_tokens)


def test_all_tokens_per_second_are_those_counted_under_full_load(frontier: Any) -> None:
    one = run(answer(100, 1.0), answer(100, 4.0), full_load_tokens=160)
    point = frontier.point_of([frontier.of_answers(one)] * 2)
    assert point.user() == pytest.approx((100 + 25) / 2)
    assert point.all() == 80.0  # in place of 2 * 62.5


def test_counting_everybody_once_changes_nothing_and_the_slow_ones_twice_lowers_both(frontier: Any) -> None:
    point = frontier.point_of([frontier.of_answers(run(answer(100, 1.0), answer(100, 4.0), full_load_tokens=160))])
    once, slow_twice = np.ones(2), np.array([1.0, 2.0])
    assert (point.user(once), point.all(once)) == (pytest.approx(62.5), pytest.approx(80.0))
    assert point.user(slow_twice) == pytest.approx(50.0)
    assert point.all(slow_twice) == pytest.approx(80.0 * (300 / 9) / (200 / 5))


def point(frontier: Any, user: float, everybody: float, *, spread: float = 0.0) -> Any:
    speeds = user * (1.0 + spread * np.linspace(-1, 1, 12))
    return frontier.Point(speeds, np.full(12, 100.0), 100.0 / speeds, everybody)


def test_a_way_that_is_half_as_fast_again_in_both_is_found_so_with_an_interval_around_it(frontier: Any) -> None:
    """Ours at 4 stands level in a user's speed with the rival at 1: only there both have a point to compare."""
    speeds = {("ours", 1): (150.0, 150.0), ("ours", 4): (100.0, 400.0)}
    speeds |= {("rival", 1): (100.0, 100.0), ("rival", 4): (60.0, 240.0)}
    points = {key: point(frontier, *value, spread=0.1) for key, value in speeds.items()}
    low, high = frontier.compared(points, LOADS)
    assert low["all, rival"] == 100.0
    assert low["user"]["ratio"] == pytest.approx(1.5)  # all get less than ours at its lowest load: that end
    assert low["all"]["ratio"] == pytest.approx(4.0)
    assert high["user"]["ratio"] == pytest.approx((150 - 50 * 90 / 250) / 60)
    first, last = high["user"]["interval"]
    assert first <= high["user"]["ratio"] <= last


def test_an_answer_that_failed_is_no_point(frontier: Any) -> None:
    failed = answer(1, 1.0)
    failed.failure = "timeout"
    with pytest.raises(AssertionError, match="a request failed"):
        frontier.of_answers(run(failed, full_load_tokens=1))
