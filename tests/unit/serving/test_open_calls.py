"""How many calls a replica has open, against a count that knows everything."""

import random
from typing import Any

from dspark.serving.open_calls import VOID_S, OpenCalls


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def said(num_calls: int) -> dict[str, Any]:
    return {"token_s": 1.0, "num_calls": float(num_calls)}


def test_ones_own_calls_are_counted_from_the_choice_to_the_end() -> None:
    draw, calls = random.Random(0), OpenCalls[str](Clock())
    truth: dict[str, str] = {}
    sent: set[str] = set()
    for number in range(1000):
        name, replica = str(number), draw.choice("xy")
        calls.choose(name, replica)
        truth[name] = replica
        if draw.random() < 0.2:  # it was not taken: another one is chosen
            truth[name] = draw.choice("xy")
            calls.choose(name, truth[name])
        if draw.random() < 0.8:
            calls.send(name, truth[name])
            sent.add(name)
        while truth and draw.random() < 0.5:
            ended = draw.choice(list(truth))
            del truth[ended]
            calls.end(ended)
        for one in "xy":
            assert calls.num_at(one, {}) == list(truth.values()).count(one)


def test_a_call_may_go_elsewhere_than_it_was_chosen_for() -> None:
    calls = OpenCalls[str](Clock())
    calls.choose("1", "x")
    calls.send("1", "y")
    assert (calls.num_at("x", {}), calls.num_at("y", {})) == (0, 1)


def test_what_ended_before_it_was_said_to_be_sent_has_ended() -> None:
    calls = OpenCalls[str](Clock())
    calls.choose("1", "x")
    calls.end("1")
    calls.send("1", "x")
    calls.end("never heard of")
    assert calls.num_at("x", {}) == 0


def test_a_call_that_is_never_sent_is_forgotten() -> None:
    clock = Clock()
    calls = OpenCalls[str](clock)
    calls.choose("1", "x")
    calls.choose("2", "x")
    calls.send("2", "x")
    clock.now += VOID_S + 1
    calls.choose("3", "y")
    assert calls.num_at("x", {}) == 1  # the one that was sent may last as long as it likes


def test_others_calls_are_what_a_replica_has_beside_ones_own() -> None:
    calls = OpenCalls[str](Clock())
    for name in "123":
        calls.choose(name, "x")
        calls.send(name, "x")
    assert calls.num_at("x", said(5)) == 5
    calls.choose("4", "x")
    assert calls.num_at("x", said(5)) == 6  # the same word, one more since
    for name in "1234":
        calls.end(name)
    assert calls.num_at("x", said(5)) == 2
    assert calls.num_at("x", said(6)) == 2  # it may have been said when there were four of one's own
    assert calls.num_at("x", said(2)) == 2
    calls.keep({})
    assert calls.num_at("x", {}) == 0
