"""Requests over real sockets to servers that fail to order: spread, tried again, set aside, given up."""

import asyncio
import logging
import socket
import time
from typing import Any

import pytest

from dspark.config import build_config
from dspark.data.backend import BackendConfig
from dspark.data.endpoint_pool import EndpointPool, RequestRejected
from dspark.errors import DsparkError
from scripted_server import MODEL, ScriptedServer, output_of

BUSY: Any = (503, {})


def backend(*servers: "ScriptedServer | str", **changes: Any) -> BackendConfig:
    urls = [server if isinstance(server, str) else server.url for server in servers]
    content = {"kind": "openai", "base_urls": urls, "model": MODEL, "backoff_s": 0.01, "concurrency": 4}
    return build_config(BackendConfig, content | changes)


def ask(config: BackendConfig, num_requests: int = 1, *, check: bool = False) -> list[Any]:
    """Answers, or the rejections, of that many requests sent together."""

    async def run() -> list[Any]:
        pool = EndpointPool(config)
        try:
            if check:
                await pool.check()
            bodies = [{"prompt": [number], "max_tokens": 20} for number in range(num_requests)]
            outcomes = await asyncio.gather(*(post(pool, body) for body in bodies))
        finally:
            await pool.close()
        return outcomes

    async def post(pool: EndpointPool, body: dict[str, Any]) -> Any:
        try:
            return (await pool.post("completions", body))["choices"][0]["token_ids"]
        except RequestRejected as rejected:
            return str(rejected)

    return asyncio.run(run())


