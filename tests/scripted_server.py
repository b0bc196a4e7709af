"""A real HTTP server in the test's process that speaks the OpenAI API for a made-up target, with faults to order."""

import json
import threading
import time
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

MODEL = "scripted"
STOP_ID = 2

Fault = tuple[int, dict[str, str]]
Change = Callable[[dict[str, Any], dict[str, Any]], None]


def output_of(prompt_ids: list[int], max_tokens: int) -> tuple[list[int], str]:
    """Ids that depend on the prompt alone, 3 to 9 of them and then the stop token, or as many as are allowed."""
    total = sum(prompt_ids)
    ids = [20 + (total * 7 + 13 * place) % 90 for place in range(3 + total % 7)] + [STOP_ID]
    return (ids, "stop") if len(ids) <= max_tokens else (ids[:max_tokens], "length")


class ScriptedServer:
    """Use it as a context manager. faults: taken first, one a request: a status with headers, or a pause in seconds.

    change: edits (body, answer) of a good answer before it is sent. owner: what /v1/models says.
    """

    def __init__(
        self,
        faults: Iterable[Fault | float] = (),
        *,
        change: Change | None = None,
        owner: str = "somebody",
        pause_s: float = 0.0,
        model: str = MODEL,
    ) -> None:
        self.faults = iter(faults)
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.times: list[float] = []
        self.most_at_once = 0
        self._change, self._owner, self._pause_s, self._model = change, owner, pause_s, model
        self._at_once = 0
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> "ScriptedServer":
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def respond(self, path: str, body: dict[str, Any], key: str | None) -> tuple[int, dict[str, str], Any]:
        with self._lock:
            self.bodies.append(body)
            self.keys.append(key)
            self.times.append(time.monotonic())
            fault = next(self.faults, None)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            time.sleep(fault if isinstance(fault, float) else self._pause_s)
            if isinstance(fault, tuple):
                return fault[0], fault[1], {"error": {"message": f"told to fail with {fault[0]}"}}
            return 200, {}, self._answer(path, body)
        finally:
            with self._lock:
                self._at_once -= 1

    def _answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        is_chat = path.endswith("/chat/completions")
        prompt_ids = [ord(c) for m in body["messages"] for c in m["content"]] if is_chat else body["prompt"]
        ids, reason = output_of(prompt_ids, body["max_tokens"])
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "token_ids": ids}
        choice |= {"message": {"role": "assistant", "content": "text"}} if is_chat else {"text": "text"}
        usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(ids)}
        answer = {"choices": [choice], "usage": usage}
        if self._change is not None:
            self._change(body, answer)
        return answer

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._send(200, {}, {"data": [{"id": server._model, "owned_by": server._owner}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._send(*server.respond(self.path, body, self.headers.get("Authorization")))

            def _send(self, status: int, headers: dict[str, str], content: Any) -> None:
                payload = json.dumps(content).encode()
                self.send_response(status)
                for name, value in (headers | {"Content-Length": str(len(payload))}).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *_: Any) -> None:
                pass

        return Handler
