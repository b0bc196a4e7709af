"""Calls found in a text: whatever the pieces it comes in, and no character lost that is none."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.serving.tool_calls import CLOSE, OPEN, ToolCall, ToolCallReader

NAMES = frozenset({"weather", "add"})
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
OTHER = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'

Read = tuple[str, list[tuple[str, Any]]]


def read(*pieces: str, is_whole: bool = True) -> Read:
    """What is said, and names with arguments of what is called."""
    reader = ToolCallReader(NAMES)
    said, calls = "", list[ToolCall]()
    for piece in pieces:
        more, new = reader.feed(piece)
        said, calls = said + more, calls + new
    more, new = reader.finish(is_whole=is_whole)
    calls += new
    assert [call.index for call in calls] == list(range(len(calls)))
    assert len({call.id for call in calls}) == len(calls)
    return said + more, [(call.name, json.loads(call.arguments)) for call in calls]


def read_at_once(text: str) -> Read:
    """The same of a whole text whose calls are all closed, by a pattern."""
    said, calls, end = "", list[tuple[str, Any]](), 0
    for match in re.finditer(r"\s*<tool_call>(.*?)</tool_call>\s*", text, re.DOTALL):
        try:
            content = json.loads(match[1])
        except ValueError:
            content = None
        if isinstance(content, dict) and content.get("name") in NAMES and isinstance(content.get("arguments"), dict):
            said, end = said + text[end : match.start()], match.end()
            calls.append((content["name"], content["arguments"]))
    return said + text[end:], calls


WEATHER = ("weather", {"city": "Oslo"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello", ("hello", [])),
        ("", ("", [])),
        (" hello \n", (" hello \n", [])),
        (CALL, ("", [WEATHER])),
        (f"Let me see.\n\n{CALL}", ("Let me see.", [WEATHER])),
        (f"{CALL}\n{OTHER}\n", ("", [WEATHER, ("add", {})])),
        (f"{CALL} done", (" done", [WEATHER])),
        (CALL.removesuffix(CLOSE), ("", [WEATHER])),  # a model may end at once
        (f"a {OPEN}not JSON{CLOSE} b", (f"a {OPEN}not JSON{CLOSE} b", [])),
        (f"a {OPEN}", (f"a {OPEN}", [])),
        (f"a {CLOSE}", (f"a {CLOSE}", [])),
        ("a <tool", ("a <tool", [])),
        (f"{OPEN}[]{CLOSE}{CALL}", (f"{OPEN}[]{CLOSE}", [WEATHER])),
    ],
)  # fmt: skip
def test_a_text_is_said_and_its_calls_are_called(text: str, expected: Read) -> None:
    assert read(text) == expected
    assert read(*text) == expected


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "rob", "arguments": {}}',
        '{"name": ["add"], "arguments": {}}',
        '{"name": "add", "arguments": "{}"}',
        '{"name": "add", "arguments": {"a": 1e999}}',
        '{"name": "add", "arguments": {"a": "\\ud800"}}',
        '{"name": "add"}',
        '{"name": "add", "arguments": {}} and more',
    ],
)
def test_what_only_looks_like_a_call_is_said(body: str) -> None:
    for text in (f"{OPEN}{body}{CLOSE}", f"{OPEN}{body}"):
        assert read(text) == (text, [])


def test_an_answer_that_is_cut_in_a_call_has_not_made_it() -> None:
    cut = CALL.removesuffix(CLOSE)
    assert read(cut, is_whole=False) == (cut, [])
    assert read(f"a{CALL}{cut}", is_whole=False) == (f"a{cut}", [WEATHER])


def test_what_is_said_comes_as_soon_as_it_cannot_be_a_call() -> None:
    reader = ToolCallReader(NAMES)
    assert reader.feed("one two ") == ("one two", [])
    assert reader.feed("<tool") == ("", [])
    assert reader.feed("box>") == (" <toolbox>", [])


PARTS = st.sampled_from([CALL, OTHER, OPEN + "x" + CLOSE, "a", " ", "\n", "<", "<tool_", "é", "{}"])


@given(st.lists(PARTS, max_size=8), st.data())
def test_every_cut_into_pieces_reads_as_the_whole_text_does(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(*pieces) == read(text)
    assert read(text)[1] == read_at_once(text)[1]
    assert _squeezed(read(text)[0]) == _squeezed(read_at_once(text)[0])


def _squeezed(text: str) -> str:
    """Whitespace beside calls may be the call's or the text's: the pattern is greedier than the reader."""
    return "".join(text.split())
