"""OpenAI's own client over HTTP against a real tiny engine: what people's programs do, unchanged."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from dspark.serving.ingress import build_app
from dspark.serving.target_replica import TargetReplica
from streaming_server import serving
from tiny_serving import MODEL, serve_config, slowed
from tool_calling_target import ASKED, RESULT, SAID, TOOLS, WIDE

FUNCTION = {"name": "weather", "arguments": {"city": "Oslo"}}


@pytest.fixture(scope="module")
def replica(tool_calling_target: Path) -> Iterator[TargetReplica]:
    limits = {"max_concurrent_requests": 4, "max_output_tokens": 300}
    replica = TargetReplica(serve_config(tool_calling_target, limits=limits))
    yield replica
    replica.close()


@pytest.fixture(scope="module")
def url(replica: TargetReplica) -> Iterator[str]:
    with serving(build_app(replica, serve_config("unused"))) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


def ask(client: openai.OpenAI, messages: Any = ASKED, **fields: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=messages, temperature=0, **fields)


def called(message: Any) -> list[Any]:
    return [{"name": c.function.name, "arguments": json.loads(c.function.arguments)} for c in message.tool_calls]


def test_an_answer_calls_its_tools_and_goes_on_from_what_they_say(client: openai.OpenAI) -> None:
    answer = ask(client, tools=TOOLS)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "ok"
    assert called(choice.message) == [FUNCTION, {**FUNCTION, "arguments": {"city": "Rome"}}]
    first = choice.message.model_dump() | {"tool_calls": [choice.message.tool_calls[0].model_dump()]}
    result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": RESULT}
    said = ask(client, [*ASKED, first, result], tools=TOOLS)
    assert (said.choices[0].message.content, said.choices[0].finish_reason) == (SAID, "stop")
    assert said.choices[0].message.tool_calls is None


@pytest.mark.parametrize("verify_length", [0, 5])
def test_a_stream_calls_the_same_tools(client: openai.OpenAI, verify_length: int) -> None:
    whole = ask(client, tools=TOOLS)
    extra = {"verify_length": verify_length}
    with client.chat.completions.stream(
        model=MODEL, messages=ASKED, temperature=0, tools=TOOLS, extra_body=extra
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    (choice,) = final.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "ok"
    assert called(choice.message) == called(whole.choices[0].message)
    assert kinds.count("tool_calls.function.arguments.done") == 2


def test_the_calls_of_several_answers_are_their_own(client: openai.OpenAI) -> None:
    answer = ask(client, tools=TOOLS, n=2)
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls]
    assert len(set(ids)) == len(ids) == 4
    chunks = list(ask(client, tools=TOOLS, n=2, stream=True))
    calls = [(c.choices[0].index, call.index) for c in chunks for call in c.choices[0].delta.tool_calls or []]
    assert sorted(calls) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_one_call_is_one_call_and_ends_the_answer(client: openai.OpenAI) -> None:
    answer = ask(client, tools=TOOLS, parallel_tool_calls=False)
    assert called(answer.choices[0].message) == [FUNCTION]
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.usage.completion_tokens < ask(client, tools=TOOLS).usage.completion_tokens


@pytest.mark.parametrize("verify_length", [0, 1, 2, 3, 7])
def test_characters_of_several_tokens_come_whole(client: openai.OpenAI, verify_length: int) -> None:
    """Blocks of every length end within characters; what is joined is what is said at once."""
    extra = {"verify_length": verify_length}
    chunks = list(ask(client, stream=True, extra_body=extra))
    parts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(parts) == ask(client, extra_body=extra).choices[0].message.content == WIDE
    assert len(parts) > 10


def test_without_tools_the_same_text_is_text(client: openai.OpenAI) -> None:
    def text(**fields: Any) -> Any:
        return ask(client, max_tokens=40, **fields).choices[0]

    assert text(tools=TOOLS, tool_choice="none").message == text().message
    ids = client.post("/../tokenize", body={"messages": ASKED, "tools": TOOLS}, cast_to=object)["tokens"]  # type: ignore[index]
    raw = client.completions.create(model=MODEL, prompt=ids, max_tokens=300, temperature=0)
    assert raw.choices[0].text.startswith("ok\n<tool_call>")
    assert raw.choices[0].finish_reason == "stop"


def test_an_answer_cut_in_a_call_shows_its_text(client: openai.OpenAI) -> None:
    (choice,) = ask(client, tools=TOOLS, max_tokens=20).choices
    assert choice.finish_reason == "length"
    assert choice.message.content.startswith("ok\n<tool_call>")


def test_logprobs_stand_beside_calls_one_per_token(client: openai.OpenAI) -> None:
    answer = ask(client, tools=TOOLS, logprobs=True)
    assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens
    chunks = list(ask(client, tools=TOOLS, logprobs=True, stream=True))
    told = [one for c in chunks if c.choices[0].logprobs for one in c.choices[0].logprobs.content]
    assert [one.token for one in told] == [one.token for one in answer.choices[0].logprobs.content]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools.0.function.strict"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools.0.type"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"extra_body": {"chat_template_kwargs": {"tokenize": False}}}, "chat_template_kwargs.tokenize"),
        ({"extra_body": {"chat_template_kwargs": {"whisper": True}}}, "chat_template_kwargs.whisper"),
    ],
)
def test_what_is_not_done_is_refused_by_name(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, **fields)
    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"


def test_a_call_in_the_history_that_is_no_json_is_refused_by_place(client: openai.OpenAI) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{"}}
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, [*ASKED, {"role": "assistant", "tool_calls": [call]}])
    assert refused.value.param == "messages.1.tool_calls.0.function.arguments"


def test_a_streams_usage_runs_along_when_asked_to(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(ask(client, tools=TOOLS, n=2, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    whole = ask(client, tools=TOOLS, n=2).usage
    assert (counts[-1], chunks[-1].usage.prompt_tokens) == (whole.completion_tokens, whole.prompt_tokens)
    assert chunks[-1].choices == []


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as unknown:
        client.models.retrieve("some/other")
    assert unknown.value.code == "model_not_found"


def test_a_request_keeps_the_name_it_comes_with(client: openai.OpenAI) -> None:
    answer = ask(client, max_tokens=2, extra_headers={"X-Request-Id": "order-66"})
    assert (answer.id, answer._request_id) == ("chatcmpl-order-66", "order-66")
    unnamed = ask(client, max_tokens=2)
    assert unnamed.id == f"chatcmpl-{unnamed._request_id}"
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, max_tokens=0, extra_headers={"X-Request-Id": "order-67"})
    assert refused.value.request_id == "order-67"


def test_a_request_repeated_under_its_name_while_it_runs_is_answered(client: openai.OpenAI) -> None:
    """A client that lost its connection cannot know whether the first one still runs."""
    named = {"X-Request-Id": "again"}
    with ask(client, tools=TOOLS, stream=True, extra_headers=named) as stream:
        next(iter(stream))
        again = ask(client, tools=TOOLS, extra_headers=named)
        rest = list(stream)
    assert again.choices[0].finish_reason == rest[-1].choices[0].finish_reason == "tool_calls"
    assert again.id == rest[-1].id


def test_too_much_at_once_is_told_when_to_come_back(client: openai.OpenAI, replica: TargetReplica) -> None:
    with slowed(replica, 0.02), ask(client, max_tokens=200, n=4, stream=True) as stream:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as refused:
            ask(client, max_tokens=2)
    assert int(refused.value.response.headers["retry-after"]) >= 1


def test_the_clients_own_retry_gets_through(url: str, replica: TargetReplica) -> None:
    patient = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=3, timeout=20)
    with slowed(replica, 0.004), ask(patient, max_tokens=60, n=4, stream=True) as stream:
        next(iter(stream))
        assert ask(patient, max_tokens=2).usage.completion_tokens <= 2


def test_the_version_is_told(url: str) -> None:
    assert httpx.get(f"{url}/version").json().keys() == {"version"}