def closed_url() -> str:
    """A place where nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/v1"


def expected(num_requests: int) -> list[list[int]]:
    return [output_of([number], 20)[0] for number in range(num_requests)]


def test_requests_are_spread_and_never_more_at_once_than_allowed() -> None:
    with ScriptedServer(pause_s=0.02) as one, ScriptedServer(pause_s=0.02) as two:
        assert ask(backend(one, two, concurrency=3), 24) == expected(24)
        assert one.most_at_once <= 3
        assert two.most_at_once <= 3
        assert min(len(one.bodies), len(two.bodies)) >= 4


def test_passing_failures_are_tried_again() -> None:
    with ScriptedServer([BUSY, (429, {}), (500, {})]) as server:
        assert ask(backend(server)) == expected(1)
        assert len(server.bodies) == 4


def test_a_second_try_goes_to_another_endpoint() -> None:
    with ScriptedServer([BUSY] * 9) as broken, ScriptedServer() as sound:
        assert ask(backend(broken, sound)) == expected(1)
        assert (len(broken.bodies), len(sound.bodies)) == (1, 1)


def test_waits_grow_and_a_server_may_ask_for_longer_ones() -> None:
    with ScriptedServer([(429, {}), (429, {}), (429, {"Retry-After": "1"})]) as server:
        ask(backend(server, backoff_s=0.1))
        gaps = [later - earlier for earlier, later in zip(server.times, server.times[1:], strict=False)]
        assert gaps[0] >= 0.05
        assert gaps[1] >= 0.1
        assert gaps[2] >= 1.0


def test_an_answer_that_takes_too_long_is_asked_for_again() -> None:
    with ScriptedServer([2.0]) as server:
        assert ask(backend(server, timeout_s=0.5)) == expected(1)
        assert len(server.bodies) >= 2


def test_tries_have_a_limit() -> None:
    with ScriptedServer([(429, {})] * 9) as server:
        assert ask(backend(server, max_retries=3)) == ["no answer in 4 tries, at last: status 429"]
        assert len(server.bodies) == 4


def test_a_refusal_of_one_request_is_final() -> None:
    with ScriptedServer([(400, {})]) as server:
        (reason,) = ask(backend(server))
        assert reason.startswith("refused with status 400")
        assert len(server.bodies) == 1


def test_a_failing_endpoint_is_set_aside_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    with ScriptedServer([BUSY] * 999) as broken, ScriptedServer(pause_s=0.02) as sound, caplog.at_level("WARNING"):
        assert ask(backend(broken, sound, max_failures=2), 30) == expected(30)
        assert len(broken.bodies) < 15
        url = broken.url
    lines = [record.getMessage() for record in caplog.records if "set aside" in record.getMessage()]
    assert lines == [f"endpoint {url} is set aside for 60 s: status 503"]


def test_an_endpoint_that_was_set_aside_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    with ScriptedServer([BUSY] * 2) as server, ScriptedServer(pause_s=0.05) as other, caplog.at_level(logging.INFO):
        config = backend(server, other, max_failures=1, aside_s=0.2, concurrency=1)
        assert ask(config, 20) == expected(20)
        assert len(server.bodies) > 2
        assert f"endpoint {server.url} answers again" in caplog.text


def test_failures_of_one_moment_count_once() -> None:
    with ScriptedServer([BUSY] * 8, pause_s=0.3) as server:
        assert ask(backend(server, concurrency=8, max_failures=2), 8) == expected(8)


def test_when_no_endpoint_is_left_the_run_stops_and_names_each() -> None:
    with ScriptedServer([BUSY] * 999) as broken:
        gone = closed_url()
        with pytest.raises(DsparkError, match=r"every endpoint fails .*the same command goes on") as caught:
            ask(backend(broken, gone, max_failures=2), 10)
    assert broken.url in str(caught.value)
    assert gone in str(caught.value)
    assert "status 503" in str(caught.value)


def test_the_start_finds_who_does_not_answer() -> None:
    with ScriptedServer() as sound:
        assert ask(backend(closed_url(), sound), 3, check=True) == expected(3)
    with pytest.raises(DsparkError, match="every endpoint fails"):
        ask(backend(closed_url()), check=True)


def test_another_model_than_the_served_one_is_refused_at_the_start() -> None:
    with (
        ScriptedServer(model="other") as server,
        pytest.raises(DsparkError, match=r"serves \['other'\], not 'scripted'"),
    ):
        ask(backend(server), check=True)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_wrong_settings_stop_the_run_at_once(status: int) -> None:
    with ScriptedServer([(status, {})]) as server, pytest.raises(DsparkError, match=f"status {status}: .*; check back"):
        ask(backend(server))


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "secret")
    with ScriptedServer() as server:
        ask(backend(server, api_key_env="SOME_KEY"))
        assert server.keys == ["Bearer secret"]
        monkeypatch.delenv("SOME_KEY")
        with pytest.raises(ValueError, match="SOME_KEY"):
            ask(backend(server, api_key_env="SOME_KEY"))


@pytest.mark.parametrize("owner", ["vllm", "sglang"])
def test_servers_that_would_fill_in_their_own_defaults_are_told_all(owner: str) -> None:
    with ScriptedServer(owner=owner) as server:
        ask(backend(server, extra_body={"min_p": None, "custom": 1}), check=True)
        (body,) = server.bodies
        assert (body["top_k"], body["repetition_penalty"], body["custom"]) == (-1, 1.0, 1)
        assert "min_p" not in body


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "local"}, "base_urls has no effect with kind local"),
        ({"base_urls": []}, "needs base_urls"),
        ({"base_urls": ["host:8000"]}, "must start with http"),
        ({"base_urls": ["http://a/v1", "http://a/v1"]}, "names one endpoint twice"),
        ({"max_failures": 9}, "max_failures 9 is over max_retries"),
        ({"concurency": 3}, "did you mean 'concurrency'"),
    ],
)
def test_a_backend_that_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        backend("http://a/v1", **changes)


def test_a_pool_does_not_wait_for_time_when_a_place_falls_free() -> None:
    with ScriptedServer(pause_s=0.01) as server:
        started = time.monotonic()
        ask(backend(server, concurrency=1), 10)
        assert time.monotonic() - started < 4.0
