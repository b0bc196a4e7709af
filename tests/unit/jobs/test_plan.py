"""The plan job from its command line: from numbers alone, from a drafter's folder, and what it refuses."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import plan
import runner
from dspark.provenance import write_json
from dspark.speculation.cost_curve import CostCurve

REPOSITORY = Path(__file__).resolve().parents[3]


def run_job(capsys: pytest.CaptureFixture[str], config: str, *overrides: str) -> tuple[int, Any, str]:
    argv = ["--config", config, *overrides, "tracking.enabled=false"]
    status = runner.main(plan.PlanConfig, plan.run, default_config="plan.yaml", argv=argv)
    out, err = capsys.readouterr()
    return status, json.loads(out.splitlines()[-1]) if status == 0 else None, out + err


@pytest.fixture
def curve(tmp_path: Path) -> Path:
    made = CostCurve((1, 16, 256), (0.01, 0.012, 0.12), (1, 64), (0.001, 0.01), fingerprint={"device": "toy"})
    made.save(tmp_path / "drafter" / "cost_curve.json")
    return tmp_path / "drafter"


def test_numbers_alone_make_a_plan(
    curve: Path, tmp_path: Path, tiny_target: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    status, result, out = run_job(
        capsys, "configs/tiny/plan.yaml", f"curve={curve}", "tau=2.5", "concurrency=[1,8,256]",
        f"target.name={tiny_target}", f"output={tmp_path}/plan",
    )  # fmt: skip
    assert status == 0
    assert [row["requests"] for row in result["loads"]] == [1, 8, 256]
    assert result["loads"][0]["speedup"] > 1.2
    assert 256 not in result["pays_at"]
    assert "do not speculate" in out
    cache = result["cache"]
    assert cache["bytes"] == 15_000 * (5 + 2 * 5 * 64) + 10_000 * (4 + 2 * 64)  # a hidden size of 64
    training = result["training"]
    assert training["seconds_at_most"] == pytest.approx(training["max_anchors"] / 500, abs=0.1)
    assert json.loads((tmp_path / "plan" / "plan.json").read_text())["loads"] == result["loads"]


def test_the_pace_is_that_of_an_earlier_training(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    write_json(tmp_path / "result.json", {"anchors": 1000, "seconds": 4.0})
    changes = ["anchors_per_s=null", f"output={tmp_path}/plan", "cache=null"]
    _, result, _ = run_job(capsys, "configs/tiny/plan.yaml", f"trained={tmp_path}", *changes)
    assert result["training"]["anchors_per_s"] == 250.0
    _, result, out = run_job(capsys, "configs/tiny/plan.yaml", *changes)
    assert result["training"]["seconds_at_most"] is None
    assert "not known" in out


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["tau=2"], "tau alone tells no gain; give curve"),
        (["curve=x"], "a curve alone tells no gain"),
        (["curve=x", "tau=2", "survival=[0.5]"], "survival and tau both say"),
        (["curve=x", "survival=[0.5,0.6]"], "must lie in 0..1 and not rise"),
        (["curve=/nowhere", "tau=2"], "run jobs/profile_engine.py"),
        (["target=null"], "give target"),
    ],
)
def test_what_tells_nothing_is_refused_in_one_line(
    overrides: list[str], message: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    status, _, out = run_job(capsys, "configs/tiny/plan.yaml", *overrides)
    assert status == 1
    assert message in out.splitlines()[-1]


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(sys, "argv", ["plan.py"])
    _, result, _ = run_job(capsys, "configs/tiny/plan.yaml", f"output={tmp_path}/plan", "cache=null", "--dry-run")
    assert result["dry_run"]
    assert not (tmp_path / "plan").exists()
