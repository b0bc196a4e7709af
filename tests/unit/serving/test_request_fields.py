"""Every field of a request, over HTTP against a tiny engine: it does something, is refused, or changes nothing."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dspark.serving.field_table import field_rows
from dspark.serving.ingress import build_app
from dspark.serving.request_fields import UNSUPPORTED, WITHOUT_EFFECT
from dspark.serving.target_replica import TargetReplica
from streaming_server import serving
from tiny_serving import CHAT, MODEL, TEXT, chat, completion, error_of, events, serve_config
from tool_calling_target import ASKED, TOOLS

HONOURED = {row.name: row for row in field_rows() if row.treatment == "honoured"}
USAGE = {"include_usage": True}


class Api:
    """Two servers: one whose output wanders, and one whose template knows tools."""

    def __init__(self, url: str, calling_url: str) -> None:
        self.url, self.calling_url = url, calling_url
        self.http = httpx.Client(timeout=20)

    def text(self, **fields: Any) -> Any:
        """The answer to a greedy completion of 24 tokens, with token ids."""
        return self._ask(self.url + TEXT, completion(**{"return_token_ids": True, **fields}))

    def chat(self, **fields: Any) -> Any:
        """The same of a chat, of the server that knows tools."""
        return self._ask(self.calling_url + CHAT, chat(**{"return_token_ids": True, **fields}))

    def ids(self, **fields: Any) -> list[int]:
        return list(self.text(**fields)["choices"][0]["token_ids"])

    def refused(self, path: str, **fields: Any) -> Any:
        response = self.http.post(self.url + path, json=(completion if path == TEXT else chat)(**fields))
        assert response.status_code in (400, 404)
        return error_of(response)

    def _ask(self, url: str, body: dict[str, Any]) -> Any:
        response = self.http.post(url, json=body)
        assert response.status_code == 200, response.text
        return events(response) if body.get("stream") else response.json()


@pytest.fixture(scope="module")
def api(tiny_target: Path, tool_calling_target: Path) -> Iterator[Api]:
    configs = [
        serve_config(target, limits={"allow_priority": True, "max_output_tokens": 300})
        for target in (tiny_target, tool_calling_target)
    ]
    replicas = [TargetReplica(config) for config in configs]
    first, second = (build_app(replica, config) for replica, config in zip(replicas, configs, strict=True))
    with serving(first) as url, serving(second) as calling_url:
        yield Api(url, calling_url)
    for replica in replicas:
        replica.close()


EFFECTS: dict[str, Callable[[Api], None]] = {}


def effect(check: Callable[[Api], None]) -> Callable[[Api], None]:
    """Its name is that of the field that it checks."""
    EFFECTS[check.__name__] = check
    return check


def test_every_honoured_field_has_its_check() -> None:
    assert EFFECTS.keys() == HONOURED.keys()


@pytest.mark.parametrize("name", sorted(HONOURED))
def test_a_field_does_what_it_says(api: Api, name: str) -> None:
    EFFECTS[name](api)


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_an_unsupported_field_is_refused_by_name(api: Api, name: str) -> None:
    for path in (CHAT, TEXT):
        error = api.refused(path, **{name: {"something": "else"}})
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")


def test_what_asks_for_nothing_changes_nothing(api: Api) -> None:
    neutral = {name: refused.neutral[0] for name, refused in UNSUPPORTED.items() if refused.neutral}
    assert api.ids(**neutral) == api.ids()
    assert api.chat(**neutral)["choices"] == api.chat()["choices"]


def test_fields_without_effect_have_none(api: Api) -> None:
    assert api.ids(**{name: {"any": ["thing"]} for name in WITHOUT_EFFECT}) == api.ids()


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_field_of_nobody_is_refused(api: Api, path: str) -> None:
    assert api.refused(path, temprature=1)["code"] == "unknown_parameter"


@effect
def add_special_tokens(api: Api) -> None:
    """This tokenizer adds none, which must not be told apart; test_resolve has one that does."""
    assert api.ids(add_special_tokens=False) == api.ids(add_special_tokens=True)


@effect
def allowed_token_ids(api: Api) -> None:
    assert set(api.ids(allowed_token_ids=[40, 41])) <= {40, 41}


@effect
def banned_token_ids(api: Api) -> None:
    first = api.ids()[0]
    assert first not in api.ids(banned_token_ids=[first])


@effect
def chat_template_kwargs(api: Api) -> None:
    plain, loud = (api.chat(chat_template_kwargs={"shout": on})["prompt_token_ids"] for on in (False, True))
    assert loud[:-1] == plain


@effect
def frequency_penalty(api: Api) -> None:
    assert most_often(api.ids(frequency_penalty=2.0, max_tokens=80)) < most_often(api.ids(max_tokens=80))


@effect
def ignore_eos(api: Api) -> None:
    biased = {"logit_bias": {"2": 100}}
    assert api.ids(ignore_eos=False, **biased) == [2]
    assert api.ids(ignore_eos=True, **biased) == [2] * 24


@effect
def logit_bias(api: Api) -> None:
    assert api.ids(logit_bias={"77": 100}) == [77] * 24


@effect
def logprobs(api: Api) -> None:
    told = api.text(logprobs=3)["choices"][0]["logprobs"]
    assert len(told["token_logprobs"]) == 24
    assert 3 <= max(len(one) for one in told["top_logprobs"]) <= 4  # of tokens with one text, the likeliest is told
    assert api.text()["choices"][0]["logprobs"] is None
    assert len(api.chat(logprobs=True)["choices"][0]["logprobs"]["content"]) == 24


@effect
def max_completion_tokens(api: Api) -> None:
    assert api.chat(max_tokens=None, max_completion_tokens=5)["usage"]["completion_tokens"] == 5


@effect
def max_tokens(api: Api) -> None:
    answer = api.text(max_tokens=5)
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (5, "length")
    assert len(api.ids(max_tokens=None)) == 16


@effect
def messages(api: Api) -> None:
    assert api.chat(content="one")["prompt_token_ids"] != api.chat(content="two")["prompt_token_ids"]


@effect
def min_p(api: Api) -> None:
    assert api.ids(temperature=1.0, min_p=1.0) == api.ids()


@effect
def min_tokens(api: Api) -> None:
    stop = api.ids()[3]
    assert len(api.ids(stop_token_ids=[stop])) == 4
    assert len(api.ids(stop_token_ids=[stop], min_tokens=9)) >= 9


@effect
def model(api: Api) -> None:
    assert api.text()["model"] == MODEL
    assert api.refused(TEXT, model="other")["code"] == "model_not_found"


@effect
def n(api: Api) -> None:
    answer = api.text(n=3, temperature=1.0)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]


@effect
def parallel_tool_calls(api: Api) -> None:
    counts = [len(calls_of(api, parallel_tool_calls=both)) for both in (False, True)]
    assert counts == [1, 2]


@effect
def presence_penalty(api: Api) -> None:
    assert len(set(api.ids(presence_penalty=2.0, max_tokens=80))) > len(set(api.ids(max_tokens=80)))


@effect
def priority(api: Api) -> None:
    """Who goes first is the engine's to test; without leave it is refused, as test_service_tiers has it."""
    assert api.ids(priority=-1) == api.ids()
    assert api.refused(TEXT, priority=2**31)["param"] == "priority"


