"""Servers measured in turn: order, ratios, failures, and what the table says."""

from typing import Any

import pytest

from dspark.config import build_config
from dspark.data.prompts import Prompt
from dspark.errors import DsparkError
from dspark.evaluation.endpoint_contest import EndpointBenchmark
from dspark.evaluation.load_config import BenchmarkConfig
from streaming_server import NUM_TOKENS, StreamingApp, serving

PROMPTS = [Prompt(name, "math", "heldout", [{"role": "user", "content": name}]) for name in ("a", "b")]


def config_of(urls: dict[str, str], **changes: Any) -> BenchmarkConfig:
    content = {
        "endpoints": {name: {"base_url": f"{url}/v1"} for name, url in urls.items()},
        "output": "o",
        "prompts": [{"path": "p.jsonl"}],
        "concurrency": [2],
        "pairs": 2,
        "min_requests": 2,
        "requests_per_place": 2,
        "max_tokens": 16,
    }
    return build_config(BenchmarkConfig, content | changes)


URLS = {"first": "http://a", "second": "http://b"}


def test_every_setting_is_measured_once_before_any_is_measured_again():
    benchmark = EndpointBenchmark(config_of(URLS, concurrency=[1, 2], request_rates=[0.5]))
    loads = ["1 at once", "2 at once", "0.5 per second"]
    assert benchmark.keys() == [("greedy", load, repeat) for repeat in (0, 1) for load in loads]
    assert [benchmark.num_requests(load) for load in loads] == [2, 4, 30]
    assert benchmark.most_tokens == 2 * 2 * 36 * 16


def test_servers_are_asked_in_turn_the_first_one_last_the_next_time():
    slow, fast = StreamingApp(pause_s=0.01), StreamingApp(pause_s=0.002)
    with serving(slow) as a, serving(fast) as b:
        benchmark = EndpointBenchmark(config_of({"slow": a, "fast": b}, request_rates=[50.0], rate_s=0.1))
        rows = list(benchmark.measure(PROMPTS, benchmark.keys()))
    assert [row["order"] for row in rows] == [["slow", "fast"]] * 2 + [["fast", "slow"]] * 2
    assert len(slow.bodies) == len(fast.bodies) == 2 + 2 * 4 + 2 * 5  # two to warm up
    speeds = [{name: figures["tokens_per_s"] for name, figures in row["runs"].items()} for row in rows]
    assert [row["ratio"] for row in rows] == [{"fast": speed["fast"] / speed["slow"]} for speed in speeds]
    summary = benchmark.summarize(rows)
    figures = summary["greedy"]["2 at once"]
    assert (figures["slow"]["ratio"], figures["slow"]["requests"], figures["slow"]["failed"]) == (None, 8, {})
    assert figures["fast"]["ratio"]["low"] == min(row["ratio"]["fast"] for row in rows[::2])
    headline = benchmark.headline(summary)["greedy"]["2 at once"]
    assert headline["fast_ratio"] == figures["fast"]["ratio"]["median"]
    assert headline["fast_failed"] == 0
    table = benchmark.table(summary).splitlines()
    assert [line.split()[0] for line in table[:3]] == ["greedy,", "endpoint", "slow"]
    assert "50 per second" in table[4]


def test_failures_of_all_repeats_stand_in_the_summary_and_the_table():
    app = StreamingApp()
    app.faults = [None, None, 500, None, None, None, "cut"]  # the first two warm up
    with serving(app) as url:
        benchmark = EndpointBenchmark(config_of({"only": url}))
        rows = list(benchmark.measure(PROMPTS, benchmark.keys()))
    summary = benchmark.summarize(rows)
    figures = summary["greedy"]["2 at once"]["only"]
    assert figures["failed"] == {"status 500: told to fail with 500": 1, "the answer broke off": 1}
    assert "2 of 8 requests failed: 1 status 500: told to fail with 500; 1 the answer broke" in benchmark.table(summary)
    assert sum(run["output_tokens"] for row in rows for run in benchmark.runs(row)) == 6 * NUM_TOKENS


def test_a_server_that_fails_at_once_is_an_error_before_anything_is_measured():
    app = StreamingApp()
    app.faults = [401]
    with serving(app) as url:
        benchmark = EndpointBenchmark(config_of({"only": url}))
        with pytest.raises(DsparkError, match="status 401"):
            list(benchmark.measure(PROMPTS, benchmark.keys()))
