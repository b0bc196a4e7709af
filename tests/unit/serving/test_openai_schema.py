"""What a client may send: read as it is, or refused with the name of what is wrong."""

import json
from typing import Any

import pytest

from dspark.engine.sampling import SamplingParams
from dspark.serving.chat_messages import template_messages
from dspark.serving.openai_schema import ChatRequest, CompletionRequest, Refusal, RequestRefused, parse_request
from dspark.serving.request_fields import UNSUPPORTED, WITHOUT_EFFECT

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}


def chat(**fields: Any) -> ChatRequest:
    return parse_request(ChatRequest, json.dumps(CHAT | fields).encode())


def text(**fields: Any) -> CompletionRequest:
    return parse_request(CompletionRequest, json.dumps(TEXT | fields).encode())


def refusal(parse: Any, **fields: Any) -> Refusal:
    with pytest.raises(RequestRefused) as caught:
        parse(**fields)
    return caught.value.refusal


def test_defaults_are_openais() -> None:
    request = chat()
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, None)
    assert (request.stream, request.stop, request.seed, request.token_limit) == (False, [], None, None)


def test_every_supported_field_is_read() -> None:
    request = chat(
        stream=True,
        stream_options={"include_usage": True},
        max_completion_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=3,
        stop=["a", "b"],
        seed=-4,
        verify_length=2,
        ignore_eos=True,
        return_token_ids=True,
        min_p=0.1,
        presence_penalty=-1,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        logit_bias={"50": -100, "7": 1.5},
        allowed_token_ids=[1, 7],
        banned_token_ids=[4],
        min_tokens=3,
        stop_token_ids=[9],
        logprobs=True,
        top_logprobs=5,
        n=3,
    )
    assert request.includes_usage
    assert request.sampling == SamplingParams(
        temperature=0,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        presence_penalty=-1,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        logit_bias={50: -100, 7: 1.5},
        allowed_token_ids=(1, 7),
        banned_token_ids=(4,),
        min_tokens=3,
        logprobs=5,
    )
    assert (request.n, request.stop_token_ids) == (3, [9])
    assert (request.token_limit, request.stop, request.seed, request.verify_length) == (7, ["a", "b"], -4, 2)
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (0.0, 0.5, 3)


def test_null_is_the_default() -> None:
    assert chat(temperature=None, stop=None, n=None, logit_bias=None, stream_options=None) == chat()


def test_one_stop_string_is_a_list_of_one() -> None:
    assert text(stop="\n").stop == ["\n"]


def test_text_parts_are_joined_by_line_breaks() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].content == "one\ntwo"


@pytest.mark.parametrize(("prompt", "read"), [("a", "a"), ([1, 2], [1, 2]), (["a"], "a"), ([[3, 4]], [3, 4])])
def test_one_prompt_is_a_text_or_ids(prompt: Any, read: Any) -> None:
    assert text(prompt=prompt).prompt == read


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["a", "b"], [[1], [2]], [1, "a"], [True], [1.5], {}, 3])
def test_no_prompt_and_several_prompts_are_refused(prompt: Any) -> None:
    found = refusal(text, prompt=prompt)
    assert (found.status, found.param) == (400, "prompt")


def test_several_prompts_are_told_what_to_do() -> None:
    assert "one request for each" in refusal(text, prompt=["a", "b"]).message


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([{"role": "user", "content": ""}], "messages.0.content"),
        ([{"role": "user", "content": []}], "messages.0.content"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": None}], "messages.0.content"),
        ([{"role": "tool", "content": "1"}], "messages.0.tool_call_id"),
        ([{"role": "function", "content": "1"}], "messages.0.role"),
        ([{"content": "1"}], "messages.0.role"),
        ([{"role": "assistant"}], "messages.0"),
        ([{"role": "assistant", "tool_calls": [{"id": "a"}]}], "messages.0.tool_calls.0.type"),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": "b", "name": "x"}], "messages.1.name"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages.0.content"),
    ],
)
def test_a_bad_conversation_is_refused_by_place(messages: Any, param: str) -> None:
    found = refusal(chat, messages=messages)
    assert (found.status, found.param) == (400, param)


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_what_would_change_the_output_is_refused_by_name(name: str) -> None:
    found = refusal(chat, **{name: {"something": "else"}})
    assert (found.status, found.param, found.code) == (400, name, "unsupported_parameter")
    assert name in found.message


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_what_asks_for_nothing_is_let_through(name: str) -> None:
    for neutral in UNSUPPORTED[name].neutral:
        if name == "tool_choice":
            continue  # is read
        assert chat(**{name: neutral}) == chat()


