"""Calls of tools within an answer's text, found as it comes.

Answers of Hermes and Qwen models call a tool so; nothing else is taken for a call:

    <tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>
"""

import json
import uuid
from collections.abc import Collection
from dataclasses import dataclass

from dspark.serving.chat_messages import parse_object

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """index: its place among the calls of one answer. arguments: a JSON object as text."""

    id: str
    index: int
    name: str
    arguments: str


class ToolCallReader:
    """Splits one answer's text into what is said and what is called, whatever the pieces it comes in.

    What looks like a call and is none (no JSON object with a known name and arguments) is said, every character of it.
    Whitespace around a call belongs to the call. names: of the tools that may be called.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.num_calls = 0
        self._names = names
        self._held = ""  # not known yet whether it is said
        self._space = ""  # whitespace before it, which is said if something follows that is no call
        self._is_inside = False
        self._is_behind_call = False  # with nothing but whitespace in between

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """What is now known to be said, and to be called."""
        self._held += text
        said, calls = "", []
        while True:
            mark = CLOSE if self._is_inside else OPEN
            before, found, after = self._held.partition(mark)
            if not found:
                break
            self._held, self._is_inside = after, not self._is_inside
            if mark == OPEN:
                said += self._say(before)
            elif (call := self._call(before)) is not None:
                calls.append(call)
            else:
                said += self._say(f"{OPEN}{before}{CLOSE}")
        if not self._is_inside:
            end = len(self._held) - _num_begun(self._held)
            said, self._held = said + self._say(self._held[:end]), self._held[end:]
        return said, calls

    def finish(self, *, is_whole: bool) -> tuple[str, list[ToolCall]]:
        """The rest. A last call may lack its closing mark, unless the answer was cut at its length: is_whole."""
        rest, self._held = self._held, ""
        if self._is_inside:
            call = self._call(rest) if is_whole else None
            if call is not None:
                return "", [call]
            rest = OPEN + rest
        said = self._say(rest)
        return said if self._is_behind_call else said + self._space, []

    def _say(self, text: str) -> str:
        """The text with the whitespace before it; that behind it waits."""
        body = text.rstrip()
        if not body:
            self._space += text
            return ""
        said, self._space, self._is_behind_call = self._space + body, text[len(body) :], False
        return said

    def _call(self, body: str) -> ToolCall | None:
        try:
            content = parse_object(body)
            name, arguments = content.get("name"), content.get("arguments")
            if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
                return None
            told = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except ValueError:
            return None
        index, self.num_calls, self._space, self._is_behind_call = self.num_calls, self.num_calls + 1, "", True
        return ToolCall(f"call_{uuid.uuid4().hex[:24]}", index, name, told)


def _num_begun(text: str) -> int:
    """Characters at the text's end with which a call may begin."""
    longest = min(len(text), len(OPEN) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(OPEN[:n])), 0)
