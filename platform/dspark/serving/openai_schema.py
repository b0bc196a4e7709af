"""The OpenAI wire format: what a client may send and what it gets. What is not supported is refused by name."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeVar

import pydantic
import pydantic_core
from pydantic import Field

from dspark.engine.sampling import MAX_LOGPROBS
from dspark.serving.sampling_fields import SamplingFields, Wire

# Parameters of the API that change the output in a way this server does not, with the values that ask for nothing.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),  # how tools are called; there are none
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
# Say who asks or how it is billed and stored, never what is answered.
WITHOUT_EFFECT = ("metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user")

R = TypeVar("R", bound="GenerateRequest")


@dataclass(frozen=True)
class Refusal:
    """Why a request is not, or no longer, served: an HTTP status and the fields of OpenAI's error object."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None

    def body(self) -> dict[str, Any]:
        """The JSON of an error response."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class RequestRefused(Exception):
    """Carries a refusal up to where the response is written."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal

    @classmethod
    def of(cls, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> Self:
        return cls(Refusal(status, message, param, code))


class Nested(Wire):
    """An object within a request: a null in it is as good as absent, as it is at the top."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, content: Any) -> Any:
        return {k: v for k, v in content.items() if v is not None} if isinstance(content, dict) else content


class StreamOptions(Nested):
    """How a stream is told."""

    include_usage: bool = False
    """End the stream with a chunk that holds the usage and no choice."""


class ChatTurn(Nested):
    """One message of a conversation; a list of text parts is joined by line breaks. Templates know no developer: what
    it says is the system's."""

    role: Literal["system", "user", "assistant"]
    content: str = Field(min_length=1)

    @pydantic.field_validator("role", mode="before")
    @classmethod
    def _known_to_templates(cls, role: Any) -> Any:
        return "system" if role == "developer" else role

    @pydantic.field_validator("content", mode="before")
    @classmethod
    def _join_text_parts(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        return "\n".join(_text_of(part) for part in content)


class GenerateRequest(SamplingFields):
    """What both endpoints take."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    """Extension, as vLLM's: a smaller one is served earlier and preempted later."""
    verify_length: int | None = Field(None, ge=0)
    """Extension, for tests and benchmarks: verify this many draft tokens a round, whatever the scheduler says."""
    return_token_ids: bool = False
    """Extension, as vLLM's: each choice carries its ids as `token_ids`, and the prompt's stand as `prompt_token_ids`
    in a completion's choice or beside a chat's choices, in a stream with the first chunk."""

    @property
    def token_limit(self) -> int | None:
        """Most tokens of the answer, or None to leave it to the server."""
        return self.max_tokens

    @property
    def token_limit_name(self) -> str:
        return "max_tokens"

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(GenerateRequest):
    """POST /v1/chat/completions."""

    messages: list[ChatTurn] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def token_limit_name(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


class CompletionRequest(GenerateRequest):
    """POST /v1/completions. A prompt is a text or token ids; several prompts are several requests."""

    prompt: str | list[int]
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @pydantic.field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt(cls, prompt: Any) -> Any:
        if isinstance(prompt, list) and any(isinstance(item, str | list) for item in prompt):
            if len(prompt) != 1:
                raise ValueError(f"holds {len(prompt)} prompts; send one request for each")
            prompt = prompt[0]
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(type(item) is int for item in prompt)):
            raise ValueError("must be a string or a list of token ids")
        if not prompt:
            raise ValueError("must not be empty")
        return prompt


def parse_request(request_class: type[R], body: bytes) -> R:
    """The request in a JSON body. Raises: RequestRefused (400) naming the first parameter that is wrong."""
    try:
        content = pydantic_core.from_json(body)
    except ValueError as error:
        raise RequestRefused.of(f"the body is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise RequestRefused.of("the body must be a JSON object")
    given = {name: value for name, value in content.items() if value is not None and name not in WITHOUT_EFFECT}
    for name in sorted(given.keys() & UNSUPPORTED.keys()):
        if not _asks_for_nothing(given.pop(name), UNSUPPORTED[name]):
            raise RequestRefused.of(f"{name} is not supported; leave it out", param=name, code="unsupported_parameter")
    try:
        request = request_class.model_validate(given)
    except pydantic.ValidationError as error:
        raise _first_problem(error, request_class) from None
    _require_consistent(request)
    return request


def _require_consistent(request: GenerateRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise RequestRefused.of("stream_options needs stream = true", param="stream_options")
    if request.max_tokens is not None and request.token_limit != request.max_tokens:
        raise RequestRefused.of(
            f"max_tokens is {request.max_tokens} but max_completion_tokens is {request.token_limit}; send one of them",
            param="max_tokens",
        )
    if isinstance(request, ChatRequest) and request.top_logprobs is not None and not request.logprobs:
        raise RequestRefused.of("top_logprobs needs logprobs = true", param="top_logprobs")


def _asks_for_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether the value is one of the neutral ones; 0 is not false here, since `logprobs: 0` does ask for something."""
    return any(isinstance(value, bool) == isinstance(one, bool) and value == one for one in neutral)


def _text_of(part: Any) -> str:
    if isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text":
        text = part["text"]
        if isinstance(text, str):
            return text
    raise ValueError('only parts of the form {"type": "text", "text": "..."} are supported')


def _first_problem(error: pydantic.ValidationError, request_class: type[GenerateRequest]) -> RequestRefused:
    """The first thing that is wrong, without repeating what was sent: it may be a prompt."""
    problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
    param = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        nearest = difflib.get_close_matches(param, list(request_class.model_fields), n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else "; leave it out"
        return RequestRefused.of(f"{param} is not known{hint}", param=param, code="unknown_parameter")
    if problem["type"] == "missing":
        return RequestRefused.of(f"{param} is required", param=param)
    return RequestRefused.of(f"{param}: {problem['msg'].removeprefix('Value error, ')}", param=param)
