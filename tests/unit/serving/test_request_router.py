"""Where a request goes: the policy by itself, and the router that Serve calls with replicas made by hand."""

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from dspark.serving.config import RoutingConfig
from dspark.serving.openai_schema import ChatRequest, CompletionRequest
from dspark.serving.request_router import (
    MOST_PIECES,
    PromptPrefixes,
    TargetRouter,
    prompt_text,
    ranked,
    token_cost,
)

PIECE = 4


def prefixes(most: int = 100) -> PromptPrefixes[str]:
    return PromptPrefixes(piece_characters=PIECE, most=most)


def longest_common(text: str, known: dict[str, str]) -> int:
    """Characters of whole pieces that the text begins with alike to any known one: the slow way."""
    best = 0
    for other in known:
        same = next(
            (i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other))
        )
        best = max(best, same // PIECE * PIECE)
    return best


def test_the_reader_of_the_longest_beginning_is_found() -> None:
    draw = random.Random(0)
    for _ in range(200):
        known = {"".join(draw.choices("ab", k=draw.randrange(24))): name for name in "xyz"}
        memory = prefixes()
        for text, name in known.items():
            memory.note(text, name)
        text = "".join(draw.choices("ab", k=20))
        found = memory.find(text, dict.fromkeys("xyz"))
        length = longest_common(text, known)
        assert (found is None) == (length == 0)
        if found is not None:
            assert found in {name for other, name in known.items() if other[:length] == text[:length]}


def test_the_last_reader_counts_and_only_among_the_candidates() -> None:
    memory = prefixes()
    memory.note("abcdefgh", "x")
    memory.note("abcdwxyz", "y")
    assert memory.find("abcd----", {"x": 0, "y": 0}) == "y"
    assert memory.find("abcdefgh", {"x": 0, "y": 0}) == "x"
    assert memory.find("abcdefgh", {"y": 0}) == "y"
    assert memory.find("abcdefgh", {"z": 0}) is None
    assert memory.find("abc", {"x": 0}) is None


def test_what_is_remembered_is_bounded_and_the_longest_unused_is_forgotten() -> None:
    memory = prefixes(most=3)
    for text in ("aaaa", "bbbb", "cccc"):
        memory.note(text, text[0])
    assert memory.find("aaaa", {"a": 0}) == "a"  # used again
    memory.note("dddd", "d")
    assert len(memory) == 3
    assert memory.find("bbbb", {"b": 0}) is None
    assert memory.find("aaaa", {"a": 0}) == "a"
    memory.note("x" * PIECE * (MOST_PIECES + 5), "x")
    assert len(memory) == 3
    assert len(prefixes()._digests("x" * PIECE * (MOST_PIECES + 5))) == MOST_PIECES


def test_a_text_tells_its_turns_apart() -> None:
    def text(*turns: tuple[str, str]) -> str:
        messages = [{"role": role, "content": content} for role, content in turns]
        return prompt_text(ChatRequest.model_validate({"model": "m", "messages": messages}))

    assert text(("user", "a b")) != text(("user", "a"), ("user", "b"))
    assert text(("user", "hello"), ("assistant", "yes")).startswith(text(("user", "hello")))
    assert prompt_text(CompletionRequest(model="m", prompt=[1, 23])) == "1 23"
    assert prompt_text("no request") == ""


def test_a_cost_grows_with_what_came_since_it_was_told() -> None:
    stats = {"token_s": 0.1, "num_calls": 3.0}
    assert token_cost(stats, None) == token_cost(stats, 3) == 0.1
    assert token_cost(stats, 7) == pytest.approx(0.2)
    assert token_cost({}, 7) is None


def order(costs: dict[str, float | None], affine: str | None = None, *, most: float = 1.5, seed: int = 0) -> list[str]:
    return ranked(costs, affine, most_imbalance=most, draw=random.Random(seed))


def test_the_affine_replica_is_first_until_it_is_too_dear() -> None:
    for seed in range(20):
        assert order({"x": 1.4, "y": 1.0, "z": 1.1}, "x", seed=seed)[0] == "x"
        assert order({"x": 1.6, "y": 1.0, "z": 1.1}, "x", seed=seed)[0] != "x"


def test_of_two_drawn_the_cheaper_is_first_and_everybody_is_tried() -> None:
    costs: dict[str, float | None] = {"x": 3.0, "y": 1.0, "z": 2.0}
    firsts = [order(costs, seed=seed)[0] for seed in range(300)]
    assert "x" not in firsts  # the dearest loses against whichever is drawn beside it
    assert 0.25 < firsts.count("z") / 300 < 0.42  # when it is drawn with the dearest: 1 of 3 pairs
    assert all(sorted(order(costs, seed=seed)) == ["x", "y", "z"] for seed in range(20))
    assert order({"x": 1.0}) == ["x"]
    assert order({}) == []


def test_a_new_replica_is_as_good_as_the_cheapest() -> None:
    firsts = [order({"new": None, "y": 1.0, "z": 5.0}, seed=seed)[0] for seed in range(100)]
    assert firsts.count("new") > 40
    assert {order({"x": None, "y": None}, seed=seed)[0] for seed in range(20)} == {"x", "y"}


def test_load_is_spread_as_evenly_as_costs_say() -> None:
    """Tokens cost twice as much at y: with costs that grow with what is open, x gets about twice as many."""
    num_open = {"x": 0, "y": 0}
    draw = random.Random(1)
    for _ in range(300):
        costs: dict[str, float | None] = {
            name: token_cost({"token_s": base, "num_calls": 0}, num_open[name])
            for name, base in (("x", 1.0), ("y", 2.0))
        }
        num_open[ranked(costs, None, most_imbalance=1.5, draw=draw)[0]] += 1
    assert num_open["x"] / num_open["y"] == pytest.approx(2.0, abs=0.1)


def replica(name: str, **stats: float) -> Any:
    async def get_queue_len(*, deadline_s: float) -> int:
        await asyncio.sleep(random.uniform(0, 0.002))
        return 0

    return SimpleNamespace(
        replica_id=ReplicaID(name, DeploymentID("TargetReplica", "app")),
        routing_stats=stats,
        max_ongoing_requests=100,
        get_queue_len=get_queue_len,
    )


def pending(prompt: str, name: str = "i") -> PendingRequest:
    """Within an event loop."""
    request = CompletionRequest(model="m", prompt=prompt)
    metadata = RequestMetadata(request_id="r", internal_request_id=name)
    return PendingRequest(args=["r", request, None], kwargs={}, metadata=metadata)


def test_serves_router_sends_a_prompt_back_to_where_it_was_read() -> None:
    async def run() -> None:
        router = TargetRouter(DeploymentID("TargetReplica", "app"), DeploymentHandleSource.REPLICA)
        router.initialize_state(**RoutingConfig(piece_characters=PIECE).model_dump())
        replicas = [replica(name, token_s=1.0, num_calls=0.0) for name in "xyz"]
        for number in range(12):
            asked = pending(f"prompt {number} and more")
            chosen = await router.choose_replicas(replicas, asked)
            assert asked.routing_context.should_backoff
            assert [len(rank) for rank in chosen] == [1, 1, 1]
            router.on_request_routed(asked, chosen[0][0].replica_id, None)  # type: ignore[arg-type]
            router.on_request_completed(chosen[0][0].replica_id, asked.metadata.internal_request_id)
            again = await router.choose_replicas(replicas, pending(f"prompt {number} and more of it"))
            assert again[0] == chosen[0]
            without = [one for one in replicas if one is not chosen[0][0]]
            assert (await router.choose_replicas(without, asked))[0][0] in without
        assert await router.choose_replicas([], None) == []

    asyncio.run(run())


def test_requests_that_come_together_each_go_to_their_own_replica() -> None:
    """Through Serve's own loop, which asks replicas for their queues in between."""

    async def run() -> None:
        router = TargetRouter(
            DeploymentID("TargetReplica", "app"), DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True
        )
        router.initialize_state(**RoutingConfig(piece_characters=PIECE, most_imbalance=1000.0).model_dump())
        replicas = [replica(name, token_s=1.0, num_open=0.0) for name in "xyz"]
        router.update_replicas(replicas)
        asked = []
        for number in range(60):
            one = replicas[random.Random(number).randrange(3)]
            request = pending(f"{one.replica_id.unique_id * 2 * PIECE}{number}", name=str(number))
            router.on_request_routed(request, one.replica_id, None)  # type: ignore[arg-type]
            asked.append((request, one))
        chosen = await asyncio.gather(*(router._choose_replica_for_request(request) for request, _ in asked))
        assert [one.replica_id for one in chosen] == [one.replica_id for _, one in asked]

    asyncio.run(run())


@pytest.mark.parametrize("stats", [{"token_s": 1.0, "num_calls": 0.0}, {}], ids=["measured", "new"])
def test_requests_that_come_at_the_same_moment_are_spread(stats: dict[str, float]) -> None:
    """Through Serve's own loop, before any replica could say that it has something to do."""

    async def run() -> None:
        router = TargetRouter(
            DeploymentID("TargetReplica", "app"), DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True
        )
        router.initialize_state(**RoutingConfig(piece_characters=PIECE).model_dump())
        replicas = [replica(name, **stats) for name in "xyz"]
        router.update_replicas(replicas)
        asked = [pending(f"{number}: a prompt of its own", name=str(number)) for number in range(60)]
        chosen = await asyncio.gather(*(router._choose_replica_for_request(request) for request in asked))
        counts = [sum(one is other for one in chosen) for other in replicas]
        assert max(counts) - min(counts) <= 6, counts
        for number in range(60):
            router.on_request_completed(chosen[number].replica_id, str(number))
        assert [router._calls.num_at(one.replica_id, {}) for one in replicas] == [0, 0, 0]

    asyncio.run(run())


def test_a_shared_beginning_holds_together_until_its_replica_is_too_dear() -> None:
    async def run() -> None:
        router = TargetRouter(DeploymentID("TargetReplica", "app"), DeploymentHandleSource.REPLICA)
        router.initialize_state(**RoutingConfig(piece_characters=PIECE, most_imbalance=1.5).model_dump())
        replicas = [replica(name, token_s=1.0, num_calls=8.0) for name in "xy"]
        first = pending("the same beginning", name="first")
        router.on_request_routed(first, replicas[0].replica_id, None)  # type: ignore[arg-type]
        firsts = []
        for number in range(12):
            asked = pending(f"the same beginning {number}", name=str(number))
            firsts.append((await router.choose_replicas(replicas, asked))[0][0] is replicas[0])
        assert firsts[:4] == [True] * 4  # up to half as dear again
        assert not all(firsts)

    asyncio.run(run())


def test_a_misspelt_setting_is_refused() -> None:
    router = TargetRouter(DeploymentID("TargetReplica", "app"), DeploymentHandleSource.REPLICA)
    with pytest.raises(ValueError, match="most_imbalance"):
        router.initialize_state(most_imbalanc=2.0)
