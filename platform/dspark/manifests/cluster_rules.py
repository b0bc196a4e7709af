"""What KubeRay refuses, or fails with later, though the schema of its kinds allows it. Of Ray clusters in any kind.

Source: KubeRay v1.7, controllers/ray/utils/validation.go, in own words; the rest is this project's.
"""

import re
from collections.abc import Iterator

from dspark.config import nearest
from dspark.manifests.documents import Document, Place, Problem
from dspark.manifests.pods import CLUSTER_OF

MAX_NAME = {"RayCluster": 53, "RayJob": 47, "RayService": 47}
START_PARAMETERS = (
    "block", "dashboard-agent-grpc-port", "dashboard-agent-listen-port", "dashboard-host", "dashboard-port",
    "disable-usage-stats", "include-dashboard", "include-log-monitor", "log-color", "log-style", "max-worker-port",
    "memory", "metrics-export-port", "min-worker-port", "no-monitor", "node-ip-address", "node-manager-port",
    "node-name", "num-cpus", "num-gpus", "object-manager-port", "object-spilling-directory", "object-store-memory",
    "plasma-directory", "plasma-store-socket-name", "port", "ray-client-server-port", "raylet-socket-name",
    "redis-password", "redis-username", "resources", "runtime-env-agent-port", "storage", "system-config", "temp-dir",
    "worker-port-list",
)  # fmt: skip
RESOURCE_PARAMETERS = ("num-cpus", "num-gpus", "memory", "resources")
FIRST_WITH_TOKENS = (2, 52)
LOGS_FOLDER, LOGS_VOLUME = "/tmp/ray", "ray-logs"
REDIS_VARIABLES = ("RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME")


def cluster_problems(document: Document, ray_version: str) -> Iterator[Problem]:
    """Of a RayCluster, RayJob or RayService. ray_version: of the image."""
    base = CLUSTER_OF.get(document.kind)
    if base is None:
        return
    yield from _name(document)
    if not isinstance(document.get(*base), dict):
        return
    yield from _version(document, base, ray_version)
    yield from _images(document, base)
    yield from _group(document, (*base, "headGroupSpec"))
    workers = document.get(*base, "workerGroupSpecs") or []
    names = [worker.get("groupName") for worker in workers]
    for number, worker in enumerate(workers):
        place = (*base, "workerGroupSpecs", number)
        if names.count(worker.get("groupName")) > 1:
            yield document.problem((*place, "groupName"), "is the name of another group too")
        yield from _group(document, place)
        yield from _replicas(document, base, place)
    yield from _autoscaling(document, base)
    yield from _fault_tolerance(document, base)


def _name(document: Document) -> Iterator[Problem]:
    most = MAX_NAME[document.kind]
    if len(document.name) > most:
        yield document.problem(("metadata", "name"), f"has more than the {most} characters of a {document.kind}'s name")
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", document.name):
        yield document.problem(("metadata", "name"), "must be small letters, digits and -, a letter first")


def _version(document: Document, base: Place, ray_version: str) -> Iterator[Problem]:
    version = str(document.get(*base, "rayVersion"))
    if version != ray_version:
        message = f"is not the Ray of the image, which constraints.txt has as {ray_version}"
        yield document.problem((*base, "rayVersion"), message, version)
    if document.get(*base, "authOptions", "mode") != "token":
        message = "must be token: without one everybody who reaches the dashboard runs code"
        yield document.problem((*base, "authOptions", "mode"), message)
    elif tuple(map(int, re.findall(r"\d+", version)[:2])) < FIRST_WITH_TOKENS:
        yield document.problem((*base, "rayVersion"), "knows no tokens (authOptions): these are of 2.52 and later")


def _images(document: Document, base: Place) -> Iterator[Problem]:
    first = ("template", "spec", "containers", 0, "image")
    head = document.get(*base, "headGroupSpec", *first)
    for number, _ in enumerate(document.get(*base, "workerGroupSpecs") or []):
        place = (*base, "workerGroupSpecs", number, *first)
        if document.get(*place) != head:
            yield document.problem(place, f"is not the head's image {head!r}: Python and Ray must be the same")


