"""Who is taken in, and when those that are not should come again."""

import pytest

from dspark.serving.admission import LONGEST_RETRY_S, WINDOW_S, Admission
from dspark.serving.config import LimitsConfig
from dspark.serving.openai_schema import Refusal


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def admission(clock: Clock, **limits: float) -> Admission:
    return Admission(LimitsConfig.model_validate({"max_concurrent_requests": 10, **limits}), clock)


def at_pace(one: Admission, clock: Clock, *, per_s: float, seconds: int) -> None:
    for _ in range(seconds * int(per_s)):
        clock.now += 1 / per_s
        one.ended(1)


def refused(one: Admission, *, num_open: int, num_new: int = 1, max_running: int = 8) -> Refusal:
    refusal = one.refusal(num_new=num_new, num_open=num_open, max_running=max_running)
    assert refusal is not None
    assert refusal.status == 429
    return refusal


def test_no_more_than_so_many_at_once() -> None:
    one = admission(Clock())
    assert one.refusal(num_new=1, num_open=9, max_running=8) is None
    assert one.refusal(num_new=4, num_open=6, max_running=8) is None
    assert "10 requests are running or waiting" in refused(one, num_open=10).message
    assert refused(one, num_open=7, num_new=4).retry_after_s == 1


def test_nobody_waits_longer_than_is_allowed_at_the_pace_of_lately() -> None:
    clock = Clock()
    one = admission(clock, max_wait_s=3.0, max_concurrent_requests=100)
    assert one.refusal(num_new=1, num_open=90, max_running=8) is None  # no pace is known
    at_pace(one, clock, per_s=2, seconds=10)
    assert one.refusal(num_new=1, num_open=12, max_running=8) is None
    refusal = refused(one, num_open=19)
    assert "would wait about 6 s; at most 3 s" in refusal.message
    assert refusal.retry_after_s == 3  # until six of the twelve have ended


def test_those_for_whom_there_is_room_do_not_wait_whatever_the_pace() -> None:
    clock = Clock()
    one = admission(clock, max_wait_s=3.0, max_concurrent_requests=100)
    at_pace(one, clock, per_s=1, seconds=28)
    assert one.refusal(num_new=4, num_open=28, max_running=32) is None


def test_without_a_longest_wait_only_the_number_counts() -> None:
    clock = Clock()
    one = admission(clock)
    at_pace(one, clock, per_s=1, seconds=20)
    assert one.refusal(num_new=1, num_open=9, max_running=1) is None


def test_a_pace_is_forgotten() -> None:
    clock = Clock()
    one = admission(clock)
    at_pace(one, clock, per_s=2, seconds=10)
    assert one.wait_s(4) == pytest.approx(2.0, rel=0.1)
    clock.now += WINDOW_S + 1
    assert one.wait_s(4) is None


def test_nobody_is_sent_away_for_ever() -> None:
    clock = Clock()
    one = admission(clock, max_concurrent_requests=1000)
    at_pace(one, clock, per_s=1, seconds=10)
    assert refused(one, num_open=1000, num_new=128).retry_after_s == LONGEST_RETRY_S
