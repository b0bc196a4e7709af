"""The test of acceptance: what it promises of false alarms, what it finds, and its slow twin."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.traffic.drift import AcceptanceCusum, AcceptanceWatch, LevelCount, log_likelihood_ratio, trials

LEVELS = [0.8, 0.7, 0.6]
OPTIONS = {"drop": 0.2, "rounds_between_false_alarms": 100.0, "design_effect": 1.0}


def draw_round(rng: random.Random, levels: list[float], *, drop: float = 0.0) -> tuple[int, int]:
    judged, accepted = rng.randint(1, len(levels)), 0
    while accepted < judged and rng.random() < levels[accepted] * (1 - drop):
        accepted += 1
    return accepted, judged


def rounds_until_alarm(rng: random.Random, *, drop: float, most: int, **options: float) -> int:
    test = AcceptanceCusum(LEVELS, **{**OPTIONS, **options})
    for number in range(1, most + 1):
        test.add(*draw_round(rng, LEVELS, drop=drop))
        if test.is_drifting:
            return number
    return most


def test_false_alarms_are_as_far_apart_as_promised() -> None:
    rng = random.Random(0)
    lengths = [rounds_until_alarm(rng, drop=0.0, most=3000) for _ in range(100)]
    assert sum(lengths) / len(lengths) > 100.0  # a few hundred in fact: the bound is loose


def test_a_fall_is_found_soon_and_the_further_the_sooner() -> None:
    rng = random.Random(1)
    means = [sum(rounds_until_alarm(rng, drop=drop, most=3000) for _ in range(50)) / 50 for drop in (0.2, 0.5)]
    assert means[1] < means[0] < 100
    assert means[1] < 20


def test_a_design_effect_takes_that_many_rounds_for_one() -> None:
    rng = random.Random(2)
    plain, shared = (
        sum(rounds_until_alarm(rng, drop=0.4, most=3000, design_effect=effect) for _ in range(40)) / 40
        for effect in (1.0, 4.0)
    )
    assert 2.5 < shared / plain < 5.5


def test_an_alarm_ends_once_acceptance_is_back() -> None:
    rng, test = random.Random(3), AcceptanceCusum(LEVELS, **OPTIONS)
    for _ in range(5000):
        test.add(*draw_round(rng, LEVELS, drop=0.4))
    assert test.score == 2.0
    assert test.ratio == pytest.approx(0.6, abs=0.08)
    for _ in range(500):
        test.add(*draw_round(rng, LEVELS))
    assert not test.is_drifting
    assert test.ratio == pytest.approx(1.0, abs=0.15)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), max_size=40))
def test_the_running_sum_is_the_largest_of_all_last_stretches(rounds: list[tuple[int, int]]) -> None:
    """Slow twin: Page's maximum over where the change may have been, which the recursion keeps."""
    test = AcceptanceCusum(LEVELS, **{**OPTIONS, "rounds_between_false_alarms": 1e300})
    changes = []
    for accepted, judged in rounds:
        accepted = min(accepted, judged)
        test.add(accepted, judged)
        changes.append(sum(log_likelihood_ratio(LEVELS[min(k, 2)], 0.2)[not s] for k, s in trials(accepted, judged)))
    largest = max([0.0, *(sum(changes[start:]) for start in range(len(changes)))])
    assert test.score * test.threshold == pytest.approx(largest, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.floats(0.02, 0.98), st.floats(0.01, 0.9), st.floats(1.0, 20.0))
def test_one_trial_gains_nothing_in_the_mean_where_nothing_changed(level: float, drop: float, effect: float) -> None:
    """What the bound on false alarms rests on: the mean of exp(llr / design_effect) is at most 1."""
    stood, fell = (math.exp(change / effect) for change in log_likelihood_ratio(level, drop))
    assert level * stood + (1 - level) * fell <= 1 + 1e-12


def test_a_watch_without_a_level_learns_one_and_counts_alarms_once() -> None:
    rng, watch = random.Random(4), AcceptanceWatch(None, learn_rounds=2000, **OPTIONS)
    for _ in range(2000):
        assert not watch.add(*draw_round(rng, LEVELS))
    assert watch.test is not None
    assert watch.test.levels == pytest.approx(LEVELS, abs=0.06)
    begun = sum(watch.add(*draw_round(rng, LEVELS, drop=0.6)) for _ in range(300))
    assert begun == watch.num_alarms == 1
    assert not watch.add(0, 0)


def test_levels_are_conditional_acceptance_over_what_was_reached() -> None:
    count = LevelCount()
    for accepted, judged in [(2, 3), (0, 3), (3, 3), (1, 1)]:
        count.add(accepted, judged)
    assert count.levels(min_rounds=1) == [3 / 4, 2 / 2, 1 / 2]
    assert count.levels() == [3 / 4]
    assert LevelCount().levels() == []


def test_a_level_of_one_or_none_at_all_does_not_break_it() -> None:
    test = AcceptanceCusum([1.0, 0.0], **OPTIONS)
    test.add(0, 2)
    assert np.isfinite(test.score)
    with pytest.raises(ValueError, match="slot 0"):
        AcceptanceCusum([], **OPTIONS)
