"""Names of requests: the client's own or new ones, told by every response, one of a kind within the engine."""

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from dspark.serving.request_ids import HEADER, MAX_LENGTH, RequestIds, answer_id, engine_id


def asked(header: str | None, *, is_told: bool = True) -> httpx.Response:
    async def names(http: Request) -> JSONResponse:
        return JSONResponse([answer_id(http, "cmpl"), engine_id(http, "cmpl")])

    app = FastAPI()
    app.add_api_route("/", names)
    app.add_middleware(RequestIds, is_told=is_told)

    async def run() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            headers: Any = {} if header is None else {HEADER: header.encode("latin-1")}
            return await client.get("/", headers=headers)

    return asyncio.run(run())


def test_a_given_name_stays() -> None:
    response = asked("order-66")
    answer, engine = response.json()
    assert (answer, response.headers[HEADER]) == ("cmpl-order-66", "order-66")
    assert engine.startswith(answer)
    assert engine != asked("order-66").json()[1]


def test_a_new_name_is_made() -> None:
    first, second = asked(None), asked(None)
    assert first.json() == [f"cmpl-{first.headers[HEADER]}"] * 2
    assert first.headers[HEADER] != second.headers[HEADER]


def test_a_proxy_that_tells_the_name_is_not_doubled() -> None:
    response = asked("order-66", is_told=False)
    assert response.json()[0] == "cmpl-order-66"
    assert HEADER not in response.headers


@pytest.mark.parametrize("name", ["", "two words", "é", "x" * (MAX_LENGTH + 1)])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    response = asked(name)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == HEADER
    assert response.headers[HEADER] != name