@effect
def service_tier(api: Api) -> None:
    """What it is to the engine is a priority; the answer tells it, a stream in every chunk."""
    told = [api.text(service_tier=tier)["service_tier"] for tier in ("auto", "flex", "priority")]
    assert told == ["default", "flex", "priority"]
    assert "service_tier" not in api.text()
    assert api.refused(TEXT, service_tier="scale")["param"] == "service_tier"
    assert api.refused(TEXT, service_tier=1)["param"] == "service_tier"


@effect
def prompt(api: Api) -> None:
    asked = api.text(prompt="hello")
    ids = asked["choices"][0]["prompt_token_ids"]
    assert api.text(prompt=ids)["choices"] == asked["choices"] == api.text(prompt=["hello"])["choices"]


@effect
def repetition_penalty(api: Api) -> None:
    assert len(set(api.ids(repetition_penalty=100.0))) == 24


@effect
def return_speculation(api: Api) -> None:
    asked = {"max_tokens": 100, "verify_length": 3, "return_speculation": True}  # a scheduled length follows the clock
    answer = api.text(**asked)
    told = answer["metrics"]["speculative_decoding"]
    assert told["num_decode_steps"] + told["num_accepted_draft_tokens"] == 99
    assert told["num_draft_tokens"] >= told["num_verified_tokens"] >= told["num_accepted_draft_tokens"] > 0
    assert told["mean_acceptance_length"] > 1
    assert told["draft_acceptance_rate"] == told["num_accepted_draft_tokens"] / told["num_verified_tokens"]
    stop = answer["choices"][0]["token_ids"][60]
    stopped = api.text(**asked, stop_token_ids=[stop])  # in the midst of a block
    told = stopped["metrics"]["speculative_decoding"]
    most = 1 + told["num_decode_steps"] + told["num_accepted_draft_tokens"]
    assert told["num_accepted_draft_tokens"] < stopped["usage"]["completion_tokens"] <= most
    *_, last, _ = api.text(**asked, stream=True)
    assert (last["choices"], last["metrics"]) == ([], answer["metrics"])
    assert "metrics" not in api.text()