def _group(document: Document, place: Place) -> Iterator[Problem]:
    parameters = document.get(*place, "rayStartParams") or {}
    for name in parameters:
        if name == "labels":
            message = "labels of Ray stand beside rayStartParams, in `labels`"
            yield document.problem((*place, "rayStartParams", name), message)
        elif name not in START_PARAMETERS:
            message = f"is no option of `ray start`{nearest(name, START_PARAMETERS)}"
            yield document.problem((*place, "rayStartParams", name), message)
    twice = [name for name in RESOURCE_PARAMETERS if name in parameters]
    if twice and document.get(*place, "resources"):
        message = f"resources stand in rayStartParams ({', '.join(twice)}) too; keep one of them"
        yield document.problem((*place, "resources"), message)


def _replicas(document: Document, base: Place, place: Place) -> Iterator[Problem]:
    low, high = document.get(*place, "minReplicas"), document.get(*place, "maxReplicas")
    wanted = document.get(*place, "replicas")
    for name in ("minReplicas", "maxReplicas"):
        value = document.get(*place, name)
        if value is None and not document.get(*base, "enableInTreeAutoscaling"):
            yield document.problem((*place, name), "is required without autoscaling")
        if isinstance(value, int) and value < 0:
            yield document.problem((*place, name), "must not be negative")
    if isinstance(low, int) and isinstance(high, int) and low > high:
        yield document.problem((*place, "minReplicas"), f"is over maxReplicas {high}; lower it")
    elif isinstance(wanted, int) and isinstance(low, int) and isinstance(high, int) and not low <= wanted <= high:
        yield document.problem((*place, "replicas"), f"is not within minReplicas {low} and maxReplicas {high}")


def _autoscaling(document: Document, base: Place) -> Iterator[Problem]:
    if not document.get(*base, "enableInTreeAutoscaling"):
        if document.get(*base, "autoscalerOptions"):
            message = "has no effect without enableInTreeAutoscaling: true; set it, or leave this out"
            yield document.problem((*base, "autoscalerOptions"), message)
        return
    groups: list[Place] = [(*base, "headGroupSpec")]
    groups += [(*base, "workerGroupSpecs", n) for n, _ in enumerate(document.get(*base, "workerGroupSpecs") or [])]
    for place in groups:
        policy = (*place, "template", "spec", "restartPolicy")
        if document.get(*policy) not in (None, "Never"):
            yield document.problem(policy, "must be Never, or left out, under autoscaling")
        if document.get(*place, "suspend"):
            yield document.problem((*place, "suspend"), "a group cannot be suspended under autoscaling")
    mounts = (*groups[0], "template", "spec", "containers", 0, "volumeMounts")
    for number, mount in enumerate(document.get(*mounts) or []):
        if mount.get("mountPath") == LOGS_FOLDER and mount.get("name") != LOGS_VOLUME:
            message = f"must be {LOGS_VOLUME}, the volume of {LOGS_FOLDER} that the operator gives the autoscaler too"
            yield document.problem((*mounts, number, "name"), message)
    token = (*groups[0], "template", "spec", "automountServiceAccountToken")
    if document.get(*token) is False:
        yield document.problem(token, "the autoscaler in the head's pod needs its account; leave this out")


def _fault_tolerance(document: Document, base: Place) -> Iterator[Problem]:
    place = (*base, "gcsFaultToleranceOptions")
    options = document.get(*place) or {}
    head = (*base, "headGroupSpec")
    variables = document.get(*head, "template", "spec", "containers", 0, "env") or []
    for number, variable in enumerate(variables):
        if variable.get("name") in REDIS_VARIABLES:
            message = f"{variable['name']} belongs into gcsFaultToleranceOptions"
            yield document.problem((*head, "template", "spec", "containers", 0, "env", number, "name"), message)
    for name in ("redis-password", "redis-username"):
        if document.get(*head, "rayStartParams", name) is not None:
            at = (*head, "rayStartParams", name)
            yield document.problem(at, "belongs into gcsFaultToleranceOptions", hidden=True)
    if options.get("backend", "redis") == "redis" and options and not options.get("redisAddress"):
        yield document.problem((*place, "redisAddress"), "is required with Redis")
    if options.get("backend") == "rocksdb":
        yield document.problem((*place, "backend"), "is behind a feature gate of the operator that is off; use redis")
    for name in ("redisPassword", "redisUsername"):
        if (options.get(name) or {}).get("value"):
            yield document.problem((*place, name, "value"), "stands here for all to read; use valueFrom", hidden=True)
