"""The wiring: from the arguments in a deployment file to a Serve application."""

from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from dspark.config import build_config
from dspark.engine.loading import WITHOUT_FOLDER
from dspark.serving.config import ServeConfig
from dspark.serving.engine_client import ReplicaClient
from dspark.serving.ingress import build_app
from dspark.serving.target_replica import TargetReplica
from dspark.storage import absolute


class Ingress:
    """The HTTP API in a process of its own, so that it answers whatever a replica is doing."""

    def __init__(self, config: ServeConfig, replica: DeploymentHandle[Any]) -> None:
        self._config = config
        self._replica = replica

    def __serve_build_asgi_app__(self) -> FastAPI:  # Serve's name for it
        return build_app(ReplicaClient(self._replica), self._config)


def build(args: dict[str, Any]) -> Application:
    """The application of `args`, a ServeConfig. Raises: ValueError naming what is wrong in it."""
    config = build_config(ServeConfig, args, source="application args")
    config = _with_absolute_paths(config)
    replica = serve.deployment(
        max_ongoing_requests=config.limits.max_concurrent_requests + 16,  # so that the replica itself refuses the rest
        ray_actor_options=_replica_resources(config),
    )(TargetReplica)
    ingress = serve.deployment(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0})(serve.ingress()(Ingress))
    return ingress.bind(config, replica.bind(config))


def _with_absolute_paths(config: ServeConfig) -> ServeConfig:
    """Replicas may run in another folder than the one `serve` was started in."""
    folder = None if config.drafter in WITHOUT_FOLDER else config.drafter
    paths = {"api_keys_file": config.api_keys_file, "drafter": folder}
    resolved = {name: absolute(path) for name, path in paths.items() if path is not None}
    return config.with_changes(**resolved)


def _replica_resources(config: ServeConfig) -> dict[str, Any]:
    """Ray's CPUs are bookkeeping; the threads that a replica really uses are set by its environment."""
    environment = {
        "OMP_NUM_THREADS": str(config.threads),
        "GOMP_SPINCOUNT": "10000",  # a short spin at barriers: none doubles a step, a long one starves API and loop
        "THP_MEM_ALLOC_ENABLE": "1",  # tensors on huge pages
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    return {"num_cpus": 1, "num_gpus": _gpus(config), "runtime_env": {"env_vars": environment}}


def _gpus(config: ServeConfig) -> float:
    if config.gpus_per_replica is not None:
        return config.gpus_per_replica
    return 1.0 if ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0 else 0.0
