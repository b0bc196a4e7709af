"""Stages between an engine and a writer: what they change, and that closing one closes all before it."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from dspark.serving.answer_stages import staged
from dspark.serving.engine_client import Delta
from dspark.serving.openai_schema import ChatRequest, Refusal
from dspark.serving.speculation_metrics import SpeculationTally, StepDraft

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "f"}}


def delta(text: str, reason: Any = None, *, index: int = 0, draft: StepDraft | None = None) -> Delta:
    return Delta(text, [5], reason, 3, 1, index=index, draft=draft)


def request(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields})


class Engine:
    """Yields these, and knows whether it was closed."""

    def __init__(self, items: Sequence[Delta | Refusal]) -> None:
        self.items, self.is_closed = items, False

    async def answers(self) -> AsyncGenerator[Delta | Refusal, None]:
        try:
            for item in self.items:
                yield item
        finally:
            self.is_closed = True


def passed(items: Sequence[Delta | Refusal], asked: ChatRequest, tally: SpeculationTally | None = None) -> list[Any]:
    async def run() -> list[Any]:
        return [item async for item in staged(Engine(items).answers(), asked, tally)]

    return asyncio.run(run())


def test_nothing_asked_for_changes_nothing() -> None:
    items = [delta(CALL), delta("", "stop")]
    assert passed(items, request()) == items
    assert passed(items, request(tools=[TOOL], tool_choice="none")) == items


@pytest.mark.parametrize(("reason", "ending"), [("stop", "tool_calls"), ("length", "length")])
def test_a_call_is_taken_out_of_the_text(reason: Any, ending: str) -> None:
    items = passed([delta("a "), delta(CALL[:9]), delta(CALL[9:], reason)], request(tools=[TOOL]))
    assert [item.text for item in items] == ["a", "", ""]
    assert [[call.name for call in item.tool_calls] for item in items] == [[], [], ["f"]]
    assert items[-1].finish_reason == ending
    assert all(item.token_ids == [5] for item in items)


def test_each_choice_is_read_by_itself() -> None:
    mixed = [delta(CALL[:5]), delta("b", index=1), delta(CALL[5:], "stop"), delta("c", "stop", index=1)]
    items = passed(mixed, request(tools=[TOOL], n=2))
    assert [(item.index, item.text, len(item.tool_calls), item.finish_reason) for item in items] == [
        (0, "", 0, None),
        (1, "b", 0, None),
        (0, "", 1, "tool_calls"),
        (1, "c", 0, "stop"),
    ]


def test_a_refusal_passes() -> None:
    refusal = Refusal(503, "gone")
    assert passed([delta("a"), refusal], request(tools=[TOOL]), SpeculationTally())[-1] == refusal


def test_steps_are_counted_as_they_pass() -> None:
    tally = SpeculationTally()
    items = [delta("a"), delta("b", draft=StepDraft(4, 3, 2, 3)), delta("", "stop", draft=StepDraft(0, 0, 0, 1))]
    assert passed(items, request(), tally) == items
    assert tally.metrics().speculative_decoding.num_accepted_draft_tokens == 2


def test_closing_the_last_stage_closes_the_engines_answers() -> None:
    engine = Engine([delta("a"), delta("b")])

    async def run() -> None:
        answers = staged(engine.answers(), request(tools=[TOOL]), SpeculationTally())
        await anext(answers)
        await answers.aclose()

    asyncio.run(run())
    assert engine.is_closed
