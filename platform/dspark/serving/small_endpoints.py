"""Endpoints that generate nothing: models, version, tokens of a text and back."""

import time
from importlib import metadata
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from dspark.serving.answer_schema import ModelCard, ModelList
from dspark.serving.config import ServeConfig
from dspark.serving.engine_client import EngineClient
from dspark.serving.incoming import Incoming
from dspark.serving.openai_schema import Refusal, RequestRefused
from dspark.serving.tokenization import DetokenizeRequest, TokenizeRequest

DISTRIBUTION = "dspark-platform"


class SmallEndpoints:
    """Handlers of `build_app`."""

    def __init__(self, engine: EngineClient, incoming: Incoming, config: ServeConfig) -> None:
        self._engine = engine
        self._incoming = incoming
        self._card = ModelCard(id=config.model_name, created=int(time.time()))

    async def version(self) -> Response:
        return JSONResponse({"version": platform_version()})

    async def models(self, http: Request) -> Response:
        self._incoming.authorise(http.headers)
        return JSONResponse(ModelList(data=[self._card]).model_dump())

    async def model(self, http: Request) -> Response:
        self._incoming.authorise(http.headers)
        self._incoming.require_served(http.path_params["model"])
        return JSONResponse(self._card.model_dump())

    async def tokenize(self, http: Request) -> Response:
        request = await self._incoming.read(http, TokenizeRequest)
        return _response(await self._engine.tokenize(request))

    async def detokenize(self, http: Request) -> Response:
        request = await self._incoming.read(http, DetokenizeRequest)
        return _response(await self._engine.detokenize(request))


def platform_version() -> str:
    """Of the installed distribution; "unknown" where its files are used without being installed."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"


def _response(answer: Any) -> Response:
    if isinstance(answer, Refusal):
        raise RequestRefused(answer)
    return JSONResponse(answer.model_dump())
