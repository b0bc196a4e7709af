"""Where runs are recorded, as every job's config says it."""

import os
from pathlib import Path

from dspark.config import Config

SQLITE = "sqlite:///"


class TrackingConfig(Config):
    """Where runs are recorded."""

    uri: str | None = None
    """MLflow store, `sqlite:///file` or `http://host:port`; None takes $MLFLOW_TRACKING_URI, else ./mlflow.db."""
    experiment: str = "dspark"
    """Name under which runs are compared; made on first use."""
    run_name: str | None = None
    """Name shown for the run; None lets MLflow choose."""
    register_as: str | None = None
    """Name of a registered model of which each trained drafter becomes a version; tags tell how far it has come. None
    registers nothing."""
    system_metrics: bool = False
    """Record the host's load beside the run's own figures, every ten seconds."""
    enabled: bool = True
    """False records nothing and needs no store."""


def resolve_uri(config: TrackingConfig) -> str:
    """The store's URI, the same from every working directory. Raises: ValueError for a store MLflow 3 refuses."""
    uri = config.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"{SQLITE}mlflow.db"
    if uri.startswith(SQLITE):
        return SQLITE + str(Path(uri.removeprefix(SQLITE)).absolute())
    if "://" not in uri or uri.startswith("file:"):
        raise ValueError(f"tracking uri {uri!r} is a folder, and MLflow 3 writes none; use {SQLITE}<file> or http://…")
    return uri
