"""The OpenAI-compatible HTTP API. It holds no model: every answer comes through an `EngineClient`."""

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from dspark.serving.answer_stages import Answers, staged
from dspark.serving.config import ServeConfig
from dspark.serving.engine_client import Delta, EngineClient
from dspark.serving.fleet_view import FleetView
from dspark.serving.gate import Gate, GateCounts
from dspark.serving.incoming import Incoming
from dspark.serving.metrics import render
from dspark.serving.openai_schema import ChatRequest, CompletionRequest, GenerateRequest, Refusal, RequestRefused
from dspark.serving.openapi import openapi_document
from dspark.serving.request_ids import RequestIds, answer_id, engine_id
from dspark.serving.responses import DONE, ChatWriter, TextWriter, error_event
from dspark.serving.small_endpoints import SmallEndpoints
from dspark.serving.this_replica import ingress_name

HEALTH_TIMEOUT_S = 0.8
METRICS_TIMEOUT_S = 5.0
BUSY_STATUSES = (429, 503)
CLIENT_GONE = 499  # nobody reads it; it stands in access logs
INTERNAL = Refusal(500, "internal error; the server's log has the details", code="internal_error")

T = TypeVar("T")

log = logging.getLogger("dspark")


def build_app(engine: EngineClient, config: ServeConfig, *, is_behind_proxy: bool = False) -> FastAPI:
    """The API as an ASGI application. is_behind_proxy: Ray Serve's, which tells requests' ids itself."""
    app = FastAPI(title="dspark", docs_url=None, redoc_url=None)
    incoming = Incoming(config)
    view = FleetView(config.limits)
    counts = GateCounts(view)
    endpoints, small = _Endpoints(engine, incoming, counts), SmallEndpoints(engine, incoming, config)
    app.add_api_route("/health", endpoints.health)
    app.add_api_route("/metrics", endpoints.metrics)
    app.add_api_route("/version", small.version)
    app.add_api_route("/v1/models", small.models)
    app.add_api_route("/v1/models/{model:path}", small.model)
    app.add_api_route("/v1/chat/completions", endpoints.chat_completions, methods=["POST"])
    app.add_api_route("/v1/completions", endpoints.completions, methods=["POST"])
    app.add_api_route("/tokenize", small.tokenize, methods=["POST"])
    app.add_api_route("/detokenize", small.detokenize, methods=["POST"])
    app.add_exception_handler(RequestRefused, _on_refused)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_failure)
    app.add_middleware(Gate, engine=engine, view=view, counts=counts, may_be_urgent=incoming.may_be_urgent)
    app.add_middleware(RequestIds, is_told=not is_behind_proxy)
    app.openapi = functools.partial(openapi_document, config.model_name)  # type: ignore[method-assign]
    return app


