"""Load over HTTP, on a transport that answers as a server does: tokens by usage, however the stream is cut."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from dspark.config import build_config
from dspark.data.prompts import Prompt
from dspark.errors import DsparkError
from dspark.evaluation.config import EvaluationMode
from dspark.evaluation.http_load import HttpLoad
from dspark.evaluation.load import LoadRun, Side
from dspark.evaluation.load_config import BenchmarkConfig

CONFIG = build_config(BenchmarkConfig, {"base_url": "http://server", "output": "o", "prompts": [{"path": "p.jsonl"}]})
PROMPTS = [Prompt(name, "math", "heldout", [{"role": "user", "content": name}]) for name in ("a", "b")]
GREEDY = EvaluationMode(name="greedy")
SAMPLED = EvaluationMode(name="sampled", temperature=0.7, top_k=20)
NUM_TOKENS = 10
USAGE = {"prompt_tokens": 3, "completion_tokens": NUM_TOKENS, "total_tokens": 3 + NUM_TOKENS}


def chunk(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def stream_of(tokens_per_chunk: int, *, usage: dict[str, int] | None = USAGE) -> bytes:
    """An answer of ten tokens in chunks of some."""
    sizes = [min(tokens_per_chunk, NUM_TOKENS - start) for start in range(0, NUM_TOKENS, tokens_per_chunk)]
    events = [chunk(choices=[{"delta": {"content": "x " * size}, "finish_reason": None}]) for size in sizes]
    events.append(chunk(choices=[{"delta": {}, "finish_reason": "stop"}]))
    if usage is not None:
        events.append(chunk(choices=[], usage=usage))
    return b": a comment\n\n" + b"".join(events) + b"data: [DONE]\n\n"


class Server:
    """Counts what it is asked; `answer` makes the response to a request's body."""

    def __init__(self, answer: Callable[[dict[str, Any]], httpx.Response]) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.most_at_once = self.at_once = 0
        self._answer = answer

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "served"}]})
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0.001)
        self.at_once -= 1
        self.bodies.append(json.loads(request.content))
        return self._answer(self.bodies[-1])


def whole(body: dict[str, Any]) -> httpx.Response:
    message = {"message": {"content": "x " * NUM_TOKENS}, "finish_reason": "stop"}
    return httpx.Response(200, json={"choices": [message], "usage": USAGE})


def run(server: Server, *, side: Side = "speculative", stream: bool = True, mode: EvaluationMode = GREEDY) -> LoadRun:
    load = HttpLoad(CONFIG, PROMPTS, stream=stream, transport=httpx.MockTransport(server))
    return load.run(side, mode, concurrency=2, num_requests=5, max_tokens=16)


@pytest.mark.parametrize("tokens_per_chunk", [1, 3, 10])
def test_tokens_are_those_of_the_usage_however_many_come_in_a_chunk(tokens_per_chunk):
    streamed = run(Server(lambda body: httpx.Response(200, content=stream_of(tokens_per_chunk))))
    assert streamed.num_tokens == run(Server(whole), stream=False).num_tokens == 5 * NUM_TOKENS
    assert streamed.tokens_per_s == 5 * NUM_TOKENS / streamed.seconds
    num_chunks = -(-NUM_TOKENS // tokens_per_chunk)
    assert [len(answer.arrived_s) for answer in streamed.answers] == [num_chunks] * 5
    assert {answer.finish_reason for answer in streamed.answers} == {"stop"}


def test_no_more_requests_are_open_than_asked_for():
    server = Server(whole)
    run(server, stream=False)
    assert (len(server.bodies), server.most_at_once) == (5, 2)


def test_plain_is_a_verify_length_of_zero_and_nothing_else_differs():
    plain, fast = Server(whole), Server(whole)
    run(plain, side="plain", stream=False)
    run(fast, stream=False)
    assert {body.pop("verify_length") for body in plain.bodies} == {0}
    assert sorted(map(json.dumps, plain.bodies)) == sorted(map(json.dumps, fast.bodies))
    body = fast.bodies[0]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("served", 16, 0.0)
    assert body["messages"] == [{"role": "user", "content": "a"}]
    assert "seed" not in body


def test_sampling_is_asked_for_without_a_seed_which_would_cost_acceptance():
    server = Server(lambda body: httpx.Response(200, content=stream_of(2)))
    run(server, mode=SAMPLED)
    assert not any("seed" in body for body in server.bodies)
    assert all((body["temperature"], body["top_k"]) == (0.7, 20) for body in server.bodies)
    assert all(body["stream_options"] == {"include_usage": True} for body in server.bodies)


def test_an_answer_of_a_stop_token_alone_counts():
    usage = USAGE | {"completion_tokens": 1}
    content = chunk(choices=[{"delta": {}, "finish_reason": "stop"}]) + chunk(choices=[], usage=usage)
    answered = run(Server(lambda body: httpx.Response(200, content=content)))
    assert answered.num_tokens == 5
    assert answered.figures()["token_ms"] is None


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (httpx.Response(200, content=stream_of(2, usage=None)), "told no usage"),
        (httpx.Response(400, json={"error": {"message": "verify_length is not known"}}), "status 400.*verify_length"),
        (httpx.Response(200, content=chunk(error={"message": "replica died"})), "replica died"),
    ],
)
def test_what_cannot_be_counted_is_an_error(response, reason):
    with pytest.raises(DsparkError, match=reason):
        run(Server(lambda body: httpx.Response(response.status_code, content=response.content)))


def test_a_server_that_is_not_there_is_named():
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused")

    load = HttpLoad(CONFIG, PROMPTS, transport=httpx.MockTransport(refuse))
    with pytest.raises(DsparkError, match="http://server does not answer: connection refused"):
        load.run("plain", GREEDY, concurrency=1, num_requests=1, max_tokens=4)


def test_the_key_comes_from_the_environment_and_is_sent(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    seen = []

    def check(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["authorization"])
        return httpx.Response(401, text="no")

    load = HttpLoad(CONFIG, PROMPTS, transport=httpx.MockTransport(check))
    with pytest.raises(DsparkError, match="status 401"):
        load.run("plain", GREEDY, concurrency=1, num_requests=1, max_tokens=4)
    assert seen == ["Bearer secret"]
