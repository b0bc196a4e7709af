"""The benchmark job on a tiny target: what it writes, and which pairs it measures again."""

import json
from pathlib import Path
from typing import Any

import pytest

import benchmark
import runner
from dspark.config import build_config
from dspark.errors import MissingInput
from dspark.evaluation.load_config import BenchmarkConfig
from dspark.provenance import read_json, write_json
from streaming_server import NUM_TOKENS, StreamingApp, serving
from tiny_drafter import make_tiny_drafter


@pytest.fixture
def content(tmp_path: Path, tiny_target: Path) -> dict[str, Any]:
    rows = [{"id": f"{d}{n}", "domain": d, "turns": [f"hello {d} {n}"]} for d in ("math", "chat") for n in range(3)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return {
        "drafter": str(make_tiny_drafter(tmp_path / "drafter", tiny_target)),
        "output": str(tmp_path / "benchmark"),
        "prompts": [{"path": str(tmp_path / "prompts.jsonl"), "split": "heldout"}],
        "concurrency": [1, 2],
        "pairs": 1,
        "max_tokens": 6,
        "requests_per_place": 1,
        "min_requests": 2,
        "warmup_tokens": 2,
        "engine": {"kv_tokens": 512, "page_size": 8, "max_running_requests": 2},
        "threads": 1,
        "tracking": {"enabled": False},
    }


def run(content: dict[str, Any], **options: Any) -> dict[str, Any]:
    return benchmark.run(build_config(BenchmarkConfig, content), **options)


def pairs_of(content: dict[str, Any]) -> list[dict[str, Any]]:
    return read_json(Path(content["output"]) / "benchmark.json")["pairs"]


def test_both_sides_are_measured_at_every_concurrency_and_answer_the_same(content, capsys):
    result = run(content)
    assert list(result["load"]["greedy"]) == ["1", "2"]
    pairs = pairs_of(content)
    for pair in pairs:
        assert pair["identical"] == pair["plain"]["requests"] == 2  # float32: exactly the same
        assert pair["ratio"] == pair["speculative"]["tokens_per_s"] / pair["plain"]["tokens_per_s"]
        assert pair["speculative"]["verify_length"] > 0 == pair["plain"]["verify_length"]
    assert result["tokens"] == sum(p[s]["output_tokens"] for p in pairs for s in ("plain", "speculative"))
    out = capsys.readouterr().out
    assert "at once" in out
    assert "note: no cost curve" in out


def test_a_second_run_measures_nothing_and_says_the_same(content):
    first = run(content)
    assert run(content) == first | {"skipped": True}


def test_more_pairs_are_added_to_those_that_are_there(content):
    run(content)
    earlier = pairs_of(content)
    assert "skipped" not in run(content | {"pairs": 2})
    pairs = pairs_of(content)
    assert pairs[:2] == earlier
    assert [(pair["concurrency"], pair["pair"]) for pair in pairs] == [(1, 0), (2, 0), (1, 1), (2, 1)]


@pytest.mark.parametrize("change", [{"max_tokens": 5}, {"domains": ["math"]}, "fresh", "other drafter", "cost curve"])
def test_pairs_of_another_request_are_not_mixed_in(change, content, tiny_target):
    run(content)
    earlier = pairs_of(content)
    if change == "other drafter":
        make_tiny_drafter(content["drafter"], tiny_target, block_size=3)
    elif change == "cost curve":
        write_json(Path(content["drafter"]) / "cost_curve.json", [])
    elif change != "fresh":
        content |= change
    assert "skipped" not in run(content, fresh=change == "fresh")
    pairs = pairs_of(content)
    assert len(pairs) == 2
    assert pairs != earlier


def test_n_gram_speculation_needs_no_trained_drafter(content, tiny_target):
    target = {"name": str(tiny_target), "dtype": "float32", "device": "cpu"}
    run(content | {"drafter": "ngram", "target": target, "concurrency": [2]})
    assert [pair["identical"] for pair in pairs_of(content)] == [2]


def test_running_servers_are_measured_at_both_kinds_of_load_and_not_again(content, tmp_path, capsys):
    app = StreamingApp(tokens_per_chunk=3)
    left_out = ("drafter", "engine", "threads")
    content = {key: value for key, value in content.items() if key not in left_out}
    content |= {"concurrency": [2], "request_rates": [100.0], "rate_s": 0.05}
    with serving(app) as url:
        content["endpoints"] = {"ours": {"base_url": f"{url}/v1"}, "plain": {"base_url": f"{url}/v1", "model": "m"}}
        result = run(content)
        assert list(result["load"]["greedy"]) == ["2 at once", "100 per second"]
        assert result["load"]["greedy"]["2 at once"]["plain_ratio"] > 0
        assert result["tokens"] == 2 * (2 + 5) * NUM_TOKENS
        assert "100 per second" in capsys.readouterr().out
        asked = len(app.bodies)
        assert run(content) == result | {"skipped": True}
        assert len(app.bodies) == asked


def test_a_dry_run_says_what_would_be_measured_and_writes_nothing(content, capsys):
    assert run(content | {"pairs": 3}, dry_run=True)["to_do"] == 6
    assert "6 to measure, at most 144 tokens" in capsys.readouterr().out  # 2 sides, 2 + 2 requests, 3 pairs, 6 tokens
    assert not Path(content["output"]).exists()


def test_without_the_drafter_it_names_the_job_that_makes_it(content):
    with pytest.raises(MissingInput, match=r"jobs/train\.py"):
        run(content | {"drafter": "nowhere"})


def test_as_a_command_it_ends_with_one_line_of_json(content, tmp_path, capsys):
    write_json(tmp_path / "benchmark.yaml", content)  # JSON is YAML
    arguments = ["--config", str(tmp_path / "benchmark.yaml"), "concurrency=[1]"]
    assert runner.main(BenchmarkConfig, benchmark.run, default_config="benchmark.yaml", argv=arguments) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["stage"] == "benchmark"
