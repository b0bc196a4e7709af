"""Clients of a real HTTP server that hang up, and far more of them than can be served."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dspark.serving.ingress import build_app
from dspark.serving.target_replica import TargetReplica
from streaming_server import serving
from tiny_serving import TEXT, completion, is_empty, num_ended, serve_config, slowed, wait_until

NUM_CLIENTS = 100


@pytest.fixture(scope="module")
def replica(tiny_target: Path) -> Iterator[TargetReplica]:
    engine = {"page_size": 4, "kv_tokens": 40_000, "max_running_requests": NUM_CLIENTS, "max_batch_tokens": 2048}
    limits = {"max_output_tokens": 400, "max_concurrent_requests": NUM_CLIENTS}
    replica = TargetReplica(serve_config(tiny_target, engine=engine, limits=limits, drafter=None))
    yield replica
    replica.close()


async def first_chunk(url: str, body: dict[str, Any]) -> asyncio.StreamWriter:
    """A connection whose stream has begun."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    content = json.dumps(body).encode()
    head = [f"POST {TEXT} HTTP/1.1", "Host: test", "Content-Type: application/json", f"Content-Length: {len(content)}"]
    writer.write("\r\n".join([*head, "", ""]).encode() + content)
    await writer.drain()
    received = await reader.readuntil(b"data: ")
    assert received.startswith(b"HTTP/1.1 200")
    return writer


def test_a_hundred_clients_that_hang_up_after_the_first_chunk_free_everything_within_a_second(
    replica: TargetReplica,
) -> None:
    async def run(url: str) -> float:
        bodies = [completion(f"question {k}", max_tokens=400, stream=True) for k in range(NUM_CLIENTS)]
        writers = await asyncio.gather(*(first_chunk(url, body) for body in bodies))
        assert replica._loop.num_open == NUM_CLIENTS
        gone_at = time.monotonic()
        for writer in writers:
            writer.transport.abort()
        assert await wait_until(lambda: is_empty(replica))
        return time.monotonic() - gone_at

    before = num_ended(replica, "abort")
    with slowed(replica, 0.02), serving(build_app(replica, serve_config("unused"))) as url:
        assert asyncio.run(run(url)) < 1.0
        assert httpx.post(f"{url}{TEXT}", json=completion()).status_code == 200
    assert num_ended(replica, "abort") - before == NUM_CLIENTS


def test_of_ten_times_too_many_each_is_answered_and_few_are_let_in(replica: TargetReplica) -> None:
    """Those that are let in have few before them, whatever the rest does: that bounds how long they wait."""
    replica._limits = replica._limits.with_changes(max_concurrent_requests=16)
    replica.loaded.engine._requests._max_running = 8
    statuses: Counter[int] = Counter()
    num_open: list[int] = []

    async def client(http: httpx.AsyncClient, url: str) -> None:
        for _ in range(3):
            response = await http.post(url, json=completion("hi", max_tokens=8))
            statuses[response.status_code] += 1
            num_open.append(replica._loop.num_open)
            if response.status_code != 200:
                assert 1 <= int(response.headers["retry-after"]) <= 60

    async def run(url: str) -> None:
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=80)) as http:
            await asyncio.gather(*(client(http, f"{url}{TEXT}") for _ in range(80)))

    with slowed(replica, 0.01), serving(build_app(replica, serve_config("unused"))) as url:
        asyncio.run(run(url))
    assert statuses.keys() == {200, 429}
    assert statuses.total() == 240
    assert statuses[200] >= 16
    assert max(num_open) <= 16
    assert is_empty(replica)
