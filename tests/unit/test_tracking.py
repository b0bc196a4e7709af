"""Runs in a real SQLite store: what they hold, how they end, and that a job outlives its store."""

import logging
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from mlflow import MlflowClient

from dspark.tracking import Run, TrackingConfig, attach, reap_dead_runs, start_run
from dspark.tracking_config import resolve_uri

DOWN = "http://127.0.0.1:9"  # the discard port: nothing listens
JOB = """
import os, sys, time
from dspark.tracking import TrackingConfig, start_run
with start_run(TrackingConfig(uri=sys.argv[1], experiment=sys.argv[2])) as run:
    print(run.run_id, flush=True)
    {body}
"""


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store of its own; the first run in it makes the tables, which takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture
def config(uri: str, request: pytest.FixtureRequest) -> TrackingConfig:
    return TrackingConfig(uri=uri, experiment=request.node.name)


@pytest.fixture
def client(uri: str) -> MlflowClient:
    return MlflowClient(tracking_uri=uri)


def start_job(config: TrackingConfig, body: str) -> tuple["subprocess.Popen[str]", str]:
    """A process in a run of its own that executes `body`; its run id."""
    command = [sys.executable, "-c", JOB.format(body=body), str(config.uri), config.experiment]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def status_of(client: MlflowClient, run_id: str) -> str:
    return str(client.get_run(run_id).info.status)


def artifact(client: MlflowClient, run_id: str, path: str, folder: Path) -> str:
    return Path(client.download_artifacts(run_id, path, str(folder))).read_text()


def test_a_run_holds_params_tags_metrics_and_artifacts(
    config: TrackingConfig, client: MlflowClient, tmp_path: Path
) -> None:
    (tmp_path / "file.txt").write_text("content")
    with start_run(config, params={"optimizer": {"lr": 0.1}, "name": "x"}, tags={"kind": "test"}) as run:
        assert run.run_id is not None
        run.log_metrics({"loss": 2.0}, 0)
        run.log_metrics({"loss": 1.0, "accepted_length": 2.5}, 1)
        run.log_artifact(tmp_path / "file.txt", "sub")
        run.log_artifacts(tmp_path, "all")
        run.log_text("text", "note.txt")
        run.log_dict({"a": 1}, "plan.json")
        run.log_figure(Figure(), "plot.png")
    stored = client.get_run(run.run_id)
    assert stored.info.status == "FINISHED"
    assert stored.data.params == {"optimizer.lr": "0.1", "name": "x"}
    assert stored.data.tags["kind"] == "test"
    assert stored.data.metrics == {"loss": 1.0, "accepted_length": 2.5}
    history = client.get_metric_history(run.run_id, "loss")
    assert sorted((point.step, point.value) for point in history) == [(0, 2.0), (1, 1.0)]
    names = {entry.path for entry in client.list_artifacts(run.run_id)}
    assert names == {"sub", "all", "note.txt", "plan.json", "plot.png"}
    assert artifact(client, run.run_id, "sub/file.txt", tmp_path) == "content"


