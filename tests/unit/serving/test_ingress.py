"""The API over a real tiny engine: formats, stops, seeds, refusals, keys, metrics."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dspark.serving.incoming import read_api_keys
from dspark.serving.ingress import build_app
from dspark.serving.target_replica import TargetReplica
from tiny_serving import (
    CHAT,
    MODEL,
    TEXT,
    ask,
    chat,
    completion,
    error_of,
    events,
    hang_up,
    is_empty,
    num_ended,
    post,
    serve_config,
    slowed,
    wait_until,
)


def counted(answer: dict[str, Any]) -> dict[str, int]:
    """Its usage, but for what was found of the prompt: more when it is asked again."""
    return {name: value for name, value in answer["usage"].items() if name != "prompt_tokens_details"}


@pytest.fixture(scope="module")
def replica(tiny_target: Path) -> Iterator[TargetReplica]:
    replica = TargetReplica(serve_config(tiny_target))
    yield replica
    replica.close()


def test_a_prompt_asked_twice_is_found_the_second_time(replica: TargetReplica) -> None:
    body = completion("what is the number of answers to this question")
    usages = [post(replica, TEXT, body).json()["usage"] for _ in range(2)]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached[0] < cached[1] == (usages[1]["prompt_tokens"] - 1) // 4 * 4


@pytest.mark.parametrize(("path", "make"), [(CHAT, chat), (TEXT, completion)])
def test_a_stream_joins_to_the_whole_answer(replica: TargetReplica, path: str, make: Any) -> None:
    whole = post(replica, path, make(return_token_ids=True)).json()
    stream = post(replica, path, make(return_token_ids=True, stream=True, stream_options={"include_usage": True}))
    *chunks, final, usage, done = events(stream)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert counted(usage) == counted(whole)
    assert whole["usage"]["completion_tokens"] == 24
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * len(chunks)
    assert final["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"
    text = [c["choices"][0]["text"] if path == TEXT else c["choices"][0]["delta"]["content"] for c in chunks]
    choice = whole["choices"][0]
    assert "".join(text) == (choice["text"] if path == TEXT else choice["message"]["content"])
    ids = [token_id for chunk in chunks for token_id in chunk["choices"][0]["token_ids"]]
    assert ids == choice["token_ids"]
    prompt_ids = (choice if path == TEXT else whole)["prompt_token_ids"]
    assert len(prompt_ids) == whole["usage"]["prompt_tokens"]
    assert (chunks[0]["choices"][0] if path == TEXT else chunks[0])["prompt_token_ids"] == prompt_ids
    assert len({chunk["id"] for chunk in [*chunks, final, usage]}) == 1


def test_a_stream_has_a_chunk_per_step_and_not_per_token(replica: TargetReplica) -> None:
    body = completion(max_tokens=120, stream=True, return_token_ids=True)
    chunks = [chunk for chunk in events(post(replica, TEXT, body))[:-1] if "token_ids" in chunk["choices"][0]]
    counts = [len(chunk["choices"][0]["token_ids"]) for chunk in chunks]
    assert sum(counts) == 120
    assert max(counts) > 1  # the tiny target's output runs in circles, which n-grams foresee
    plain = events(post(replica, TEXT, {**body, "verify_length": 0}))
    assert sum(len(chunk["choices"][0]["token_ids"]) == 1 for chunk in plain[:-2]) == 120


def test_no_usage_chunk_unless_asked_for(replica: TargetReplica) -> None:
    assert not any("usage" in chunk for chunk in events(post(replica, TEXT, completion(stream=True)))[:-1])


def test_a_stop_token_ends_the_answer_without_its_text(replica: TargetReplica) -> None:
    free = post(replica, TEXT, completion(return_token_ids=True, max_tokens=60)).json()["choices"][0]
    stop = free["token_ids"][20]
    answer = post(replica, TEXT, completion(return_token_ids=True, max_tokens=60, stop_token_ids=[stop])).json()
    choice, cut = answer["choices"][0], free["token_ids"].index(stop)
    assert choice["token_ids"] == free["token_ids"][: cut + 1]
    assert choice["finish_reason"] == "stop"
    assert free["text"].startswith(choice["text"])
    assert answer["usage"]["completion_tokens"] == cut + 1
    without = post(replica, TEXT, completion(max_tokens=cut)).json()["choices"][0]["text"] if cut else ""
    assert choice["text"] == without


@pytest.mark.parametrize("verify_length", [0, 1, 3, 7])
def test_a_stop_string_cuts_at_the_same_character_at_every_length(replica: TargetReplica, verify_length: int) -> None:
    async def talk(client: httpx.AsyncClient) -> tuple[str, list[str], list[httpx.Response]]:
        text = (await client.post(TEXT, json=completion(max_tokens=80))).json()["choices"][0]["text"]
        stops = [text[start : start + 3] for start in range(10, len(text) - 4, 13)]
        bodies = [
            completion(max_tokens=80, stop=["never there", stop], verify_length=verify_length) | options
            for stop in stops
            for options in ({}, {"stream": True, "stream_options": {"include_usage": True}})
        ]
        return text, stops, await asyncio.gather(*(client.post(TEXT, json=body) for body in bodies))

    text, stops, answers = ask(replica, serve_config("unused"), talk)
    for stop, whole, stream in zip(stops, answers[::2], answers[1::2], strict=True):
        chunks = events(stream)
        assert whole.json()["choices"][0]["text"] == text[: text.index(stop)]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-2]) == text[: text.index(stop)]
        assert whole.json()["choices"][0]["finish_reason"] == chunks[-3]["choices"][0]["finish_reason"] == "stop"
        assert counted(chunks[-2]) == counted(whole.json())


def test_one_token_is_one_token(replica: TargetReplica) -> None:
    before = replica.loaded.engine.stats.drafted
    answer = post(replica, TEXT, completion(max_tokens=1)).json()
    assert answer["usage"]["completion_tokens"] == 1
    assert replica.loaded.engine.stats.drafted == before


def test_a_seed_repeats_in_any_company_and_another_differs(replica: TargetReplica) -> None:
    def sampled(*seeds: int) -> list[list[int]]:
        async def talk(client: httpx.AsyncClient) -> list[httpx.Response]:
            bodies = [completion(temperature=1.0, seed=seed, return_token_ids=True, verify_length=2) for seed in seeds]
            return await asyncio.gather(*(client.post(TEXT, json=body) for body in bodies))

        return [a.json()["choices"][0]["token_ids"] for a in ask(replica, serve_config("unused"), talk)]

    (alone,) = sampled(42)
    assert sampled(42) == [alone]
    assert sampled(42, 1, 2, 3)[0] == alone
    assert sampled(43) != [alone]


PENALTIES: dict[str, Any] = {"presence_penalty": 0.5, "repetition_penalty": 1.2, "min_p": 0.01, "logit_bias": {"40": 2}}


def test_a_seed_gives_one_text_at_every_verify_length(replica: TargetReplica) -> None:
    answers = [
        post(replica, TEXT, completion(temperature=1.0, seed=42, verify_length=length, **PENALTIES)).json()
        for length in (0, 1, 4, 7)
    ]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1


@pytest.mark.parametrize(("path", "make"), [(CHAT, chat), (TEXT, completion)])
def test_choices_of_a_stream_are_those_of_the_whole_answer(replica: TargetReplica, path: str, make: Any) -> None:
    body = make(n=3, temperature=1.0, seed=9, return_token_ids=True, stop_token_ids=[40, 41], min_tokens=4)
    whole = post(replica, path, body).json()
    ids = [choice["token_ids"] for choice in whole["choices"]]
    assert len({tuple(one) for one in ids}) == 3
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert whole["usage"]["completion_tokens"] == sum(len(one) for one in ids)
    stream = events(post(replica, path, {**body, "stream": True, "stream_options": {"include_usage": True}}))
    *chunks, usage, done = stream
    assert done == "[DONE]"
    assert counted(usage) == counted(whole)
    for index, choice in enumerate(whole["choices"]):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [token_id for part in own for token_id in part.get("token_ids", [])] == choice["token_ids"]
        assert [part["finish_reason"] for part in own] == [None] * (len(own) - 1) + [choice["finish_reason"]]
    (alone,) = post(replica, path, {**body, "n": 1}).json()["choices"]
    assert alone["token_ids"] == ids[0]


def test_closing_a_stream_of_several_choices_frees_all_of_them(replica: TargetReplica) -> None:
    async def talk() -> bool:
        app = build_app(replica, serve_config("unused"))
        await hang_up(app, TEXT, completion(n=4, temperature=1.0, max_tokens=200, stream=True), after_chunks=3)
        return await wait_until(lambda: is_empty(replica))

    before = num_ended(replica, "abort")
    with slowed(replica, 0.005):
        assert asyncio.run(talk())
    assert num_ended(replica, "abort") == before + 4
    assert replica._loop.num_open == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("verify_length", [0, 4])
def test_there_is_a_logprob_per_returned_token_and_none_past_the_stop(
    replica: TargetReplica, verify_length: int, stream: bool
) -> None:
    """A stop string in mid-block, by greedy output."""
    free = post(replica, TEXT, completion(max_tokens=60)).json()["choices"][0]["text"]
    body = completion(
        max_tokens=60, stop=[free[20:23]], logprobs=5, return_token_ids=True, verify_length=verify_length, stream=stream
    )
    answer = post(replica, TEXT, body)
    parts = [part["choices"][0] for part in events(answer)[:-1]] if stream else answer.json()["choices"]
    told = [part["logprobs"] for part in parts if part["logprobs"] is not None]
    ids = [token_id for part in parts for token_id in part.get("token_ids", [])]
    values = [value for one in told for value in one["token_logprobs"]]
    best = [max(one.values()) for part in told for one in part["top_logprobs"]]
    assert len(values) == len(ids) == sum(len(one["tokens"]) for one in told) > 3
    assert values == pytest.approx(best)  # greedy: the token is the likeliest
    assert all(value < 0 for value in values)
    assert "".join(part["text"] for part in parts) == free[: free.index(free[20:23])]


def test_a_chats_logprobs_are_those_of_the_plain_target(replica: TargetReplica) -> None:
    def told(**options: Any) -> list[Any]:
        answer = post(replica, CHAT, chat(logprobs=True, top_logprobs=2, **options)).json()
        return list(answer["choices"][0]["logprobs"]["content"])

    plain, biased = told(verify_length=0), told(logit_bias={"5": -100})
    assert len(plain) == 24
    assert plain[0]["top_logprobs"] == biased[0]["top_logprobs"]  # a bias is not in them
    for one, other in zip(plain, told(verify_length=5), strict=True):
        assert one["token"] == other["token"]
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-3)
        assert bytes(one["bytes"]).decode(errors="replace") == one["token"]
        assert [top["token"] for top in one["top_logprobs"]] == [top["token"] for top in other["top_logprobs"]]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, completion(""), "prompt"),
        (TEXT, completion([]), "prompt"),
        (TEXT, completion(max_tokens=0), "max_tokens"),
        (TEXT, completion(max_tokens=201), "max_tokens"),
        (TEXT, completion([5] * 500, max_tokens=20), "max_tokens"),
        (TEXT, completion([5] * 512), "prompt"),
        (TEXT, completion([320]), "prompt"),
        (TEXT, completion([-1]), "prompt"),
        (TEXT, completion(verify_length=8), "verify_length"),
        (TEXT, completion(logprobs=21), "logprobs"),
        (TEXT, completion(banned_token_ids=[320]), "banned_token_ids"),
        (TEXT, completion(n=129), "n"),
        (CHAT, chat(logprobs=5), "logprobs"),
        (CHAT, chat(top_logprobs=5), "top_logprobs"),
        (CHAT, chat(tools=[{"type": "function"}]), "tools.0.function"),
        (CHAT, chat(tools=[{"type": "function", "function": {"name": "f"}}]), "tools"),  # its template knows none
        (CHAT, {**chat(), "messages": []}, "messages"),
        (CHAT, chat(""), "messages.0.content"),
        (CHAT, chat("x" * 2000), "messages"),
        (CHAT, chat(max_tokens=None, max_completion_tokens=300), "max_completion_tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_run_is_refused_before_the_first_byte(
    replica: TargetReplica, path: str, body: Any, param: str, stream: bool
) -> None:
    response = post(replica, path, {**body, "stream": stream})
    assert response.status_code == 400
    assert error_of(response)["param"] == param
    assert post(replica, TEXT, completion()).status_code == 200  # and the next good request works


def test_another_model_is_not_found(replica: TargetReplica) -> None:
    response = post(replica, TEXT, completion(model="gpt-5"))
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"
    assert MODEL in error_of(response)["message"]


def test_models_lists_the_one_that_is_served(replica: TargetReplica) -> None:
    async def talk(client: httpx.AsyncClient) -> Any:
        return (await client.get("/v1/models")).json()

    models = ask(replica, serve_config("unused"), talk)
    assert [model["id"] for model in models["data"]] == [MODEL]


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/nothing", 404), ("GET", CHAT, 405)])
def test_errors_of_http_have_the_same_form(replica: TargetReplica, method: str, path: str, status: int) -> None:
    async def talk(client: httpx.AsyncClient) -> httpx.Response:
        return await client.request(method, path)

    response = ask(replica, serve_config("unused"), talk)
    assert response.status_code == status
    assert error_of(response)["type"] == "invalid_request_error"


def test_a_long_body_is_refused(replica: TargetReplica) -> None:
    response = post(replica, TEXT, completion("x" * 2000), limits={"max_body_bytes": 1000})
    assert response.status_code == 413
    assert "1000 bytes" in error_of(response)["message"]


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        ("Bearer k\u00e9y", 401),
        ("one", 401),
        ("Bearer one", 200),
        ("bearer two", 200),
    ],
)
def test_a_key_lets_in(replica: TargetReplica, tmp_path: Path, header: str | None, status: int) -> None:
    async def talk(client: httpx.AsyncClient) -> list[int]:
        headers = {} if header is None else {"Authorization": header.encode("utf-8")}
        answers = [await client.post(TEXT, json=completion(), headers=headers)]
        answers += [await client.get(path, headers=headers) for path in ("/v1/models", "/health", "/metrics")]
        return [answer.status_code for answer in answers]

    (tmp_path / "keys").write_text("one\n\n two \n")
    config = serve_config("unused", api_keys_file=str(tmp_path / "keys"))
    assert ask(replica, config, talk) == [status, status, 200, 200]


def test_a_key_file_without_keys_locks_nobody_in_or_out(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ValueError, match="holds no key"):
        read_api_keys(tmp_path / "empty")
    with pytest.raises(ValueError, match="not found"):
        read_api_keys(tmp_path / "nothing")


def test_metrics_account_for_every_token(replica: TargetReplica) -> None:
    async def talk(client: httpx.AsyncClient) -> tuple[list[Any], dict[str, float], dict[str, float]]:
        before = parse((await client.get("/metrics")).text)
        bodies = [completion(f"question {k}", max_tokens=60, return_token_ids=True, stream=True) for k in range(5)]
        answers = await asyncio.gather(*(client.post(TEXT, json=body) for body in bodies))
        return [events(answer) for answer in answers], before, parse((await client.get("/metrics")).text)

    streams, before, after = ask(replica, serve_config("unused"), talk)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    steps = [
        len(chunk["choices"][0]["token_ids"])
        for stream in streams
        for chunk in stream[:-1]
        if "token_ids" in chunk["choices"][0]
    ]
    label = '{replica="local"}'
    first_tokens = len(streams)  # the prompt's own token is no round
    committed = grown[f"dspark_committed_tokens_total{label}"] + grown[f"dspark_plain_rounds_total{label}"]
    rounds = grown[f"dspark_rounds_total{label}"] + grown[f"dspark_plain_rounds_total{label}"]
    assert sum(steps) == grown[f"dspark_output_tokens_total{label}"] == 300
    assert committed == 300 - first_tokens
    assert rounds == len(steps) - first_tokens == grown[f"dspark_decodes_total{label}"]
    assert grown['dspark_requests_total{finish_reason="length",replica="local"}'] == 5
    assert grown[f"dspark_time_to_first_token_seconds_count{label}"] == 5
    assert grown[f"dspark_inter_token_latency_seconds_count{label}"] == 300 - first_tokens
    accepted = sum(value for name, value in grown.items() if name.startswith("dspark_position_accepted_total"))
    assert accepted == grown[f"dspark_accepted_tokens_total{label}"] > 0
    assert after['dspark_drafter_info{kind="ngram",replica="local"}'] == 1
    assert after[f"dspark_kv_pages_free{label}"] == after[f"dspark_kv_pages{label}"]


def parse(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
