"""The wiring: from the arguments in a deployment file to a Serve application."""

from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from dspark.config import build_config
from dspark.engine.drafter_folder import WITHOUT_FOLDER
from dspark.serving.config import URGENT, DraftReplicasConfig, RoutingConfig, ServeConfig
from dspark.serving.draft_replica import DraftReplica
from dspark.serving.draft_router import TurnRouter
from dspark.serving.ingress import build_app
from dspark.serving.replica_client import ReplicaClient
from dspark.serving.target_replica import TargetReplica
from dspark.storage import absolute

TURN_ROUTER = f"{TurnRouter.__module__}.{TurnRouter.__name__}"
MAX_DRAFT_MESSAGES = 1000  # at once to a draft replica: two per target replica, so never the limit
INGRESS_REQUESTS = 1000  # at once in one process of the API
LEAN_SERVE = {  # for the API's process, which never blocks its loop: no thread has to be switched for a chunk
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
}
INGRESS_GRACE_S = 30.0  # beyond the longest request, before a process of the API that is taken away is ended


class Ingress:
    """The HTTP API in a process of its own, so that it answers whatever a replica is doing."""

    def __init__(self, config: ServeConfig, replica: DeploymentHandle[Any]) -> None:
        self._config = config
        self._replica = replica

    def __serve_build_asgi_app__(self) -> FastAPI:  # Serve's name for it
        config = self._config
        replicas = ReplicaClient(
            self._replica,
            config.failover,
            timeout_s=config.limits.request_timeout_s,
            scales_to_zero=config.scaling.to_zero,
        )
        return build_app(replicas, config, is_behind_proxy=True)


def build(args: dict[str, Any]) -> Application:
    """The application of `args`, a ServeConfig. Raises: ValueError naming what is wrong in it."""
    config = build_config(ServeConfig, args, source="application args")
    config = _with_absolute_paths(config)
    drafts = None if config.draft_replicas is None else draft_deployment(config.draft_replicas).bind(config)
    replica = target_deployment(config).bind(config, drafts)
    ingress = serve.deployment(
        max_ongoing_requests=INGRESS_REQUESTS,
        max_queued_requests=INGRESS_REQUESTS,  # what is over that gets a 503 from Serve's proxy, in place of waiting
        backpressure_config={"status_code": 503, "retry_after_s": 1},
        graceful_shutdown_timeout_s=config.limits.request_timeout_s + INGRESS_GRACE_S,
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": LEAN_SERVE}},
    )(serve.ingress()(Ingress))
    return ingress.bind(config, replica)


def _router(config: RoutingConfig) -> RequestRouterConfig:
    fields = {
        "request_router_class": "dspark.serving.request_router:TargetRouter",
        "request_router_kwargs": config.model_dump(),
        "request_routing_stats_period_s": config.stats_period_s,
    }
    return RequestRouterConfig.model_validate(fields)


def _with_absolute_paths(config: ServeConfig) -> ServeConfig:
    """Replicas may run in another folder than the one `serve` was started in."""
    folder = None if config.drafter in WITHOUT_FOLDER else config.drafter
    paths = {"api_keys_file": config.api_keys_file, "drafter": folder}
    resolved: dict[str, Any] = {name: absolute(path) for name, path in paths.items() if path is not None}
    if config.traffic is not None:
        resolved["traffic"] = config.traffic.with_changes(folder=absolute(config.traffic.folder))
    return config.with_changes(**resolved)


def target_deployment(config: ServeConfig) -> Deployment:
    """Target replicas, each with an engine of its own."""
    return serve.deployment(
        max_ongoing_requests=config.limits.most_open(URGENT) + 16,  # so that the replica itself refuses the rest
        max_queued_requests=config.limits.most_open(URGENT),
        request_router_config=_router(config.routing),
        graceful_shutdown_timeout_s=config.failover.drain_s,
        ray_actor_options=_resources(1, config.gpus_per_replica, config.threads),
    )(TargetReplica)


def draft_deployment(settings: DraftReplicasConfig) -> Deployment:
    """Draft replicas. An engine's messages all go to one: what it keeps of their contexts is there and nowhere else."""
    return serve.deployment(
        max_ongoing_requests=MAX_DRAFT_MESSAGES,
        ray_actor_options=_resources(settings.cpus_per_replica, settings.gpus_per_replica, settings.threads),
        request_router_config=RequestRouterConfig.model_validate({"request_router_class": TURN_ROUTER}),
        logging_config={"enable_access_log": False},  # a line per step of every engine
    )(DraftReplica)


def _resources(cpus: float, gpus: float | None, threads: int) -> dict[str, Any]:
    """Ray's CPUs are bookkeeping; the threads that a replica really uses are set by its environment."""
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "GOMP_SPINCOUNT": "10000",  # a short spin at barriers: none doubles a step, a long one starves API and loop
        "THP_MEM_ALLOC_ENABLE": "1",  # tensors on huge pages
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    return {"num_cpus": cpus, "num_gpus": _gpus(gpus), "runtime_env": {"env_vars": environment}}


def _gpus(wanted: float | None) -> float:
    if wanted is not None:
        return wanted
    return 1.0 if ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0 else 0.0