@pytest.mark.parametrize(("name", "value"), [("best_of", True), ("best_of", 2), ("echo", 0), ("suffix", " ")])
def test_close_to_nothing_is_something(name: str, value: Any) -> None:
    assert refusal(text, **{name: value}).param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 1e39), ("temperature", 1e-3), ("top_p", 1e-46), ("repetition_penalty", 1e-40), ("min_p", -1e-9)],
)
def test_what_float32_cannot_hold_is_refused(name: str, value: float) -> None:
    """It would make all probabilities of a row NaN, and end every request beside this one."""
    assert refusal(text, **{name: value}).param == name


def test_an_answer_goes_back_as_the_client_dumps_it() -> None:
    nulls = {"refusal": None, "tool_calls": None, "function_call": None, "audio": None, "name": None}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", **nulls}]
    asked = chat(messages=messages, stream=True, stream_options={"include_usage": None})
    assert template_messages(asked.messages) == [{k: m[k] for k in ("role", "content")} for m in messages]
    assert not asked.includes_usage


def test_a_developer_speaks_as_the_system() -> None:
    asked = chat(messages=[{"role": "developer", "content": "a"}])
    assert template_messages(asked.messages) == [{"role": "system", "content": "a"}]


def test_logprobs_are_told_as_each_endpoint_asks_for_them() -> None:
    assert [text(logprobs=n).sampling.logprobs for n in (None, 0, 5)] == [None, 0, 5]
    assert [chat(logprobs=on).sampling.logprobs for on in (None, False, True)] == [None, None, 0]
    assert chat(logprobs=True, top_logprobs=2).sampling.logprobs == 2
    assert refusal(chat, top_logprobs=2).message == "top_logprobs needs logprobs = true"
    assert refusal(chat, logprobs=2).param == "logprobs"
    assert refusal(text, logprobs=True).param == "logprobs"
    assert refusal(text, top_logprobs=2).param == "top_logprobs"


@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
def test_who_asks_does_not_matter(name: str) -> None:
    assert chat(**{name: "someone"}) == chat()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 2.5),
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("temperature", -1),
        ("temperature", 0.001),
        ("temperature", "1"),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", 0),
        ("top_k", 2**40),
        ("seed", 2**63),
        ("seed", 1.5),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", 5),
        ("stop", ["x"] * 17),
        ("verify_length", -1),
        ("min_p", 1.1),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("logit_bias", [1]),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1" * 5000: 1}),
        ("allowed_token_ids", []),
        ("allowed_token_ids", "all"),
        ("banned_token_ids", 5),
        ("min_tokens", -1),
        ("min_tokens", 1.5),
        ("stop_token_ids", 2),
        ("logprobs", 21),
        ("n", 0),
        ("n", 129),
        ("n", True),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("model", 5),
        ("model", None),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    for parse in (chat, text):
        found = refusal(parse, **{name: value})
        assert (found.status, found.param) == (400, name)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_a_temperature_is_a_finite_number(number: str) -> None:
    body = json.dumps(TEXT)[:-1] + f', "temperature": {number}}}'
    with pytest.raises(RequestRefused):
        parse_request(CompletionRequest, body.encode())


@pytest.mark.parametrize(
    ("name", "value", "param"),
    [
        ("logit_bias", {"5": 101}, "logit_bias.5"),
        ("logit_bias", {"5": "1"}, "logit_bias.5"),
        ("allowed_token_ids", [1, -1], "allowed_token_ids.1"),
        ("banned_token_ids", [1.5], "banned_token_ids.0"),
        ("stop_token_ids", [True], "stop_token_ids.0"),
    ],
)
def test_a_value_inside_of_a_parameter_is_refused_by_its_place(name: str, value: Any, param: str) -> None:
    for parse in (chat, text):
        assert refusal(parse, **{name: value}).param == param


def test_an_unknown_field_is_refused_with_the_nearest_name() -> None:
    found = refusal(chat, max_token=5)
    assert (found.status, found.param) == (400, "max_token")
    assert "did you mean max_tokens" in found.message


def test_two_limits_that_differ_are_refused_and_equal_ones_not() -> None:
    assert chat(max_tokens=5, max_completion_tokens=5).token_limit == 5
    assert refusal(chat, max_tokens=5, max_completion_tokens=6).param == "max_tokens"
    assert refusal(text, max_completion_tokens=6).param == "max_completion_tokens"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"5", b'{"model": "\xff"}', b'{"model": "\\ud800"}', b"[" * 5000])
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(RequestRefused) as caught:
        parse_request(ChatRequest, body)
    assert caught.value.refusal.status == 400


def test_a_refusal_does_not_repeat_the_prompt() -> None:
    secret = "correct horse"
    for fields in ({"prompt": [secret, secret]}, {"prompt": {secret: 1}}, {"prompt": secret, "stop": {secret: 1}}):
        assert secret not in refusal(text, **fields).message


def test_the_error_object_is_openais() -> None:
    assert Refusal(400, "m", "p", "c").body() == {
        "error": {"message": "m", "type": "invalid_request_error", "param": "p", "code": "c"}
    }
    assert Refusal(503, "m").body()["error"]["type"] == "server_error"
