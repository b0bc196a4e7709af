"""What stands between a client and an endpoint: its key, the length of its body, and what the body says."""

import hmac
import re
from pathlib import Path
from typing import TypeVar

from fastapi import Request

from dspark.serving.config import ServeConfig
from dspark.serving.openai_schema import MAX_SHOWN, GenerateRequest, RequestRefused, parse_request
from dspark.serving.sampling_fields import RequestBody

PRIORITY = "X-Priority"

R = TypeVar("R", bound=RequestBody)
G = TypeVar("G", bound=GenerateRequest)


class Incoming:
    """Reads requests for one model. Raises: ValueError when the file of keys has none."""

    def __init__(self, config: ServeConfig) -> None:
        self._model = config.model_name
        self._max_body_bytes = config.limits.max_body_bytes
        self._api_keys = [] if config.api_keys_file is None else read_api_keys(config.api_keys_file)

    def authorise(self, http: Request) -> None:
        """Raises: RequestRefused (401) without a valid key. Every key is compared, each in constant time."""
        if not self._api_keys:
            return
        scheme, _, given = http.headers.get("authorization", "").partition(" ")
        matches = [hmac.compare_digest(given.strip().encode("latin-1"), key) for key in self._api_keys]
        if scheme.lower() != "bearer" or not any(matches):
            message = "no valid API key; send one as `Authorization: Bearer KEY`"
            raise RequestRefused.of(message, code="invalid_api_key", status=401)

    async def read(self, http: Request, request_class: type[R]) -> R:
        """The request in the body. Raises: RequestRefused (400, 401, 404, 413), ClientDisconnect."""
        self.authorise(http)
        request = parse_request(request_class, await _read_body(http, self._max_body_bytes))
        self.require_served(getattr(request, "model", None))
        return _with_priority(request, http.headers.get(PRIORITY)) if isinstance(request, GenerateRequest) else request

    def require_served(self, model: str | None) -> None:
        """Raises: RequestRefused (404) for another model; None stands for the one that is served."""
        if model is not None and model != self._model:
            message = f"model {model[:MAX_SHOWN]!r} is not served here; {self._model!r} is"
            raise RequestRefused.of(message, param="model", code="model_not_found", status=404)


def read_api_keys(path: str | Path) -> list[bytes]:
    """The keys in a file, one per line. Raises: ValueError without any: an empty list would let everybody in."""
    if not Path(path).is_file():
        raise ValueError(f"api_keys_file not found: {path}; write a key per line into it, or leave it out")
    keys = [line.strip() for line in Path(path).read_bytes().splitlines() if line.strip()]
    if not keys:
        raise ValueError(f"api_keys_file {path} holds no key; write one per line into it, or leave it out")
    return keys


def _with_priority(request: G, header: str | None) -> G:
    """The request with the header's priority, by which a gateway may say it for clients that do not."""
    if header is None:
        return request
    if not (re.fullmatch(r"-?[0-9]{1,10}", header) and -(2**31) <= int(header) < 2**31):
        raise RequestRefused.of(f"{PRIORITY} must be an integer of 32 bits; leave it out for 0", param=PRIORITY)
    if "priority" in request.model_fields_set and request.priority != int(header):
        message = f"priority is {request.priority} but {PRIORITY} is {int(header)}; send one of them"
        raise RequestRefused.of(message, param="priority")
    return request.model_copy(update={"priority": int(header)})


async def _read_body(http: Request, max_bytes: int) -> bytes:
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > max_bytes:
            raise RequestRefused.of(f"the body is longer than {max_bytes} bytes", status=413)
    return bytes(body)
