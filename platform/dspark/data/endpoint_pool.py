"""Servers with an OpenAI-compatible API that hold one target: requests spread over them, failures waited out.

A request that fails for a passing reason (429, 5xx, timeout, broken connection) is sent again, elsewhere if it can be.
An endpoint that fails several times in a row is set aside for a while and then tried with one request.
"""

import asyncio
import logging
import random
import time
from dataclasses import dataclass
from typing import Any

import httpx

from dspark.data.backend import BackendConfig
from dspark.errors import DsparkError, one_line

MAX_BACKOFF_S = 30.0
MAX_RETRY_AFTER_S = 120.0
PREFLIGHT_TIMEOUT_S = 20.0
PASSING_STATUSES = {408, 425, 429}
WRONG_SETTINGS = {401: "backend.api_key_env", 403: "backend.api_key_env", 404: "backend.base_urls and backend.model"}
# Servers that fill in the model's own recommendations where a request is silent are told all of them.
NEUTRAL: dict[str, dict[str, Any]] = {
    name: {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0} for name in ("vllm", "sglang")
}

log = logging.getLogger("dspark.generate")


class RequestRejected(Exception):
    """No answer to this one request, for a reason of its own or after too many tries."""


class _PassingFailure(Exception):
    """A try that failed, and may succeed later or elsewhere."""

    def __init__(self, reason: str, *, retry_after_s: float = 0.0, is_endpoint_at_fault: bool = True) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s
        self.is_endpoint_at_fault = is_endpoint_at_fault


@dataclass(eq=False)
class Endpoint:
    """One server, and how it has fared. Times are of the monotonic clock."""

    url: str
    neutral: dict[str, Any]
    num_open: int = 0
    num_answered: int = 0
    num_failed: int = 0
    failures_in_a_row: int = 0
    failed_at: float = 0.0
    aside_until: float = 0.0
    reason: str = ""

    def is_aside(self) -> bool:
        return time.monotonic() < self.aside_until


