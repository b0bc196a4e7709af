"""Answers in OpenAI's form: what the endpoints return, whole or in chunks."""

from collections.abc import Sequence
from typing import Literal

from dspark.serving.engine_client import AnswerEnd
from dspark.serving.sampling_fields import Wire
from dspark.serving.speculation_metrics import Metrics
from dspark.serving.token_logprobs import ChatLogprobs, TextLogprobs

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
    finish_reason: AnswerEnd | None
    logprobs: TextLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CalledFunction(Wire):
    name: str
    arguments: str
    """A JSON object as text."""


class CalledTool(Wire):
    """A call of a tool, in a chunk always whole."""

    index: int | None = None
    """In a chunk: its place among the calls of the choice."""
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AnswerMessage(Wire):
    role: Literal["assistant"] = "assistant"
    content: str | None
    """Null where nothing was said beside calls."""
    tool_calls: list[CalledTool] | None = None


class ChatChoice(Wire):
    index: int = 0
    message: AnswerMessage
    finish_reason: AnswerEnd | None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | None = None


class MessageDelta(Wire):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[CalledTool] | None = None


class ChatChunkChoice(Wire):
    index: int = 0
    delta: MessageDelta
    finish_reason: AnswerEnd | None
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
    metrics: Metrics | None = None
    prompt_token_ids: list[int] | None = None
    """Of a chat; of a completion they stand in its choice."""
    service_tier: str | None = None
    """The turn that it had, where the request asked for one."""


class ModelCard(Wire):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "dspark"


class ModelList(Wire):
    object: Literal["list"] = "list"
    data: list[ModelCard]
