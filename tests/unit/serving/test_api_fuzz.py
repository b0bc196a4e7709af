"""Random requests made of the API's own description: never a 500, never a hang, every error an OpenAI error object.

DSPARK_FUZZ_SECONDS says for how long; 20 by default, and the engine is looked at once it is over.
"""

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from dspark.serving.ingress import build_app
from dspark.serving.openai_schema import RequestRefused, parse_request
from dspark.serving.openapi import REQUESTS, openapi_document
from dspark.serving.target_replica import TargetReplica
from schema_values import SchemaValues
from streaming_server import serving
from tiny_serving import MODEL, is_empty, serve_config

SECONDS = float(os.environ.get("DSPARK_FUZZ_SECONDS", "20"))
SETTINGS = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))
BATCH = 100  # examples between two looks at the clock
HANGS_AFTER_S = 60.0  # a busy machine may starve a server for long, but not for ever
PREFERRED = {
    "max_tokens": st.none() | st.integers(1, 8),
    "max_completion_tokens": st.none() | st.integers(1, 8),
    "n": st.none() | st.integers(1, 4),
    "name": st.sampled_from(["weather", "add"]),
    "logit_bias": st.dictionaries(st.integers(0, 400).map(str), st.floats(-100, 100), max_size=3),
    "allowed_token_ids": st.none() | st.lists(st.integers(0, 330), min_size=1, max_size=4),
    "banned_token_ids": st.lists(st.integers(0, 330), max_size=4),
    "stop_token_ids": st.lists(st.integers(0, 330), max_size=4),
    "tokens": st.lists(st.integers(0, 330), max_size=8),
    "arguments": st.dictionaries(st.text("ab"), st.integers(), max_size=2).map(json.dumps),
    "service_tier": st.sampled_from(["auto", "default", "flex", "priority", "any"]),
    "chat_template_kwargs": st.dictionaries(st.sampled_from(["shout", "tools", "x"]), st.booleans(), max_size=2),
}
LIMITS = {"max_output_tokens": 12, "max_concurrent_requests": 8, "allow_priority": True}
DOCUMENT = openapi_document(MODEL)
VALUES = SchemaValues(DOCUMENT, PREFERRED)


def schema_of(path: str) -> Any:
    return DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]


def as_json(content: Any, is_ascii: bool) -> bytes:
    return json.dumps(content, ensure_ascii=is_ascii).encode()


def bodies(path: str) -> st.SearchStrategy[bytes]:
    """One that fits the description, one that nearly does, or one whose end is missing."""
    fitting, near = (st.builds(as_json, one(schema_of(path)), st.booleans()) for one in (VALUES.of, VALUES.near))
    cut = st.builds(lambda body, share: body[: int(share * len(body))], fitting, st.floats(0, 1))
    return st.one_of(fitting, fitting, near, cut)


REQUEST = st.one_of(*(st.tuples(st.just(path), bodies(path)) for path in sorted(REQUESTS)))


@pytest.fixture(scope="module")
def replica(tool_calling_target: Path) -> Iterator[TargetReplica]:
    replica = TargetReplica(serve_config(tool_calling_target, limits=LIMITS))
    yield replica
    replica.close()


def test_no_request_fails_the_server(replica: TargetReplica) -> None:
    statuses: Counter[int] = Counter()
    app = build_app(replica, serve_config("unused", limits=LIMITS))
    with serving(app) as url, httpx.Client(base_url=url, timeout=HANGS_AFTER_S) as http:

        @settings(SETTINGS, max_examples=BATCH, phases=[Phase.generate])
        @given(REQUEST)
        def batch(request: tuple[str, bytes]) -> None:
            path, body = request
            response = http.post(path, content=body)
            statuses[response.status_code] += 1
            check(path, response)

        deadline, number = time.monotonic() + SECONDS, 0
        while time.monotonic() < deadline:
            seed(number)(batch)()
            number += 1
        assert http.get("/health").status_code == 200
    print(f"statuses in {SECONDS:g} s: {dict(statuses)}")
    assert statuses[200] > 0.1 * statuses.total()  # many run, not only get refused
    assert statuses[400] > 0.1 * statuses.total()
    assert is_empty(replica)


def check(path: str, response: httpx.Response) -> None:
    """The answer is of its documented form."""
    if response.status_code != 200:
        assert response.status_code in (400, 404, 413), response.text
        assert response.headers["content-type"] == "application/json"
        require_fit(response.json(), {"$ref": "#/components/schemas/Error"})
    elif response.headers["content-type"].startswith("text/event-stream"):
        *chunks, last = [block.removeprefix("data: ") for block in response.text.split("\n\n")[:-1]]
        assert last == "[DONE]", response.text
        for chunk in chunks:
            require_fit(json.loads(chunk), {"$ref": "#/components/schemas/Answer"})
    else:
        answer = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
        require_fit(response.json(), answer)


def require_fit(content: Any, schema: dict[str, Any]) -> None:
    validator = jsonschema.Draft202012Validator({**schema, "components": DOCUMENT["components"]})
    assert not [error.message for error in validator.iter_errors(content)]


@settings(SETTINGS, max_examples=200)
@given(REQUEST)
def test_what_the_server_reads_fits_its_description(request: tuple[str, bytes]) -> None:
    """The other way round does not hold: a description cannot say all that makes a request one."""
    path, body = request
    try:
        parse_request(REQUESTS[path], body)  # type: ignore[type-var]
    except RequestRefused:
        return
    require_fit(json.loads(body), schema_of(path))


METHODS = st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "BREW"])
PATHS = st.sampled_from([*DOCUMENT["paths"], "/v1/models/"]) | st.text(st.characters(codec="utf-8"), max_size=10).map(
    lambda text: f"/v1/models/{quote(text)}"
)


@settings(SETTINGS, max_examples=100)
@given(METHODS, PATHS, st.text(st.characters(codec="latin-1"), max_size=20))
def test_every_method_on_every_path_gets_an_answer(method: str, path: str, header: str) -> None:
    """Of an engine that is not there: nothing here may get as far as that."""
    transport = httpx.ASGITransport(build_app(object(), serve_config("unused")))  # type: ignore[arg-type]

    async def run() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            names = {"X-Request-Id": header.encode("latin-1"), "Authorization": header.encode("latin-1")}
            return await http.request(method, path, headers=names)

    if path in ("/health", "/metrics"):
        return
    response = asyncio.run(run())
    assert response.status_code < 500
    if response.status_code >= 400 and method != "HEAD":
        require_fit(response.json(), {"$ref": "#/components/schemas/Error"})
