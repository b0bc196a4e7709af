"""Load over real HTTP: tokens by usage however streams are cut, latency from intended arrivals, failures counted."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark.config import build_config
from dspark.data.prompts import Prompt
from dspark.errors import DsparkError
from dspark.evaluation.config import EvaluationMode
from dspark.evaluation.http_load import HttpLoad, LoadPoint, poisson_arrivals
from dspark.evaluation.load_config import Endpoint
from dspark.evaluation.load_run import ROUND_FIGURES, LoadRun
from dspark.serving.ingress import build_app
from dspark.serving.target_replica import TargetReplica
from streaming_server import NUM_TOKENS, StreamingApp, serving
from tiny_drafter import make_tiny_drafter
from tiny_serving import serve_config

PROMPTS = [Prompt(name, "math", "heldout", [{"role": "user", "content": name}]) for name in ("a", "b")]
GREEDY = EvaluationMode(name="greedy")
SAMPLED = EvaluationMode(name="sampled", temperature=0.7, top_k=20)
OPENAI_FIELDS = {"model", "messages", "max_tokens", "temperature", "top_p", "stream", "stream_options"}


def load_of(url: str, **fields: Any) -> HttpLoad:
    return HttpLoad(build_config(Endpoint, {"base_url": f"{url}/v1"} | fields), PROMPTS)


def run(
    app: Any, mode: EvaluationMode = GREEDY, point: LoadPoint | None = None, number: int = 5, **fields: Any
) -> LoadRun:
    with serving(app) as url:
        point = point or LoadPoint(concurrency=2)
        return load_of(url, **fields).run(mode, point, num_requests=number, max_tokens=16)


@pytest.mark.parametrize("tokens_per_chunk", [1, 3, 10])
def test_tokens_are_those_of_the_usage_however_many_come_in_a_chunk(tokens_per_chunk):
    streamed = run(StreamingApp(tokens_per_chunk=tokens_per_chunk))
    assert streamed.num_tokens == run(StreamingApp(), stream=False).num_tokens == 5 * NUM_TOKENS
    assert streamed.tokens_per_s == 5 * NUM_TOKENS / streamed.seconds
    num_chunks = -(-NUM_TOKENS // tokens_per_chunk)
    assert [len(answer.arrived_s) for answer in streamed.answers] == [num_chunks] * 5
    assert {answer.finish_reason for answer in streamed.answers} == {"stop"}


@pytest.mark.parametrize(("tokens_per_chunk", "num_gaps"), [(1, 9), (5, 1)])
def test_time_per_token_goes_by_usage_and_gaps_by_chunks(tokens_per_chunk, num_gaps):
    done = run(StreamingApp(tokens_per_chunk=tokens_per_chunk, pause_s=0.005), number=1)
    (answer,), figures = done.answers, done.figures()
    lasting = 1000 * (answer.arrived_s[-1] - answer.arrived_s[0])
    assert figures["token_ms"]["p50"] == pytest.approx(lasting / (NUM_TOKENS - 1))
    assert figures["gap_ms"]["mean"] == pytest.approx(lasting / num_gaps)
    assert figures["user_tokens_per_s"]["p50"] < 1000 * NUM_TOKENS / lasting  # waiting for the first counts too


def test_no_more_requests_are_open_than_asked_for():
    app = StreamingApp(pause_s=0.002)
    run(app)
    assert (len(app.bodies), app.most_at_once) == (5, 2)


def test_nothing_but_openai_s_own_fields_is_sent_beside_what_the_config_adds():
    plain, added = StreamingApp(), StreamingApp()
    run(plain, EvaluationMode(name="sampled", temperature=0.7))
    run(added, body={"verify_length": 0})
    assert {key for body in plain.bodies for key in body} == OPENAI_FIELDS
    assert {body["verify_length"] for body in added.bodies} == {0}
    body = added.bodies[0]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("made-up", 16, 0.0)
    assert {body["messages"][0]["content"] for body in plain.bodies} == {"a", "b"}


def test_sampling_is_asked_for_without_a_seed_which_would_cost_acceptance_unless_the_config_wants_one():
    without, seeded, greedy = StreamingApp(), StreamingApp(), StreamingApp()
    run(without, SAMPLED)
    run(seeded, SAMPLED, send_seed=True)
    run(greedy, send_seed=True)
    assert not any("seed" in body for body in without.bodies + greedy.bodies)
    assert all((body["temperature"], body["top_k"]) == (0.7, 20) for body in without.bodies)
    assert all(body["stream_options"] == {"include_usage": True} for body in without.bodies)
    assert len({body["seed"] for body in seeded.bodies}) == 5


def test_the_key_comes_from_the_named_variable_and_no_other(monkeypatch):
    monkeypatch.setenv("OTHER_KEY", "secret")
    monkeypatch.setenv("OPENAI_API_KEY", "not for everybody")
    with_key, without = StreamingApp(), StreamingApp()
    run(with_key, api_key_env="OTHER_KEY", model="given")
    run(without)
    assert set(with_key.keys) == {"Bearer secret"}
    assert {body["model"] for body in with_key.bodies} == {"given"}
    assert set(without.keys) == {None}
    monkeypatch.delenv("OTHER_KEY")
    with pytest.raises(ValueError, match="api_key_env names OTHER_KEY, which is not set"):
        load_of("http://server", api_key_env="OTHER_KEY")


def test_requests_are_finished_or_failed_and_failures_count_no_token():
    app = StreamingApp(tokens_per_chunk=4)
    app.faults = [None, 503, "cut", "silent", "error", "text", None, 503]
    done = run(app, point=LoadPoint(concurrency=1), number=9)
    figures = done.figures()
    assert figures["failed"] == {
        "status 503: told to fail with 503": 2,
        "the answer broke off": 1,
        "no usage was told, so tokens cannot be counted": 1,
        "error: replica died": 1,
        "what came is no JSON": 1,
    }
    assert figures["finished"] == {"stop": 3}
    assert figures["requests"] == 9 == sum(figures["failed"].values()) + sum(figures["finished"].values())
    assert figures["output_tokens"] == 3 * NUM_TOKENS


def test_a_request_without_an_end_fails_in_time():
    figures = run(StreamingApp(pause_s=0.2), number=2, timeout_s=0.3).figures()
    assert figures["failed"] == {"no end within 0.3 s": 2}
    assert figures["tokens_per_s"] == 0


def test_arrivals_are_poisson_and_decided_by_the_seed():
    arrivals = poisson_arrivals(4.0, 4000, seed=3)
    gaps = np.diff([0.0, *arrivals])
    assert arrivals == poisson_arrivals(4.0, 4000, seed=3) != poisson_arrivals(4.0, 4000, seed=4)
    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
    assert gaps.std() == pytest.approx(0.25, rel=0.07)  # an exponential's spread is its mean
    assert gaps.min() >= 0


def test_in_an_open_loop_requests_do_not_wait_for_each_other_and_waiting_counts_as_latency():
    """A server that takes 40 ms a request, asked 200 times a second: the last answer comes 0.4 s behind its time."""
    slow = {"tokens_per_chunk": 10, "pause_s": 0.01, "one_at_a_time": True}
    app = StreamingApp(**slow)
    opened = run(app, point=LoadPoint(request_rate=200.0), number=12)
    assert app.most_at_once > 4
    closed = run(StreamingApp(**slow), point=LoadPoint(concurrency=1), number=12)
    assert opened.figures()["request_ms"]["p99"] > 2 * closed.figures()["request_ms"]["p50"]
    lasting = [answer.arrived_s[-1] - answer.sent_s for answer in opened.answers]
    assert np.mean(lasting[-3:]) > np.mean(lasting[:3]) + 0.1


def test_latency_counts_from_the_intended_arrival_even_where_the_client_is_late(monkeypatch):
    """Arrivals that all lie 0.2 s back: that is when their latency begins."""
    monkeypatch.setattr("dspark.evaluation.http_load.poisson_arrivals", lambda rate, number, *, seed: [-0.2] * number)
    late = run(StreamingApp(tokens_per_chunk=10), point=LoadPoint(request_rate=1.0), number=3)
    assert all(answer.late_s >= 0.2 for answer in late.answers)
    assert all(answer.arrived_s[0] - answer.sent_s >= 0.2 for answer in late.answers)


@pytest.fixture(scope="module")
def replica(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetReplica]:
    drafter = make_tiny_drafter(tmp_path_factory.mktemp("drafter"), tiny_target)
    replica = TargetReplica(serve_config(tiny_target, drafter=str(drafter)))
    yield replica
    replica.close()


def test_a_server_of_ours_tells_what_it_verified_and_what_stood(replica: TargetReplica):
    rounds = replica.loaded.engine.stats.rounds
    before = rounds.rounds, rounds.committed_tokens
    app = build_app(replica, serve_config("unused"))
    body = {"ignore_eos": True}
    with serving(app) as url:
        fast = load_of(url, body=body | {"verify_length": 2}).run(
            GREEDY, LoadPoint(concurrency=2), num_requests=4, max_tokens=24
        )
        after = rounds.rounds, rounds.committed_tokens
        plain = load_of(url, body=body | {"verify_length": 0}).run(
            GREEDY, LoadPoint(concurrency=2), num_requests=4, max_tokens=24
        )
    assert fast.num_tokens == plain.num_tokens == 4 * 24
    assert fast.told_rounds["accepted_length"] == (after[1] - before[1]) / (after[0] - before[0])
    assert fast.told_rounds["verify_length"] > 0
    assert plain.told_rounds["verify_length"] == 0
    assert plain.told_rounds["accepted_length"] is None
    assert plain.told_rounds["round_tokens"] == 1.0


def test_of_another_server_rounds_are_not_known():
    figures = run(StreamingApp()).figures()
    assert [figures[name] for name in ROUND_FIGURES] == [None] * len(ROUND_FIGURES)


def test_a_server_that_is_not_there_is_named():
    with serving(StreamingApp()) as url:
        pass
    with pytest.raises(DsparkError, match=f"{url}/v1 does not answer: .*start one first"):
        load_of(url).run(GREEDY, LoadPoint(concurrency=1), num_requests=1, max_tokens=4)


def test_where_all_must_succeed_the_first_failure_is_an_error():
    app = StreamingApp()
    app.faults = [None, 400]
    with serving(app) as url, pytest.raises(DsparkError, match=r"1 of 2 requests to .* fail: status 400: told to fail"):
        load_of(url).run(GREEDY, LoadPoint(concurrency=1), num_requests=2, max_tokens=4, must_succeed=True)
