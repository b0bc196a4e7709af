"""Requests of an event loop on an engine that steps in its own thread."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dspark.engine.engine import Engine
from dspark.serving.admission import Pace
from dspark.serving.engine_loop import EngineLoop, EngineStopped, _Abort, _Add, _Receiver
from dspark.serving.metrics import ReplicaMetrics
from dspark.speculation.fleet import Share
from tiny_engine import PROMPTS, greedy_continuations, ids_of, load, make_engine, request
from tiny_serving import wait_until


@pytest.fixture
def engine(tiny_target: Path) -> Engine:
    return make_engine(load(tiny_target))


@pytest.fixture
def loop(engine: Engine) -> Iterator[EngineLoop]:
    loop = EngineLoop(engine, ReplicaMetrics())
    loop.start()
    yield loop
    loop.stop()


def is_empty(engine: Engine) -> bool:
    return not engine.has_work and engine.num_free_pages == engine.num_pages


async def outputs_of(loop: EngineLoop, one: Any, *, timeout_s: float = 30.0) -> list[Any]:
    return [output async for output in loop.generate(one, timeout_s=timeout_s)]


def test_each_request_gets_its_own_answer(loop: EngineLoop, tiny_target: Path) -> None:
    async def run() -> list[Any]:
        requests = [request(prompt, str(i), max_tokens=12) for i, prompt in enumerate(PROMPTS)]
        return await asyncio.gather(*(outputs_of(loop, one) for one in requests))

    answers = asyncio.run(run())
    assert [ids_of(answer) for answer in answers] == greedy_continuations(load(tiny_target), PROMPTS, 12)
    assert loop.num_open == 0


def test_an_idle_loop_waits_without_stepping(loop: EngineLoop) -> None:
    asyncio.run(outputs_of(loop, request([5], max_tokens=3)))
    steps = loop.engine.stats.steps
    asyncio.run(asyncio.sleep(0.05))
    assert loop.engine.stats.steps == steps
    asyncio.run(outputs_of(loop, request([5], max_tokens=3)))  # and from another event loop


def test_a_request_the_engine_refuses_leaves_nothing_behind(loop: EngineLoop) -> None:
    async def run() -> None:
        with pytest.raises(ValueError, match="over the context"):
            await outputs_of(loop, request([5], max_tokens=5000))
        assert ids_of(await outputs_of(loop, request([5], max_tokens=3)))

    asyncio.run(run())
    assert loop.num_open == 0


def test_requests_that_begin_together_come_on_one_stream_and_close_together(loop: EngineLoop) -> None:
    asked = [request([5 + i], str(i), max_tokens=4 + 3 * i) for i in range(3)]

    async def run() -> tuple[list[Any], bool]:
        outputs = [output async for output in loop.generate(*asked, timeout_s=30)]
        answer = loop.generate(*(request([5], f"again {i}", max_tokens=400) for i in range(3)), timeout_s=30)
        await anext(answer)
        await answer.aclose()
        return outputs, await wait_until(lambda: is_empty(loop.engine))

    outputs, is_freed = asyncio.run(run())
    assert is_freed
    assert loop.num_open == 0
    for one in asked:
        own = [output for output in outputs if output.request_id == one.request_id]
        assert len(ids_of(own)) == one.max_tokens
        assert [output.finish_reason for output in own] == [None] * (len(own) - 1) + ["length"]


def test_one_that_is_refused_ends_those_it_began_with_and_no_other_of_its_name(loop: EngineLoop) -> None:
    async def run() -> None:
        other = loop.generate(request([5], "taken", max_tokens=60), timeout_s=30)
        first = await anext(other)
        with pytest.raises(ValueError, match="in use"):
            async for _ in loop.generate(request([6], "mine", max_tokens=400), request([5], "taken"), timeout_s=30):
                pass
        rest = [output async for output in other]
        assert len(ids_of([first, *rest])) == 60
        assert await wait_until(lambda: is_empty(loop.engine))

    asyncio.run(run())


def test_a_pace_is_made_while_more_is_open_than_runs_at_once(tiny_target: Path) -> None:
    """Endings of a replica that has room for more tell what was asked for, and no burst may be refused by them."""
    pace = Pace()
    loop = EngineLoop(make_engine(load(tiny_target), max_running_requests=4), ReplicaMetrics(), pace=pace)
    loop.start()

    async def burst(num: int) -> None:
        await asyncio.gather(*(outputs_of(loop, request([5 + i], str(i), max_tokens=8)) for i in range(num)))

    for _ in range(3):
        asyncio.run(burst(4))
    assert pace.per_s is None
    asyncio.run(burst(24))
    assert pace.per_s is not None
    loop.stop()


@pytest.mark.parametrize("after", [0, 1, 2])
def test_closing_a_request_frees_its_pages(loop: EngineLoop, after: int) -> None:
    async def run() -> bool:
        answer = loop.generate(request([5, 6], max_tokens=400), timeout_s=30)
        task = asyncio.ensure_future(anext(answer)) if after == 0 else None
        if task is not None:
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for _ in range(after):
            await anext(answer)
        await answer.aclose()
        return await wait_until(lambda: is_empty(loop.engine))

    assert asyncio.run(run())
    assert loop.num_open == 0


def test_a_failure_reaches_every_request_and_every_later_one(loop: EngineLoop) -> None:
    def fail() -> Any:
        raise RuntimeError("broken")

    async def run() -> list[Any]:
        answers = [loop.generate(request([5], str(i), max_tokens=400), timeout_s=30) for i in range(3)]
        for answer in answers:
            await anext(answer)
        loop.engine.step = fail  # type: ignore[method-assign]
        return await asyncio.gather(*(drain(answer) for answer in answers), return_exceptions=True)

    async def drain(answer: Any) -> None:
        async for _ in answer:
            pass

    assert [type(error) for error in asyncio.run(run())] == [EngineStopped] * 3
    with pytest.raises(EngineStopped, match="RuntimeError"):
        loop.check()
    with pytest.raises(EngineStopped):
        asyncio.run(outputs_of(loop, request([5], "late")))


def test_after_a_failure_the_process_may_end_but_not_after_a_stop(engine: Engine) -> None:
    ended: list[str] = []
    stopped = EngineLoop(engine, ReplicaMetrics(), on_failure=lambda: ended.append("stopped"))
    stopped.start()
    stopped.stop()
    failing = EngineLoop(engine, ReplicaMetrics(), on_failure=lambda: ended.append("failed"))

    def fail() -> Any:
        raise RuntimeError("broken")

    engine.step = fail  # type: ignore[method-assign]
    failing.start()
    with pytest.raises(EngineStopped):
        asyncio.run(outputs_of(failing, request([5])))
    failing.stop()
    assert ended == ["failed"]


def test_pages_that_got_lost_are_a_failure(loop: EngineLoop) -> None:
    asyncio.run(outputs_of(loop, request([5], max_tokens=3)))
    loop.engine.pool.allocate(1)  # held by nobody
    asyncio.run(outputs_of(loop, request([5], max_tokens=3)))
    loop._thread.join(5)
    with pytest.raises(EngineStopped, match="AssertionError"):
        loop.check()


def test_stopping_ends_the_thread_and_what_is_open(engine: Engine) -> None:
    loop = EngineLoop(engine, ReplicaMetrics())
    loop.start()

    async def run() -> None:
        answer = loop.generate(request([5], max_tokens=400), timeout_s=30)
        await anext(answer)
        await asyncio.to_thread(loop.stop)
        with pytest.raises(EngineStopped, match="was stopped"):
            async for _ in answer:
                pass

    asyncio.run(run())
    assert not loop._thread.is_alive()


def test_time_is_up(loop: EngineLoop) -> None:
    with pytest.raises(TimeoutError, match=r"0\.01 s"):
        asyncio.run(outputs_of(loop, request([5], max_tokens=500), timeout_s=0.01))
    assert asyncio.run(wait_until(lambda: is_empty(loop.engine)))


def test_the_share_is_asked_for_before_each_step(engine: Engine) -> None:
    asked: list[int] = []

    def share() -> Share:
        asked.append(len(asked))
        return Share(capacity=5)

    loop = EngineLoop(engine, ReplicaMetrics(), share=share)
    loop.start()
    asyncio.run(outputs_of(loop, request([5], max_tokens=6)))
    loop.stop()
    assert engine.policy.share == Share(capacity=5)
    assert len(asked) == engine.stats.steps


def test_requests_that_come_while_a_step_computes_are_begun_within_it_and_what_ends_one_waits(engine: Engine) -> None:
    loop = EngineLoop(engine, ReplicaMetrics())  # its thread is this one
    receiver = _Receiver(asyncio.new_event_loop())

    def send(*commands: Any) -> None:
        for command in commands:
            loop._inbox.put(command if isinstance(command, _Abort) else _Add(request([5], command), receiver))

    send("first")
    assert loop._apply_inbox()
    send("second", _Abort("first", receiver), "third")
    assert {output.request_id for output in engine.step()} == {"first"}
    assert set(engine._requests.running) == {"first", "second"}
    assert loop._apply_inbox()
    assert {output.request_id for output in engine.step()} == {"second", "third"}
    assert not loop._held
    receiver.loop.close()
