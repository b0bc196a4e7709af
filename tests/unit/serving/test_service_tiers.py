"""Who may go before others, and by which name."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi import Request

from dspark.serving.config import LimitsConfig
from dspark.serving.incoming import Incoming, read_api_keys
from dspark.serving.openai_schema import CompletionRequest, RequestRefused
from dspark.serving.service_tiers import NOBODYS, ApiKey, ServiceTiers
from tiny_serving import completion, serve_config

KEYS = "plain\npaying priority\nowner priority urgent\n"
TIERS = {"default": 0, "flex": 5, "priority": -1, "urgent": -7}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    (tmp_path / "keys").write_text(KEYS)
    return tmp_path / "keys"


def read(
    fields: dict[str, Any],
    *,
    keys: Path | None = None,
    key: str | None = None,
    number: str | None = None,
    **limits: Any,
) -> CompletionRequest:
    """What becomes of a completion with such fields, sent with a key and the header X-Priority."""
    given = {"authorization": None if key is None else f"Bearer {key}", "x-priority": number}
    headers = [(name.encode(), value.encode()) for name, value in given.items() if value is not None]
    body = json.dumps(completion(**fields)).encode()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    config = serve_config(
        "unused", limits={"service_tiers": TIERS, **limits}, api_keys_file=None if keys is None else str(keys)
    )
    return asyncio.run(Incoming(config).read(Request({"type": "http", "headers": headers}, receive), CompletionRequest))


def refused(*args: Any, **options: Any) -> tuple[int, str | None]:
    with pytest.raises(RequestRefused) as caught:
        read(*args, **options)
    return caught.value.refusal.status, caught.value.refusal.param


@pytest.mark.parametrize(
    ("tier", "key", "priority"),
    [
        ("auto", "plain", 0),
        ("default", "plain", 0),
        ("flex", "plain", 5),
        ("priority", "paying", -1),
        ("urgent", "owner", -7),
    ],
)
def test_a_tier_is_a_priority(keys: Path, tier: str, key: str, priority: int) -> None:
    request = read({"service_tier": tier}, keys=keys, key=key)
    assert request.priority == priority
    assert request.service_tier == ("default" if tier == "auto" else tier)


def test_without_a_tier_nothing_changes(keys: Path) -> None:
    request = read({}, keys=keys, key="owner")
    assert (request.priority, request.service_tier) == (0, None)
    assert read({"service_tier": None}).service_tier is None


def test_only_keys_that_a_tier_was_given_to_go_before_others(keys: Path) -> None:
    assert refused({"service_tier": "priority"}, keys=keys, key="plain") == (400, "service_tier")
    assert refused({"service_tier": "urgent"}, keys=keys, key="paying") == (400, "service_tier")
    assert refused({"service_tier": "priority"}) == (400, "service_tier")  # nobody has a key
    assert read({"service_tier": "priority"}, allow_priority=True).priority == -1
    assert read({"service_tier": "flex"}).priority == 5  # to stand back needs no leave


def test_an_unknown_tier_is_refused_by_name() -> None:
    with pytest.raises(RequestRefused, match="'scale' is not known; this server has auto, default, flex"):
        read({"service_tier": "scale"})


def test_a_number_needs_leave_and_must_agree_with_the_tier() -> None:
    assert refused({"priority": -1}) == refused({}, number="3") == (400, "priority")
    assert read({"priority": 0}, number="0").priority == 0
    assert read({"priority": -1}, allow_priority=True).priority == -1
    assert read({"service_tier": "flex"}, number="5", allow_priority=True).priority == 5
    assert refused({"service_tier": "flex", "priority": 4}, allow_priority=True) == (400, "service_tier")


def test_a_line_of_the_keys_that_names_an_unknown_tier_is_refused_at_the_start(keys: Path) -> None:
    assert [sorted(key.tiers) for key in read_api_keys(keys)] == [[], ["priority"], ["priority", "urgent"]]
    with pytest.raises(ValueError, match=r"names the tier 'urgent'; limits.service_tiers has default, flex, priority"):
        Incoming(serve_config("unused", api_keys_file=str(keys)))


def test_headers_tell_who_may_go_before_others_as_far_as_they_do() -> None:
    """Under allow_priority anybody's body may say so; else only one whose key was given such a tier."""
    everybody, some = ServiceTiers(LimitsConfig(allow_priority=True)), ServiceTiers(LimitsConfig())
    holder = ApiKey(b"k", frozenset({"priority"}))
    assert everybody.may_be_urgent(None, NOBODYS)
    assert everybody.may_be_urgent("-1", NOBODYS)
    assert not everybody.may_be_urgent("0", NOBODYS)
    assert not some.may_be_urgent(None, NOBODYS)
    assert not some.may_be_urgent(None, ApiKey(b"k", frozenset({"flex"})))
    assert some.may_be_urgent(None, holder)
    assert not some.may_be_urgent("5", holder)