@effect
def return_token_ids(api: Api) -> None:
    assert len(api.text(return_token_ids=True)["choices"][0]["token_ids"]) == 24
    assert "token_ids" not in api.text(return_token_ids=False)["choices"][0]


@effect
def seed(api: Api) -> None:
    first, again, other = (api.ids(temperature=1.0, seed=seed) for seed in (7, 7, 8))
    assert first == again != other


@effect
def speculation(api: Api) -> None:
    plain = api.text(max_tokens=60, speculation=False, return_speculation=True)
    told = plain["metrics"]["speculative_decoding"]
    assert (told["num_draft_tokens"], told["num_verified_tokens"], told["num_decode_steps"]) == (0, 0, 59)
    assert (told["mean_acceptance_length"], told["draft_acceptance_rate"]) == (None, None)
    assert plain["choices"][0]["token_ids"] == api.ids(max_tokens=60)
    assert api.refused(TEXT, speculation=False, verify_length=2)["param"] == "verify_length"


@effect
def stop(api: Api) -> None:
    text = api.text()["choices"][0]["text"]
    choice = api.text(stop=["never there", text[5:8]])["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(text[5:8])], "stop")


@effect
def stop_token_ids(api: Api) -> None:
    ids = api.ids()
    assert api.ids(stop_token_ids=[ids[5]]) == ids[: ids.index(ids[5]) + 1]


@effect
def store(api: Api) -> None:
    """What is kept of a request is test_closed_loop's to show; its answer is the same."""
    assert api.ids(store=False) == api.ids(store=True) == api.ids()
    assert api.refused(TEXT, store="never")["param"] == "store"


@effect
def stream(api: Api) -> None:
    *chunks, done = api.text(stream=True)
    assert done == "[DONE]"
    assert [one for chunk in chunks for one in chunk["choices"][0].get("token_ids", [])] == api.ids()


@effect
def stream_options(api: Api) -> None:
    *_, plain, _ = api.text(stream=True, stream_options={"include_usage": False})
    assert "usage" not in plain
    *chunks, usage, _ = api.text(stream=True, stream_options=USAGE)
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 24)
    assert not any("usage" in chunk for chunk in chunks)
    *chunks, _, _ = api.text(stream=True, stream_options={**USAGE, "continuous_usage_stats": True})
    told = 0
    for chunk in chunks:
        told += len(chunk["choices"][0].get("token_ids", []))
        assert chunk["usage"]["completion_tokens"] == told
    assert api.refused(TEXT, stream_options=USAGE)["param"] == "stream_options"
    without = api.refused(TEXT, stream=True, stream_options={"continuous_usage_stats": True})
    assert without["param"] == "stream_options.continuous_usage_stats"


@effect
def temperature(api: Api) -> None:
    assert api.ids(temperature=0.0) == api.ids(temperature=0.01, seed=1)
    assert api.ids(temperature=5.0, seed=1) != api.ids()


@effect
def tool_choice(api: Api) -> None:
    assert calls_of(api, tool_choice="auto")
    assert not calls_of(api, tool_choice="none")
    assert api.refused(CHAT, tool_choice="required")["param"] == "tool_choice"


@effect
def tools(api: Api) -> None:
    assert [call["function"]["name"] for call in calls_of(api)] == ["weather"] * 2
    assert api.refused(CHAT, tools=TOOLS)["param"] == "tools"  # by the template that knows none


@effect
def top_k(api: Api) -> None:
    assert api.ids(temperature=1.0, top_k=1) == api.ids()


@effect
def top_logprobs(api: Api) -> None:
    told = api.chat(logprobs=True, top_logprobs=4)["choices"][0]["logprobs"]["content"]
    assert [len(one["top_logprobs"]) for one in told] == [4] * 24
    assert api.refused(CHAT, top_logprobs=4)["param"] == "top_logprobs"


@effect
def top_p(api: Api) -> None:
    assert api.ids(temperature=1.0, top_p=1e-6) == api.ids()


@effect
def verify_length(api: Api) -> None:
    def steps(length: int) -> Any:
        told = api.text(max_tokens=60, verify_length=length, return_speculation=True)
        return told["metrics"]["speculative_decoding"]

    assert steps(0)["num_verified_tokens"] == 0
    one = steps(1)
    assert 0 < one["num_verified_tokens"] == one["num_spec_steps"]


def most_often(ids: list[int]) -> int:
    return max(ids.count(one) for one in ids)


def calls_of(api: Api, **fields: Any) -> list[Any]:
    body = {"messages": ASKED, "tools": TOOLS, "max_tokens": 200, "ignore_eos": False}
    answer = api.chat(**(body | fields))
    return list(answer["choices"][0]["message"].get("tool_calls", []))
