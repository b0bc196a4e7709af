"""A draft replica around its thread: what waits is drafted together, what is late is not, and failures are told."""

import asyncio
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import randn

from draft_pool import IDENTITY, make_server
from dspark.engine.draft_messages import ContextPart, DraftAnswer, DraftAsk, DraftMessage, to_array
from dspark.engine.drafter_folder import draft_identity
from dspark.serving.config import ServeConfig
from dspark.serving.draft_replica import DraftLoop, DraftReplica, DraftReplicaStopped
from dspark.targets import TargetConfig
from random_drafter import random_drafter
from tiny_drafter import make_tiny_drafter
from tiny_serving import serve_config
from tiny_target import make_tiny_target


@pytest.fixture
def loop() -> Any:
    started = DraftLoop(make_server(random_drafter().eval().requires_grad_(False)))
    yield started
    started.stop()


def message(sender: str, *, stop: int = 5, timeout_s: float = 30.0) -> DraftMessage:
    """A context of so many tokens and a request for three draft tokens behind it."""
    part = ContextPart(0, 0, (7,) * (stop + 1), stop)
    ask = DraftAsk(0, stop, 7, 3, 0.0, None, stop + 1, None, None)
    features = to_array(randn(stop, 32))
    return DraftMessage(sender, 1, IDENTITY, (part,), (ask,), (), features, "float32", timeout_s)


def num_drafted(answer: DraftAnswer) -> int:
    return sum(reply.proposal is not None for reply in answer.replies)


def test_what_came_before_a_pass_is_drafted_in_it_together(loop):
    waiting = [loop.post(message(f"engine {k}")) for k in range(3)]
    loop.start()
    assert [num_drafted(one.result(10)) for one in waiting] == [1, 1, 1]
    assert loop.server.stats.batches == 1


def test_what_nobody_waits_for_is_not_drafted_but_its_context_is_kept(loop):
    late, cancelled = loop.post(message("late", timeout_s=-1.0)), loop.post(message("cancelled"))
    assert cancelled.cancel()
    loop.start()
    answer = late.result(10)
    assert (num_drafted(answer), answer.replies[0].num_context) == (0, 5)
    assert num_drafted(loop.post(message("another")).result(10)) == 1
    assert loop.server.stats.drafted == 1
    assert loop.server.num_contexts == 3


def test_a_long_context_is_worked_off_while_nothing_waits(loop):
    loop.start()
    first = loop.post(message("engine", stop=100)).result(10)
    assert (num_drafted(first), first.replies[0].num_context) == (0, 100)
    again = replace(message("engine", stop=100), sequence=2, parts=(), features=to_array(randn(0, 32)))
    for _ in range(100):
        if num_drafted(loop.post(again).result(10)):
            return
    pytest.fail("the context was never handed on")


def test_a_failure_is_told_to_whoever_waits_and_to_the_health_check(loop):
    broken = replace(message("engine"), features=to_array(randn(5, 7)))  # of another width than the drafter's
    first = loop.post(broken)
    loop.start()
    with pytest.raises(DraftReplicaStopped, match="the draft replica failed"):
        first.result(10)
    with pytest.raises(DraftReplicaStopped, match="the draft replica failed"):
        loop.check()
    with pytest.raises(DraftReplicaStopped):
        loop.post(message("engine"))


def test_stopping_answers_what_came_before_and_refuses_what_comes_after(loop):
    first = loop.post(message("engine"))
    loop.start()
    loop.stop()
    assert num_drafted(first.result(10)) == 1
    with pytest.raises(DraftReplicaStopped, match="was stopped"):
        loop.post(message("engine"))


def config_of(target: Path, drafter: Path) -> ServeConfig:
    contexts = {"page_size": 4, "kv_tokens": 512}
    return serve_config(target, drafter=str(drafter), draft_replicas={"contexts": contexts})


