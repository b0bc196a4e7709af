"""What a run reads and makes, in a real SQLite store: data sets, models, versions and their stages, views, children."""

import json
import os
import time
from pathlib import Path

import pytest
from mlflow import MlflowClient

import runner
from dspark.config import Config
from dspark.run_contents import DatasetRecord, log_drafter, mark_version, register, share_view, view_hint
from dspark.tracking import TrackingConfig, start_run

SHA = "ab" * 8


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrackingConfig:
    """A store of its own; the first run in it makes the tables, which takes seconds."""
    uri = f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"
    return TrackingConfig(uri=uri, experiment="contents", register_as="drafter-of-tests")


@pytest.fixture
def client(config: TrackingConfig) -> MlflowClient:
    return MlflowClient(tracking_uri=config.uri, registry_uri=config.uri)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "large").write_text("not to be stored")
    for name in ("config.json", "model.safetensors", "provenance.json"):
        (tmp_path / name).write_text(name)
    return [tmp_path / name for name in ("config.json", "model.safetensors", "provenance.json")]


def test_a_run_tells_what_it_read(config: TrackingConfig, client: MlflowClient) -> None:
    with start_run(config) as run:
        run.log_datasets(
            [
                DatasetRecord("answers", "0123456789abcdef", "runs/answers", "training", {"rows": 12}),
                DatasetRecord("x" * 900, "f" * 64, "s3://bucket/prompts", "evaluation"),
            ]
        )
    first, second = sorted(client.get_run(str(run.run_id)).inputs.dataset_inputs, key=lambda one: len(one.dataset.name))
    assert (first.dataset.name, first.dataset.digest) == ("answers", "0123456789abcdef")
    assert json.loads(first.dataset.source) == {"uri": "runs/answers"}
    assert json.loads(first.dataset.profile) == {"rows": 12}
    assert [(tag.key, tag.value) for tag in first.tags] == [("mlflow.data.context", "training")]
    assert len(second.dataset.name) == 500


def test_a_drafter_becomes_a_model_a_version_and_is_marked_as_it_gets_further(
    config: TrackingConfig, client: MlflowClient, files: list[Path], tmp_path: Path
) -> None:
    name = str(config.register_as)
    with start_run(config) as run:
        params = {"block_size": 7, "moe": {"experts": 4}, "long": "x" * 5000}
        model_id = log_drafter(run, "dspark", files, sha256=SHA, params=params)
        other_id = log_drafter(run, "dspark", files, sha256="cd" * 8, params={})
        assert model_id is not None
        assert other_id is not None
        versions = [register(run, name, one, sha256=sha) for one, sha in ((model_id, SHA), (other_id, "cd" * 8))]
        assert versions == ["1", "2"]
    model = client.get_logged_model(model_id)
    assert (model.model_type, model.status.value, model.source_run_id) == ("drafter", "READY", run.run_id)
    assert model.params["moe.experts"] == "4"
    stored = Path(model.artifact_location.removeprefix("file://"))
    assert {path.name: path.read_text() for path in stored.iterdir()} == {path.name: path.name for path in files}
    assert not any(path.is_symlink() for path in stored.iterdir())
    with start_run(config) as run:
        runner.mark_drafter(run, config, SHA, "calibrated", {"ece.greedy": 0.01, "ece.sampled": None})
        assert mark_version(run, name, sha256="00" * 8, stage="evaluated", tags={}) == 0
    first, second = (client.get_model_version(name, version) for version in ("1", "2"))
    assert (first.tags["dspark.stage"], first.tags["dspark.ece.greedy"]) == ("calibrated", "0.01")
    assert "dspark.ece.sampled" not in first.tags
    assert second.tags["dspark.stage"] == "trained"
    assert str(client.get_model_version_by_alias(name, "newest").version) == "2"


def test_a_view_is_kept_with_the_experiment_and_found_by_its_address(
    config: TrackingConfig, client: MlflowClient
) -> None:
    with start_run(config) as run:
        columns = ["params.kind", "metrics.greedy/overall/accepted_length"]
        options = {"columns": columns, "search": "tags.kind = 'drafter'", "order_by": columns[1]}
        path = share_view(run, name="compare", **options)
        assert path == share_view(run, name="compare", **options)
        experiment_id = client.get_run(str(run.run_id)).info.experiment_id
        assert str(path).startswith(f"/#/experiments/{experiment_id}/runs?viewStateShareKey=")
        key = str(path).rpartition("=")[2]
        assert path is not None
        assert view_hint(run, path).startswith(f"comparison in MLflow: mlflow ui --backend-store-uri {config.uri}")
    state = json.loads(client.get_experiment(experiment_id).tags[f"mlflow.sharedViewState.{key}"])
    assert "metrics.`greedy/overall/accepted_length`" in state["selectedColumns"]
    assert state["orderByKey"] == "metrics.`greedy/overall/accepted_length`"
    assert path is not None
    run.uri = "http://user:secret@tracking:5000/"
    assert view_hint(run, path) == f"comparison in MLflow: http://tracking:5000{path}"


def test_runs_within_a_pipeline_are_its_children(config: TrackingConfig, client: MlflowClient) -> None:
    class Stage(Config):
        tracking: TrackingConfig = config

    with runner.track_all(config, "pipeline") as parent:
        assert os.environ["DSPARK_PARENT_RUN"] == parent.run_id
        with runner.track(Stage(), "cache") as child:
            pass
    assert "DSPARK_PARENT_RUN" not in os.environ
    assert client.get_run(str(child.run_id)).data.tags["mlflow.parentRunId"] == parent.run_id
    with runner.track(Stage(), "cache") as alone:
        pass
    assert "mlflow.parentRunId" not in client.get_run(str(alone.run_id)).data.tags


def test_the_hosts_load_is_recorded_where_it_is_asked_for(
    config: TrackingConfig, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    with start_run(config.with_changes(system_metrics=True)) as run:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if any(name.startswith("system/") for name in client.get_run(str(run.run_id)).data.metrics):
                break
            time.sleep(0.1)
    assert "system/cpu_utilization_percentage" in client.get_run(str(run.run_id)).data.metrics


def test_without_a_store_nothing_of_it_is_recorded_and_the_job_goes_on(files: list[Path]) -> None:
    with start_run(TrackingConfig(enabled=False)) as run:
        run.log_datasets([DatasetRecord("answers", "0", "x", "training")])
        assert log_drafter(run, "dspark", files, sha256=SHA, params={}) is None
        assert share_view(run, name="x", columns=["metrics.a"], search="", order_by="metrics.a") is None
        assert mark_version(run, "x", sha256=SHA, stage="evaluated", tags={}) == 0
    with runner.track_all(TrackingConfig(enabled=False), "pipeline"):
        assert "DSPARK_PARENT_RUN" not in os.environ


def test_progress_tells_pace_and_what_is_left() -> None:
    now = [0.0]
    progress = runner.Progress(40, clock=lambda: now[0])
    assert progress.said(0) == "0 of 40, 0/min, ? left"
    now[0] = 4.0
    assert progress.said(10) == "10 of 40, 2.5/s, 12 s left"
    now[0] = 600.0
    assert progress.said(10) == "10 of 40, 1/min, 30 min 00 s left"
    assert [runner.duration(s) for s in (0.4, 59.9, 61, 7300)] == ["0 s", "1 min 00 s", "1 min 01 s", "2 h 01 min"]
