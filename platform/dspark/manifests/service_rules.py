"""RayServices: what KubeRay refuses, whether what they serve is what its file says, and fits the pods it runs on."""

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import yaml

from dspark.bundled_target import PREFIX, find_bundled
from dspark.config import build_config, config_problems, nearest, read_content
from dspark.errors import DsparkError, one_line
from dspark.manifests.documents import Document, Place, Problem, dotted, shown
from dspark.manifests.pods import GPU, Pod, ray_pods
from dspark.manifests.served import KEY, PORT, SERVED_FROM, deployed
from dspark.manifests.surroundings import Surroundings
from dspark.serving.config import ServeConfig
from dspark.serving.deployment_file import ApplicationOptions, DeploymentFile, DeploymentOptions

UPGRADES = ("NewCluster", "NewClusterWithIncrementalUpgrade", "None")
CONFIG: Place = ("spec", KEY)
TIMEOUT = "ray.io/initializing-timeout"
SERVE_PORT_NAME = "serve"


def service_problems(document: Document, known: Surroundings) -> Iterator[Problem]:
    """Of a RayService."""
    if document.kind != "RayService":
        return
    yield from _operator(document)
    text = document.get(*CONFIG)
    if not isinstance(text, str):
        yield document.problem(CONFIG, "is required, as text")
        return
    try:
        content = read_content(text)
    except (yaml.YAMLError, TypeError) as error:
        yield document.problem(CONFIG, f"is no YAML mapping: {one_line(error)}", hidden=True)
        return
    problems = config_problems(DeploymentFile, content)
    for problem in problems:
        yield _inside(document, problem.location, problem.value, problem.message)
    if problems:
        return
    served = build_config(DeploymentFile, content)
    yield from _drift(document, content, known)
    yield from _reach(document, served)
    for number, application in enumerate(served.applications):
        yield from _files(document, application, number)
        yield from _room(document, application, number)
    yield from _time(document, served)


def _inside(document: Document, place: Place, value: Any, message: str) -> Problem:
    """A problem within the text of the serve config."""
    where = dotted(place)
    text = f"{where} = {shown(value)}: {message}" if where and value is not None else f"{where}: {message}".lstrip(": ")
    return document.problem(CONFIG, text, hidden=True)


def _operator(document: Document) -> Iterator[Problem]:
    kind: Place = ("spec", "upgradeStrategy", "type")
    wanted = document.get(*kind)
    if wanted is not None and wanted not in UPGRADES:
        yield document.problem(kind, f"is no way to upgrade{nearest(str(wanted), UPGRADES)}")
    if wanted == UPGRADES[1]:
        yield from _incremental(document)
    name: Place = ("spec", "rayClusterConfig", "headGroupSpec", "headService", "metadata", "name")
    if document.get(*name):
        yield document.problem(name, "must not be set: the operator names it")
    delay: Place = ("spec", "rayClusterDeletionDelaySeconds")
    if (document.get(*delay) or 0) < 0:
        yield document.problem(delay, "must not be negative")
    timeout = document.get("metadata", "annotations", TIMEOUT)
    if timeout is not None and not re.fullmatch(r"([1-9]\d*|(\d+(\.\d+)?(ms|s|m|h))+)", str(timeout)):
        yield document.problem(("metadata", "annotations", TIMEOUT), "must be like 30m, or seconds")


def _incremental(document: Document) -> Iterator[Problem]:
    place: Place = ("spec", "upgradeStrategy", "clusterUpgradeOptions")
    options = document.get(*place) or {}
    if not document.get("spec", "rayClusterConfig", "enableInTreeAutoscaling"):
        message = "NewClusterWithIncrementalUpgrade needs enableInTreeAutoscaling: true"
        yield document.problem(("spec", "upgradeStrategy", "type"), message)
    for name in ("stepSizePercent", "intervalSeconds", "gatewayClassName"):
        if not options.get(name):
            yield document.problem((*place, name), "is required, above 0")
    step, surge = options.get("stepSizePercent") or 0, options.get("maxSurgePercent", 100)
    if not 0 <= surge <= 100:
        yield document.problem((*place, "maxSurgePercent"), "must be from 0 to 100")
    if step > surge:
        yield document.problem((*place, "stepSizePercent"), f"is over maxSurgePercent {surge}")


def _drift(document: Document, content: dict[str, Any], known: Surroundings) -> Iterator[Problem]:
    place: Place = ("metadata", "annotations", SERVED_FROM)
    file = document.get(*place)
    if file is None:
        yield document.problem(place, "is required: the file in deployments/ that serveConfigV2 is written from")
        return
    try:
        wanted = deployed(known.root, file)
    except ValueError as error:
        there = [str(path.relative_to(known.root)) for path in (known.root / "deployments").glob("*.yaml")]
        yield document.problem(place, f"{error}{nearest(file, there)}")
        return
    for where, found, meant in differences(content, wanted):
        message = f"{file} says {shown(meant)}; change it there, then `make serve-config`"
        yield _inside(document, where, found, message)


