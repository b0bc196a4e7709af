"""A name for every request: the client's own, from the header X-Request-Id, or a new one; every response tells it."""

import uuid

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dspark.serving.openai_schema import Refusal

HEADER = "X-Request-Id"
MAX_LENGTH = 256
STATE = "request_id"


class RequestIds:
    """ASGI middleware: puts the id into the scope's state and, unless a proxy does that, into the response."""

    def __init__(self, app: ASGIApp, *, is_told: bool = True) -> None:
        self._app = app
        self._is_told = is_told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER)
        request_id = uuid.uuid4().hex if given is None or not _is_name(given) else given
        scope.setdefault("state", {})[STATE] = (request_id, given is not None)

        async def send_named(message: Message) -> None:
            if self._is_told and message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        if given is None or given == request_id:
            await self._app(scope, receive, send_named)
        else:
            text = f"{HEADER} must be 1 to {MAX_LENGTH} visible ASCII characters; shorten it, or leave it out"
            await JSONResponse(Refusal(400, text, param=HEADER).body(), status_code=400)(scope, receive, send_named)


def answer_id(http: Request, prefix: str) -> str:
    """The id that an answer carries: a repetition of a request under its id carries it again."""
    return f"{prefix}-{_named(http)[0]}"


def engine_id(http: Request, prefix: str) -> str:
    """The id that the engine knows it by, which is nobody else's: a repetition may come while the first still runs."""
    is_given = _named(http)[1]
    return f"{answer_id(http, prefix)}-{uuid.uuid4().hex[:12]}" if is_given else answer_id(http, prefix)


def _named(http: Request) -> tuple[str, bool]:
    request_id, is_given = getattr(http.state, STATE)
    return request_id, is_given


def _is_name(text: str) -> bool:
    return 0 < len(text) <= MAX_LENGTH and all("!" <= character <= "~" for character in text)
