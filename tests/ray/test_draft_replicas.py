"""Two target replicas and a draft replica in a fleet on Ray, and what becomes of their streams when it is killed."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve

from dspark.serving.app import draft_deployment, target_deployment
from dspark.serving.config import ServeConfig
from dspark.serving.openai_schema import CompletionRequest, Refusal
from dspark.speculation.draft_supply import LEAST_CALLS
from local_cluster import replicas_of, start_local_cluster
from tiny_drafter import make_tiny_drafter
from tiny_serving import MODEL, serve_config
from tiny_target import make_tiny_target

pytestmark = pytest.mark.ray

LONG = 400  # tokens of an answer during which something happens
LEASE_S = 1.0


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ServeConfig:
    folder = tmp_path_factory.mktemp("draft_replicas")
    target = make_tiny_target(folder / "target", max_length=LONG + 96)
    contexts = {"page_size": 4, "kv_tokens": 8192}
    return serve_config(
        target,
        drafter=str(make_tiny_drafter(folder / "drafter", target)),
        limits={"max_output_tokens": LONG},
        draft_replicas={"contexts": contexts, "link": {"deadline_s": 0.5}},
        fleet={"name": "drafts", "lease_ttl_s": LEASE_S},
    )


def deployed(config: ServeConfig, user_config: dict[str, Any] | None = None) -> Any:
    """With one version, as a deployment file has it whose `user_config` alone is changed: nobody starts anew."""
    assert config.draft_replicas is not None
    options: dict[str, Any] = {"user_config": user_config, "version": "1", "_internal": True}
    drafts = draft_deployment(config.draft_replicas).options(health_check_period_s=1, **options)
    target = target_deployment(config).options(num_replicas=2, **options)
    return serve.run(target.bind(config, drafts.bind(config)), name="drafts", route_prefix=None)


@pytest.fixture(scope="module")
def targets(config: ServeConfig) -> Iterator[Any]:
    start_local_cluster()
    serve.start(proxy_location="Disabled")
    yield deployed(config)
    serve.shutdown()


def ask(targets: Any, name: str, *, max_tokens: int = 40, **fields: Any) -> "asyncio.Task[list[int]]":
    handle = targets.options(method_name="generate", stream=True)
    prompt = [1, 40, 77, len(name)]
    request = CompletionRequest(
        model=MODEL, prompt=prompt, temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **fields
    )

    async def run() -> list[int]:
        ids: list[int] = []
        async for delta in handle.remote(name, request):
            assert not isinstance(delta, Refusal), delta
            ids += delta.token_ids
        return ids

    return asyncio.create_task(run())


def figures(targets: Any) -> list[dict[str, float]]:
    """Counters and gauges of each target replica."""
    found = []
    for families in targets.broadcast("metrics").results():
        found.append({sample.name: sample.value for family in families for sample in family.samples})
    return found


def of_drafts() -> dict[str, float]:
    (found,) = serve.get_deployment_handle("DraftReplica", "drafts").broadcast("figures").results()
    return dict(found)


def wait_for(holds: Callable[[], bool], *, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


async def answers(targets: Any, label: str, num: int, **fields: Any) -> list[list[int]]:
    return await asyncio.gather(*(ask(targets, f"{label}{'x' * k}", **fields) for k in range(num)))


def test_both_targets_are_drafted_for_and_answer_as_without_a_drafter(targets: Any) -> None:
    plain = asyncio.run(answers(targets, "a", 8, verify_length=0))
    drafted = asyncio.run(answers(targets, "a", 8))
    assert drafted == plain
    for one in figures(targets):
        assert one["dspark_draft_link_up"] == 1
        assert one["dspark_drafted_tokens_total"] > 0
    assert wait_for(lambda: of_drafts()["contexts"] == 0, seconds=5)
    found = of_drafts()
    assert found["pages_free"] == 2048
    assert found["drafted"] > 0


def kill_draft_replica() -> None:
    (replica,) = replicas_of("DraftReplica").values()
    ray.kill(replica, no_restart=False)


def test_a_draft_replica_killed_amid_streams_costs_no_token_and_drafting_comes_back(targets: Any) -> None:
    """The scheduler knows what the one that is killed could do, and forgets it; the next one has yet to show it."""

    def has_offered() -> bool:
        asyncio.run(answers(targets, "o", 8))
        return of_drafts()["batches"] >= LEAST_CALLS

    assert wait_for(has_offered, seconds=30)
    time.sleep(LEASE_S)  # the offer has come, and a lease by it
    assert all(one["dspark_fleet_attached"] == 1 for one in figures(targets))
    plain = asyncio.run(answers(targets, "b", 6, max_tokens=LONG, verify_length=0))

    async def interrupted() -> list[list[int]]:
        tasks = [ask(targets, f"b{'x' * k}", max_tokens=LONG) for k in range(6)]
        await asyncio.sleep(0.3)
        await asyncio.to_thread(kill_draft_replica)
        return await asyncio.gather(*tasks)

    assert asyncio.run(interrupted()) == plain
    failures = [one["dspark_draft_link_failures_total"] for one in figures(targets)]
    assert max(failures) > 0

    def is_back() -> bool:
        asyncio.run(answers(targets, "c", 4))
        return all(one["dspark_draft_link_up"] == 1 for one in figures(targets))

    assert wait_for(is_back, seconds=60)
    time.sleep(LEASE_S)  # what the scheduler makes of it has come
    before = [one["dspark_drafted_tokens_total"] for one in figures(targets)]
    assert asyncio.run(answers(targets, "b", 6, max_tokens=LONG)) == plain
    after = [one["dspark_drafted_tokens_total"] for one in figures(targets)]
    assert sum(after) > sum(before)


def test_after_that_no_context_stays_open(targets: Any) -> None:
    lengths = itertools.count(1)

    def is_empty() -> bool:
        """What could not be said when a request ended is said with the next one's, if that comes to the same target:
        so many at once, each time of other beginnings, that both get some."""
        asyncio.run(answers(targets, "d" * next(lengths), 16))
        return of_drafts()["contexts"] == 0

    assert wait_for(is_empty, seconds=30)


def test_another_drafter_is_taken_over_amid_streams_by_targets_and_draft_replica(
    targets: Any, config: ServeConfig, tmp_path: Path
) -> None:
    other = make_tiny_drafter(tmp_path / "other", config.target.name, num_layers=2)
    before = {**replicas_of("TargetReplica"), **replicas_of("DraftReplica")}.keys()
    plain = asyncio.run(answers(targets, "d", 6, max_tokens=LONG, verify_length=0))

    async def changed() -> list[list[int]]:
        tasks = [ask(targets, f"d{'x' * k}", max_tokens=LONG) for k in range(6)]
        await asyncio.sleep(0.3)
        await asyncio.to_thread(deployed, config, {"drafter": str(other)})
        return await asyncio.gather(*tasks)

    assert asyncio.run(changed()) == plain

    def is_drafted_with() -> bool:
        asyncio.run(answers(targets, "e", 4))
        return all(
            one["dspark_draft_link_up"] == 1 and one["dspark_drafted_tokens_total"] > 0 for one in figures(targets)
        )

    assert wait_for(is_drafted_with, seconds=60)
    found = of_drafts()
    assert (found["swaps_done"], found["swaps_refused"]) == (1, 0)
    assert {**replicas_of("TargetReplica"), **replicas_of("DraftReplica")}.keys() == before
