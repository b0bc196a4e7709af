"""Answers in OpenAI's form, whole or as server-sent events: one chunk per verify step, never one per token."""

import json
import time
from collections.abc import Sequence
from typing import Any, Literal

from dspark.engine.request import FinishReason
from dspark.serving.engine_client import Delta
from dspark.serving.openai_schema import GenerateRequest, Refusal
from dspark.serving.sampling_fields import Wire
from dspark.serving.token_logprobs import ChatLogprobs, ShownLogprobs, TextLogprobs, chat_logprobs, text_logprobs

DONE = b"data: [DONE]\n\n"

AnswerObject = Literal["chat.completion", "chat.completion.chunk", "text_completion"]


class PromptTokensDetails(Wire):
    cached_tokens: int
    """Found in the prefix cache, and not read for this request."""


class Usage(Wire):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TextChoice(Wire):
    """A choice of /v1/completions, whole or in part."""

    index: int = 0
    text: str
    finish_reason: FinishReason | None
    logprobs: TextLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class AnswerMessage(Wire):
    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(Wire):
    index: int = 0
    message: AnswerMessage
    finish_reason: FinishReason | None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | None = None


class MessageDelta(Wire):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(Wire):
    index: int = 0
    delta: MessageDelta
    finish_reason: FinishReason | None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | None = None


class Answer(Wire):
    """A whole answer or a chunk of one."""

    id: str
    object: AnswerObject
    created: int
    model: str
    choices: Sequence[ChatChoice | ChatChunkChoice | TextChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    """Of a chat; of a completion they stand in its choice."""


class ModelCard(Wire):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "dspark"


class ModelList(Wire):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TextWriter:
    """Answers of /v1/completions."""

    prefix = "cmpl"
    whole_object: AnswerObject = "text_completion"
    chunk_object: AnswerObject = "text_completion"

    def __init__(self, request_id: str, request: GenerateRequest) -> None:
        self.num_choices = request.n
        self._head: dict[str, Any] = {"id": request_id, "created": int(time.time()), "model": request.model}
        self._has_ids = request.return_token_ids
        self._has_logprobs = request.num_logprobs is not None
        self._offsets = [0] * request.n
        self._has_begun = [False] * request.n

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """The response to a request that does not stream. deltas: all of them, those of the choices mixed."""
        by_choice = [[delta for delta in deltas if delta.index == index] for index in range(self.num_choices)]
        choices = [self._whole_choice(own) for own in by_choice]
        usage = _usage([own[-1] for own in by_choice])
        return _plain(self._answer(self.whole_object, choices, usage, _prompt_ids(deltas[0])))

    def has_part(self, delta: Delta) -> bool:
        """Whether a step has something to show in a stream, beside how it ended."""
        return bool(delta.text or ((self._has_ids or self._has_logprobs) and delta.token_ids))

    def chunk(self, delta: Delta) -> bytes:
        """The event of one step."""
        choice = self._part(delta)
        self._has_begun[delta.index] = True
        return self._event([choice], prompt_ids=_prompt_ids(delta))

    def final(self, delta: Delta) -> bytes:
        """The event that says why a choice ended; its text, ids and logprobs were told before."""
        return self._event([self._last_part(delta)])

    def usage(self, lasts: Sequence[Delta]) -> bytes:
        """The event with the usage, after the final ones. lasts: the last of every choice."""
        return self._event([], _usage(lasts))

    def _event(self, choices: Sequence[Any], usage: Usage | None = None, prompt_ids: list[int] | None = None) -> bytes:
        return _event(_plain(self._answer(self.chunk_object, choices, usage, prompt_ids)))

    def _answer(
        self, kind: AnswerObject, choices: Sequence[Any], usage: Usage | None, prompt_ids: list[int] | None
    ) -> Answer:
        """prompt_ids: where they are asked for, and not told yet."""
        choices = [choice.model_copy(update={"prompt_token_ids": prompt_ids}) for choice in choices]
        return Answer(**self._head, object=kind, choices=choices, usage=usage)

    def _whole_choice(self, deltas: Sequence[Delta]) -> TextChoice | ChatChoice:
        return self._text_choice(deltas, deltas[-1].finish_reason)

    def _part(self, delta: Delta) -> TextChoice | ChatChunkChoice:
        return self._text_choice([delta], None)

    def _last_part(self, delta: Delta) -> TextChoice | ChatChunkChoice:
        return TextChoice(index=delta.index, text="", finish_reason=delta.finish_reason)

    def _text_choice(self, deltas: Sequence[Delta], reason: FinishReason | None) -> TextChoice:
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

    def _answer(
        self, kind: AnswerObject, choices: Sequence[Any], usage: Usage | None, prompt_ids: list[int] | None
    ) -> Answer:
        return Answer(**self._head, object=kind, choices=choices, usage=usage, prompt_token_ids=prompt_ids)

    def _whole_choice(self, deltas: Sequence[Delta]) -> TextChoice | ChatChoice:
        return ChatChoice(
            index=deltas[0].index,
            message=AnswerMessage(content=_text(deltas)),
            finish_reason=deltas[-1].finish_reason,
            logprobs=chat_logprobs(_logprobs(deltas)) if self._has_logprobs else None,
            token_ids=self._ids(deltas),
        )

    def _part(self, delta: Delta) -> TextChoice | ChatChunkChoice:
        return ChatChunkChoice(
            index=delta.index,
            delta=self._message(delta, content=delta.text),
            finish_reason=None,
            logprobs=chat_logprobs(_logprobs([delta])) if self._has_logprobs else None,
            token_ids=self._ids([delta]),
        )

    def _last_part(self, delta: Delta) -> TextChoice | ChatChunkChoice:
        return ChatChunkChoice(
            index=delta.index, delta=self._message(delta, content=None), finish_reason=delta.finish_reason
        )

    def _message(self, delta: Delta, *, content: str | None) -> MessageDelta:
        """A choice names its role once."""
        return MessageDelta(role=None if self._has_begun[delta.index] else "assistant", content=content)


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
    """JSON-ready. What is None is absent, but `finish_reason` and `logprobs` are null, as OpenAI's."""
    return _without_empty(answer.model_dump(mode="json"))


def _without_empty(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_empty(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {k: _without_empty(v) for k, v in value.items() if v is not None or k in ("finish_reason", "logprobs")}


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
