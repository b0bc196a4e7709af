"""Every replica is asked, and none of them holds up the others."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError

from dspark.serving.config import FailoverConfig
from dspark.serving.engine_client import LoadReport
from dspark.serving.every_replica import Silent, ask_any, ask_every
from dspark.serving.metrics import gauge, render, with_label
from dspark.serving.replica_client import NoReplica, ReplicaClient


class Stuck:
    """A replica that never answers."""

    async def get_async(self) -> Any:
        await asyncio.sleep(3600)


class Answers:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    async def get_async(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def handle(*calls: Any) -> Any:
    """As Serve's: a call under way per replica; without any it says that there is none."""

    async def under_way() -> list[Any]:
        if not calls:
            raise DeploymentUnavailableError("there is none")  # type: ignore[arg-type]
        return list(calls)

    broadcast = SimpleNamespace(_fetch_replica_results_async=under_way)
    return SimpleNamespace(broadcast=lambda method: broadcast, options=lambda **_: None)


def test_the_others_answers_come_though_one_is_stuck_and_one_has_died() -> None:
    started = time.monotonic()
    answers = asyncio.run(ask_every(handle(Answers(1), Stuck(), Answers(RayError()), Answers(2)), "m", timeout_s=0.1))
    assert time.monotonic() - started < 2.0
    assert (answers[0], answers[3]) == (1, 2)
    assert isinstance(answers[1], Silent)
    assert isinstance(answers[2], RayError)
    assert asyncio.run(ask_every(handle(), "m", timeout_s=0.1)) == []


def test_any_answer_does() -> None:
    started = time.monotonic()
    assert asyncio.run(ask_any(handle(Stuck(), Answers(RayError()), Answers(True)), "m", timeout_s=60.0)) is True
    assert time.monotonic() - started < 10.0
    assert isinstance(asyncio.run(ask_any(handle(Stuck()), "m", timeout_s=0.05)), Silent)
    assert asyncio.run(ask_any(handle(), "m", timeout_s=0.05)) is None


def client(*calls: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> ReplicaClient:
    monkeypatch.setattr("dspark.serving.replica_client.ANSWER_S", 0.1)
    return ReplicaClient(handle(*calls), FailoverConfig(), timeout_s=1.0, **options)


def test_metrics_come_without_those_of_a_stuck_replica_and_say_that_it_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = with_label([gauge("steps", "Steps.", 5)], "replica", "a")
    text = render(asyncio.run(client(Answers(told), Stuck(), monkeypatch=monkeypatch).metrics())).decode()
    assert 'dspark_steps{replica="a"} 5.0' in text
    assert 'dspark_replicas_running{replica="ingress-local"} 2.0' in text
    assert 'dspark_replicas_silent{replica="ingress-local"} 1.0' in text
    assert 'dspark_answers_interrupted_total{outcome="poison",replica="ingress-local"} 0.0' in text


def test_without_a_replica_the_api_tells_that_none_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    text = render(asyncio.run(client(monkeypatch=monkeypatch, scales_to_zero=True).metrics())).decode()
    assert 'dspark_replicas_running{replica="ingress-local"} 0.0' in text


def test_loads_tell_the_silent_from_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    report = LoadReport("a", 1, 2, None)
    one = client(Answers(report), Stuck(), Answers(RayError()), monkeypatch=monkeypatch)
    assert asyncio.run(one.loads()) == [report, None]
    assert asyncio.run(client(monkeypatch=monkeypatch).loads()) == []


def test_health_is_that_of_the_best_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(client(Stuck(), Answers(True), monkeypatch=monkeypatch).check_health())
    with pytest.raises(RayError):
        asyncio.run(client(Answers(RayError()), monkeypatch=monkeypatch).check_health())
    with pytest.raises(NoReplica):
        asyncio.run(client(monkeypatch=monkeypatch).check_health())
    asyncio.run(client(monkeypatch=monkeypatch, scales_to_zero=True).check_health())
