"""Answers and chunks in OpenAI's form, read by OpenAI's own types."""

import json
from dataclasses import replace
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from dspark.serving.engine_client import Delta
from dspark.serving.openai_schema import ChatRequest, CompletionRequest, Refusal
from dspark.serving.responses import ChatWriter, TextWriter, error_event

DELTAS = [
    Delta("Hel", [5], None, 3, 1),
    Delta("", [6, 7], None, 3, 3),  # half a character
    Delta("lo ✓", [8, 9, 2], "stop", 3, 6),
]


def chat_writer(**fields: Any) -> ChatWriter:
    return ChatWriter("id", ChatRequest(model="m", messages=[{"role": "user", "content": "x"}], **fields))


def text_writer(**fields: Any) -> TextWriter:
    return TextWriter("id", CompletionRequest(model="m", prompt="x", **fields))


def content(event: bytes) -> Any:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    return json.loads(event.removeprefix(b"data: "))


def test_a_whole_chat_answer() -> None:
    answer = chat_writer().whole(DELTAS)
    parsed = ChatCompletion.model_validate(answer)
    assert parsed.choices[0].message.content == "Hello ✓"
    assert parsed.choices[0].finish_reason == "stop"
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    assert "token_ids" not in answer["choices"][0]


def test_a_whole_completion() -> None:
    parsed = Completion.model_validate(text_writer().whole(DELTAS))
    assert (parsed.object, parsed.choices[0].text, parsed.choices[0].logprobs) == ("text_completion", "Hello ✓", None)


def test_token_ids_are_there_when_asked_for() -> None:
    answer = text_writer(return_token_ids=True).whole(DELTAS)
    assert answer["choices"][0]["token_ids"] == [5, 6, 7, 8, 9, 2]
    assert len(answer["choices"][0]["token_ids"]) == answer["usage"]["completion_tokens"]


def with_prompt() -> list[Delta]:
    return [replace(DELTAS[0], prompt_token_ids=(1, 2, 3)), *DELTAS[1:]]


def test_the_prompts_ids_stand_where_vllm_has_them() -> None:
    chat = chat_writer(return_token_ids=True).whole(with_prompt())
    assert (chat["prompt_token_ids"], chat["choices"][0]["token_ids"]) == ([1, 2, 3], [5, 6, 7, 8, 9, 2])
    assert "prompt_token_ids" not in chat["choices"][0]
    text = text_writer(return_token_ids=True).whole(with_prompt())
    assert text["choices"][0]["prompt_token_ids"] == [1, 2, 3]
    assert "prompt_token_ids" not in text


def test_a_stream_tells_the_prompts_ids_once() -> None:
    for writer in (chat_writer(return_token_ids=True), text_writer(return_token_ids=True)):
        events = [writer.chunk(delta) for delta in with_prompt()] + [writer.final(DELTAS[2])]
        assert [b'"prompt_token_ids":[1,2,3]' in event for event in events] == [True, False, False, False]


def test_chat_chunks_name_the_role_once_and_the_reason_last() -> None:
    writer = chat_writer()
    chunks = [content(writer.chunk(delta)) for delta in (DELTAS[0], DELTAS[2])] + [content(writer.final(DELTAS[2]))]
    parsed = [ChatCompletionChunk.model_validate(chunk) for chunk in chunks]
    assert [chunk.choices[0].delta.role for chunk in parsed] == ["assistant", None, None]
    assert [chunk.choices[0].delta.content for chunk in parsed] == ["Hel", "lo ✓", None]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert not any("usage" in chunk for chunk in chunks)


def test_an_answer_without_text_still_names_the_role() -> None:
    assert content(chat_writer().final(Delta("", [2], "stop", 3, 1)))["choices"][0]["delta"] == {"role": "assistant"}


def test_the_usage_chunk_has_no_choice() -> None:
    for writer in (chat_writer(), text_writer()):
        chunk = content(writer.usage(DELTAS[2]))
        assert (chunk["choices"], chunk["usage"]["total_tokens"]) == ([], 9)


def test_completion_chunks_are_completions() -> None:
    writer = text_writer()
    for event in (writer.chunk(DELTAS[0]), writer.final(DELTAS[2])):
        parsed = Completion.construct(**content(event))  # as the client does: a chunk's reason may be null
        assert (parsed.id, parsed.object) == ("id", "text_completion")


@pytest.mark.parametrize("text", ["a\n\nb", "data: x", "\r\n", "\u2028"])
def test_text_cannot_break_out_of_its_event(text: str) -> None:
    event = text_writer().chunk(Delta(text, [1], None, 1, 1))
    assert event.count(b"\n\n") == 1
    assert b"\r" not in event
    assert content(event)["choices"][0]["text"] == text


def test_an_error_event_holds_the_error_object() -> None:
    assert content(error_event(Refusal(503, "gone")))["error"]["message"] == "gone"
