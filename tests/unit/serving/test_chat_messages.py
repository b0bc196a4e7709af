"""Messages as a template gets them, and what is no message."""

import json
from typing import Any

import pydantic
import pytest

from dspark.serving.chat_messages import ChatTurn, Tool, has_calls, parse_object, template_messages

TURN: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ChatTurn)
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def read(**message: Any) -> Any:
    return TURN.validate_python(message)


def test_arguments_of_calls_are_objects_in_a_template() -> None:
    turn = read(role="assistant", content=None, tool_calls=[CALL])
    expected = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert template_messages([turn]) == [{"role": "assistant", "content": "", "tool_calls": [expected]}]
    assert has_calls([turn])


def test_a_tools_result_keeps_what_it_belongs_to() -> None:
    turn = read(role="tool", content=[{"type": "text", "text": "3"}], tool_call_id="c1", name="add")
    assert template_messages([turn]) == [{"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add"}]
    assert read(role="tool", content="", tool_call_id="c1").content == ""
    assert not has_calls([turn])


def test_a_plain_answer_has_no_calls() -> None:
    turn = read(role="assistant", content="a", tool_calls=None)
    assert template_messages([turn]) == [{"role": "assistant", "content": "a"}]
    assert not has_calls([turn])


def test_a_tool_goes_to_the_template_as_it_came() -> None:
    function = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {"a": {}}}}
    tool = Tool.model_validate({"type": "function", "function": {**function, "strict": False}})
    assert tool.for_template() == {"type": "function", "function": function}
    assert json.dumps(tool.for_template())


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "", "tool_calls": []},
        {"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]},
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "add", "arguments": "[]"}}]},
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "add", "arguments": {}}}]},
        {"role": "user", "content": "a", "tool_calls": [CALL]},
        {"role": "tool", "content": "a"},
    ],
)
def test_what_is_no_message_is_refused(message: Any) -> None:
    with pytest.raises(pydantic.ValidationError):
        read(**message)


@pytest.mark.parametrize("text", ["", "[]", "1", "{", '{"a": NaN}', '{"a": "\\ud800"}', "{} {}"])
def test_only_a_json_object_is_one(text: str) -> None:
    with pytest.raises(ValueError):
        parse_object(text)
