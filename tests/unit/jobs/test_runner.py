"""What every job does the same way: arguments in, one JSON line or one error line out."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import runner
from dspark.config import Config
from dspark.errors import MissingInput

JOBS = Path(runner.__file__).parent


class JobConfig(Config):
    seed: int = 0
    sizes: dict[str, int] = {}


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    (tmp_path / "job.yaml").write_text("seed: 3\n")
    return str(tmp_path / "job.yaml")


def run_job(config: JobConfig, *, fresh: bool = False, dry_run: bool = False) -> dict[str, Any]:
    print("work goes on")
    return {"seed": config.seed, "sizes": config.sizes, "fresh": fresh, "dry_run": dry_run, "text": "ü"}


def test_the_last_line_of_stdout_is_the_result_as_json(config_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(JobConfig, run_job, default_config="job.yaml", argv=["--config", config_file]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1]) == {"seed": 3, "sizes": {}, "fresh": False, "dry_run": False, "text": "ü"}
    assert len(lines) == 2


@pytest.mark.parametrize(
    "argv",
    [
        ["seed=7", "sizes.a=1", "--fresh", "--dry-run"],
        ["--fresh", "seed=7", "--dry-run", "sizes.a=1"],
        ["--fresh", "--dry-run", "seed=7", "sizes.a=1"],
    ],
)
def test_overrides_and_flags_come_through_in_any_order(
    config_file: str, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert runner.main(JobConfig, run_job, default_config="job.yaml", argv=["--config", config_file, *argv]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["seed"], result["sizes"], result["fresh"], result["dry_run"]) == (7, {"a": 1}, True, True)


def test_without_config_the_demo_file_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "configs" / "demo").mkdir(parents=True)
    (tmp_path / "configs" / "demo" / "job.yaml").write_text("seed: 11\n")
    monkeypatch.setattr(runner, "REPOSITORY", tmp_path)
    assert runner.main(JobConfig, run_job, default_config="job.yaml", argv=[]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["seed"] == 11


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["sed=7"], "unknown key 'sed'; did you mean 'seed'"),
        (["seed=x"], "seed = 'x'"),
        (["--config", "absent.yaml"], "config file not found: absent.yaml"),
    ],
)
def test_a_wrong_config_exits_1_with_one_line(
    config_file: str, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runner.main(JobConfig, run_job, default_config="job.yaml", argv=["--config", config_file, *argv]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def fails_with(error: Exception) -> runner.Run:
    def run(*_: object, **__: object) -> dict[str, Any]:
        raise error

    return run


def test_a_failure_the_user_can_act_on_is_one_line(config_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = fails_with(MissingInput("no answers in runs/demo;\n  run jobs/generate.py first"))
    assert runner.main(JobConfig, run, default_config="job.yaml", argv=["--config", config_file]) == 1
    assert capsys.readouterr().err == "error: no answers in runs/demo; run jobs/generate.py first\n"


def test_an_interrupted_job_says_in_one_line_how_to_go_on(config_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object, **__: object) -> dict[str, Any]:
        raise KeyboardInterrupt

    assert runner.main(JobConfig, interrupted, default_config="job.yaml", argv=["--config", config_file]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted: the same command goes on from here"


def test_a_failure_from_a_ray_worker_shows_its_cause(config_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    from ray.exceptions import RayTaskError

    error = RayTaskError("work", "Traceback (most recent call last): ...", MissingInput("no answers"))
    run = fails_with(error.as_instanceof_cause())
    assert runner.main(JobConfig, run, default_config="job.yaml", argv=["--config", config_file]) == 1
    assert capsys.readouterr().err == "error: no answers\n"


def test_any_other_failure_is_logged_with_traceback_and_ends_in_one_line(
    config_file: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    run = fails_with(KeyError("lost"))
    assert runner.main(JobConfig, run, default_config="job.yaml", argv=["--config", config_file]) == 1
    assert caplog.records[-1].exc_info is not None
    assert capsys.readouterr().err.splitlines()[-1] == "error: KeyError: 'lost'"


def test_importing_the_runner_sets_what_openmp_needs_and_leaves_the_users_own_settings() -> None:
    code = (
        "import os, sys, runner\n"
        "print(os.environ['GOMP_SPINCOUNT'], os.environ['OMP_NUM_THREADS'], 'torch' in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    environment |= {"OMP_NUM_THREADS": "7", "PYTHONPATH": os.pathsep.join([str(JOBS), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["10000", "7", "False"]
