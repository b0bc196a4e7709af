"""What one process of the API knows of the replicas' load between two looks at them."""

import random

import pytest

from dspark.serving.config import LimitsConfig
from dspark.serving.engine_client import LoadReport
from dspark.serving.fleet_view import FleetView

MOST = 10


def view(**limits: float) -> FleetView:
    return FleetView(LimitsConfig.model_validate({"max_concurrent_requests": MOST, **limits}))


def report(name: str, num_open: int = 0, *, per_s: float | None = None, **ahead: int) -> LoadReport:
    return LoadReport(name, num_open, max_running=4, per_s=per_s, **ahead)


def test_before_a_word_from_any_replica_there_is_room_for_one_replicas_requests() -> None:
    one = view()
    for _ in range(MOST):
        assert one.refusal() is None
        one.begin()
    assert one.refusal() is not None
    one.end()
    assert one.refusal() is None


def test_room_follows_the_replicas_that_are_there() -> None:
    one = view()
    for num_replicas in (1, 3, 2):
        one.heard([report(str(k)) for k in range(num_replicas)], one.asked())
        assert (one.room().most, one.room().max_running) == (MOST * num_replicas, 4 * num_replicas)
    one.heard([], one.asked())
    assert one.room().most == MOST


def test_what_was_sent_since_the_replicas_were_asked_is_counted() -> None:
    """Against the truth, kept beside: replicas tell of all, this process's requests are some of them."""
    draw, one = random.Random(0), view(max_concurrent_requests=1000)
    own = others = 0
    for _ in range(500):
        if draw.random() < 0.2:  # asked and answered at once
            others = draw.randrange(20)
            one.heard([report("a", own + others), report("b", 0)], one.asked())
        elif draw.random() < 0.6 or not own:
            one.begin()
            own += 1
        else:
            one.end()
            own -= 1
        assert one.room().num_open == own + others


def test_an_answer_that_was_long_on_its_way_counts_from_when_it_was_asked_for() -> None:
    one = view()
    asked = one.asked()
    for _ in range(5):
        one.begin()
    one.heard([report("a", 3)], asked)
    assert one.room().num_open == 8  # the five may have come after the replica spoke
    assert one.num_open == 5


def test_there_are_never_fewer_than_this_process_sent() -> None:
    one = view()
    for _ in range(6):
        one.begin()
    one.heard([report("a", 2)], one.asked())  # four are still on their way to it
    assert one.room().num_open == 6


def test_a_silent_replica_stands_as_it_stood_and_a_dead_one_is_gone() -> None:
    one = view()
    one.heard([report("a", 1), report("b", 2)], one.asked())
    one.heard([report("a", 3), None], one.asked())
    assert (one.room().num_open, one.room().most) == (5, 2 * MOST)
    one.heard([report("a", 3)], one.asked())
    assert (one.room().num_open, one.room().most) == (3, MOST)


def test_a_replica_without_a_pace_is_taken_to_have_the_others() -> None:
    one = view()
    one.heard([report("a", per_s=2.0), report("b", per_s=4.0), report("new")], one.asked())
    assert one.room().per_s == pytest.approx(9.0)
    one.heard([report("new")], one.asked())
    assert one.room().per_s is None


def test_nobody_is_let_in_who_would_wait_too_long() -> None:
    one = view(max_wait_s=2.0, max_concurrent_requests=1000)
    one.heard([report("a", 4, per_s=3.0)], one.asked())
    num_let_in = 0
    while one.refusal() is None:
        one.begin()
        num_let_in += 1
    assert num_let_in == 6  # behind the four that run, at three a second


def test_who_goes_before_others_waits_for_those_before_it_only_and_is_let_in_when_they_fill_the_house() -> None:
    one = view(max_wait_s=2.0, urgent_share=0.2)
    one.heard([report("a", MOST, per_s=1.0, num_ahead=8, num_urgent=5)], one.asked())
    assert one.refusal(-1) is None  # two before it take two seconds
    assert one.refusal() is not None  # there are as many as may be
    one.heard([report("a", MOST + 1, per_s=1.0, num_ahead=8, num_urgent=7)], one.asked())
    assert one.refusal(-1) is not None  # four before it take four seconds
    one.heard([report("a", MOST + 2, per_s=1.0)], one.asked())
    assert one.refusal(-1) is not None  # of its kind, too, there are as many as may be
    one.heard([report("a", MOST - 1, per_s=1.0, num_ahead=4)], one.asked())
    assert one.refusal() is None  # most of them stand behind it


def test_a_queue_of_those_behind_holds_up_nobody_else() -> None:
    one = view(max_wait_s=2.0, max_concurrent_requests=100)
    one.heard([report("a", 90, per_s=1.0, num_ahead=3)], one.asked())
    let_in = 0
    while one.refusal() is None:
        one.begin()
        let_in += 1
    assert let_in == 3  # one beside the three, and two who wait two seconds
