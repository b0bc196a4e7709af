"""Messages of a conversation and the tools an answer may call, in OpenAI's form and as a chat template gets them."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pydantic
import pydantic_core
from pydantic import Field

from dspark.serving.sampling_fields import Wire

MAX_TOOLS = 128
MAX_NAME = 256  # characters

TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}


class Nested(Wire):
    """An object within a request: a null in it is as good as absent, as it is at the top."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, content: Any) -> Any:
        return {k: v for k, v in content.items() if v is not None} if isinstance(content, dict) else content


def _join_text_parts(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return "\n".join(_text_of(part) for part in content)


def _text_of(part: Any) -> str:
    if isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text":
        text = part["text"]
        if isinstance(text, str):
            return text
    raise ValueError('only parts of the form {"type": "text", "text": "..."} are supported')


def _content_schema(*, min_length: int) -> pydantic.WithJsonSchema:
    text = {"type": "string", "minLength": min_length}
    parts = {"type": "array", "items": TEXT_PART, "minItems": min_length}
    return pydantic.WithJsonSchema({"anyOf": [text, parts]})


Content = Annotated[str, Field(min_length=1), pydantic.BeforeValidator(_join_text_parts), _content_schema(min_length=1)]
"""A text, or a list of text parts, which is joined by line breaks."""
ToolResult = Annotated[str, pydantic.BeforeValidator(_join_text_parts), _content_schema(min_length=0)]
"""The same, but a tool may have nothing to say."""


class SystemTurn(Nested):
    """Templates know no developer: what it says is the system's."""

    role: Literal["system", "developer"]
    content: Content


class UserTurn(Nested):
    role: Literal["user"]
    content: Content


def _json_object(arguments: Any) -> Any:
    if isinstance(arguments, str):
        parse_object(arguments)
    return arguments


class CalledFunction(Nested):
    name: str = Field(min_length=1, max_length=MAX_NAME)
    arguments: Annotated[str, pydantic.BeforeValidator(_json_object)]
    """A JSON object as a text; the template gets it as an object."""


class CalledTool(Nested):
    """A call that an earlier answer made."""

    id: str = Field(min_length=1, max_length=MAX_NAME)
    type: Literal["function"]
    function: CalledFunction


class AssistantTurn(Nested):
    """An earlier answer: a text, calls, or both."""

    role: Literal["assistant"]
    content: Annotated[str, pydantic.BeforeValidator(_join_text_parts), _content_schema(min_length=0)] = ""
    tool_calls: list[CalledTool] = Field([], max_length=MAX_TOOLS)

    @pydantic.model_validator(mode="after")
    def _says_something(self) -> "AssistantTurn":
        if not self.content and not self.tool_calls:
            raise ValueError("an assistant's message needs content or tool_calls")
        return self


class ToolTurn(Nested):
    """What a called tool answered."""

    role: Literal["tool"]
    content: ToolResult
    tool_call_id: str = Field(min_length=1, max_length=MAX_NAME)
    """The call it belongs to; goes to the template, which may or may not look at it."""
    name: str | None = Field(None, min_length=1, max_length=MAX_NAME)


ChatTurn = Annotated[SystemTurn | UserTurn | AssistantTurn | ToolTurn, Field(discriminator="role")]


def _not_strict(strict: bool) -> bool:
    if strict:
        raise ValueError("strict calls need constrained decoding, which this server does not have; leave it out")
    return strict


class FunctionSpec(Nested):
    name: str = Field(min_length=1, max_length=MAX_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments; goes to the template as it is, and is not enforced."""
    strict: Annotated[bool, pydantic.AfterValidator(_not_strict), pydantic.WithJsonSchema({"const": False})] = False


class Tool(Nested):
    type: Literal["function"]
    function: FunctionSpec

    def for_template(self) -> dict[str, Any]:
        """What a chat template knows as a tool."""
        return {"type": "function", "function": self.function.model_dump(exclude={"strict"}, exclude_none=True)}


def template_messages(turns: Sequence[Any]) -> list[dict[str, Any]]:
    """The conversation as chat templates take it; arguments of calls are objects there. turns: of ChatTurn."""
    return [_template_message(turn) for turn in turns]


def has_calls(turns: Sequence[Any]) -> bool:
    """Whether an answer in the conversation called a tool, which not every template can tell."""
    return any(isinstance(turn, AssistantTurn) and turn.tool_calls for turn in turns)


def _template_message(turn: SystemTurn | UserTurn | AssistantTurn | ToolTurn) -> dict[str, Any]:
    message = turn.model_dump(exclude_none=True)
    if isinstance(turn, SystemTurn):
        message["role"] = "system"
    if isinstance(turn, AssistantTurn):
        if turn.tool_calls:
            for call in message["tool_calls"]:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        else:
            del message["tool_calls"]
    return message


def parse_object(text: str) -> dict[str, Any]:
    """The JSON object in a text. Raises: ValueError without one, or with what JSON has no number or character for."""
    parsed = pydantic_core.from_json(text, allow_inf_nan=False)
    if not isinstance(parsed, dict):
        raise ValueError("must hold a JSON object")
    return parsed
