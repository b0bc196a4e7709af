"""MLflow runs that end truthfully and never take a job down with them; the only module that imports mlflow, inside
functions: it costs a second and 170 MB, which the watcher and untracked jobs do without.
"""

import contextlib
import logging
import os
import re
import sqlite3
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dspark.errors import one_line
from dspark.outbox import Measured, Outbox, StoreAway, flatten_params
from dspark.provenance import folder_lock, temporary_sibling
from dspark.run_contents import CONTEXT, DatasetRecord
from dspark.run_lifecycle import Sigterm, mark_if_dead, open_run, process_start, reap, spawn_watcher, status_for
from dspark.tracking_config import SQLITE, resolve_uri
from dspark.tracking_config import TrackingConfig as TrackingConfig  # what configs take from here

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from mlflow import MlflowClient

WATCH_PERIOD_S = 1.0

log = logging.getLogger("dspark.tracking")


def start_run(
    config: TrackingConfig,
    *,
    params: Mapping[str, Any] | None = None,
    tags: Mapping[str, str] | None = None,
    run_id: str | None = None,
) -> "Run":
    """A run in state RUNNING: a new one, or `run_id` again after a restart. Use it as a context manager.

    Without a reachable store the run records nothing; that is said once and the job goes on.
    Runs of this experiment whose process on this host is gone are marked KILLED first.
    """
    if not config.enabled:
        return Run("", None, None)
    uri = resolve_uri(config)
    try:
        client = _connect(uri)
        experiment_id = _experiment_id(client, uri, config.experiment)
        reap(client, experiment_id)
        run_id = open_run(client, experiment_id, run_id, name=config.run_name)
    except _store_errors() as error:
        log.warning("the job goes on untracked: %s", _why(uri, error))
        return Run(uri, None, None)
    run = Run(uri, run_id, client, owns=True)
    run.read_back()
    run.set_tags(tags or {})
    run.log_params(params or {})
    if config.system_metrics:
        run.monitor_system()
    return run


def attach(uri: str, run_id: str | None) -> "Run":
    """The same run from another process, such as a training worker; it logs, but ending the run is the owner's."""
    if run_id is None:
        return Run(uri, None, None)
    try:
        if uri.startswith(SQLITE) and not Path(uri.removeprefix(SQLITE)).is_file():
            raise FileNotFoundError("no such file on this host; across hosts use an MLflow server")
        run = Run(uri, run_id, _connect(uri))
    except _store_errors() as error:
        log.warning("this process goes on without run %s: %s", run_id, _why(uri, error))
        return Run(uri, None, None)
    run.read_back()
    return run


def reap_dead_runs(config: TrackingConfig) -> list[str]:
    """Ids of runs that were RUNNING though their process on this host is gone; they are KILLED from now on."""
    uri = resolve_uri(config)
    try:
        client = _connect(uri)
        return reap(client, _experiment_id(client, uri, config.experiment))
    except _store_errors() as error:
        log.warning("dead runs were not looked for: %s", _why(uri, error))
        return []


