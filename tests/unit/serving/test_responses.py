"""Answers and chunks in OpenAI's form, read by OpenAI's own types."""

import json
from dataclasses import replace
from typing import Any

import pytest
from openai.types import Completion, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion_usage import PromptTokensDetails

from dspark.serving.engine_client import Delta
from dspark.serving.openai_schema import ChatRequest, CompletionRequest, Refusal, StreamOptions
from dspark.serving.responses import ChatWriter, TextWriter, error_event
from dspark.serving.token_logprobs import ShownLogprobs, ShownToken

DELTAS = [
    Delta("Hel", [5], None, 3, 1),
    Delta("", [6, 7], None, 3, 3),  # half a character
    Delta("lo ✓", [8, 9, 2], "stop", 3, 6),
]

USAGE_TOLD: dict[str, Any] = {"stream": True, "stream_options": StreamOptions(include_usage=True)}


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
    counts = {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    assert answer["usage"] == counts | {"prompt_tokens_details": {"cached_tokens": 0}}
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
    for writer in (chat_writer(**USAGE_TOLD), text_writer(**USAGE_TOLD)):
        chunk = content(writer.totals(DELTAS[2:]))
        assert (chunk["choices"], chunk["usage"]["total_tokens"]) == ([], 9)


def test_the_usage_tells_what_of_the_prompt_nobody_had_to_read() -> None:
    lasts = [Delta("a", [5], "stop", 40, 1, index=0, num_cached_tokens=16)]
    lasts.append(Delta("b", [6], "stop", 40, 1, index=1, num_cached_tokens=32))  # found what the first one read
    for writer in (chat_writer(n=2, **USAGE_TOLD), text_writer(n=2, **USAGE_TOLD)):
        for usage in (content(writer.totals(lasts))["usage"], writer.whole(lasts)["usage"]):
            assert CompletionUsage.model_validate(usage).prompt_tokens_details == PromptTokensDetails(cached_tokens=16)


def test_completion_chunks_are_completions() -> None:
    writer = text_writer()
    for event in (writer.chunk(DELTAS[0]), writer.final(DELTAS[2])):
        parsed = Completion.construct(**content(event))  # as the client does: a chunk's reason may be null
        assert (parsed.id, parsed.object) == ("id", "text_completion")


def token(text: str, logprob: float) -> ShownToken:
    return ShownToken(text, text.encode(), logprob)


def told(text: str, logprob: float) -> ShownLogprobs:
    """A token, the best one, and one with the same text as the token that is less likely."""
    return ShownLogprobs(token(text, logprob), (token("best", -0.1), token(text, -9.0)))


TOLD = [
    Delta("Hel", [5], None, 3, 1, logprobs=[told("Hel", -1.0)]),
    Delta("", [6, 7], None, 3, 3, logprobs=[told("l", -2.0), told("o", -3.0)]),  # held back: a stop may begin there
    Delta("lo", [2], "stop", 3, 4, logprobs=[told("<end>", -4.0)]),
]


def test_a_chats_logprobs_have_an_entry_per_token_with_text_and_bytes() -> None:
    answer = ChatCompletion.model_validate(chat_writer(logprobs=True, top_logprobs=2).whole(TOLD))
    assert answer.choices[0].logprobs is not None
    content_ = answer.choices[0].logprobs.content
    assert content_ is not None
    assert [(one.token, one.logprob, one.bytes) for one in content_][:2] == [
        ("Hel", -1.0, [72, 101, 108]),
        ("l", -2.0, [108]),
    ]
    assert [[other.token for other in one.top_logprobs] for one in content_][3] == ["best", "<end>"]


def test_a_completions_logprobs_are_lists_with_offsets() -> None:
    answer = Completion.model_validate(text_writer(logprobs=2).whole(TOLD))
    found = answer.choices[0].logprobs
    assert found is not None
    assert (found.tokens, found.token_logprobs) == (["Hel", "l", "o", "<end>"], [-1.0, -2.0, -3.0, -4.0])
    assert found.text_offset == [0, 3, 4, 5]
    assert found.top_logprobs is not None
    assert found.top_logprobs[1] == {"best": -0.1, "l": -2.0}


@pytest.mark.parametrize("writer_of", [lambda: chat_writer(logprobs=True), lambda: text_writer(logprobs=0)])
def test_the_logprobs_of_a_streams_chunks_join_to_those_of_the_whole(writer_of: Any) -> None:
    whole = writer_of().whole(TOLD)["choices"][0]["logprobs"]
    writer = writer_of()
    assert all(writer.has_part(delta) for delta in TOLD)
    parts = [content(writer.chunk(delta))["choices"][0]["logprobs"] for delta in TOLD]
    assert content(writer.final(TOLD[-1]))["choices"][0]["logprobs"] is None
    assert whole == {key: [entry for part in parts for entry in part[key]] for key in whole}


def test_nothing_is_shown_of_a_step_that_only_holds_text_back() -> None:
    assert not text_writer().has_part(DELTAS[1])
    assert text_writer(return_token_ids=True).has_part(DELTAS[1])


MIXED = [
    Delta("a", [5], None, 3, 1, (1, 2, 3), index=1),
    Delta("b", [6], "length", 3, 1, index=0),
    Delta("c", [7, 8], "stop", 3, 3, index=1),
]


@pytest.mark.parametrize("writer_of", [chat_writer, text_writer])
def test_choices_that_come_mixed_are_told_in_order(writer_of: Any) -> None:
    answer = writer_of(n=2, return_token_ids=True).whole(MIXED)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "stop"]
    assert [choice["token_ids"] for choice in answer["choices"]] == [[6], [5, 7, 8]]
    texts = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in answer["choices"]]
    assert texts == ["b", "ac"]
    counts = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert answer["usage"] == counts | {"prompt_tokens_details": {"cached_tokens": 0}}


def test_each_choice_of_a_stream_names_its_role_once_and_has_its_own_offsets() -> None:
    writer = chat_writer(n=2, **USAGE_TOLD)
    chunks = [content(writer.chunk(delta))["choices"][0] for delta in MIXED]
    assert [(chunk["index"], chunk["delta"].get("role")) for chunk in chunks] == [
        (1, "assistant"),
        (0, "assistant"),
        (1, None),
    ]
    lasts = [content(writer.final(delta))["choices"][0] for delta in MIXED[1:]]
    assert [(last["index"], last["finish_reason"]) for last in lasts] == [(0, "length"), (1, "stop")]
    assert content(writer.totals(MIXED[1:]))["usage"]["completion_tokens"] == 4
    writer_ = text_writer(n=2, logprobs=0)
    shown = [replace(delta, logprobs=[told(delta.text, -1.0)]) for delta in MIXED]
    offsets = [content(writer_.chunk(delta))["choices"][0]["logprobs"]["text_offset"] for delta in shown]
    assert offsets == [[0], [0], [1]]


@pytest.mark.parametrize("text", ["a\n\nb", "data: x", "\r\n", "\u2028"])
def test_text_cannot_break_out_of_its_event(text: str) -> None:
    event = text_writer().chunk(Delta(text, [1], None, 1, 1))
    assert event.count(b"\n\n") == 1
    assert b"\r" not in event
    assert content(event)["choices"][0]["text"] == text


def test_an_error_event_holds_the_error_object() -> None:
    assert content(error_event(Refusal(503, "gone")))["error"]["message"] == "gone"
