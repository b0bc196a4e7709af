"""Who is taken in, and when those that are not should come again."""

from dataclasses import replace

import pytest

from dspark.serving.admission import LONGEST_RETRY_S, WINDOW_S, Pace, Room, refusal
from dspark.serving.config import LimitsConfig
from dspark.serving.openai_schema import Refusal


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def pace(clock: Clock, *, per_s: float, seconds: int, step_s: float = 0.05) -> Pace:
    """Of a replica at which somebody waits all the time."""
    one = Pace(clock)
    for number in range(1, round(seconds / step_s) + 1):
        clock.now += step_s
        one.waited(step_s, num_ended=int(number * step_s * per_s) - int((number - 1) * step_s * per_s))
    return one


def asked(
    *,
    num_open: int,
    num_new: int = 1,
    most: int = 10,
    per_s: float | None = None,
    max_wait_s: float | None = 3.0,
    may_wait: bool = False,
) -> Refusal | None:
    room = Room(num_open, max_running=8, most=most, per_s=per_s)
    return refusal(room, LimitsConfig(max_wait_s=max_wait_s), num_new=num_new, may_wait=may_wait)


def refused(*, num_open: int, num_new: int = 1, most: int = 10, per_s: float | None = None) -> Refusal:
    found = asked(num_open=num_open, num_new=num_new, most=most, per_s=per_s)
    assert found is not None
    assert found.status == 429
    return found


def test_no_more_than_so_many_at_once() -> None:
    assert asked(num_open=9) is None
    assert asked(num_open=6, num_new=4) is None
    assert "10 requests are running or waiting" in refused(num_open=10).message
    assert refused(num_open=7, num_new=4).retry_after_s == 1


def test_nobody_waits_longer_than_is_allowed_at_the_pace_of_lately() -> None:
    assert asked(num_open=90, most=100) is None  # no pace is known
    assert asked(num_open=12, most=100, per_s=2.0) is None
    found = refused(num_open=19, most=100, per_s=2.0)
    assert "would wait about 6 s; at most 3 s" in found.message
    assert found.retry_after_s == 3  # until six of the twelve have ended
    assert asked(num_open=19, most=100, per_s=4.0) is None


def test_after_the_time_that_it_was_told_a_request_is_taken() -> None:
    for num_open in range(15, 100):
        found = refused(num_open=num_open, most=1000, per_s=2.0)
        assert found.retry_after_s is not None
        left = num_open - int(2.0 * found.retry_after_s)
        assert asked(num_open=left, most=1000, per_s=2.0) is None


def test_those_for_whom_there_is_room_do_not_wait_whatever_the_pace() -> None:
    assert asked(num_open=4, num_new=4, most=100, per_s=0.1) is None


def test_those_that_one_passes_are_no_wait_but_are_counted() -> None:
    room = Room(90, max_running=8, most=100, per_s=2.0, num_ahead=9)
    assert refusal(room, LimitsConfig(max_wait_s=3.0), num_new=1) is None
    assert refusal(replace(room, num_ahead=20), LimitsConfig(max_wait_s=3.0), num_new=1) is not None
    assert refusal(replace(room, num_open=100), LimitsConfig(max_wait_s=3.0), num_new=1) is not None


def test_who_may_wait_is_refused_by_number_only() -> None:
    assert asked(num_open=19, most=100, per_s=2.0, may_wait=True) is None
    assert asked(num_open=19, most=100, per_s=2.0, max_wait_s=None) is None
    assert asked(num_open=100, most=100, per_s=2.0, may_wait=True) is not None


def test_a_pace_is_measured_and_forgotten() -> None:
    clock = Clock()
    one = pace(clock, per_s=2, seconds=10)
    assert one.per_s == pytest.approx(2.0, rel=0.1)
    clock.now += WINDOW_S + 1
    assert one.per_s is None


def test_time_in_which_nobody_waits_says_nothing_of_the_pace() -> None:
    """A request each ten seconds is what was asked for; of what could be done it says nothing."""
    clock = Clock()
    one = pace(clock, per_s=8, seconds=2)
    clock.now += 15.0
    assert one.per_s == pytest.approx(8.0)
    for _ in range(20):
        clock.now += 0.05
        one.waited(0.05, num_ended=0)  # long answers now
    assert one.per_s == pytest.approx(16 / 3)


def test_too_few_endings_make_no_pace() -> None:
    clock = Clock()
    one = pace(clock, per_s=1, seconds=3)
    assert one.per_s is None
    one.waited(1.0, num_ended=1)
    assert one.per_s == pytest.approx(1.0)


def test_nobody_is_sent_away_for_ever() -> None:
    assert refused(num_open=1000, num_new=128, most=1000, per_s=1.0).retry_after_s == LONGEST_RETRY_S
