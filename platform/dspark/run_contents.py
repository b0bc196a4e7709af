"""What a tracked run reads and makes: data sets, drafters as models and their versions, and a view to compare runs in.

Only `tracking` imports MLflow: here its client comes from a `Run`.
"""

import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from dspark.outbox import flatten_params
from dspark.provenance import fingerprint

STAGE, SHA256 = "dspark.stage", "dspark.drafter_sha256"
CONTEXT = "mlflow.data.context"  # MLflow's tag of what a data set is used for
NEWEST = "newest"  # alias of the version that was registered last
SHARED_VIEW = "mlflow.sharedViewState."  # prefix of the experiment's tag that MLflow's page takes a view from
MAX_PARAMS = 100


@dataclass(frozen=True)
class DatasetRecord:
    """What a run reads. digest: of its content; source: path or URI; context: what it is used for."""

    name: str
    digest: str
    source: str
    context: str
    profile: Mapping[str, Any] = field(default_factory=dict)

    def fields(self) -> dict[str, str]:
        """As MLflow's Dataset takes it."""
        return {
            "name": self.name[:500],
            "digest": self.digest[:36],
            "source_type": "uri" if "://" in self.source else "local",
            "source": json.dumps({"uri": self.source}),
            "profile": json.dumps(dict(self.profile)),
        }


class Recorder(Protocol):
    """The part of `tracking.Run` that is needed here."""

    uri: str
    run_id: str | None

    def store(self, what: str, call: Any) -> Any: ...


def log_drafter(
    run: Recorder, name: str, files: Sequence[Path], *, sha256: str, params: Mapping[str, Any], stage: str = "trained"
) -> str | None:
    """Id of the logged model that holds the files, an output of the run; None where nothing is recorded."""

    def log(client: Any, run_id: str) -> str:
        experiment_id = client.get_run(run_id).info.experiment_id
        flat = {key: value[:500] for key, value in list(flatten_params(params).items())[:MAX_PARAMS]}
        model = client.create_logged_model(
            experiment_id,
            name=re.sub(r"[/:.%\"']", "_", name),
            source_run_id=run_id,
            model_type="drafter",
            params=flat,
            tags={STAGE: stage, SHA256: sha256},
        )
        for folder in sorted({file.parent for file in files}):
            _log_files(client, model.model_id, [file for file in files if file.parent == folder])
        client.finalize_logged_model(model.model_id, "READY")
        return str(model.model_id)

    found: str | None = run.store(f"model {name}", log)
    return found


def register(run: Recorder, name: str, model_id: str, *, sha256: str, stage: str = "trained") -> str | None:
    """Number of the registered version that the logged model becomes; the alias NEWEST is its from then on."""

    def make(client: Any, run_id: str) -> str:
        if not client.search_registered_models(f"name = '{name}'"):
            client.create_registered_model(name)
        tags = {STAGE: stage, SHA256: sha256}
        source = client.get_logged_model(model_id).artifact_location  # "models:/…" would be looked up in another store
        version = client.create_model_version(name, source, run_id=run_id, tags=tags, model_id=model_id)
        client.set_registered_model_alias(name, NEWEST, version.version)
        return str(version.version)

    found: str | None = run.store(f"version of {name}", make)
    return found


def mark_version(run: Recorder, name: str, *, sha256: str, stage: str, tags: Mapping[str, Any]) -> int:
    """Versions of the drafter with these weights that now say how far they have come."""

    def mark(client: Any, _: str) -> int:
        versions = [one for one in client.search_model_versions(f"name = '{name}'") if one.tags.get(SHA256) == sha256]
        for version in versions:
            for key, value in {STAGE: stage, **{f"dspark.{tag}": value for tag, value in tags.items()}}.items():
                client.set_model_version_tag(name, version.version, key, str(value))
        return len(versions)

    return run.store(f"stage of {name}", mark) or 0


def share_view(run: Recorder, *, name: str, columns: Sequence[str], search: str, order_by: str) -> str | None:
    """Address, behind the server's own, of the experiment's runs with these columns, filtered and ordered.

    columns, order_by: "metrics.x", "params.x" or "tags.x". The view is a tag of the experiment, as MLflow's own
    "share" makes one. Source: mlflow 3.17, `viewStateShareKey` of its experiment page.
    """
    shown = [_column(column) for column in columns]
    state = {
        "searchFilter": search,
        "orderByKey": _column(order_by),
        "orderByAsc": False,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "selectedColumns": ["attributes.`Created`", *shown],
        "runsExpanded": {},
        "runsPinned": [],
        "runsHidden": [],
    }
    key = fingerprint([name, state])

    def share(client: Any, run_id: str) -> str:
        experiment_id = client.get_run(run_id).info.experiment_id
        client.set_experiment_tag(experiment_id, SHARED_VIEW + key, json.dumps(state))
        return f"/#/experiments/{quote(experiment_id)}/runs?viewStateShareKey={key}"

    found: str | None = run.store("view", share)
    return found


def view_hint(run: Recorder, path: str) -> str:
    """Where to look, in words. path: from `share_view`."""
    if run.uri.startswith("http"):
        return f"comparison in MLflow: {re.sub(r'//[^/@]*@', '//', run.uri).rstrip('/')}{path}"
    return f"comparison in MLflow: mlflow ui --backend-store-uri {run.uri}, then http://127.0.0.1:5000{path}"


def _column(name: str) -> str:
    kind, _, key = name.partition(".")
    return f"{kind}.`{key}`"


def _log_files(client: Any, model_id: str, files: Sequence[Path]) -> None:
    """MLflow takes folders; a drafter's holds checkpoints, too, which are not the model."""
    with tempfile.TemporaryDirectory() as folder:
        for file in files:
            os.symlink(file.resolve(), Path(folder) / file.name)
        client.log_model_artifacts(model_id, folder)
