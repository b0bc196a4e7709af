"""What counts as recovered, what as spoilt, and that a repeat is asked under the id of the first."""

import asyncio
import itertools
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

OPTIONS = Namespace(replicas=2, wait_s=1.5)


@pytest.fixture
def kill(script: Any) -> Any:
    return script("kill_replicas")


class Fleet:
    """Answers what it is asked for with a metric of its replicas, the last one again and again."""

    url, model = "http://fleet", "m"

    def __init__(self, *told: dict[str, float]) -> None:
        self._told = itertools.chain(told, itertools.repeat(told[-1]))

    def by_replica(self, name: str) -> dict[str, float]:
        assert name == "dspark_drafted_tokens_total"
        return next(self._told)

    def wait_until_ready(self) -> None:
        """It is."""


def seconds_until_drafting(kill: Any, *told: dict[str, float]) -> float | None:
    return asyncio.run(kill._seconds_until_drafting(Fleet(*told), time.monotonic(), OPTIONS))


def test_drafting_is_back_once_all_replicas_have_drafted_more(kill: Any) -> None:
    told = [{}, {"a": 5.0}, {"a": 7.0, "b": 0.0}, {"a": 8.0, "b": 2.0}]
    assert seconds_until_drafting(kill, *told) is not None


@pytest.mark.parametrize("last", [{}, {"a": 7.0}, {"a": 7.0, "b": 0.0}, {"a": 5.0, "b": 9.0}])
def test_one_that_is_missing_or_drafts_no_more_is_not_back(kill: Any, last: dict[str, float]) -> None:
    assert seconds_until_drafting(kill, {"a": 5.0, "b": 0.0}, last) is None


def report(**changes: Any) -> dict[str, Any]:
    well = {"victim": "draft", "streams_open_at_the_kill": 3, "problems": {}, "silently_spoilt": 0, "repeated": 0}
    well |= {"repeat_problems": {}, "process_back_s": 1.0, "drafting_back_s": 2.0, "free_after_s": 0.1}
    return well | changes


def test_a_fleet_that_does_not_draft_again_has_failed(kill: Any) -> None:
    assert not kill._has_failed(report())
    for away in ("process_back_s", "drafting_back_s", "free_after_s"):
        assert kill._has_failed(report(**{away: None}))
    assert kill._has_failed(report(problems={"status 500": 1}))


def test_a_killed_ingress_may_spoil_answers_that_are_right_when_repeated(kill: Any) -> None:
    spoilt = report(victim="ingress", problems={"connection: ReadError": 3}, repeated=3)
    assert not kill._has_failed(spoilt)
    assert kill._has_failed(spoilt | {"repeated": 0})
    assert kill._has_failed(spoilt | {"repeat_problems": {"another text from token 3": 1}})
    assert kill._has_failed(spoilt | {"silently_spoilt": 1})


def test_whoever_saw_an_error_is_repeated_under_the_same_id(kill: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, broken = kill.Stream({"prompt": "a"}, finish_reason="length"), kill.Stream({"prompt": "b"})
    short = kill.Stream({"prompt": "c"}, error=kill.ENDED)
    broken.error = "connection: ReadError"
    asked: list[Any] = []

    async def ask_all(url: str, bodies: Sequence[dict[str, Any]], streams: Sequence[Any]) -> None:
        asked.extend(streams)

    monkeypatch.setattr(kill, "_ask_all", ask_all)
    again = asyncio.run(kill._ask_again(Fleet({}), [whole, broken, short]))
    assert list(again) == [1]
    assert (asked[0].request_id, asked[0].body, asked[0].error) == (broken.request_id, {"prompt": "b"}, None)


@pytest.mark.parametrize("is_kept", [True, False])
def test_an_answer_under_another_id_is_an_error(kill: Any, is_kept: bool) -> None:
    event = 'data: {"choices": [{"text": "x", "token_ids": [1], "finish_reason": "length"}]}\n\n'

    def answer(request: httpx.Request) -> httpx.Response:
        name = request.headers["x-request-id"] if is_kept else "other"
        return httpx.Response(200, headers={"X-Request-Id": name}, text=event)

    async def asked() -> Any:
        stream = kill.Stream({"prompt": "a"})
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            await kill._ask(client, "http://fleet", stream)
        return stream

    stream = asyncio.run(asked())
    assert (stream.error is None) == is_kept
    assert stream.saw_error != is_kept


def test_all_kinds_of_processes_are_killed_unless_some_are_named(kill: Any) -> None:
    assert kill._options([]).victims == ["target", "draft", "scheduler", "controller", "ingress"]


def test_a_metric_is_told_by_replica(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    running = script("running_fleet").RunningFleet
    fleet = running.__new__(running)
    lines = ['m_total{replica="a"} 5.0', 'm_total{kind="x",replica="b"} 7e0']
    monkeypatch.setattr(fleet, "metrics", lambda name: lines, raising=False)
    assert fleet.by_replica("m_total") == {"a": 5.0, "b": 7.0}
