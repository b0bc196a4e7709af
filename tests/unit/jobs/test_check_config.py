"""The check_config job: every file of the repository passes, and a wrong one is told with its place."""

import json
from pathlib import Path

import pytest

import check_config
import runner
from check_config import CheckConfig, config_file_problems, curve_problems, file_problems, job_configs
from dspark.config import Config
from dspark.errors import DsparkError
from dspark.serving.deployment_file import DeploymentFile

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def classes() -> dict[str, type[Config]]:
    return job_configs()


def test_every_job_tells_its_config_class(classes: dict[str, type[Config]]) -> None:
    assert sorted(classes) == sorted(path.stem for path in (ROOT / "jobs").glob("*.py") if path.stem != "runner")
    assert classes["check_config"] is CheckConfig


def test_the_repository_passes(capsys: pytest.CaptureFixture[str]) -> None:
    status = runner.main(CheckConfig, check_config.run, default_config="check_config.yaml", argv=[])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (status, result["problems"]) == (0, 0)
    assert result["files"] == sum(1 for folder in ("configs", "deployments") for _ in (ROOT / folder).rglob("*.yaml"))


@pytest.mark.parametrize(
    ("name", "old", "new", "told"),
    [
        ("configs/demo/train.yaml", "steps:", "step:", "train.yaml: step = 860: unknown key; did you mean 'steps'?"),
        ("configs/demo/train.yaml", "steps: 860", "steps: 0", "train.yaml: steps = 0: Input should be greater than 0"),
        ("configs/demo/train.yaml", "zero_stage: 1", "zero_stage: 7", "train.yaml: zero_stage = 7: "),
        (
            "configs/demo/train.yaml",
            "bfloat16",
            "bfloat",
            "precision = 'bfloat': Input should be 'float32' or 'bfloat16'; d",
        ),
        (
            "configs/demo/train.yaml",
            "- {until: 0.5",
            "- {untill: 0.5",
            "loss_phases[0].untill = 0.5: unknown key; did you",
        ),
        ("configs/demo/train.yaml", "output:", "cache:", "train.yaml: is no YAML mapping: key 'cache' stands twice"),
        ("configs/demo/pipeline.yaml", "demo/cache.yaml", "demo/cahe.yaml", "did you mean 'configs/demo/cache.yaml'"),
        ("deployments/dspark.yaml", "name: DraftReplica", "name: DrafReplica", "deployments[2].name = 'DrafReplica': "),
        ("deployments/dspark.yaml", "num_replicas: 2", "num_replica: 2", "deployments[1].num_replica = 2: unknown key"),
        ("deployments/dspark_autoscaling.yaml", "min_replicas: 0", "min_replicas: 3", "over max_replicas 2"),
    ],
)
def test_a_wrong_file_is_told_with_its_place(
    name: str,
    old: str,
    new: str,
    told: str,
    classes: dict[str, type[Config]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = (ROOT / name).read_text()
    assert old in text
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(text.replace(old, new, 1))
    (path.parent / "cache.yaml").touch()
    monkeypatch.setattr(check_config, "ROOT", tmp_path)
    is_deployment = name.startswith("deployments")
    found = file_problems(path, DeploymentFile) if is_deployment else config_file_problems(path, classes)
    problems = [str(problem) for problem in found]
    assert any(one.startswith(f"{name}: ") and told in one for one in problems), problems


def test_a_file_of_no_job_is_told_the_nearest(
    classes: dict[str, type[Config]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (problem,) = config_file_problems(ROOT / "configs" / "demo" / "trian.yaml", classes)
    assert str(problem) == "configs/demo/trian.yaml: is named for no job; did you mean 'train'?"


def test_a_drafter_that_is_profiled_with_other_threads_than_it_is_served_with_is_told(
    classes: dict[str, type[Config]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its replicas would look for a curve of theirs, and find none."""
    deployments = []
    for name in ("dspark", "dspark_autoscaling", "colocated", "dspark_tiny"):
        deployments.append(tmp_path / f"{name}.yaml")
        deployments[-1].write_text((ROOT / "deployments" / f"{name}.yaml").read_text())
    profiles = [tmp_path / "profile_engine.yaml", tmp_path / "profile_engine_fleet.yaml"]
    for path in profiles:
        path.write_text((ROOT / "configs" / "demo" / path.name).read_text())
    monkeypatch.setattr(check_config, "ROOT", tmp_path)
    assert list(curve_problems(profiles, deployments, classes)) == []
    problems = [str(problem) for problem in curve_problems(profiles[:1], deployments, classes)]
    assert len(problems) == 2
    told = "applications[0].args.threads = 1: the cost curve of runs/demo/drafter is measured with 2 threads"
    assert all(told in problem for problem in problems)
    profiles[1].write_text("threads: one\n")  # told of elsewhere
    assert len(list(curve_problems(profiles, deployments, classes))) == 2
    assert list(curve_problems([], deployments, classes)) == []


def test_problems_are_printed_and_end_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "train.yaml").write_text("stepps: 1\n")
    monkeypatch.setattr(check_config, "ROOT", tmp_path)
    config = CheckConfig(deployments=(), manifests=None)
    with pytest.raises(DsparkError, match="4 problems found"):
        check_config.run(config)
    assert "configs/train.yaml: stepps = 1: unknown key; did you mean 'steps'?" in capsys.readouterr().out
    assert check_config.run(config, dry_run=True)["dry_run"]
