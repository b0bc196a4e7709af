"""Load on a running server over its OpenAI-compatible API, as its users see it."""

import asyncio
import json
import os
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dspark.data.prompts import Prompt
from dspark.errors import DsparkError, one_line
from dspark.evaluation.config import EvaluationMode
from dspark.evaluation.load import Answer, LoadRun, Side
from dspark.evaluation.load_config import BenchmarkConfig

if TYPE_CHECKING:
    import httpx

API_KEY = "OPENAI_API_KEY"  # environment variable: a config would be recorded, and the key with it
TIMEOUT_S = 600.0


class HttpLoad:
    """A server at `base_url`. Plain means its extension `verify_length: 0`.

    No seed is sent: one would fix the text, at the price of acceptance, and what is measured is how a server does
    without being asked for that.
    stream: as answers are asked for. transport: how requests travel; None uses the network.
    """

    def __init__(
        self,
        config: BenchmarkConfig,
        prompts: Sequence[Prompt],
        *,
        stream: bool = True,
        transport: "httpx.AsyncBaseTransport | None" = None,
    ) -> None:
        self.notes: list[str] = []
        self._base_url = str(config.base_url)
        self._prompts = list(prompts)
        self._stream = stream
        self._transport = transport

    def run(self, side: Side, mode: EvaluationMode, *, concurrency: int, num_requests: int, max_tokens: int) -> LoadRun:
        """Raises: DsparkError when the server cannot be reached, refuses a request or does not tell its usage."""
        bodies = [self._body(number, side, mode, max_tokens) for number in range(num_requests)]
        return asyncio.run(self._run(bodies, concurrency))

    def _body(self, number: int, side: Side, mode: EvaluationMode, max_tokens: int) -> dict[str, Any]:
        prompt = self._prompts[number % len(self._prompts)]
        body: dict[str, Any] = {
            "messages": prompt.opening,
            "max_tokens": max_tokens,
            "temperature": mode.temperature,
            "top_p": mode.top_p,
        }
        if mode.top_k is not None:
            body["top_k"] = mode.top_k
        if side == "plain":
            body["verify_length"] = 0
        if self._stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    async def _run(self, bodies: Sequence[dict[str, Any]], concurrency: int) -> LoadRun:
        import httpx  # heavy, and not needed for an engine in this process

        key = os.environ.get(API_KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=concurrency)
        try:
            async with httpx.AsyncClient(
                base_url=self._base_url, headers=headers, timeout=TIMEOUT_S, limits=limits, transport=self._transport
            ) as client:
                model = await _served_model(client)
                started = time.perf_counter()
                answers = await _closed_loop(client, [body | {"model": model} for body in bodies], concurrency)
        except httpx.HTTPError as error:
            reason = one_line(error) or type(error).__name__
            raise DsparkError(f"the server at {self._base_url} does not answer: {reason}; start one first") from error
        return LoadRun(answers, max(answer.arrived_s[-1] for answer in answers) - started)


async def _served_model(client: "httpx.AsyncClient") -> str:
    response = await client.get("/v1/models")
    _require_success(response.status_code, response.text)
    return str(response.json()["data"][0]["id"])


async def _closed_loop(client: "httpx.AsyncClient", bodies: Sequence[dict[str, Any]], concurrency: int) -> list[Answer]:
    answers: dict[int, Answer] = {}

    async def work(waiting: Iterator[tuple[int, dict[str, Any]]]) -> None:
        for number, body in waiting:  # shared by all: each takes the next one
            answers[number] = await _ask(client, body)

    shared = iter(enumerate(bodies))
    await asyncio.gather(*(work(shared) for _ in range(concurrency)))
    return [answers[number] for number in range(len(bodies))]


async def _ask(client: "httpx.AsyncClient", body: dict[str, Any]) -> Answer:
    answer = Answer(sent_s=time.perf_counter())
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            await response.aread()
            _require_success(response.status_code, response.text)
        if not body.get("stream"):
            await response.aread()
            _take(answer, response.json())
        else:
            async for line in response.aiter_lines():
                content = line.removeprefix("data:").strip()
                if line.startswith("data:") and content != "[DONE]":
                    _take(answer, json.loads(content))
    if not answer.num_tokens:
        raise DsparkError("the server told no usage, so tokens cannot be counted; it must support include_usage")
    return answer


def _take(answer: Answer, event: dict[str, Any]) -> None:
    """Note a whole answer or one event of a stream."""
    if "error" in event:
        raise DsparkError(f"the server ended a request with an error: {one_line(Exception(event['error']))}")
    for choice in event.get("choices", []):
        text = choice.get("delta", choice.get("message", {})).get("content")
        if text:
            answer.arrived_s.append(time.perf_counter())
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    if event.get("usage"):
        answer.num_tokens = event["usage"]["completion_tokens"]
        if not answer.arrived_s:  # an answer without text ends when its usage comes
            answer.arrived_s.append(time.perf_counter())


def _require_success(status: int, text: str) -> None:
    if status != 200:
        raise DsparkError(f"the server answers with status {status}: {one_line(Exception(text))}")
