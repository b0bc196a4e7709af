"""Load on a running server over OpenAI's API, as its users see it: a closed loop, or arrivals that wait for nobody.

closed   `concurrency` requests at once; where one ends the next begins
open     requests arrive at times fixed before; each one's latency counts from its own, however late it was sent. A
         server that falls behind cannot slow its own clock by being asked less.
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dspark.data.decoding import derive_seed
from dspark.data.prompts import Prompt
from dspark.errors import DsparkError, one_line
from dspark.evaluation.config import EvaluationMode
from dspark.evaluation.load_config import Endpoint
from dspark.evaluation.load_run import Answer, LoadRun
from dspark.evaluation.server_metrics import round_figures, sum_samples

if TYPE_CHECKING:
    import httpx

METRICS_TIMEOUT_S = 10.0

log = logging.getLogger("dspark.benchmark")


@dataclass(frozen=True)
class LoadPoint:
    """How hard a server is asked: so many requests at once, or so many per second."""

    concurrency: int | None = None
    request_rate: float | None = None

    @property
    def name(self) -> str:
        return f"{self.request_rate:g} per second" if self.concurrency is None else f"{self.concurrency} at once"


def poisson_arrivals(request_rate: float, number: int, *, seed: int) -> list[float]:
    """Seconds from the start at which requests arrive: [number], ascending, independent of each other."""
    gaps = np.random.default_rng(seed).exponential(1.0 / request_rate, number)
    arrivals: list[float] = np.cumsum(gaps).tolist()
    return arrivals


class HttpLoad:
    """A server. transport: how requests travel; None uses the network."""

    def __init__(
        self,
        endpoint: Endpoint,
        prompts: Sequence[Prompt],
        *,
        seed: int = 0,
        transport: "httpx.AsyncBaseTransport | None" = None,
    ) -> None:
        """Raises: ValueError when the key is to come from a variable that is not set."""
        self._endpoint = endpoint
        self._prompts = list(prompts)
        self._seed = seed
        self._transport = transport
        key = None if endpoint.api_key_env is None else os.environ.get(endpoint.api_key_env)
        if endpoint.api_key_env is not None and not key:
            raise ValueError(f"api_key_env names {endpoint.api_key_env}, which is not set; set it, or leave it out")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def run(
        self,
        mode: EvaluationMode,
        point: LoadPoint,
        *,
        num_requests: int,
        max_tokens: int,
        arrival_seed: int = 0,
        must_succeed: bool = False,
    ) -> LoadRun:
        """The first requests, the same ones whenever they are asked for. arrival_seed: of an open loop's times.

        Raises: DsparkError when the server is not there, and with must_succeed when any request fails.
        """
        bodies = [self._body(number, mode, max_tokens) for number in range(num_requests)]
        run = asyncio.run(self._run(bodies, point, arrival_seed))
        failed = [answer.failure for answer in run.answers if answer.failure is not None]
        if must_succeed and failed:
            url = self._endpoint.base_url
            raise DsparkError(f"{len(failed)} of {num_requests} requests to {url} fail: {failed[0]}")
        return run

    def _body(self, number: int, mode: EvaluationMode, max_tokens: int) -> dict[str, Any]:
        prompt = self._prompts[number % len(self._prompts)]
        body: dict[str, Any] = {
            "messages": prompt.opening,
            "max_tokens": max_tokens,
            "temperature": mode.temperature,
            "top_p": mode.top_p,
        }
        if mode.top_k is not None:
            body["top_k"] = mode.top_k
        if mode.temperature > 0 and self._endpoint.send_seed:
            body["seed"] = derive_seed(self._seed, prompt.id, number)
        if self._endpoint.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body | self._endpoint.body

    async def _run(self, bodies: Sequence[dict[str, Any]], point: LoadPoint, arrival_seed: int) -> LoadRun:
        import httpx  # heavy, and not needed for an engine in this process

        async with httpx.AsyncClient(
            base_url=f"{self._endpoint.base_url.rstrip('/')}/",
            headers=self._headers,
            timeout=self._endpoint.timeout_s,
            limits=httpx.Limits(max_connections=None),
            transport=self._transport,
        ) as client:
            model = self._endpoint.model or await self._listed_model(client)
            bodies = [{"model": model} | body for body in bodies]
            before = await self._samples(client)
            started = time.perf_counter()
            if point.request_rate is None:
                assert point.concurrency is not None
                answers = await self._closed_loop(client, bodies, point.concurrency)
            else:
                arrivals = poisson_arrivals(point.request_rate, len(bodies), seed=arrival_seed)
                answers = await self._open_loop(client, bodies, [started + after for after in arrivals])
            ended = max((a.arrived_s[-1] for a in answers if a.arrived_s), default=time.perf_counter())
            told = round_figures(before, await self._samples(client))
        return LoadRun(answers, ended - started, told_rounds=told)

    async def _closed_loop(
        self, client: "httpx.AsyncClient", bodies: Sequence[dict[str, Any]], concurrency: int
    ) -> list[Answer]:
        answers: dict[int, Answer] = {}

        async def work(waiting: Iterator[tuple[int, dict[str, Any]]]) -> None:
            for number, body in waiting:  # shared by all: each takes the next one
                answers[number] = await self._ask(client, body, time.perf_counter())

        shared = iter(enumerate(bodies))
        await asyncio.gather(*(work(shared) for _ in range(concurrency)))
        return [answers[number] for number in range(len(bodies))]

    async def _open_loop(
        self, client: "httpx.AsyncClient", bodies: Sequence[dict[str, Any]], due_s: Sequence[float]
    ) -> list[Answer]:
        async def ask_at(body: dict[str, Any], due: float) -> Answer:
            await asyncio.sleep(due - time.perf_counter())
            return await self._ask(client, body, due)

        return list(await asyncio.gather(*(ask_at(body, due) for body, due in zip(bodies, due_s, strict=True))))

    async def _ask(self, client: "httpx.AsyncClient", body: Mapping[str, Any], due_s: float) -> Answer:
        """A whole answer, or one with the reason why there is none. due_s: when it was to be sent."""
        import httpx  # as above

        answer = Answer(sent_s=due_s, late_s=time.perf_counter() - due_s)
        try:
            async with asyncio.timeout(self._endpoint.timeout_s):
                await self._read(client, body, answer)
            if answer.finish_reason is None:
                raise _Failed("the answer broke off")
            if not answer.num_tokens:
                raise _Failed("no usage was told, so tokens cannot be counted")
        except (httpx.TimeoutException, TimeoutError):
            answer.failure = f"no end within {self._endpoint.timeout_s:g} s"
        except httpx.HTTPError as error:
            answer.failure = f"connection: {type(error).__name__}"
            log.debug("request to %s: %s", self._endpoint.base_url, one_line(error))
        except _Failed as failed:
            answer.failure = str(failed)
        if answer.failure is not None:
            answer.num_tokens = 0  # what a request got that failed is no output
        return answer

    async def _read(self, client: "httpx.AsyncClient", body: Mapping[str, Any], answer: Answer) -> None:
        async with client.stream("POST", "chat/completions", json=dict(body)) as response:
            if response.status_code != 200:
                await response.aread()
                raise _Failed(f"status {response.status_code}: {_message(response.text)}")
            if not self._endpoint.stream:
                await response.aread()
                _take(answer, _parsed(response.text))
                return
            async for line in response.aiter_lines():
                content = line.removeprefix("data:").strip()
                if line.startswith("data:") and content != "[DONE]":
                    _take(answer, _parsed(content))

    async def _listed_model(self, client: "httpx.AsyncClient") -> str:
        import httpx  # as above

        try:
            response = await client.get("models")
            if response.status_code != 200:
                raise DsparkError(
                    f"{self._endpoint.base_url}/models answers with status {response.status_code}: "
                    f"{_message(response.text)}; give the endpoint's model"
                )
            return str(response.json()["data"][0]["id"])
        except httpx.HTTPError as error:
            reason = one_line(error) or type(error).__name__
            url = self._endpoint.base_url
            raise DsparkError(f"the server at {url} does not answer: {reason}; start one first") from error
        except (ValueError, LookupError, TypeError) as error:
            raise DsparkError(f"{self._endpoint.base_url}/models lists no model; give the endpoint's model") from error

    async def _samples(self, client: "httpx.AsyncClient") -> dict[str, float]:
        """Our counters at the server's root; {} where there are none."""
        import httpx  # as above

        root = self._endpoint.base_url.rstrip("/").removesuffix("/v1")
        try:
            response = await client.get(f"{root}/metrics", timeout=METRICS_TIMEOUT_S)
        except httpx.HTTPError:
            return {}
        return sum_samples(response.text) if response.status_code == 200 else {}


