"""What stands between a client and an endpoint: its key, the length of its body, and what the body says."""

import hmac
from pathlib import Path
from typing import TypeVar

from fastapi import Request
from starlette.datastructures import Headers

from dspark.serving.config import ServeConfig
from dspark.serving.openai_schema import MAX_SHOWN, GenerateRequest, RequestRefused, parse_request
from dspark.serving.sampling_fields import RequestBody
from dspark.serving.service_tiers import NOBODYS, PRIORITY, ApiKey, ServiceTiers

R = TypeVar("R", bound=RequestBody)


class Incoming:
    """Reads requests for one model. Raises: ValueError when the file of keys has none, or names an unknown tier."""

    def __init__(self, config: ServeConfig) -> None:
        self._model = config.model_name
        self._max_body_bytes = config.limits.max_body_bytes
        self._api_keys = [] if config.api_keys_file is None else read_api_keys(config.api_keys_file)
        self._tiers = ServiceTiers(config.limits)
        for key in self._api_keys:
            self._tiers.require_known(key)

    def authorise(self, headers: Headers) -> ApiKey:
        """The client's key. Raises: RequestRefused (401) without one. Every key is compared, each in constant time."""
        if not self._api_keys:
            return NOBODYS
        scheme, _, given = headers.get("authorization", "").partition(" ")
        secret = given.strip().encode("latin-1")
        matches = [key for key in self._api_keys if hmac.compare_digest(secret, key.secret)]
        if scheme.lower() != "bearer" or not matches:
            message = "no valid API key; send one as `Authorization: Bearer KEY`"
            raise RequestRefused.of(message, code="invalid_api_key", status=401)
        return matches[0]

    def may_be_urgent(self, headers: Headers) -> bool:
        """Whether the request that begins with these may go before others, as far as they tell."""
        try:
            key = self.authorise(headers)
        except RequestRefused:
            return False
        return self._tiers.may_be_urgent(headers.get(PRIORITY), key)

    async def read(self, http: Request, request_class: type[R]) -> R:
        """The request in the body. Raises: RequestRefused (400, 401, 404, 413), ClientDisconnect."""
        key = self.authorise(http.headers)
        request = parse_request(request_class, await _read_body(http, self._max_body_bytes))
        self.require_served(getattr(request, "model", None))
        if isinstance(request, GenerateRequest):
            return self._tiers.with_priority(request, http.headers.get(PRIORITY), key)
        return request

    def require_served(self, model: str | None) -> None:
        """Raises: RequestRefused (404) for another model; None stands for the one that is served."""
        if model is not None and model != self._model:
            message = f"model {model[:MAX_SHOWN]!r} is not served here; {self._model!r} is"
            raise RequestRefused.of(message, param="model", code="model_not_found", status=404)


def read_api_keys(path: str | Path) -> list[ApiKey]:
    """The keys in a file, one per line, each with the tiers that stand behind it.

    Raises: ValueError without any: an empty list would let everybody in.
    """
    if not Path(path).is_file():
        raise ValueError(f"api_keys_file not found: {path}; write a key per line into it, or leave it out")
    lines = [line.split() for line in Path(path).read_bytes().splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"api_keys_file {path} holds no key; write one per line into it, or leave it out")
    return [ApiKey(secret, frozenset(tier.decode(errors="replace") for tier in tiers)) for secret, *tiers in lines]


async def _read_body(http: Request, max_bytes: int) -> bytes:
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > max_bytes:
            raise RequestRefused.of(f"the body is longer than {max_bytes} bytes", status=413)
    return bytes(body)
