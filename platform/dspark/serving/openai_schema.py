"""The OpenAI wire format: what a client may send and what it gets. What is not supported is refused by name."""

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeVar

import pydantic
import pydantic_core
from pydantic import Field

from dspark.engine.sampling import MAX_LOGPROBS
from dspark.serving.chat_messages import MAX_TOOLS, ChatTurn, Nested, Tool
from dspark.serving.request_fields import UNSUPPORTED, WITHOUT_EFFECT
from dspark.serving.sampling_fields import RequestBody, SamplingFields

MAX_SHOWN = 200  # characters of a name that was sent

R = TypeVar("R", bound=RequestBody)


@dataclass(frozen=True)
class Refusal:
    """Why a request is not, or no longer, served: an HTTP status and the fields of OpenAI's error object.

    retry_after_s: seconds after which to try again, where the status says that it may help; None: one.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None

    def body(self) -> dict[str, Any]:
        """The JSON of an error response."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Of an error response."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        is_temporary = self.status in (429, 503)
        if self.retry_after_s is None and not is_temporary:
            return {}
        return {"Retry-After": str(max(1, math.ceil(self.retry_after_s or 0)))}


class RequestRefused(Exception):
    """Carries a refusal up to where the response is written."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal

    @classmethod
    def of(cls, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> Self:
        return cls(Refusal(status, message, param, code))


def _one_prompt(prompt: Any) -> Any:
    if isinstance(prompt, list) and any(isinstance(item, str | list) for item in prompt):
        if len(prompt) != 1:
            raise ValueError(f"holds {len(prompt)} prompts; send one request for each")
        prompt = prompt[0]
    if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(type(item) is int for item in prompt)):
        raise ValueError("must be a string or a list of token ids")
    if not prompt:
        raise ValueError("must not be empty")
    return prompt


_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_ONE_OF_THEM = [{"type": "array", "items": one, "minItems": 1, "maxItems": 1} for one in (_TEXT, _IDS)]
Prompt = Annotated[
    str | list[int],
    pydantic.BeforeValidator(_one_prompt),
    pydantic.WithJsonSchema({"anyOf": [_TEXT, _IDS, *_ONE_OF_THEM]}),
]


class StreamOptions(Nested):
    """How a stream is told."""

    include_usage: bool = False
    """End the stream with a chunk that holds the usage and no choice."""
    continuous_usage_stats: bool = False
    """Extension, as vLLM's: every chunk holds the usage so far; needs include_usage."""
    include_obfuscation: Literal[False] = False
    """Chunks are not padded to hide their lengths."""


class GenerateRequest(SamplingFields):
    """What both endpoints take."""

    model: str
    """The served model's name; any other is status 404."""
    stream: bool = False
    """Answer as server-sent events, one per verify step and answer."""
    stream_options: StreamOptions | None = None
    """`include_usage` and `continuous_usage_stats`; needs stream = true."""
    max_tokens: int | None = Field(None, ge=1)
    """Most tokens of an answer; over limits.max_output_tokens or the context it is refused."""
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    """Extension, as vLLM's: a smaller one is served earlier and preempted later; needs limits.allow_priority."""
    service_tier: str | None = None
    """A turn by its name: default (or auto); flex, behind others; priority, before others, for keys that it is given
    to, else refused; or what limits.service_tiers has. The answer tells it. A priority sent beside it must agree."""
    speculation: bool = True
    """Extension: false decodes this request plainly; its text stays the same where it is greedy or seeded."""
    verify_length: int | None = Field(None, ge=0)
    """Extension, for tests and benchmarks: verify this many draft tokens a round, whatever the scheduler says."""
    return_speculation: bool = False
    """Extension: tell beside the usage, as `metrics.speculative_decoding`, what was drafted, verified and accepted."""
    return_token_ids: bool = False
    """Extension, as vLLM's: each choice carries its ids as `token_ids`, and the prompt's stand as `prompt_token_ids`
    in a completion's choice or beside a chat's choices, in a stream with the first chunk."""

    store: bool = True
    """false keeps the request's texts from being kept, where the server keeps any; by default none does."""

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

    @property
    def has_running_usage(self) -> bool:
        """Whether every chunk of the stream tells the usage so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def require_consistent(self) -> None:
        """Raises: RequestRefused (400) for fields that contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise RequestRefused.of("stream_options needs stream = true", param="stream_options")
        if self.has_running_usage and not self.includes_usage:
            message = "continuous_usage_stats needs include_usage = true"
            raise RequestRefused.of(message, param="stream_options.continuous_usage_stats")
        if self.verify_length and not self.speculation:
            message = f"verify_length is {self.verify_length} but speculation is false; send one of them"
            raise RequestRefused.of(message, param="verify_length")
        if self.max_tokens is not None and self.token_limit != self.max_tokens:
            raise RequestRefused.of(
                f"max_tokens is {self.max_tokens} but max_completion_tokens is {self.token_limit}; send one of them",
                param="max_tokens",
            )


