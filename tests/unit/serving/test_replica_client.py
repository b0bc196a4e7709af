"""The way to a replica through a Serve handle, in Serve's local testing mode: no cluster, the same calls."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentResponseGenerator

from dspark.serving.config import FailoverConfig
from dspark.serving.engine_client import Delta
from dspark.serving.metrics import render
from dspark.serving.openai_schema import CompletionRequest, Refusal
from dspark.serving.replica_client import ReplicaClient
from dspark.serving.resuming import ReplicaLost
from dspark.serving.target_replica import TargetReplica
from dspark.serving.tokenization import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest
from tiny_serving import MODEL, serve_config


@pytest.fixture(scope="module")
def client(tiny_target: Path) -> ReplicaClient:
    app = serve.deployment()(TargetReplica).bind(serve_config(tiny_target))
    return ReplicaClient(serve.run(app, _local_testing_mode=True), FailoverConfig(), timeout_s=60.0)


def request(**fields: Any) -> CompletionRequest:
    return CompletionRequest(model=MODEL, prompt=[5, 6], temperature=0.0, ignore_eos=True, **fields)


def test_an_answer_comes_step_by_step(client: ReplicaClient) -> None:
    async def run() -> list[Any]:
        return [item async for item in client.generate("r", request(max_tokens=20))]

    items = asyncio.run(run())
    assert all(isinstance(item, Delta) for item in items)
    assert sum(len(item.token_ids) for item in items) == items[-1].num_output_tokens == 20
    assert [item.finish_reason for item in items][-2:] == [None, "length"]


def test_several_choices_come_to_their_ends(client: ReplicaClient) -> None:
    async def run() -> list[Any]:
        asked = CompletionRequest(model=MODEL, prompt=[5, 6], n=2, seed=1, max_tokens=9, ignore_eos=True)
        return [item async for item in client.generate("r", asked)]

    items = asyncio.run(run())
    assert [sum(len(item.token_ids) for item in items if item.index == index) for index in (0, 1)] == [9, 9]
    assert sum(item.finish_reason == "length" for item in items) == 2


def test_a_refusal_is_the_only_item(client: ReplicaClient) -> None:
    async def run() -> list[Any]:
        return [item async for item in client.generate("r", request(max_tokens=5000))]

    (item,) = asyncio.run(run())
    assert isinstance(item, Refusal)
    assert item.status == 400


def test_texts_become_tokens_and_back(client: ReplicaClient) -> None:
    async def run() -> list[Any]:
        there = await client.tokenize(TokenizeRequest(prompt="hello"))
        assert isinstance(there, TokenizeAnswer)
        back = await client.detokenize(DetokenizeRequest(tokens=there.tokens))
        return [back, await client.detokenize(DetokenizeRequest(tokens=[320]))]

    back, refused = asyncio.run(run())
    assert back == DetokenizeAnswer(prompt="hello")
    assert isinstance(refused, Refusal)
    assert refused.param == "tokens"


def test_metrics_and_health_are_asked_for_by_the_same_way(client: ReplicaClient) -> None:
    async def run() -> bytes:
        await client.check_health()
        return render(await client.metrics())

    assert b'dspark_drafter_info{kind="ngram"' in asyncio.run(run())


class Dropped(DeploymentResponseGenerator):
    """A call that Serve did not take for want of room; asked to cancel it, it raises the same."""

    def __init__(self) -> None:
        """Nothing was begun."""

    def __aiter__(self) -> "Dropped":
        return self

    async def __anext__(self) -> Any:
        raise BackPressureError(num_queued_requests=1, max_queued_requests=1)

    def cancel(self) -> None:
        raise BackPressureError(num_queued_requests=1, max_queued_requests=1)


def test_a_call_that_was_not_taken_is_refused_and_closing_it_raises_nothing() -> None:
    handle: Any = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: Dropped()))
    client = ReplicaClient(handle, FailoverConfig(), timeout_s=60.0)

    async def run() -> Any:
        answers = client.generate("r", request(max_tokens=5))
        first = await anext(answers)
        await answers.aclose()
        return first

    refused = asyncio.run(run())
    assert isinstance(refused, Refusal)
    assert refused.status == 429


def dead(reason: str) -> ActorDiedError:
    """As Ray says why an actor died."""
    return ActorDiedError(ActorDiedErrorContext(error_message=reason, actor_id=b"0" * 16))


class Dying(Dropped):
    """A call whose replica's actor ends."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def __anext__(self) -> Any:
        raise self.error


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (dead("The actor is dead because it was killed by `ray.kill`."), "taken_away"),
        (dead("The actor is dead because its worker process has died."), "died"),
        (ActorUnavailableError("the network is gone", b"0" * 16), "died"),
        (DeploymentUnavailableError(DeploymentID("TargetReplica", "app")), "missing"),
    ],
)
def test_how_a_replica_was_lost_is_told_apart(error: Exception, how: str) -> None:
    handle: Any = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: Dying(error)))
    client = ReplicaClient(handle, FailoverConfig(), timeout_s=60.0)

    async def run() -> None:
        async for _ in client._ask("r", request(), None):
            pytest.fail("it says nothing")

    with pytest.raises(ReplicaLost) as caught:
        asyncio.run(run())
    assert caught.value.how == how
