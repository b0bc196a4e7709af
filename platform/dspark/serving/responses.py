"""Answers in OpenAI's form, whole or as server-sent events: one chunk per verify step, never one per token."""

import json
import time
from collections.abc import Sequence
from typing import Any, Literal

from dspark.engine.request import FinishReason
from dspark.serving.engine_client import Delta
from dspark.serving.openai_schema import GenerateRequest, Refusal, Wire

DONE = b"data: [DONE]\n\n"

AnswerObject = Literal["chat.completion", "chat.completion.chunk", "text_completion"]


class Usage(Wire):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TextChoice(Wire):
    """A choice of /v1/completions, whole or in part."""

    index: int = 0
    text: str
    finish_reason: FinishReason | None
    logprobs: None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class AnswerMessage(Wire):
    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(Wire):
    index: int = 0
    message: AnswerMessage
    finish_reason: FinishReason | None
    logprobs: None = None
    token_ids: list[int] | None = None


class MessageDelta(Wire):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(Wire):
    index: int = 0
    delta: MessageDelta
    finish_reason: FinishReason | None
    logprobs: None = None
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
        self._head: dict[str, Any] = {"id": request_id, "created": int(time.time()), "model": request.model}
        self._has_ids = request.return_token_ids
        self._is_first = True

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """The response to a request that does not stream. deltas: all of them."""
        last = deltas[-1]
        ids = [token_id for delta in deltas for token_id in delta.token_ids] if self._has_ids else None
        choice = self._whole_choice("".join(delta.text for delta in deltas), last.finish_reason, ids)
        return _plain(self._answer(self.whole_object, [choice], _usage(last), _prompt_ids(deltas[0])))

    def chunk(self, delta: Delta) -> bytes:
        """The event of one step."""
        choice = self._part(delta.text, None, delta.token_ids if self._has_ids else None)
        self._is_first = False
        return self._event([choice], prompt_ids=_prompt_ids(delta))

    def final(self, delta: Delta) -> bytes:
        """The event that says why the answer ended; its text and ids were told before."""
        return self._event([self._part("", delta.finish_reason, None)])

    def usage(self, delta: Delta) -> bytes:
        """The event with the usage, after the final one."""
        return self._event([], _usage(delta))

    def _event(self, choices: Sequence[Any], usage: Usage | None = None, prompt_ids: list[int] | None = None) -> bytes:
        return _event(_plain(self._answer(self.chunk_object, choices, usage, prompt_ids)))

    def _answer(
        self, kind: AnswerObject, choices: Sequence[Any], usage: Usage | None, prompt_ids: list[int] | None
    ) -> Answer:
        """prompt_ids: where they are asked for, and not told yet."""
        choices = [choice.model_copy(update={"prompt_token_ids": prompt_ids}) for choice in choices]
        return Answer(**self._head, object=kind, choices=choices, usage=usage)

    def _whole_choice(self, text: str, reason: FinishReason | None, ids: list[int] | None) -> TextChoice | ChatChoice:
        return TextChoice(text=text, finish_reason=reason, token_ids=ids)

    def _part(self, text: str, reason: FinishReason | None, ids: list[int] | None) -> TextChoice | ChatChunkChoice:
        return TextChoice(text=text, finish_reason=reason, token_ids=ids)


class ChatWriter(TextWriter):
    """Answers of /v1/chat/completions."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _whole_choice(self, text: str, reason: FinishReason | None, ids: list[int] | None) -> TextChoice | ChatChoice:
        return ChatChoice(message=AnswerMessage(content=text), finish_reason=reason, token_ids=ids)

    def _answer(
        self, kind: AnswerObject, choices: Sequence[Any], usage: Usage | None, prompt_ids: list[int] | None
    ) -> Answer:
        return Answer(**self._head, object=kind, choices=choices, usage=usage, prompt_token_ids=prompt_ids)

    def _part(self, text: str, reason: FinishReason | None, ids: list[int] | None) -> TextChoice | ChatChunkChoice:
        delta = MessageDelta(role="assistant" if self._is_first else None, content=text if reason is None else None)
        return ChatChunkChoice(delta=delta, finish_reason=reason, token_ids=ids)


def error_event(refusal: Refusal) -> bytes:
    """What a stream says when it breaks after its first byte."""
    return _event(refusal.body())


def _prompt_ids(delta: Delta) -> list[int] | None:
    return None if delta.prompt_token_ids is None else list(delta.prompt_token_ids)


def _usage(delta: Delta) -> Usage:
    prompt, output = delta.num_prompt_tokens, delta.num_output_tokens
    return Usage(prompt_tokens=prompt, completion_tokens=output, total_tokens=prompt + output)


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