class _Endpoints:
    def __init__(self, engine: EngineClient, incoming: Incoming, counts: GateCounts) -> None:
        self._engine, self._incoming, self._counts = engine, incoming, counts
        self._name = ingress_name()

    async def health(self) -> Response:
        """200 while a replica answers; the engine's own steps are not waited for."""
        try:
            await asyncio.wait_for(self._engine.check_health(), HEALTH_TIMEOUT_S)
        except Exception as error:  # whatever it is, the answer is that nothing can be served
            return JSONResponse({"status": "unavailable", "reason": type(error).__name__}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def metrics(self) -> Response:
        """Prometheus text."""
        try:
            families = await asyncio.wait_for(self._engine.metrics(), METRICS_TIMEOUT_S)
        except TimeoutError:
            raise RequestRefused.of("the replicas did not answer in time", status=503) from None
        families = [*families, *self._counts.families(self._name)]
        return Response(render(families), media_type=CONTENT_TYPE_LATEST)

    async def chat_completions(self, http: Request) -> Response:
        return await self._answer(http, ChatRequest, ChatWriter)

    async def completions(self, http: Request) -> Response:
        return await self._answer(http, CompletionRequest, TextWriter)

    async def _answer(
        self, http: Request, request_class: type[GenerateRequest], writer_class: type[TextWriter]
    ) -> Response:
        request = await self._incoming.read(http, request_class)
        writer = writer_class(answer_id(http, writer_class.prefix), request)
        request_id = engine_id(http, writer_class.prefix)
        answers = staged(self._engine.generate(request_id, request), request, writer.tally)
        try:
            if request.stream:
                return await _stream(http, writer, answers)
            return await _whole(http, writer, answers)
        except (RequestRefused, ClientDisconnect):
            raise
        except Exception:
            log.exception("request %s failed", request_id)
            raise RequestRefused(INTERNAL) from None


class _EventStream(StreamingResponse):
    """Server-sent events that are closed however they end, so that the engine hears of it."""

    def __init__(self, events: AsyncGenerator[bytes, None], answers: Answers) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._generators = (events, answers)  # closing events that never began would not reach the answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for generator in self._generators:
                await generator.aclose()


async def _whole(http: Request, writer: TextWriter, answers: Answers) -> Response:
    async with contextlib.aclosing(answers):
        return JSONResponse(writer.whole(await _unless_gone(http, _collect(answers, writer.num_choices))))


async def _stream(http: Request, writer: TextWriter, answers: Answers) -> Response:
    """The stream, once its first item is there: until then an error still gets a status of its own."""
    try:
        first = await _unless_gone(http, _next(answers))
        if isinstance(first, Refusal):
            raise RequestRefused(first)
    except BaseException:
        await answers.aclose()
        raise
    return _EventStream(_events(writer, first, answers), answers)


async def _events(writer: TextWriter, first: Delta, answers: Answers) -> AsyncGenerator[bytes, None]:
    """One event per step and choice that has something to show, and what ended each choice."""
    item: Delta | Refusal = first
    lasts: list[Delta] = []
    try:
        while True:
            if isinstance(item, Refusal):
                yield error_event(item)
                return
            if writer.has_part(item):
                yield writer.chunk(item)
            if item.finish_reason is not None:
                lasts.append(item)
                if len(lasts) == writer.num_choices:
                    break
                yield writer.final(item)
            item = await _next(answers)
    except Exception:
        log.exception("stream failed")
        yield error_event(INTERNAL)
        return
    yield writer.final(item) + writer.totals(lasts) + DONE


async def _next(answers: Answers) -> Delta | Refusal:
    item = await anext(answers, None)
    if item is None:
        raise RuntimeError("the answer ended without a finish reason")
    return item


async def _collect(answers: Answers, num_choices: int) -> list[Delta]:
    """All of an answer. Raises: RequestRefused if it is refused, or breaks."""
    deltas: list[Delta] = []
    while num_choices:
        item = await _next(answers)
        if isinstance(item, Refusal):
            raise RequestRefused(item)
        deltas.append(item)
        num_choices -= item.finish_reason is not None
    return deltas


async def _unless_gone(http: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. Raises: ClientDisconnect, with `work` cancelled, when the client hangs up before."""
    working = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(_disconnect(http))
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        waiting.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)


async def _disconnect(http: Request) -> None:
    """Returns when the client has hung up. The body must have been read."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _on_refused(http: Request, error: Exception) -> Response:
    assert isinstance(error, RequestRefused)
    refusal = error.refusal
    return JSONResponse(refusal.body(), status_code=refusal.status, headers=refusal.headers())


async def _on_http_error(http: Request, error: Exception) -> Response:
    """Unknown paths and methods, in the form of every other error."""
    assert isinstance(error, HTTPException)
    refusal = Refusal(error.status_code, f"{http.method} {http.url.path}: {error.detail}")
    return JSONResponse(refusal.body(), status_code=error.status_code, headers=error.headers)


async def _on_failure(http: Request, error: Exception) -> Response:
    """What nothing else caught, which the server logs."""
    return JSONResponse(INTERNAL.body(), status_code=INTERNAL.status)


async def _on_disconnect(http: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)