class ChatRequest(GenerateRequest):
    """POST /v1/chat/completions."""

    messages: list[ChatTurn] = Field(min_length=1)
    """The conversation: turns of system, developer (told as system), user, assistant (with tool_calls) and tool."""
    max_completion_tokens: int | None = Field(None, ge=1)
    """The newer name of max_tokens."""
    logprobs: bool = False
    """Tell each token's log-probability under the target's own distribution; in a completion a number, which also tells
    so many most likely tokens."""
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """So many most likely tokens beside each; needs logprobs = true."""
    tools: list[Tool] = Field([], max_length=MAX_TOOLS)
    """Functions the answer may call, told by the target's template; one that knows no tools is refused."""
    tool_choice: Literal["none", "auto"] = "auto"
    """"none" tells the template of no tool and looks for no call; "required" and named tools are refused, since output
    is not constrained to a grammar."""
    parallel_tool_calls: bool = True
    """false ends the answer behind its first call."""
    chat_template_kwargs: dict[str, Any] = {}
    """Extension, as vLLM's: variables of the target's template, such as enable_thinking; unknown ones are refused."""

    @property
    def callable_tools(self) -> list[Tool]:
        """What the answer may call."""
        return [] if self.tool_choice == "none" else self.tools

    def require_consistent(self) -> None:
        super().require_consistent()
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestRefused.of("top_logprobs needs logprobs = true", param="top_logprobs")

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

    prompt: Prompt
    """A text or token ids; a list of one of them is taken, several are refused."""
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """Tell each token's log-probability under the target's own distribution, and so many most likely tokens."""
    add_special_tokens: bool = True
    """Extension, as vLLM's: false leaves out what the tokenizer puts around a text, such as a token that begins it."""

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


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
        if not UNSUPPORTED[name].allows(given[name]):
            message = f"{name} is not supported ({UNSUPPORTED[name].reason}); leave it out"
            raise RequestRefused.of(message, param=name, code="unsupported_parameter")
        if name not in request_class.model_fields:
            del given[name]
    try:
        request = request_class.model_validate(given)
    except pydantic.ValidationError as error:
        raise _first_problem(error, request_class) from None
    request.require_consistent()
    return request


def _first_problem(error: pydantic.ValidationError, request_class: type[RequestBody]) -> RequestRefused:
    """The first thing that is wrong, without repeating what was sent: it may be a prompt."""
    problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
    param = _place(problem["loc"])[:MAX_SHOWN]
    if problem["type"] == "union_tag_not_found":
        return RequestRefused.of(f"{param}.role is required", param=f"{param}.role")
    if problem["type"] == "union_tag_invalid":
        message = f"{param}.role: must be one of system, developer, user, assistant, tool"
        return RequestRefused.of(message, param=f"{param}.role")
    if problem["type"] == "extra_forbidden":
        nearest = difflib.get_close_matches(param, list(request_class.model_fields), n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else "; leave it out"
        return RequestRefused.of(f"{param} is not known{hint}", param=param, code="unknown_parameter")
    if problem["type"] == "missing":
        return RequestRefused.of(f"{param} is required", param=param)
    return RequestRefused.of(f"{param}: {problem['msg'].removeprefix('Value error, ')}", param=param)


def _place(location: Sequence[int | str]) -> str:
    """A message's role, by which its kind was chosen, is no step on the way to what is wrong in it."""
    is_in_message = len(location) > 2 and location[0] == "messages"
    return ".".join(str(part) for i, part in enumerate(location) if not (is_in_message and i == 2))