def test_a_replica_answers_and_its_figures_tell_of_it(tiny_target: Path, tmp_path: Path) -> None:
    replica = DraftReplica(config_of(tiny_target, make_tiny_drafter(tmp_path / "drafter", tiny_target)))

    async def ask() -> tuple[DraftAnswer, dict[str, float]]:
        await replica.check_health()
        answer = await replica.draft(message("engine"))
        return answer, await replica.figures()

    answer, figures = asyncio.run(ask())
    assert answer.refusal is not None, "the message names another drafter"
    assert (figures["contexts"], figures["pages_free"]) == (0, 128)
    threads = [thread for thread in threading.enumerate() if thread.name == "drafts"]
    replica.close()
    assert not any(thread.is_alive() for thread in threads)


def hello(drafter: Path, target: Path) -> DraftMessage:
    """What an engine with this drafter says first."""
    identity = draft_identity(drafter, TargetConfig(name=str(target), dtype="float32", device="cpu"))
    nothing = to_array(randn(0, 0))
    return replace(message("engine"), identity=identity, parts=(), asks=(), features=nothing)


@pytest.fixture(scope="module")
def drafters(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("drafters")
    return [make_tiny_drafter(folder / name, tiny_target, num_layers=n) for n, name in enumerate(("one", "two"), 1)]


async def serving(replica: DraftReplica, drafters: list[Path], target: Path) -> list[bool]:
    """Whether engines with each of the drafters are heard."""
    return [(await replica.draft(hello(drafter, target))).refusal is None for drafter in drafters]


def test_another_drafter_takes_the_place_of_the_present_one(tiny_target: Path, drafters: list[Path]) -> None:
    replica = DraftReplica(config_of(tiny_target, drafters[0]))

    async def change() -> None:
        assert await serving(replica, drafters, tiny_target) == [True, False]
        for _ in range(2):
            await replica.reconfigure({"drafter": str(drafters[1])})
            assert await serving(replica, drafters, tiny_target) == [False, True]
        await replica.check_health()
        figures = await replica.figures()
        assert (figures["swaps_done"], figures["swaps_refused"]) == (1, 0)

    asyncio.run(change())
    assert sum(thread.name == "drafts" for thread in threading.enumerate()) == 1
    replica.close()


@pytest.mark.parametrize("kind", ["another target", "missing", "misspelt", "ngram"])
def test_a_drafter_that_does_not_fit_is_refused_and_the_present_one_stays(
    tiny_target: Path, drafters: list[Path], tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "drafter"
    if kind == "another target":
        make_tiny_drafter(other, make_tiny_target(tmp_path / "target", seed=1))
    replica = DraftReplica(config_of(tiny_target, drafters[0]))
    user_config = {"misspelt": {"draftr": "x"}, "ngram": {"drafter": "ngram"}}.get(kind, {"drafter": str(other)})

    async def change() -> None:
        await replica.reconfigure(user_config)
        assert await serving(replica, drafters, tiny_target) == [True, False]
        assert (await replica.figures())["swaps_refused"] == 1

    asyncio.run(change())
    assert f"is refused, {drafters[0]} goes on" in caplog.text
    replica.close()


@pytest.mark.parametrize("is_there", [False, True], ids=["elsewhere", "where it was missed"])
def test_a_drafter_may_come_later(tiny_target: Path, drafters: list[Path], tmp_path: Path, is_there: bool) -> None:
    replica = DraftReplica(config_of(tiny_target, tmp_path / "nothing"))
    if is_there:
        shutil.copytree(drafters[0], tmp_path / "nothing")

    async def change() -> None:
        await replica.reconfigure({"drafter": str(tmp_path / "nothing" if is_there else drafters[0])})
        assert await serving(replica, drafters, tiny_target) == [True, False]

    asyncio.run(change())
    replica.close()


def test_without_a_trained_drafter_it_starts_and_says_why_it_drafts_nothing(
    tiny_target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replica = DraftReplica(config_of(tiny_target, tmp_path / "nothing"))
    answer = asyncio.run(replica.draft(message("engine")))
    assert answer.refusal is not None
    assert "jobs/train.py" in answer.refusal
    assert any("drafts nothing" in record.message for record in caplog.records)
    asyncio.run(replica.check_health())
    replica.close()
