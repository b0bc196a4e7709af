"""What is too much is refused at the door: before its body is read, and without a word to a replica."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dspark.serving.config import LimitsConfig
from dspark.serving.engine_client import LoadReport
from dspark.serving.fleet_view import FleetView
from dspark.serving.gate import Gate, GateCounts
from dspark.serving.metrics import render
from dspark.serving.target_replica import TargetReplica
from tiny_serving import CHAT, TEXT, ask, chat, completion, error_of, is_empty, serve_config, slowed, wait_until


@pytest.fixture(scope="module")
def replica(tiny_target: Path) -> Iterator[TargetReplica]:
    replica = TargetReplica(serve_config(tiny_target))
    yield replica
    assert is_empty(replica)
    replica.close()


class Behind:
    """What a gate leads to: an application that waits until it is told to go on, and one replica's word."""

    def __init__(self, **limits: Any) -> None:
        self.view = FleetView(LimitsConfig.model_validate(limits))
        self.counts = GateCounts(self.view)
        self.report = LoadReport("a", 0, max_running=4, per_s=2.0)
        self.num_looks = self.num_in = 0
        self.going_on = asyncio.Event()
        engine: Any = self
        self.gate = Gate(
            self.app,
            engine=engine,
            view=self.view,
            counts=self.counts,
            may_be_urgent=lambda headers: "x-priority" in headers,
        )

    async def loads(self) -> list[LoadReport]:
        self.num_looks += 1
        return [self.report]

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_in += 1
        await self.going_on.wait()
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def request(
        self, path: str = TEXT, method: str = "POST", headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> tuple[list[Any], list[str]]:
        """What was sent, and what was received."""
        sent: list[Any] = []
        received: list[str] = []

        async def receive() -> dict[str, Any]:
            received.append("body")
            return {"type": "http.request", "body": b"{}", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        await self.gate({"type": "http", "method": method, "path": path, "headers": headers}, receive, send)
        return sent, received


def test_what_is_over_is_answered_at_once_and_its_body_is_not_read() -> None:
    async def run() -> None:
        behind = Behind(max_concurrent_requests=3)
        let_in = [asyncio.create_task(behind.request(path)) for path in (TEXT, CHAT, TEXT)]
        await asyncio.sleep(0)
        (start, body), received = await behind.request(CHAT)
        assert (start["status"], received, behind.num_in) == (429, [], 3)
        headers = dict(start["headers"])
        assert int(headers[b"retry-after"]) >= 1
        assert int(headers[b"content-length"]) == len(body["body"])
        assert json.loads(body["body"])["error"]["code"] == "rate_limit_exceeded"
        assert "3 requests" in json.loads(body["body"])["error"]["message"]
        others = [asyncio.create_task(behind.request(path, method)) for path, method in (("/health", "GET"),)]
        await asyncio.sleep(0)
        assert behind.num_in == 4  # what generates nothing is let in whatever waits
        behind.going_on.set()
        for task in [*let_in, *others]:
            (start,), _ = await task
            assert start["status"] == 200
        assert behind.view.num_open == 0
        assert behind.view.refusal() is None
        text = render(behind.counts.families("x")).decode()
        assert 'dspark_requests_refused_total{replica="x",status="429"} 1.0' in text
        assert 'dspark_ingress_requests_open{replica="x"} 0.0' in text

    asyncio.run(run())


def test_who_may_go_before_others_is_refused_at_the_door_only_when_nobody_would_be_taken() -> None:
    async def run() -> None:
        behind = Behind(max_concurrent_requests=8, urgent_share=0.25)
        behind.going_on.set()
        await behind.request()
        await asyncio.sleep(0)
        for num_open, statuses in ((7, [200, 200]), (8, [429, 200]), (9, [429, 200]), (10, [429, 429])):
            behind.view.heard([LoadReport("a", num_open, max_running=4, per_s=2.0)], behind.view.asked())
            answers = [await behind.request(headers=headers) for headers in ((), ((b"x-priority", b"-1"),))]
            assert [sent[0]["status"] for sent, _ in answers] == statuses

    asyncio.run(run())


def test_a_queue_of_others_keeps_nobody_out_who_goes_before_them(tiny_target: Path) -> None:
    """Ten who stand back, as many as are let in: the engine would take the next urgent one before eight of them end."""
    limits = {"max_concurrent_requests": 10, "max_output_tokens": 200, "allow_priority": True}
    config = serve_config(tiny_target, limits=limits)
    replica = TargetReplica(config)

    async def talk(client: httpx.AsyncClient) -> list[int]:
        body = completion(max_tokens=150, service_tier="flex")
        others = [asyncio.create_task(client.post(TEXT, json=body)) for _ in range(10)]
        assert await wait_until(lambda: replica._loop.num_open == 10)
        answers = [
            await client.post(TEXT, json=completion(max_tokens=2, service_tier=tier))
            for tier in ("default", "flex", "priority")
        ]
        assert replica._loop.num_open
        assert {(await other).status_code for other in others} == {200}
        return [answer.status_code for answer in answers]

    with slowed(replica, 0.005):
        assert ask(replica, config, talk) == [429, 429, 200]
    replica.close()


def test_a_request_that_fails_or_is_cancelled_has_left() -> None:
    async def run() -> None:
        behind = Behind()
        task = asyncio.create_task(behind.request())
        await asyncio.sleep(0)
        assert behind.view.num_open == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert behind.view.num_open == 0

    asyncio.run(run())


def test_the_replicas_are_asked_while_requests_come_and_not_by_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("dspark.serving.gate.time.monotonic", lambda: now[0])

    async def run() -> None:
        behind = Behind(max_wait_s=1.0)
        behind.going_on.set()
        for _ in range(5):
            await behind.request()
        await asyncio.sleep(0)
        assert behind.num_looks == 1
        behind.report = LoadReport("a", 30, max_running=4, per_s=2.0)
        now[0] += 0.6
        await behind.request()  # by what was known until then
        await asyncio.sleep(0)
        assert behind.num_looks == 2
        (start, _), _ = await behind.request()
        assert (start["status"], dict(start["headers"])[b"retry-after"]) == (429, b"13")

    asyncio.run(run())


def test_a_burst_after_a_quiet_time_is_taken(replica: TargetReplica) -> None:
    """One request after the other ended as they came, which says nothing of how many could have."""
    config = serve_config("unused", limits={"max_wait_s": 1.0, "max_output_tokens": 200})

    async def talk(client: httpx.AsyncClient) -> list[int]:
        for _ in range(6):
            await client.post(TEXT, json=completion(max_tokens=2))
            await asyncio.sleep(0.15)
        await asyncio.sleep(0.5)
        await client.post(TEXT, json=completion(max_tokens=2))  # so that the replicas are asked now
        await asyncio.sleep(0)
        answers = await asyncio.gather(*(client.post(TEXT, json=completion(max_tokens=2)) for _ in range(32)))
        return [answer.status_code for answer in answers]

    assert ask(replica, config, talk) == [200] * 32


def test_a_flood_is_refused_with_the_time_to_come_back_and_who_was_let_in_is_answered_in_time(
    replica: TargetReplica,
) -> None:
    """Sixteen times what runs at once, all together, at a replica whose pace is known."""
    config = serve_config("unused", limits={"max_wait_s": 0.2, "max_output_tokens": 200})

    async def talk(client: httpx.AsyncClient) -> tuple[list[httpx.Response], float, str]:
        await asyncio.gather(*(client.post(TEXT, json=completion()) for _ in range(24)))  # two thirds of them wait
        await asyncio.sleep(0.6)
        await client.post(TEXT, json=completion())  # so that the replicas are asked now
        loop = asyncio.get_running_loop()
        started = loop.time()
        answers = await asyncio.gather(*(client.post(CHAT, json=chat()) for _ in range(128)))
        return answers, loop.time() - started, (await client.get("/metrics")).text

    with slowed(replica, 0.002):
        answers, took_s, metrics = ask(replica, config, talk)
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429}
    assert 8 <= statuses.count(200) < 100
    refused = [answer for answer in answers if answer.status_code == 429]
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert all("x-request-id" in answer.headers for answer in refused)
    assert error_of(refused[0])["code"] == "rate_limit_exceeded"
    assert f'dspark_requests_refused_total{{replica="ingress-local",status="429"}} {len(refused)}.0' in metrics
    assert took_s < 60
