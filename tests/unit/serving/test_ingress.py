"""The API over a real tiny engine: formats, refusals, disconnects, keys, health."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dspark.serving.ingress import build_app, read_api_keys
from dspark.serving.target_replica import TargetReplica
from tiny_serving import MODEL, ask, chat, client_of, completion, events, hang_up, serve_config, wait_until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def replica(tiny_target: Path) -> Iterator[TargetReplica]:
    replica = TargetReplica(serve_config(tiny_target))
    yield replica
    replica.close()


def post(replica: TargetReplica, path: str, body: Any, **config: Any) -> httpx.Response:
    async def talk(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(path, json=body)

    return ask(replica, serve_config("unused", **config), talk)


def is_empty(replica: TargetReplica) -> bool:
    engine = replica.loaded.engine
    return not engine.has_work and engine.num_free_pages == engine.num_pages


def error_of(response: httpx.Response) -> Any:
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(("path", "make"), [(CHAT, chat), (TEXT, completion)])
def test_a_stream_joins_to_the_whole_answer(replica: TargetReplica, path: str, make: Any) -> None:
    whole = post(replica, path, make(return_token_ids=True)).json()
    stream = post(replica, path, make(return_token_ids=True, stream=True, stream_options={"include_usage": True}))
    *chunks, final, usage, done = events(stream)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 24
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * len(chunks)
    assert final["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"
    text = [c["choices"][0]["text"] if path == TEXT else c["choices"][0]["delta"]["content"] for c in chunks]
    choice = whole["choices"][0]
    assert "".join(text) == (choice["text"] if path == TEXT else choice["message"]["content"])
    ids = [token_id for chunk in chunks for token_id in chunk["choices"][0]["token_ids"]]
    assert ids == choice["token_ids"]
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
    answer = post(replica, TEXT, completion(ignore_eos=False, return_token_ids=True, max_tokens=200)).json()
    ids = answer["choices"][0]["token_ids"]
    free = post(replica, TEXT, completion(return_token_ids=True, max_tokens=200)).json()["choices"][0]["token_ids"]
    cut = next((k + 1 for k, token_id in enumerate(free) if token_id in (0, 2)), 200)
    assert ids == free[:cut]
    assert answer["choices"][0]["finish_reason"] == ("stop" if cut < 200 else "length")
    assert answer["usage"]["completion_tokens"] == len(ids)


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
        assert chunks[-2]["usage"] == whole.json()["usage"]


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
        (TEXT, completion(logprobs=5), "logprobs"),
        (CHAT, chat(tools=[{"type": "function"}]), "tools"),
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


@pytest.mark.parametrize(("stream", "after_chunks"), [(False, 0), (True, 0), (True, 1), (True, 3)])
def test_a_client_that_hangs_up_frees_its_pages(replica: TargetReplica, stream: bool, after_chunks: int) -> None:
    app = build_app(replica, serve_config("unused"))

    async def run() -> None:
        body = completion(max_tokens=200, stream=stream, verify_length=0)
        await asyncio.gather(*(hang_up(app, TEXT, body, after_chunks=after_chunks) for _ in range(20)))
        assert await wait_until(lambda: is_empty(replica))

    before = _ended(replica, "abort")
    with slowed(replica, 0.005):
        asyncio.run(run())
    assert _ended(replica, "abort") - before == 20
    assert post(replica, TEXT, completion()).status_code == 200


class slowed:  # noqa: N801, reads as what it does
    """The engine with a pause before each step: a large model's pace at a tiny one's cost."""

    def __init__(self, replica: TargetReplica, seconds: float) -> None:
        self.engine, self.seconds, self.entered = replica.loaded.engine, seconds, threading.Event()

    def __enter__(self) -> "slowed":
        step = self.engine.step

        def slow() -> Any:
            self.entered.set()
            time.sleep(self.seconds)
            return step()

        self.engine.step = slow  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: Any) -> None:
        del self.engine.step


def test_health_answers_while_a_long_step_holds_the_model(replica: TargetReplica) -> None:
    async def run() -> float:
        async with client_of(replica, serve_config("unused")) as client:
            answer = asyncio.create_task(client.post(TEXT, json=completion(max_tokens=2)))
            await asyncio.to_thread(long_step.entered.wait)
            asked = time.monotonic()
            assert (await client.get("/health")).status_code == 200
            took = time.monotonic() - asked
            assert not answer.done()
            assert (await answer).status_code == 200
            return took

    with slowed(replica, 1.5) as long_step:
        assert asyncio.run(run()) < 1.0


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


def test_an_engine_that_fails_ends_its_streams_and_says_so(tiny_target: Path) -> None:
    replica = TargetReplica(serve_config(tiny_target))
    steps = iter(range(10))
    step = replica.loaded.engine.step

    def failing() -> Any:
        if next(steps) == 4:
            raise RuntimeError("a kernel failed")
        return step()

    replica.loaded.engine.step = failing  # type: ignore[method-assign]

    async def talk(client: httpx.AsyncClient) -> Any:
        body = completion(stream=True, verify_length=0)
        answers = await asyncio.gather(*(client.post(TEXT, json=body) for _ in range(3)))
        return answers, await client.post(TEXT, json=body), await client.get("/health"), await client.get("/metrics")

    answers, late, health, metrics = ask(replica, serve_config("unused"), talk)
    for answer in answers:
        last = events(answer)[-1]
        assert last["error"]["code"] == "engine_stopped"
        assert "a kernel" not in json.dumps(last)
    assert (late.status_code, error_of(late)["type"]) == (503, "server_error")
    assert health.status_code == 503
    assert 'dspark_requests_total{finish_reason="error",replica="local"} 3.0' in metrics.text
    replica.close()


def test_requests_over_the_limit_are_told_to_come_back(tiny_target: Path) -> None:
    config = serve_config(tiny_target, limits={"max_concurrent_requests": 2})
    replica = TargetReplica(config)

    async def talk(client: httpx.AsyncClient) -> list[httpx.Response]:
        return await asyncio.gather(*(client.post(TEXT, json=completion(max_tokens=40)) for _ in range(6)))

    with slowed(replica, 0.01):
        answers = ask(replica, config, talk)
    assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429, 429, 429]
    assert is_empty(replica)
    replica.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_ended(tiny_target: Path, stream: bool) -> None:
    config = serve_config(tiny_target, limits={"request_timeout_s": 0.3})
    replica = TargetReplica(config)

    async def talk(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(TEXT, json=completion(max_tokens=200, stream=stream, verify_length=0))

    with slowed(replica, 0.02):
        answer = ask(replica, config, talk)
        assert asyncio.run(wait_until(lambda: is_empty(replica)))
    assert (events(answer)[-1] if stream else answer.json())["error"]["code"] == "timeout"
    assert _ended(replica, "timeout") == 1
    replica.close()


def _ended(replica: TargetReplica, reason: str) -> float:
    async def families() -> Any:
        return await replica.metrics()

    samples = [sample for family in asyncio.run(families()) for sample in family.samples]
    return sum(s.value for s in samples if s.name == "dspark_requests_total" and s.labels["finish_reason"] == reason)
