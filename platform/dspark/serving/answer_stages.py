"""What is made of an engine's answers before they are written: each stage takes deltas and yields deltas."""

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import replace

from dspark.serving.engine_client import Delta
from dspark.serving.openai_schema import ChatRequest, GenerateRequest, Refusal
from dspark.serving.speculation_metrics import SpeculationTally
from dspark.serving.tool_calls import ToolCallReader

Answers = AsyncGenerator[Delta | Refusal, None]


def staged(answers: Answers, request: GenerateRequest, tally: SpeculationTally | None) -> Answers:
    """The answers with what the request asks for. tally: counts what speculation did, where that is to be told."""
    if tally is not None:
        answers = with_tally(answers, tally)
    if isinstance(request, ChatRequest) and request.callable_tools:
        names = frozenset(tool.function.name for tool in request.callable_tools)
        readers = [ToolCallReader(names) for _ in range(request.n)]
        answers = with_tool_calls(answers, readers)
    return answers


async def with_tally(answers: Answers, tally: SpeculationTally) -> Answers:
    """The same answers, counted as they pass."""
    async with contextlib.aclosing(answers):
        async for item in answers:
            if isinstance(item, Delta):
                tally.add(item.draft)
            yield item


async def with_tool_calls(answers: Answers, readers: list[ToolCallReader]) -> Answers:
    """Calls taken out of the texts. readers: one per choice."""
    async with contextlib.aclosing(answers):
        async for item in answers:
            yield item if isinstance(item, Refusal) else _read(item, readers[item.index])


def _read(delta: Delta, reader: ToolCallReader) -> Delta:
    """An answer that ends by itself and called a tool ends with "tool_calls"."""
    said, calls = reader.feed(delta.text)
    reason = delta.finish_reason
    if reason in ("stop", "length"):
        rest, last_calls = reader.finish(is_whole=reason == "stop")
        said, calls = said + rest, calls + last_calls
        reason = "tool_calls" if reason == "stop" and reader.num_calls else reason
    return replace(delta, text=said, tool_calls=tuple(calls), finish_reason=reason)
