"""The profile job on a tiny target: what it writes, who finds it, and when it is measured again."""

import json
from pathlib import Path
from typing import Any

import pytest

import profile_engine
import runner
from dspark.config import build_config
from dspark.engine.config import EngineConfig
from dspark.engine.loading import load_engine
from dspark.errors import MissingInput
from dspark.evaluation.profiling import ProfileConfig
from dspark.provenance import read_json, write_json
from dspark.speculation.cost_curve import CostCurve
from dspark.targets import TargetConfig
from tiny_drafter import make_tiny_drafter


@pytest.fixture
def content(tmp_path: Path, tiny_target: Path) -> dict[str, Any]:
    return {
        "drafter": str(make_tiny_drafter(tmp_path / "drafter", tiny_target)),
        "output": str(tmp_path / "profile"),
        "batch_tokens": [1, 4, 8],
        "draft_requests": [1, 3],
        "context_tokens": 20,
        "max_requests": 4,
        "repeats": 2,
        "threads": 1,
        "evaluation": str(tmp_path / "evaluation"),
        "tracking": {"enabled": False},
    }


def run(content: dict[str, Any], **options: Any) -> dict[str, Any]:
    return profile_engine.run(build_config(ProfileConfig, content), **options)


def test_the_curve_is_written_where_an_engine_on_this_machine_finds_it(content, tiny_target, capsys):
    result = run(content)
    assert list(result["verify_ms"]) == ["1", "4", "8"]
    assert list(result["draft_ms"]) == ["1", "3"]
    table = capsys.readouterr().out
    assert "each request of a step beside the first" in table
    target = TargetConfig(name=str(tiny_target), dtype="float32", device="cpu")
    loaded = load_engine(target, content["drafter"], config=EngineConfig(kv_tokens=256), num_threads=1)
    assert loaded.engine.policy.curve == CostCurve.load(Path(content["drafter"]) / "cost_curve.json")
    assert not any("cost curve" in note for note in loaded.notes)


def test_another_number_of_threads_is_another_curve(content, tiny_target):
    run(content)
    target = TargetConfig(name=str(tiny_target), dtype="float32", device="cpu")
    other = build_config(ProfileConfig, content | {"threads": 2}).request(target)["fingerprint"]
    with pytest.raises(MissingInput, match="num_threads is 1 there and 2 here"):
        CostCurve.load(Path(content["drafter"]) / "cost_curve.json", other)


def test_a_second_run_measures_nothing_and_says_the_same(content):
    first = run(content)
    curve = (Path(content["drafter"]) / "cost_curve.json").read_bytes()
    assert run(content) == first | {"skipped": True}
    assert (Path(content["drafter"]) / "cost_curve.json").read_bytes() == curve


@pytest.mark.parametrize("change", [{"repeats": 3}, {"context_tokens": 21}, "fresh", "curve gone", "other drafter"])
def test_it_is_measured_again_when_asked_to_or_when_what_was_measured_has_changed(change, content, tiny_target):
    run(content)
    options = {"fresh": change == "fresh"}
    if change == "curve gone":
        (Path(content["drafter"]) / "cost_curve.json").unlink()
    elif change == "other drafter":
        make_tiny_drafter(content["drafter"], tiny_target, block_size=3)
    elif change != "fresh":
        content |= change
    assert "skipped" not in run(content, **options)
    assert len(read_json(Path(content["drafter"]) / "cost_curve.json")) == 1


def test_verify_lengths_are_shown_once_there_is_an_evaluation(content, capsys):
    assert run(content)["verify_length"] == {}
    write_json(
        Path(content["evaluation"]) / "metrics.json", {"modes": {"greedy": {"overall": {"survival": [0.9, 0.8]}}}}
    )
    result = run(content)
    assert result["skipped"]
    assert list(result["verify_length"]) == ["1", "2", "4", "8", "16", "32"]
    profile = read_json(Path(content["output"]) / "profile.json")
    assert [row["requests"] for row in profile["budgets"]] == list(range(1, 33))
    assert "at once" in profile_engine.format_table(profile)


def test_without_a_drafter_the_targets_curve_goes_to_the_output(content, tiny_target):
    target = {"name": str(tiny_target), "dtype": "float32", "device": "cpu"}
    result = run(content | {"drafter": "ngram", "target": target})
    curve = CostCurve.load(Path(content["output"]) / "cost_curve.json")
    assert (curve.batch_tokens, curve.draft_requests) == ((1, 4, 8), ())
    assert result["draft_ms"] == {}
    assert not (Path(content["drafter"]) / "cost_curve.json").exists()


def test_a_dry_run_says_what_would_be_measured_and_writes_nothing(content, capsys):
    result = run(content, dry_run=True)
    assert result["dry_run"]
    assert "7 points, 3 sweeps" in capsys.readouterr().out  # 1; 4 alone, by ones; 8 alone, by fours; twice drafting
    assert not Path(content["output"]).exists()
    assert not (Path(content["drafter"]) / "cost_curve.json").exists()


def test_without_the_drafter_it_names_the_job_that_makes_it(content):
    with pytest.raises(MissingInput, match=r"jobs/train\.py"):
        run(content | {"drafter": "nowhere"})


def test_a_context_beyond_the_targets_is_refused(content):
    with pytest.raises(ValueError, match="make 518 positions, but the target was made for 512"):
        run(content | {"context_tokens": 510})


def test_as_a_command_it_ends_with_one_line_of_json(content, tmp_path, capsys):
    write_json(tmp_path / "profile.yaml", content)  # JSON is YAML
    arguments = ["--config", str(tmp_path / "profile.yaml"), "repeats=1"]
    assert runner.main(ProfileConfig, profile_engine.run, default_config="profile_engine.yaml", argv=arguments) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["stage"] == "profile_engine"
