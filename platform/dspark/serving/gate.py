"""The API's door: what the replicas could not answer in time is refused at once, before its body is read.

A refusal costs no parsing, no template, no tokenizer and no call to a replica, so that a flood of requests leaves the
process free for those that were let in. Replicas decide once more for themselves: several processes of the API may have
let in the same last one.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from dspark.serving.config import URGENT
from dspark.serving.engine_client import EngineClient
from dspark.serving.fleet_view import FleetView
from dspark.serving.metrics import gauge, refused_family, with_label
from dspark.serving.openai_schema import Refusal

if TYPE_CHECKING:
    from prometheus_client import Metric

GENERATING = ("/v1/chat/completions", "/v1/completions")
LOOK_EVERY_S = 0.5  # while requests come


class Gate:
    """ASGI middleware. Without requests it asks the replicas nothing.

    may_be_urgent: whether a request may go before others, by its headers; its body may say that it does not. Then only
    what even such a one would not get is refused here, and the replica that reads it decides the rest.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        engine: EngineClient,
        view: FleetView,
        counts: "GateCounts",
        may_be_urgent: Callable[[Headers], bool],
    ) -> None:
        self._app, self._engine, self._view, self._counts = app, engine, view, counts
        self._may_be_urgent = may_be_urgent
        self._looking: asyncio.Task[None] | None = None
        self._looked_at = float("-inf")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].endswith(GENERATING):
            await self._app(scope, receive, send)
            return
        self._look()
        refusal = self._view.refusal()
        if refusal is not None and self._may_be_urgent(Headers(scope=scope)):
            refusal = self._view.refusal(URGENT)
        if refusal is not None:
            self._counts.refused[refusal.status] += 1
            await _send(refusal, send)
            return
        self._view.begin()
        try:
            await self._app(scope, receive, send)
        finally:
            self._view.end()

    def _look(self) -> None:
        """Begin to ask the replicas how they stand, unless that was lately."""
        now = time.monotonic()
        if now - self._looked_at >= LOOK_EVERY_S and (self._looking is None or self._looking.done()):
            self._looked_at = now
            self._looking = asyncio.create_task(self._ask())

    async def _ask(self) -> None:
        asked = self._view.asked()
        self._view.heard(await self._engine.loads(), asked)


class GateCounts:
    """What is told of it in /metrics. refused: requests, by status."""

    def __init__(self, view: FleetView) -> None:
        self.refused: Counter[int] = Counter()
        self._view = view

    def families(self, replica_id: str) -> "list[Metric]":
        """replica_id: of this process; each sample has it for a label, as those of the replicas have theirs."""
        families = [
            gauge("ingress_requests_open", "Requests that this process of the API let in.", self._view.num_open),
            refused_family(self.refused),
        ]
        return with_label(families, "replica", replica_id)


async def _send(refusal: Refusal, send: Send) -> None:
    """The whole response."""
    body = json.dumps(refusal.body(), ensure_ascii=False, separators=(",", ":")).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **refusal.headers()}
    raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
