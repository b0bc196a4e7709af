"""The API's description of itself: a valid one, of every route, and of what really comes back."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from dspark.serving.ingress import build_app
from dspark.serving.openapi import openapi_document
from dspark.serving.request_fields import UNSUPPORTED, WITHOUT_EFFECT
from tiny_serving import MODEL, serve_config


class Nobody:
    """An engine that no request gets to."""


def test_it_is_served_and_describes_every_route() -> None:
    app = build_app(Nobody(), serve_config("unused"))  # type: ignore[arg-type]
    routes = {route.path.replace(":path", "") for route in app.routes}  # type: ignore[attr-defined]

    async def run() -> Any:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return (await client.get("/openapi.json")).json()

    document = asyncio.run(run())
    assert document == openapi_document(MODEL)
    assert document["paths"].keys() == routes - {"/openapi.json"}


@pytest.mark.parametrize("name", sorted(openapi_document(MODEL)["components"]["schemas"]))
def test_every_schema_is_one(name: str) -> None:
    schema = openapi_document(MODEL)["components"]["schemas"][name]
    jsonschema.Draft202012Validator.check_schema(schema)
    assert "#/$defs" not in str(schema)


@pytest.mark.parametrize("name", ["ChatRequest", "CompletionRequest", "TokenizeRequest"])
def test_what_is_not_read_is_described_as_well(name: str) -> None:
    schema = openapi_document(MODEL)["components"]["schemas"][name]
    assert schema["additionalProperties"] is False
    assert schema["properties"].keys() >= {*UNSUPPORTED, *WITHOUT_EFFECT}
    assert schema["properties"]["echo"]["enum"] == [False, None]


def test_the_readmes_of_the_api_name_every_endpoint() -> None:
    docs = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")
    assert all(f"`{path}`" in docs for path in openapi_document(MODEL)["paths"])
