import json
import logging
from pathlib import Path

import pytest

import pipeline
from dspark.config import load_config
from dspark.errors import Mismatch

REPOSITORY = Path(__file__).resolve().parents[3]

RESULTS = {
    "generate": {"ok": 12, "seconds": 3.0, "tokens_per_s": 40.0},
    "cache": {"tokens": 345, "seconds": 2.0, "tokens_per_s": 170.0},
    "train": {
        "parameters": 678,
        "anchors": 90,
        "validation": {"expected_accepted_length": 1.5},
        "seconds": 5.0,
        "tokens_per_s": 60.0,
    },
    "evaluate": {
        "accepted_length": {"greedy": {"math": 2.5, "overall": 2.25}, "sampled": {"math": 2.0, "overall": 1.75}},
        "generate_comparison": {"checked": 2, "identical": 2, "dtype": "float32"},
        "seconds": 7.0,
        "tokens_per_s": 8.0,
    },
    "calibrate": {
        "mean_ece": {
            "greedy": {"before": 0.05, "after": 0.02, "floor": 0.01},
            "sampled": {"before": 0.04, "after": None, "floor": None},
        },
        "seconds": 9.0,
        "tokens_per_s": 10.0,
    },
    "profile_engine": {"seconds": 11.0, "tokens_per_s": 12.0},
    "benchmark": {
        "load": {"greedy": {"1": {"plain": 40.0, "speculative": 60.0, "ratio": 1.5, "verify_length": 2.25}}},
        "seconds": 13.0,
        "tokens_per_s": 14.0,
    },
    "ask": {"answers": [], "accepted_length_served": 1.9, "seconds": 15.0, "tokens_per_s": 16.0},
}


def test_the_summary_holds_what_each_stage_measured() -> None:
    summary = pipeline.summarize("some-target", RESULTS)
    assert (summary["target"], summary["drafter_parameters"], summary["anchors"]) == ("some-target", 678, 90)
    assert (summary["answers"], summary["tokens"]) == (12, 345)
    assert summary["accepted_length"]["sampled"] == {"math": 2.0, "overall": 1.75}
    assert summary["stages"]["train"] == {"seconds": 5.0, "tokens_per_s": 60.0}
    assert json.loads(json.dumps(summary)) == summary


def test_the_closing_table_shows_every_domain_mode_and_stage() -> None:
    lines = pipeline.format_summary(pipeline.summarize("some-target", RESULTS)).splitlines()
    assert any(line.split() == ["math", "2.50", "2.00"] for line in lines)
    assert any(line.split() == ["overall", "2.25", "1.75"] for line in lines)
    assert any(line.split() == ["greedy", "5.0%", "2.0%", "1.0%"] for line in lines)
    assert any(line.split() == ["sampled", "4.0%", "-", "-"] for line in lines)
    assert any(line.split() == ["greedy,", "1", "at", "once", "40.00", "60.00", "1.50", "2.25"] for line in lines)
    assert [line.split()[0] for line in lines[-len(RESULTS) :]] == list(pipeline.STAGES)


@pytest.mark.parametrize("name", ["demo", "tiny"])
def test_the_stages_of_a_config_set_share_their_folders(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    config = load_config(pipeline.PipelineConfig, f"configs/{name}/pipeline.yaml")
    pipeline.check_joints(
        {stage: load_config(kind, getattr(config, stage)) for stage, (kind, _) in pipeline.STAGES.items()}
    )


def test_stages_that_do_not_share_a_folder_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    configs = {
        stage: load_config(kind, f"configs/tiny/{stage}.yaml", ["cache=elsewhere"] if stage == "train" else [])
        for stage, (kind, _) in pipeline.STAGES.items()
    }
    with pytest.raises(Mismatch, match=r"train\.cache is elsewhere but cache\.output is runs/tiny/cache"):
        pipeline.check_joints(configs)


def test_a_dry_run_plans_what_can_be_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    content = "".join(f"{stage}: {REPOSITORY}/configs/tiny/{stage}.yaml\n" for stage in pipeline.STAGES)
    (tmp_path / "pipeline.yaml").write_text(f"output: runs/tiny\n{content}")
    for name in ("prompts", "deployments"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)
    result = pipeline.run(load_config(pipeline.PipelineConfig, "pipeline.yaml"), dry_run=True)
    assert result["stages"]["generate"]["prompts"] == 24
    assert "stage train cannot be planned yet" in caplog.text
    assert not (tmp_path / "runs").exists()
