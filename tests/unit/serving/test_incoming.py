"""What is read of a request before it is anybody's: its key, its length, its model, its priority."""

import asyncio
import json
from typing import Any

import pytest
from fastapi import Request

from dspark.serving.incoming import Incoming
from dspark.serving.openai_schema import CompletionRequest, Refusal, RequestRefused
from dspark.serving.tokenization import TokenizeRequest
from tiny_serving import completion, serve_config


def read(body: dict[str, Any], request_class: Any = CompletionRequest, **headers: str) -> Any:
    """What comes of a body, sent in two parts; headers with underscores."""
    content = json.dumps(body).encode()
    parts = [content[:9], content[9:]]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    http = Request({"type": "http", "headers": named}, receive)
    limits = {"max_body_bytes": 400, "allow_priority": True}
    return asyncio.run(Incoming(serve_config("unused", limits=limits)).read(http, request_class))


def refusal(body: dict[str, Any], **headers: str) -> Refusal:
    with pytest.raises(RequestRefused) as caught:
        read(body, **headers)
    return caught.value.refusal


def test_a_body_in_parts_is_one_request() -> None:
    assert read(completion("hello")).prompt == "hello"


def test_a_body_may_be_as_long_as_the_limit() -> None:
    room = 400 - len(json.dumps(completion("")))
    assert read(completion("x" * room)).prompt == "x" * room
    assert refusal(completion("x" * (room + 1))).status == 413


def test_a_header_gives_a_priority_to_who_has_none() -> None:
    assert read(completion()).priority == 0
    assert read(completion(), x_priority="-3").priority == -3
    assert read(completion(priority=4), x_priority="4").priority == 4
    assert refusal(completion(priority=4), x_priority="5").param == "priority"


@pytest.mark.parametrize("value", ["", "high", "1.5", str(2**31), "1" * 5000, "+1", "1 2"])
def test_a_priority_that_is_none_is_refused(value: str) -> None:
    assert refusal(completion(), x_priority=value).param == "X-Priority"


def test_only_what_generates_has_a_priority() -> None:
    assert read({"prompt": "a"}, TokenizeRequest, x_priority="1").prompt == "a"


def test_a_long_name_of_a_model_is_not_repeated_whole() -> None:
    found = refusal(completion(model="x" * 250))
    assert (found.status, len(found.message) < 250) == (404, True)