class _Failed(Exception):
    """Why there is no whole answer."""


def _take(answer: Answer, event: Mapping[str, Any]) -> None:
    """Note a whole answer or one event of a stream. Raises: _Failed where it is an error."""
    if event.get("error"):
        raise _Failed(f"error: {_message(json.dumps(event))}")
    now = time.perf_counter()
    for choice in event.get("choices") or []:
        said = choice.get("delta") or choice.get("message") or {}
        if said.get("content") or said.get("reasoning_content") or said.get("reasoning") or said.get("tool_calls"):
            answer.arrived_s.append(now)
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    if event.get("usage"):
        answer.num_tokens = int(event["usage"].get("completion_tokens") or 0)
        if not answer.arrived_s:  # an answer without text ends when its usage comes
            answer.arrived_s.append(now)


def _parsed(text: str) -> Mapping[str, Any]:
    try:
        event = json.loads(text)
    except ValueError:
        raise _Failed("what came is no JSON") from None
    if not isinstance(event, dict):
        raise _Failed("what came is no JSON object")
    return event


def _message(text: str) -> str:
    """What an error's body says, without what differs from request to request."""
    try:
        error = json.loads(text)["error"]
        said = error["message"] if isinstance(error, dict) else error
    except (ValueError, LookupError, TypeError):
        said = text
    return one_line(Exception(said), max_chars=120)
