"""Another drafter takes the running one's place; streams go on, and what does not fit is refused."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dspark.serving.target_replica import TargetReplica
from tiny_drafter import make_tiny_drafter
from tiny_serving import TEXT, ask, completion, is_empty, post, serve_config, slowed, wait_until
from tiny_target import make_tiny_target

BODIES: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 3, "n": 2},
    {"frequency_penalty": 0.8, "verify_length": 7},  # more than the next drafter's block
    {"temperature": 0.9, "seed": 4, "logprobs": 1},
    {"min_tokens": 40, "stop": ["q", "zz"]},
]


@pytest.fixture(scope="module")
def alone(tiny_target: Path) -> list[Any]:
    """The answers with nothing in between."""
    replica = TargetReplica(serve_config(tiny_target))
    told = choices([post(replica, TEXT, body) for body in bodies()])
    replica.close()
    return told


@pytest.fixture
def replica(tiny_target: Path) -> Iterator[TargetReplica]:
    replica = TargetReplica(serve_config(tiny_target, engine={"page_size": 4, "max_running_requests": 4}))
    yield replica
    replica.close()


@pytest.fixture(scope="module")
def drafter(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_drafter(tmp_path_factory.mktemp("drafter") / "drafter", tiny_target))


def bodies(**changes: Any) -> list[dict[str, Any]]:
    common = {"max_tokens": 50, "return_token_ids": True}
    return [completion(f"question {k}", **common | fields | changes) for k, fields in enumerate(BODIES)]


def choices(responses: list[httpx.Response]) -> list[Any]:
    assert {response.status_code for response in responses} == {200}, [response.text for response in responses]
    told = [[(c["text"], c["token_ids"], c["finish_reason"]) for c in r.json()["choices"]] for r in responses]
    return told + [response.json()["usage"]["completion_tokens"] for response in responses]


def swaps(replica: TargetReplica, outcome: str) -> float:
    samples = [sample for family in asyncio.run(replica.metrics()) for sample in family.samples]
    return sum(s.value for s in samples if s.name == "dspark_drafter_swaps_total" and s.labels["outcome"] == outcome)


def answered_across(replica: TargetReplica, user_config: dict[str, Any], **changes: Any) -> list[Any]:
    """Answers in the midst of which the replica is told to change."""

    async def talk(client: httpx.AsyncClient) -> list[httpx.Response]:
        stats = replica.loaded.engine.stats
        before = stats.output_tokens
        answers = [asyncio.create_task(client.post(TEXT, json=body)) for body in bodies(**changes)]
        assert await wait_until(lambda: stats.output_tokens > before + 40)
        await replica.reconfigure(user_config)
        assert not all(answer.done() for answer in answers)
        return await asyncio.gather(*answers)

    with slowed(replica, 0.005):
        told: list[Any] = ask(replica, serve_config("unused"), talk)
    return choices(told)


def test_streams_go_on_with_another_drafter(replica: TargetReplica, alone: list[Any], drafter: str) -> None:
    assert replica.loaded.engine.drafter_kind == "ngram"
    assert answered_across(replica, {"drafter": drafter}) == alone
    assert replica.loaded.engine.drafter_kind == "dspark"
    assert replica.loaded.engine.stats.drafted_tokens > 0
    assert (swaps(replica, "done"), swaps(replica, "refused")) == (1, 0)
    assert is_empty(replica)
    told = asyncio.run(replica.record_routing_stats())
    assert told == {} or told["num_calls"] == 0  # of the new engine
    asyncio.run(replica.reconfigure({"drafter": drafter}))
    assert swaps(replica, "done") == 1  # it is that one already
    assert answered_across(replica, {"drafter": None}, verify_length=None) == alone
    assert replica.loaded.engine.drafter_kind == "none"


@pytest.mark.parametrize("kind", ["another_target", "missing", "cut short"])
def test_what_does_not_fit_is_refused_and_all_goes_on(
    replica: TargetReplica, alone: list[Any], tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "drafter"
    if kind == "another_target":
        make_tiny_drafter(folder, make_tiny_target(tmp_path / "other", seed=1))
    if kind == "cut short":
        make_tiny_drafter(folder, replica._config.target.name)
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
    engine = replica.loaded.engine
    assert answered_across(replica, {"drafter": str(folder)}) == alone
    assert replica.loaded.engine is engine
    assert swaps(replica, "refused") == 1
    assert f"drafter {folder} is refused, ngram goes on" in caplog.text


def test_a_misspelt_user_config_is_told_and_ends_no_replica(
    replica: TargetReplica, caplog: pytest.LogCaptureFixture
) -> None:
    asyncio.run(replica.reconfigure({"draftr": "x"}))
    assert "did you mean 'drafter'" in caplog.text
    asyncio.run(replica.reconfigure({}))  # which is not meant to take the drafter away
    assert swaps(replica, "refused") == 2


def test_without_room_for_an_open_request_all_stays_as_it_was(
    replica: TargetReplica, alone: list[Any], drafter: str
) -> None:
    """The one that runs fits into a context that the other engine does not have."""
    replica._config = replica._config.with_changes(engine=replica._config.engine.with_changes(max_context_tokens=40))
    assert answered_across(replica, {"drafter": drafter}) == alone
    assert replica.loaded.engine.drafter_kind == "ngram"
    assert swaps(replica, "refused") == 1
