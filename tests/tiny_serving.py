"""The API over a tiny target in this process, and a client that can hang up."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from dspark.config import build_config
from dspark.serving.config import ServeConfig
from dspark.serving.ingress import build_app
from dspark.serving.target_replica import TargetReplica

MODEL = "tiny"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def serve_config(target: str | Path, **changes: Any) -> ServeConfig:
    """Plain float32 on one thread; `changes` replace whole fields."""
    content: dict[str, Any] = {
        "target": {"name": str(target), "dtype": "float32", "device": "cpu"},
        "drafter": "ngram",
        "served_model_name": MODEL,
        "engine": {"page_size": 4, "kv_tokens": 4096, "max_running_requests": 8},
        "limits": {"max_output_tokens": 200},
        "fleet": {"enabled": False},
        "threads": 1,
    }
    return build_config(ServeConfig, content | changes)


def completion(prompt: Any = "the question 5", **fields: Any) -> dict[str, Any]:
    """A greedy request of 24 tokens that nothing stops."""
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }


def chat(content: Any = "hello", **fields: Any) -> dict[str, Any]:
    rest = completion(**fields)
    del rest["prompt"]
    return {"messages": [{"role": "user", "content": content}], **rest}


@asynccontextmanager
async def client_of(replica: TargetReplica, config: ServeConfig) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(build_app(replica, config), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


def ask(replica: TargetReplica, config: ServeConfig, talk: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
    """What `talk` makes of a client of the API."""

    async def run() -> Any:
        async with client_of(replica, config) as client:
            return await talk(client)

    return asyncio.run(run())


def events(response: httpx.Response) -> list[Any]:
    """The JSON of each server-sent event; the last one as text."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-1] == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks[:-1])
    contents = [block.removeprefix("data: ") for block in blocks[:-1]]
    return [content if content == "[DONE]" else json.loads(content) for content in contents]


async def hang_up(app: FastAPI, path: str, body: dict[str, Any], *, after_chunks: int) -> list[bytes]:
    """Send a request and close the connection after so many chunks of its answer; the chunks that came."""
    gone = asyncio.Event()
    inbox: list[dict[str, Any]] = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    chunks: list[bytes] = []

    async def receive() -> dict[str, Any]:
        if inbox:
            return inbox.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            chunks.append(message["body"])
            if len(chunks) >= after_chunks:
                gone.set()

    if after_chunks == 0:
        asyncio.get_running_loop().call_later(0.05, gone.set)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": ("test", 1),
        "server": ("test", 80),
    }
    await app(scope, receive, send)
    return chunks


async def wait_until(holds: Callable[[], bool], *, seconds: float = 5.0) -> bool:
    """Whether it came to hold in time."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not holds():
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(0.01)
    return True


def post(replica: TargetReplica, path: str, body: Any, **config: Any) -> httpx.Response:
    async def talk(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(path, json=body)

    return ask(replica, serve_config("unused", **config), talk)


def error_of(response: httpx.Response) -> Any:
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def is_empty(replica: TargetReplica) -> bool:
    engine = replica.loaded.engine
    return not engine.has_work and engine.num_free_pages == engine.num_pages


def num_ended(replica: TargetReplica, reason: str) -> float:
    """Requests that ended so."""
    samples = [sample for family in asyncio.run(replica.metrics()) for sample in family.samples]
    return sum(s.value for s in samples if s.name == "dspark_requests_total" and s.labels["finish_reason"] == reason)


class slowed:  # noqa: N801, reads as what it does
    """The engine with a pause before each step: a large model's pace at a tiny one's cost."""

    def __init__(self, replica: TargetReplica, seconds: float) -> None:
        self.engine, self.seconds, self.entered = replica.loaded.engine, seconds, threading.Event()

    def __enter__(self) -> "slowed":
        step = self.engine.step

        def slow() -> Any:
            self.entered.set()
            time.sleep(self.seconds)
            return step()

        self.engine.step = slow  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: Any) -> None:
        del self.engine.step