class Run:
    """One MLflow run. Without a client (tracking off or out of reach) every call does nothing.

    As a context manager it ends FINISHED, FAILED on an exception, KILLED on Ctrl-C or SIGTERM.
    """

    def __init__(self, uri: str, run_id: str | None, client: "MlflowClient | None", *, owns: bool = False) -> None:
        self.uri = uri
        self.run_id = run_id
        self._client = client
        self._owns = owns
        self._outbox = Outbox(self._send)
        self._sigterm = Sigterm()
        self._watcher = spawn_watcher(uri, run_id) if owns and run_id else None
        self._monitor: Any = None

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record numbers at a step; a NaN or infinity counts up `<name>.nonfinite` instead of being stored."""
        if self._client is not None:
            for name, value in metrics.items():
                self._outbox.add_metric(name, float(value), int(step))
            self._outbox.flush()

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Record settings, nested ones as `a.b.c`. One too long for MLflow is cut, and whole in long_params/.

        MLflow never changes a param: another value after a resume becomes the tag `dspark.changed.<name>`.
        """
        if self._client is None:
            return
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH

        for name, value in flatten_params(params).items():
            if len(value) > MAX_PARAM_VAL_LENGTH:
                path = f"long_params/{re.sub(r'[^a-zA-Z0-9_.-]', '_', name)}.txt"
                self.log_text(value, path)
                mark = f" ... [cut, whole in {path}]"
                value = value[: MAX_PARAM_VAL_LENGTH - len(mark)] + mark
            self._outbox.add_param(name, value)
        self._outbox.flush()

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set or replace tags."""
        if self._client is not None:
            for name, value in tags.items():
                self._outbox.add_tag(name, str(value))
            self._outbox.flush()

    def log_artifact(self, path: str | Path, folder: str | None = None) -> None:
        """Store a file. Raises: FileNotFoundError if it does not exist."""
        if not Path(path).is_file():
            raise FileNotFoundError(f"no file to store with the run: {path}")
        self.store(str(path), lambda client, run_id: client.log_artifact(run_id, str(path), folder))

    def log_artifacts(self, path: str | Path, folder: str | None = None) -> None:
        """Store everything in a folder. Raises: FileNotFoundError if it does not exist."""
        if not Path(path).is_dir():
            raise FileNotFoundError(f"no folder to store with the run: {path}")
        self.store(str(path), lambda client, run_id: client.log_artifacts(run_id, str(path), folder))

    def log_text(self, text: str, path: str) -> None:
        """Store a text under `path` among the run's artifacts."""
        self.store(path, lambda client, run_id: client.log_text(run_id, text, path))

    def log_dict(self, content: dict[str, Any], path: str) -> None:
        """Store a JSON-like value under `path`, as JSON or YAML by its ending."""
        self.store(path, lambda client, run_id: client.log_dict(run_id, content, path))

    def log_figure(self, figure: "Figure", path: str) -> None:
        """Store a plot under `path`, in the format of its ending."""
        self.store(path, lambda client, run_id: client.log_figure(run_id, figure, path))

    def store(self, what: str, call: Callable[["MlflowClient", str], Any]) -> Any:
        """What `call(client, run_id)` returns; None where nothing is recorded or the store refuses, which is said."""
        if self._client is None or self.run_id is None:
            return None
        try:
            return call(self._client, self.run_id)
        except _store_errors() as error:
            log.warning("not stored with run %s: %s (%s)", self.run_id, what, one_line(error))
            return None

    def log_datasets(self, datasets: Sequence[DatasetRecord]) -> None:
        """Record what the run reads, each under what it is used for."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        inputs = [DatasetInput(Dataset(**one.fields()), [InputTag(CONTEXT, one.context)]) for one in datasets]
        self.store("inputs", lambda client, run_id: client.log_inputs(run_id, inputs))

    def monitor_system(self) -> None:
        """Record this host's processor, memory, disk, network and GPUs every ten seconds, until the run ends."""
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor as Monitor

        options = {"resume_logging": True, "tracking_uri": self.uri}
        self._monitor = self.store("system metrics", lambda _, run_id: Monitor(run_id, **options))
        if self._monitor is not None:
            self._monitor.start()

    def finish(self, status: str = "FINISHED") -> None:
        """Send what is held and, from the process that started the run, end it. Again is a no-op."""
        if self._client is not None:
            if self._monitor is not None:
                self._monitor.finish()
            self._outbox.flush(force=True)
            if self._outbox.num_lost:
                log.warning("%d measured values of run %s were lost", self._outbox.num_lost, self.run_id)
            if self._owns:
                self.store(f"status {status}", lambda client, run_id: client.set_terminated(run_id, status))
            self._client = None
        if self._watcher is not None:
            self._watcher.terminate()
            self._watcher.wait()
            self._watcher = None

    def __enter__(self) -> "Run":
        self._sigterm.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        status = status_for(error, sigterm=self._sigterm.received)
        if error is not None and status != "FINISHED":
            self.set_tags({"dspark.error": f"{type(error).__name__}: {one_line(error)}"})
        self.finish(status)
        self._sigterm.__exit__()

    def read_back(self) -> None:
        """Learn what the store has of this run from earlier; if it is away, go on without."""
        try:
            data = self._client.get_run(self.run_id).data  # type: ignore[union-attr, arg-type]
            self._outbox.continue_from(data.params, data.metrics)
        except _store_errors() as error:
            self._outbox.pause(_why(self.uri, error))

    def _send(self, metrics: list[Measured], params: dict[str, str], tags: dict[str, str]) -> None:
        from mlflow.entities import Metric, Param, RunTag

        entities = (
            [Metric(*m) for m in metrics],
            [Param(*p) for p in params.items()],
            [RunTag(*t) for t in tags.items()],
        )
        try:
            self._client.log_batch(self.run_id, *entities)  # type: ignore[union-attr, arg-type]
        except _store_errors() as error:
            if getattr(error, "error_code", "") != "INVALID_PARAMETER_VALUE":
                raise StoreAway(_why(self.uri, error)) from None
            # It would be refused again, and nothing behind it would ever be sent.
            log.warning("run %s: MLflow refuses a batch: %s", self.run_id, one_line(error))


def watch(uri: str, run_id: str, pid: int, start: str) -> None:
    """Wait until the process is gone, then mark the run KILLED if it is still RUNNING in that process's name."""
    while process_start(pid) == start:
        time.sleep(WATCH_PERIOD_S)
    mark_if_dead(client := _connect(uri), client.get_run(run_id))


def _connect(uri: str) -> "MlflowClient":
    """A client whose failures come within seconds, not after MLflow's own minutes of retries."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # a job's last line of stdout is its own
    from mlflow import MlflowClient

    if uri.startswith(SQLITE):
        path = Path(uri.removeprefix(SQLITE))
        path.parent.mkdir(parents=True, exist_ok=True)
        with folder_lock(path.parent):
            if not path.exists():  # made aside: half-made tables, or two processes making them, spoil it for good
                MlflowClient(tracking_uri=f"{SQLITE}{(aside := temporary_sibling(path))}")
                os.replace(aside, path)
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute("PRAGMA schema_version")  # MLflow would retry a file it cannot read for 100 s
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def _experiment_id(client: "MlflowClient", uri: str, name: str) -> str:
    found = client.get_experiment_by_name(name)
    if found is None:
        folder = Path(uri.removeprefix(SQLITE)).parent / "mlruns" / re.sub(r"[^a-zA-Z0-9_.-]", "_", name)
        # MLflow's own default depends on the directory the first job happened to start in.
        location = str(folder) if uri.startswith(SQLITE) else None
        try:
            return client.create_experiment(name, artifact_location=location)
        except _store_errors():
            found = client.get_experiment_by_name(name)  # another process may have made it at this moment
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    return found.experiment_id


def _store_errors() -> tuple[type[Exception], ...]:
    """What a store that is down, locked, full or not a store raises."""
    from alembic.util import CommandError
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return MlflowException, CommandError, SQLAlchemyError, sqlite3.Error, OSError


def _why(uri: str, error: BaseException) -> str:
    return re.sub(r"//[^/@]*@", "//***@", uri) + ": " + one_line(error)


if __name__ == "__main__":
    watch(os.environ["MLFLOW_TRACKING_URI"], sys.argv[2], int(sys.argv[3]), sys.argv[4])