def differences(found: Any, wanted: Any, place: Place = ()) -> Iterator[tuple[Place, Any, Any]]:
    """Where two contents differ, and what each has there; None for nothing."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in found | wanted:
            yield from differences(found.get(key), wanted.get(key), (*place, key))
    elif isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        for number, pair in enumerate(zip(found, wanted, strict=True)):
            yield from differences(*pair, (*place, number))
    elif found != wanted:
        yield place, found, wanted


def _reach(document: Document, served: DeploymentFile) -> Iterator[Problem]:
    """Whether the Service that the operator makes finds somebody who listens."""
    http = served.http_options
    if http.host != "0.0.0.0":
        yield _inside(document, ("http_options", "host"), http.host, "is not reached from outside the pod; use 0.0.0.0")
    if served.proxy_location != "EveryNode":
        message = "workers get ready when their proxy answers; use EveryNode"
        yield _inside(document, ("proxy_location",), served.proxy_location, message)
    for pod in ray_pods(document):
        if (SERVE_PORT_NAME, http.port) not in [(port.get("name"), port.get("containerPort")) for port in pod.ports]:
            place = (*pod.place, "spec", "containers", 0, "ports")
            message = f"holds no port {http.port} with the name {SERVE_PORT_NAME}, where Serve listens"
            yield document.problem(place, message, [port.get("containerPort") for port in pod.ports])
    if http.port != PORT:
        yield _inside(document, ("http_options", "port"), http.port, f"network policies and docs have {PORT}")


def _files(document: Document, application: ApplicationOptions, number: int) -> Iterator[Problem]:
    """Whether pods have what the application reads: a folder or a file below one of their mounts."""
    args: Place = ("applications", number, "args")
    config = application.args
    if config.api_keys_file is None:
        yield _inside(document, (*args, "api_keys_file"), None, "must be set: the API is reached from other pods")
    for name in ("drafter", "api_keys_file"):
        path = getattr(config, name)
        if path is None or (name == "drafter" and ("/" not in path or "://" in path)):
            continue
        if not path.startswith("/"):
            yield _inside(document, (*args, name), path, "must be an absolute path: replicas start elsewhere")
            continue
        for pod in ray_pods(document):
            volume = pod.volume_of(path)
            if volume is None or "emptyDir" in volume:
                mounts = pod.document.get(*pod.place, "spec", "containers", 0, "volumeMounts") or []
                paths = [str(mount.get("mountPath")) for mount in mounts]
                hint = nearest(path, paths) if volume is None else ": it is empty when they start"
                message = f"is on no volume of the pods of {pod.group} that lasts{hint}"
                yield _inside(document, (*args, name), path, message)
    if config.target.name.startswith(PREFIX):
        try:
            find_bundled(config.target.name)
        except (DsparkError, ValueError) as error:
            yield _inside(document, (*args, "target", "name"), config.target.name, one_line(error))


def _room(document: Document, application: ApplicationOptions, number: int) -> Iterator[Problem]:
    """Whether the workers can hold as many replicas as there may be."""
    workers = [pod for pod in ray_pods(document) if pod.group != "head"]
    for resource, name in (("cpu", "CPUs"), (GPU, "GPUs")):
        room = sum((pod.amount(resource) * pod.replicas for pod in workers), Decimal(0))
        needed = _needed(application, resource, workers)
        if needed > room:
            there = f"{float(needed):g} {name}, the workers have {float(room):g}"
            message = f"all replicas need {there}: some would wait for ever"
            yield _inside(document, ("applications", number, "deployments"), None, message)


def _needed(application: ApplicationOptions, resource: str, workers: list[Pod]) -> Decimal:
    config: ServeConfig = application.args
    by_default = 1 if any(pod.amount(GPU) for pod in workers) else 0
    total = Decimal(0)
    for deployment in application.deployments:
        scaled = deployment.autoscaling_config
        replicas = deployment.num_replicas if scaled is None else scaled.max_replicas
        each: float = 0
        if deployment.name == "TargetReplica":
            gpus = config.gpus_per_replica
            each = 1 if resource == "cpu" else by_default if gpus is None else gpus
        elif deployment.name == "DraftReplica" and config.draft_replicas is not None:
            gpus = config.draft_replicas.gpus_per_replica
            each = config.draft_replicas.cpus_per_replica
            if resource != "cpu":
                each = by_default if gpus is None else gpus
        total += replicas * Decimal(str(each))
    return total


def _drain_s(deployment: DeploymentOptions, application: ApplicationOptions) -> float:
    """Seconds that a replica is given to end what it began. The API's own default is within the delay below."""
    by_default = application.args.failover.drain_s if deployment.name == "TargetReplica" else 0
    return deployment.graceful_shutdown_timeout_s or by_default


def _time(document: Document, served: DeploymentFile) -> Iterator[Problem]:
    """Whether pods, and clusters that were replaced, are given the time to end what they began."""
    longest = max((_drain_s(one, app) for app in served.applications for one in app.deployments), default=0)
    for pod in ray_pods(document):
        place = (*pod.place, "spec", "terminationGracePeriodSeconds")
        if (document.get(*place) or 30) <= longest:
            yield document.problem(place, f"must be over every graceful_shutdown_timeout_s, {longest:g}")
    request = max(application.args.limits.request_timeout_s for application in served.applications)
    delay: Place = ("spec", "rayClusterDeletionDelaySeconds")
    if (document.get(*delay) or 60) <= request:
        message = f"must be over limits.request_timeout_s, {request:g}: requests end on the old cluster"
        yield document.problem(delay, message)
