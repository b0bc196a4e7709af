"""Answers in OpenAI's form, whole or as server-sent events: one chunk per verify step, never one per token."""

import json
import time
from collections.abc import Sequence
from typing import Any, Literal

from dspark.serving.answer_schema import (
    Answer,
    AnswerMessage,
    AnswerObject,
    CalledFunction,
    CalledTool,
    ChatChoice,
    ChatChunkChoice,
    MessageDelta,
    PromptTokensDetails,
    TextChoice,
    Usage,
)
from dspark.serving.engine_client import AnswerEnd, Delta
from dspark.serving.openai_schema import GenerateRequest, Refusal
from dspark.serving.speculation_metrics import SpeculationTally
from dspark.serving.token_logprobs import ShownLogprobs, chat_logprobs, text_logprobs
from dspark.serving.tool_calls import ToolCall

DONE = b"data: [DONE]\n\n"
NULLS = frozenset({"finish_reason", "logprobs", "mean_acceptance_length", "draft_acceptance_rate"})
NULLS_OF_MESSAGE = frozenset({"content"})


class TextWriter:
    """Answers of /v1/completions."""

    prefix = "cmpl"
    whole_object: AnswerObject = "text_completion"
    chunk_object: AnswerObject = "text_completion"

    def __init__(self, request_id: str, request: GenerateRequest) -> None:
        self.num_choices = request.n
        self._head: dict[str, Any] = {
            "id": request_id,
            "created": int(time.time()),
            "model": request.model,
            "service_tier": request.service_tier,
        }
        self._has_ids = request.return_token_ids
        self._has_logprobs = request.num_logprobs is not None
        self._offsets = [0] * request.n
        self._has_begun = [False] * request.n
        self._has_running_usage = request.has_running_usage
        self._newest: dict[int, Delta] = {}
        self._has_usage = request.includes_usage or not request.stream
        self.tally = SpeculationTally() if request.return_speculation else None

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """The response to a request that does not stream. deltas: all of them, those of the choices mixed."""
        by_choice = [[delta for delta in deltas if delta.index == index] for index in range(self.num_choices)]
        choices = [self._whole_choice(own) for own in by_choice]
        answer = self._answer(self.whole_object, choices, _prompt_ids(deltas[0]))
        return _plain(answer.model_copy(update=self._totals([own[-1] for own in by_choice])))

    def has_part(self, delta: Delta) -> bool:
        """Whether a step has something to show in a stream, beside how it ended."""
        return bool(delta.text or delta.tool_calls or ((self._has_ids or self._has_logprobs) and delta.token_ids))

    def chunk(self, delta: Delta) -> bytes:
        """The event of one step."""
        choice = self._part(delta)
        self._has_begun[delta.index] = True
        return self._event([choice], self._running_usage(delta), prompt_ids=_prompt_ids(delta))

    def final(self, delta: Delta) -> bytes:
        """The event that says why a choice ended; its text, ids and logprobs were told before."""
        return self._event([self._last_part(delta)], self._running_usage(delta))

    def totals(self, lasts: Sequence[Delta]) -> bytes:
        """The event after the final ones, with what is asked for of usage and speculation; b"" where nothing is.

        lasts: the last of every choice.
        """
        totals = self._totals(lasts)
        return self._event([], totals) if totals else b""

    def _totals(self, lasts: Sequence[Delta]) -> dict[str, Any]:
        """What an answer tells beside its choices."""
        totals: dict[str, Any] = {"usage": _usage(lasts)} if self._has_usage else {}
        return totals if self.tally is None else totals | {"metrics": self.tally.metrics()}

    def _running_usage(self, delta: Delta) -> dict[str, Any]:
        """The usage of all choices so far, for every chunk of a stream that asks for it."""
        if not self._has_running_usage:
            return {}
        self._newest[delta.index] = delta
        return {"usage": _usage(list(self._newest.values()))}

    def _event(self, choices: Sequence[Any], totals: dict[str, Any], prompt_ids: list[int] | None = None) -> bytes:
        answer = self._answer(self.chunk_object, choices, prompt_ids)
        return _event(_plain(answer.model_copy(update=totals)))

    def _answer(self, kind: AnswerObject, choices: Sequence[Any], prompt_ids: list[int] | None) -> Answer:
        """prompt_ids: where they are asked for, and not told yet."""
        choices = [choice.model_copy(update={"prompt_token_ids": prompt_ids}) for choice in choices]
        return Answer(**self._head, object=kind, choices=choices)

    def _whole_choice(self, deltas: Sequence[Delta]) -> TextChoice | ChatChoice:
        return self._text_choice(deltas, deltas[-1].finish_reason)

    def _part(self, delta: Delta) -> TextChoice | ChatChunkChoice:
        return self._text_choice([delta], None)

    def _last_part(self, delta: Delta) -> TextChoice | ChatChunkChoice:
        return TextChoice(index=delta.index, text="", finish_reason=delta.finish_reason)

    def _text_choice(self, deltas: Sequence[Delta], reason: AnswerEnd | None) -> TextChoice:
        index, logprobs = deltas[0].index, None
        if self._has_logprobs:
            shown = _logprobs(deltas)
            logprobs = text_logprobs(shown, offset=self._offsets[index])
            self._offsets[index] += sum(len(one.own.text) for one in shown)
        return TextChoice(
            index=index, text=_text(deltas), finish_reason=reason, logprobs=logprobs, token_ids=self._ids(deltas)
        )

    def _ids(self, deltas: Sequence[Delta]) -> list[int] | None:
        return [token_id for delta in deltas for token_id in delta.token_ids] if self._has_ids else None


