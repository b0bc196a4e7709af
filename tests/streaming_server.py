"""A real HTTP server in this process for any ASGI application, and one that streams a made-up model's answers."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

NUM_TOKENS = 10
USAGE = {"prompt_tokens": 3, "completion_tokens": NUM_TOKENS, "total_tokens": 3 + NUM_TOKENS}


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """The application behind a port of its own; its address, without a path."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10.0
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.005)
    assert server.started, "the server did not start"
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=10.0)


class StreamingApp:
    """Answers of NUM_TOKENS tokens, so many in a chunk, each chunk `pause_s` after the one before.

    faults: taken first, one a request: a status, "cut" (no end), "silent" (no usage), "error" (an event that is one),
    "text" (no JSON); None for a good answer. one_at_a_time: a request waits until the one before it has been answered.
    """

    def __init__(self, *, tokens_per_chunk: int = 1, pause_s: float = 0.0, one_at_a_time: bool = False) -> None:
        self.tokens_per_chunk, self.pause_s = tokens_per_chunk, pause_s
        self.faults: list[int | str | None] = []
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.at_once = self.most_at_once = 0
        self._turn = asyncio.Semaphore(1 if one_at_a_time else 1000)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/v1/models":
            await _respond(send, 200, {"data": [{"id": "made-up"}]})
        elif scope["path"] == "/v1/chat/completions":
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            try:
                self.keys.append({k: v.decode() for k, v in scope["headers"]}.get(b"authorization"))
                self.bodies.append(json.loads(await _body(receive)))
                fault = self.faults.pop(0) if self.faults else None
                async with self._turn:
                    await self._answer(send, self.bodies[-1], fault)
            finally:
                self.at_once -= 1
        else:
            await _respond(send, 404, {"error": {"message": "no such path"}})

    async def _answer(self, send: Any, body: dict[str, Any], fault: int | str | None) -> None:
        if isinstance(fault, int):
            await _respond(send, fault, {"error": {"message": f"told to fail with {fault}"}})
        elif not body.get("stream"):
            await asyncio.sleep(self.pause_s)
            message = {"message": {"content": "x " * NUM_TOKENS}, "finish_reason": "stop"}
            await _respond(send, 200, {"choices": [message], "usage": USAGE})
        else:
            headers = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for event in self._events(fault):
                await asyncio.sleep(self.pause_s)
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _events(self, fault: str | None) -> Iterator[bytes]:
        yield b": a comment\n\n"
        starts = range(0, NUM_TOKENS, self.tokens_per_chunk)
        for size in [min(self.tokens_per_chunk, NUM_TOKENS - start) for start in starts]:
            yield _event({"choices": [{"delta": {"content": "x " * size}, "finish_reason": None}]})
            if fault == "error":
                yield _event({"error": {"message": "replica died"}})
                return
            if fault == "text":
                yield b"data: oops\n\n"
                return
            if fault == "cut":
                return
        end = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
        yield _event(end)
        if fault != "silent":
            yield _event({"choices": [], "usage": USAGE})
        yield b"data: [DONE]\n\n"


async def _body(receive: Any) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


async def _respond(send: Any, status: int, content: Any) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"