def test_artifacts_lie_beside_the_database_wherever_the_job_was_started(
    config: TrackingConfig, client: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with start_run(config) as run:
        run.log_text("text", "note.txt")
    assert list(tmp_path.iterdir()) == []
    location = Path(client.get_run(str(run.run_id)).info.artifact_uri)
    assert location.is_relative_to(Path(str(config.uri).removeprefix("sqlite:///")).parent)


def test_a_param_too_long_for_mlflow_is_cut_and_stored_whole_as_an_artifact(
    config: TrackingConfig, client: MlflowClient, tmp_path: Path
) -> None:
    value = "0123456789" * 1000
    with start_run(config, params={"data": {"prompts": value}}) as run:
        run.log_metrics({"loss": 1.0}, 0)
    stored = client.get_run(str(run.run_id))
    assert stored.data.params["data.prompts"].startswith("0123456789")
    assert stored.data.params["data.prompts"].endswith("[cut, whole in long_params/data.prompts.txt]")
    assert artifact(client, str(run.run_id), "long_params/data.prompts.txt", tmp_path) == value
    assert stored.data.metrics == {"loss": 1.0}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_nonfinite_metric_is_flagged_and_not_stored_as_a_number(
    config: TrackingConfig, client: MlflowClient, value: float
) -> None:
    with start_run(config) as run:
        run.log_metrics({"loss": value, "other": 1.0}, 7)
    data = client.get_run(str(run.run_id)).data
    assert data.metrics == {"loss.nonfinite": 1.0, "other": 1.0}
    assert data.tags["dspark.nonfinite.loss"] == f"{value} at step 7"


def test_an_exception_marks_the_run_failed_and_goes_on(config: TrackingConfig, client: MlflowClient) -> None:
    with pytest.raises(ZeroDivisionError), start_run(config) as run:
        run.log_metrics({"loss": 1 / 0}, 0)
    stored = client.get_run(str(run.run_id))
    assert stored.info.status == "FAILED"
    assert stored.data.tags["dspark.error"] == "ZeroDivisionError: division by zero"


def test_ctrl_c_marks_the_run_killed(config: TrackingConfig, client: MlflowClient) -> None:
    with pytest.raises(KeyboardInterrupt), start_run(config) as run:
        raise KeyboardInterrupt
    assert status_of(client, str(run.run_id)) == "KILLED"


def test_sigterm_marks_the_run_killed_and_the_exit_code_says_so(config: TrackingConfig, client: MlflowClient) -> None:
    process, run_id = start_job(config, "time.sleep(60)")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 143
    assert status_of(client, run_id) == "KILLED"


def test_kill_9_is_marked_within_seconds_without_another_run(config: TrackingConfig, client: MlflowClient) -> None:
    process, run_id = start_job(config, "time.sleep(60)")
    assert status_of(client, run_id) == "RUNNING"
    process.kill()
    deadline = time.monotonic() + 60
    while status_of(client, run_id) == "RUNNING" and time.monotonic() < deadline:
        time.sleep(0.2)
    process.wait()
    stored = client.get_run(run_id)
    assert stored.info.status == "KILLED"
    assert str(process.pid) in stored.data.tags["dspark.reaped"]


def test_the_next_run_marks_what_died_unwatched(config: TrackingConfig, client: MlflowClient) -> None:
    process, dead = start_job(config, "run._watcher.kill(); os.kill(os.getpid(), 9)")
    process.wait()
    with start_run(config) as alive:
        assert status_of(client, dead) == "KILLED"
        assert reap_dead_runs(config) == []
        assert status_of(client, str(alive.run_id)) == "RUNNING"


def test_a_run_is_resumed_under_its_id_and_watched_for_the_new_process(
    config: TrackingConfig, client: MlflowClient
) -> None:
    with start_run(config, params={"lr": 0.1}) as first:
        first.log_metrics({"loss": 2.0}, 0)
    client.set_tag(str(first.run_id), "dspark.pid", "1")
    with start_run(config, params={"lr": 0.2, "new": 1}, run_id=first.run_id) as second:
        assert second.run_id == first.run_id
        assert status_of(client, str(second.run_id)) == "RUNNING"
        second.log_metrics({"loss": 1.0}, 1)
    stored = client.get_run(str(first.run_id))
    assert stored.info.status == "FINISHED"
    assert stored.data.params == {"lr": "0.1", "new": "1"}
    assert stored.data.tags["dspark.changed.lr"] == "0.2"
    assert stored.data.tags["dspark.pid"] == str(os.getpid())
    assert len(client.get_metric_history(str(first.run_id), "loss")) == 2


def test_a_run_id_the_store_does_not_have_gets_a_new_run(config: TrackingConfig, client: MlflowClient) -> None:
    with start_run(config, run_id="0" * 32) as run:
        assert run.run_id not in (None, "0" * 32)
    assert client.get_run(str(run.run_id)).data.tags["dspark.continues"] == "0" * 32


def test_a_worker_logs_to_the_run_but_does_not_end_it(config: TrackingConfig, client: MlflowClient) -> None:
    with start_run(config) as run:
        with attach(run.uri, run.run_id) as worker:
            worker.log_metrics({"loss": 1.0}, 0)
        assert status_of(client, str(run.run_id)) == "RUNNING"
    assert client.get_run(str(run.run_id)).data.metrics == {"loss": 1.0}


def test_a_worker_on_another_host_makes_no_database_of_its_own(tmp_path: Path) -> None:
    run = attach(f"sqlite:///{tmp_path}/mlflow.db", "0" * 32)
    run.log_metrics({"loss": 1.0}, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_watcher_ends_with_its_run(config: TrackingConfig) -> None:
    run = start_run(config)
    watcher = run._watcher
    assert watcher is not None
    assert watcher.poll() is None
    run.finish()
    assert watcher.returncode is not None


def test_two_processes_may_use_a_new_store_at_once(tmp_path: Path) -> None:
    config = TrackingConfig(uri=f"sqlite:///{tmp_path}/new/mlflow.db", experiment="first")
    command = [sys.executable, "-c", JOB.format(body=""), str(config.uri), config.experiment]
    jobs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    run_ids = [job.communicate(timeout=120)[0].strip() for job in jobs]
    client = MlflowClient(tracking_uri=str(config.uri))
    assert [status_of(client, run_id) for run_id in run_ids] == ["FINISHED", "FINISHED"]


def exercise(run: Run, folder: Path) -> None:
    (folder / "file.txt").write_text("content")
    run.log_params({"a": "x" * 10_000})
    run.set_tags({"b": "c"})
    run.log_metrics({"loss": 1.0, "bad": math.nan}, 0)
    run.log_artifact(folder / "file.txt")
    run.log_artifacts(folder)
    run.log_text("text", "note.txt")


@pytest.mark.parametrize("broken", ["server down", "no database", "folder not writable"])
def test_a_job_goes_on_when_the_store_cannot_be_used(
    broken: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "rubbish.db").write_text("this is not a database, and long enough to be looked at\n" * 20)
    uri = {"server down": DOWN, "no database": f"sqlite:///{tmp_path}/rubbish.db"}.get(
        broken, f"sqlite:///{tmp_path}/rubbish.db/below/mlflow.db"
    )
    started = time.monotonic()
    with start_run(TrackingConfig(uri=uri), params={"a": 1}) as run:
        assert run.run_id is None
        exercise(run, tmp_path)
    assert time.monotonic() - started < 30
    assert [record.levelno for record in caplog.records if record.name == "dspark.tracking"] == [logging.WARNING]


def test_a_job_goes_on_when_the_server_goes_away_later(tmp_path: Path) -> None:
    started = time.monotonic()
    with attach(DOWN, "0" * 32) as run:
        for step in range(200):
            run.log_metrics({"loss": 1.0}, step)
    assert time.monotonic() - started < 30


def test_tracking_that_is_off_needs_no_store(tmp_path: Path) -> None:
    with start_run(TrackingConfig(uri=f"sqlite:///{tmp_path}/sub/mlflow.db", enabled=False)) as run:
        exercise(run, tmp_path)
    assert not (tmp_path / "sub").exists()
    with attach(run.uri, run.run_id) as worker:
        exercise(worker, tmp_path)


def test_a_missing_artifact_is_the_callers_mistake(config: TrackingConfig, tmp_path: Path) -> None:
    with start_run(config) as run:
        with pytest.raises(FileNotFoundError, match=r"absent\.txt"):
            run.log_artifact(tmp_path / "absent.txt")
        with pytest.raises(FileNotFoundError, match="absent"):
            run.log_artifacts(tmp_path / "absent")


def test_a_password_in_the_uri_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    start_run(TrackingConfig(uri=DOWN.replace("//", "//user:secret@")))
    assert "127.0.0.1" in caplog.text
    assert "//***@" in caplog.text


def test_resolve_uri_does_not_depend_on_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert resolve_uri(TrackingConfig()) == f"sqlite:///{tmp_path}/mlflow.db"
    assert resolve_uri(TrackingConfig(uri="sqlite:///runs/a.db")) == f"sqlite:///{tmp_path}/runs/a.db"
    assert resolve_uri(TrackingConfig(uri="sqlite:////abs/a.db")) == "sqlite:////abs/a.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    assert resolve_uri(TrackingConfig()) == "http://tracking:5000"
    assert resolve_uri(TrackingConfig(uri="sqlite:////abs/a.db")) == "sqlite:////abs/a.db"


@pytest.mark.parametrize("uri", ["mlruns", "file:./mlruns", "file:///abs/mlruns"])
def test_a_folder_as_store_is_refused_with_the_remedy(uri: str) -> None:
    with pytest.raises(ValueError, match=r"use sqlite:///<file> or http://"):
        resolve_uri(TrackingConfig(uri=uri))