class EndpointPool:
    """The endpoints of a backend; for one event loop."""

    def __init__(self, config: BackendConfig) -> None:
        self._config = config
        key = config.api_key()
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(config.timeout_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=self.capacity),
        )
        self._changed = asyncio.Condition()
        self.endpoints = [Endpoint(url.rstrip("/"), {}) for url in config.base_urls]

    @property
    def capacity(self) -> int:
        """Most requests under way at once."""
        return self._config.concurrency * len(self._config.base_urls)

    async def close(self) -> None:
        await self._client.aclose()

    async def check(self) -> None:
        """Ask each endpoint which models it serves; those that do not answer are set aside.

        Raises: DsparkError if none answers, one refuses the key, or one serves the model under no such name.
        """
        await asyncio.gather(*(self._check(endpoint) for endpoint in self.endpoints))
        self._require_one()

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON that answers a request to `{base_url}/{path}`.

        Raises: RequestRejected if there is none; DsparkError if the settings are wrong or every endpoint fails.
        """
        reason, last = "", None
        for number in range(self._config.max_retries + 1):
            endpoint = await self._acquire(unlike=last)
            started = time.monotonic()
            try:
                answer = await self._send(endpoint, path, body)
            except _PassingFailure as failure:
                reason, last = str(failure), endpoint
                delay_s = self._delay_s(number, failure.retry_after_s)
                if failure.is_endpoint_at_fault:
                    self._note_failure(endpoint, reason, started)
            else:
                self._note_success(endpoint)
                return answer
            finally:
                await self._release(endpoint)
            if number < self._config.max_retries:
                await asyncio.sleep(delay_s)
        raise RequestRejected(f"no answer in {self._config.max_retries + 1} tries, at last: {reason}")

    async def _check(self, endpoint: Endpoint) -> None:
        try:
            response = await self._client.get(f"{endpoint.url}/models", timeout=PREFLIGHT_TIMEOUT_S)
        except httpx.HTTPError as error:
            self._set_aside(endpoint, _named(error))
            return
        if response.status_code in (401, 403):
            raise _wrong_settings(endpoint, response)
        content = _json_object(response) if response.status_code == 200 else None
        if content is None:
            return  # not every server lists its models
        models = content.get("data") or []
        served = [str(model.get("id")) for model in models]
        if served and self._config.model not in served:
            raise DsparkError(f"endpoint {endpoint.url} serves {served}, not {self._config.model!r}; set backend.model")
        owners = {model.get("owned_by") for model in models if model.get("id") == self._config.model}
        endpoint.neutral = next((NEUTRAL[owner] for owner in owners if owner in NEUTRAL), {})

    async def _send(self, endpoint: Endpoint, path: str, body: dict[str, Any]) -> dict[str, Any]:
        content = endpoint.neutral | body | self._config.extra_body
        content = {name: value for name, value in content.items() if value is not None}
        try:
            async with asyncio.timeout(self._config.timeout_s):
                response = await self._client.post(f"{endpoint.url}/{path}", json=content)
        except (TimeoutError, httpx.TimeoutException):
            raise _PassingFailure(f"no answer within {self._config.timeout_s:g} s") from None
        except httpx.HTTPError as error:
            raise _PassingFailure(_named(error)) from error
        status = response.status_code
        if status >= 500 or status in PASSING_STATUSES:
            raise _PassingFailure(
                f"status {status}", retry_after_s=_retry_after_s(response), is_endpoint_at_fault=status >= 500
            )
        if status in WRONG_SETTINGS:
            raise _wrong_settings(endpoint, response)
        if status != 200:
            raise RequestRejected(f"refused with status {status}: {one_line(Exception(response.text), max_chars=200)}")
        answer = _json_object(response)
        if answer is None:
            raise _PassingFailure("the answer is no JSON object")
        return answer

    async def _acquire(self, *, unlike: Endpoint | None) -> Endpoint:
        """The endpoint with the fewest requests that takes one more; another than `unlike` where there is one."""
        async with self._changed:
            while True:
                self._require_one()
                free = [endpoint for endpoint in self.endpoints if endpoint.num_open < self._limit(endpoint)]
                if free:
                    chosen = min(free, key=lambda endpoint: (endpoint is unlike, endpoint.num_open))
                    chosen.num_open += 1
                    return chosen
                try:  # a release wakes it; so does time, which brings endpoints back
                    await asyncio.wait_for(self._changed.wait(), timeout=0.5)
                except TimeoutError:
                    continue

    async def _release(self, endpoint: Endpoint) -> None:
        async with self._changed:
            endpoint.num_open -= 1
            self._changed.notify_all()

    def _limit(self, endpoint: Endpoint) -> int:
        if endpoint.is_aside():
            return 0
        is_on_trial = endpoint.failures_in_a_row >= self._config.max_failures
        return 1 if is_on_trial else self._config.concurrency

    def _note_failure(self, endpoint: Endpoint, reason: str, started: float) -> None:
        endpoint.num_failed += 1
        if started < endpoint.failed_at:
            return  # sent before the last failure was known: the same event seen by many requests counts once
        endpoint.failed_at = time.monotonic()
        endpoint.failures_in_a_row += 1
        if endpoint.failures_in_a_row >= self._config.max_failures:
            self._set_aside(endpoint, reason)

    def _note_success(self, endpoint: Endpoint) -> None:
        if endpoint.failures_in_a_row >= self._config.max_failures:
            log.info("endpoint %s answers again", endpoint.url)
        endpoint.num_answered += 1
        endpoint.failures_in_a_row = 0
        endpoint.aside_until = 0.0

    def _set_aside(self, endpoint: Endpoint, reason: str) -> None:
        endpoint.failures_in_a_row = max(endpoint.failures_in_a_row, self._config.max_failures)
        endpoint.aside_until = time.monotonic() + self._config.aside_s
        endpoint.reason = reason
        log.warning("endpoint %s is set aside for %g s: %s", endpoint.url, self._config.aside_s, reason)

    def _require_one(self) -> None:
        if all(endpoint.is_aside() for endpoint in self.endpoints):
            reasons = "; ".join(f"{endpoint.url}: {endpoint.reason}" for endpoint in self.endpoints)
            raise DsparkError(f"every endpoint fails ({reasons}); the same command goes on from here when one answers")

    def _delay_s(self, number: int, retry_after_s: float) -> float:
        """Exponential, spread over half its length so that requests that failed together do not return together."""
        delay_s = min(MAX_BACKOFF_S, self._config.backoff_s * 2**number)
        return max(retry_after_s, delay_s * random.uniform(0.5, 1.0))


def _wrong_settings(endpoint: Endpoint, response: httpx.Response) -> DsparkError:
    said = one_line(Exception(response.text), max_chars=200)
    remedy = f"check {WRONG_SETTINGS[response.status_code]}"
    return DsparkError(f"endpoint {endpoint.url} answers with status {response.status_code}: {said}; {remedy}")


def _json_object(response: httpx.Response) -> dict[str, Any] | None:
    try:
        content = response.json()
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _retry_after_s(response: httpx.Response) -> float:
    """Seconds the server asks to wait; a date, the header's other form, is not worth its parser."""
    asked = response.headers.get("retry-after", "")
    return min(float(asked), MAX_RETRY_AFTER_S) if asked.isdecimal() else 0.0


def _named(error: httpx.HTTPError) -> str:
    return one_line(error) or type(error).__name__