class ChatWriter(TextWriter):
    """Answers of /v1/chat/completions."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _answer(self, kind: AnswerObject, choices: Sequence[Any], prompt_ids: list[int] | None) -> Answer:
        return Answer(**self._head, object=kind, choices=choices, prompt_token_ids=prompt_ids)

    def _whole_choice(self, deltas: Sequence[Delta]) -> TextChoice | ChatChoice:
        text = _text(deltas)
        calls = [_called(call) for delta in deltas for call in delta.tool_calls]
        return ChatChoice(
            index=deltas[0].index,
            message=AnswerMessage(content=text if text or not calls else None, tool_calls=calls or None),
            finish_reason=deltas[-1].finish_reason,
            logprobs=chat_logprobs(_logprobs(deltas)) if self._has_logprobs else None,
            token_ids=self._ids(deltas),
        )

    def _part(self, delta: Delta) -> TextChoice | ChatChunkChoice:
        calls = [_called(call, index=call.index) for call in delta.tool_calls]
        return ChatChunkChoice(
            index=delta.index,
            delta=self._message(delta, content=delta.text if delta.text or not calls else None, calls=calls),
            finish_reason=None,
            logprobs=chat_logprobs(_logprobs([delta])) if self._has_logprobs else None,
            token_ids=self._ids([delta]),
        )

    def _last_part(self, delta: Delta) -> TextChoice | ChatChunkChoice:
        return ChatChunkChoice(
            index=delta.index, delta=self._message(delta, content=None), finish_reason=delta.finish_reason
        )

    def _message(self, delta: Delta, *, content: str | None, calls: Sequence[CalledTool] = ()) -> MessageDelta:
        """A choice names its role once."""
        role: Literal["assistant"] | None = None if self._has_begun[delta.index] else "assistant"
        return MessageDelta(role=role, content=content, tool_calls=list(calls) or None)


def _called(call: ToolCall, *, index: int | None = None) -> CalledTool:
    return CalledTool(index=index, id=call.id, function=CalledFunction(name=call.name, arguments=call.arguments))


def error_event(refusal: Refusal) -> bytes:
    """What a stream says when it breaks after its first byte."""
    return _event(refusal.body())


def _prompt_ids(delta: Delta) -> list[int] | None:
    return None if delta.prompt_token_ids is None else list(delta.prompt_token_ids)


def _text(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def _logprobs(deltas: Sequence[Delta]) -> list[ShownLogprobs]:
    return [one for delta in deltas for one in delta.logprobs or []]


def _usage(lasts: Sequence[Delta]) -> Usage:
    """The prompt counts once, however many choices were made of it: what the first to read it did not find."""
    prompt, output = lasts[0].num_prompt_tokens, sum(last.num_output_tokens for last in lasts)
    details = PromptTokensDetails(cached_tokens=min(last.num_cached_tokens for last in lasts))
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=output,
        total_tokens=prompt + output,
        prompt_tokens_details=details,
    )


def _plain(answer: Answer) -> dict[str, Any]:
    """JSON-ready. What is None is absent, but for what OpenAI has as null."""
    return _without_empty(answer.model_dump(mode="json"))


def _without_empty(value: Any, *, nulls: frozenset[str] = NULLS) -> Any:
    if isinstance(value, list):
        return [_without_empty(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _without_empty(content, nulls=NULLS_OF_MESSAGE if name == "message" else NULLS)
        for name, content in value.items()
        if content is not None or name in nulls
    }


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
