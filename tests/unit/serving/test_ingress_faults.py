"""The API when something goes wrong: clients that hang up, long steps, a broken engine, too much at once."""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dspark.serving.ingress import build_app
from dspark.serving.target_replica import TargetReplica
from tiny_serving import (
    TEXT,
    ask,
    client_of,
    completion,
    error_of,
    events,
    hang_up,
    is_empty,
    num_ended,
    post,
    serve_config,
    slowed,
    wait_until,
)


@pytest.fixture(scope="module")
def replica(tiny_target: Path) -> Iterator[TargetReplica]:
    replica = TargetReplica(serve_config(tiny_target))
    yield replica
    replica.close()


@pytest.mark.parametrize(("stream", "after_chunks"), [(False, 0), (True, 0), (True, 1), (True, 3)])
def test_a_client_that_hangs_up_frees_its_pages(replica: TargetReplica, stream: bool, after_chunks: int) -> None:
    app = build_app(replica, serve_config("unused"))

    async def run() -> None:
        body = completion(max_tokens=200, stream=stream, verify_length=0)
        await asyncio.gather(*(hang_up(app, TEXT, body, after_chunks=after_chunks) for _ in range(20)))
        assert await wait_until(lambda: is_empty(replica))

    before = num_ended(replica, "abort")
    with slowed(replica, 0.005):
        asyncio.run(run())
    assert num_ended(replica, "abort") - before == 20
    assert post(replica, TEXT, completion()).status_code == 200


def test_health_answers_while_a_long_step_holds_the_model(replica: TargetReplica) -> None:
    async def run() -> float:
        async with client_of(replica, serve_config("unused")) as client:
            answer = asyncio.create_task(client.post(TEXT, json=completion(max_tokens=2)))
            await asyncio.to_thread(long_step.entered.wait)
            asked = time.monotonic()
            assert (await client.get("/health")).status_code == 200
            took = time.monotonic() - asked
            assert not answer.done()
            assert (await answer).status_code == 200
            return took

    with slowed(replica, 1.5) as long_step:
        assert asyncio.run(run()) < 1.0


def test_an_engine_that_fails_ends_its_streams_and_says_so(tiny_target: Path) -> None:
    replica = TargetReplica(serve_config(tiny_target))
    steps = iter(range(10))
    step = replica.loaded.engine.step

    def failing() -> Any:
        if next(steps) == 4:
            raise RuntimeError("a kernel failed")
        return step()

    replica.loaded.engine.step = failing  # type: ignore[method-assign]

    async def talk(client: httpx.AsyncClient) -> Any:
        body = completion(stream=True, verify_length=0)
        answers = await asyncio.gather(*(client.post(TEXT, json=body) for _ in range(3)))
        return answers, await client.post(TEXT, json=body), await client.get("/health"), await client.get("/metrics")

    answers, late, health, metrics = ask(replica, serve_config("unused"), talk)
    for answer in answers:
        last = events(answer)[-1]
        assert last["error"]["code"] == "engine_stopped"
        assert "a kernel" not in json.dumps(last)
    assert (late.status_code, error_of(late)["type"]) == (503, "server_error")
    assert health.status_code == 503
    assert 'dspark_requests_total{finish_reason="error",replica="local"} 3.0' in metrics.text
    replica.close()


def test_requests_over_the_limit_are_told_to_come_back(tiny_target: Path) -> None:
    config = serve_config(tiny_target, limits={"max_concurrent_requests": 2})
    replica = TargetReplica(config)

    async def talk(client: httpx.AsyncClient) -> list[httpx.Response]:
        return await asyncio.gather(*(client.post(TEXT, json=completion(max_tokens=40)) for _ in range(6)))

    with slowed(replica, 0.01):
        answers = ask(replica, config, talk)
    assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429, 429, 429]
    both, too_many = (post(replica, TEXT, completion(n=n)) for n in (2, 3))  # each choice is a request
    assert len(both.json()["choices"]) == 2
    assert (too_many.status_code, error_of(too_many)["param"]) == (400, "n")
    assert is_empty(replica)
    replica.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_isnum_ended(tiny_target: Path, stream: bool) -> None:
    config = serve_config(tiny_target, limits={"request_timeout_s": 0.3})
    replica = TargetReplica(config)

    async def talk(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(TEXT, json=completion(max_tokens=200, stream=stream, verify_length=0))

    with slowed(replica, 0.02):
        answer = ask(replica, config, talk)
        assert asyncio.run(wait_until(lambda: is_empty(replica)))
    assert (events(answer)[-1] if stream else answer.json())["error"]["code"] == "timeout"
    assert num_ended(replica, "timeout") == 1
    replica.close()
