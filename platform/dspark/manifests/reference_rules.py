"""Names that manifests refer to, and labels that they select by: each must be that of something."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dspark.config import nearest
from dspark.manifests.documents import Document, Place, Problem, named
from dspark.manifests.pods import DRAWN_LABELS, Pod, pods_in
from dspark.manifests.surroundings import Surroundings

URL = re.compile(r"^(?:[a-z]+://)?([a-z][-a-z0-9]*)(?:\.[-a-z0-9.]+)?:(\d+)(?:/.*)?$")
"""Of a Service in the same cluster: a name without dots, or one that goes on with the namespace."""
LABEL = "app.kubernetes.io/component"

Keys = Mapping[str, Sequence[str] | None]
"""Keys of each ConfigMap or Secret by its name; None for any."""


def reference_problems(documents: Sequence[Document], known: Surroundings) -> Iterator[Problem]:
    """Of all manifests that are applied together."""
    yield from _twice(documents)
    pods = pods_in(documents)
    maps = {one.name: list(one.get("data") or {}) for one in named(documents, "ConfigMap")}
    secrets = {name: list(keys) or None for name, keys in known.secrets.items()}
    claims = {one.name: None for one in named(documents, "PersistentVolumeClaim")}
    for pod in pods:
        yield from _volumes(pod, maps, secrets, claims)
        yield from _environment(pod, maps, secrets)
    yield from _redis(documents, secrets)
    yield from _urls(documents)
    yield from _selectors(documents, pods)


def _twice(documents: Sequence[Document]) -> Iterator[Problem]:
    subjects = [document.subject for document in documents]
    for number, document in enumerate(documents):
        if document.subject in subjects[:number]:
            yield document.problem(("metadata", "name"), f"another {document.kind} has this name")
        if LABEL not in (document.get("metadata", "labels") or {}):
            message = f"{LABEL} is required: by it one part is applied, or removed, alone"
            yield document.problem(("metadata", "labels"), message)


def _refer(
    document: Document, place: Place, kind: str, names: Keys, *, keys: Sequence[tuple[Place, str]] = ()
) -> Iterator[Problem]:
    """Problems of a name at a place, and of keys within it."""
    name = document.get(*place)
    if name not in names:
        yield document.problem(place, f"no {kind} of this name is defined{nearest(str(name), names)}")
        return
    for at, key in keys:
        there = names[name]
        if there is not None and key not in there:
            yield document.problem(at, f"{kind} {name} has no such key{nearest(key, there)}")


def _volumes(pod: Pod, maps: Keys, secrets: Keys, claims: Keys) -> Iterator[Problem]:
    for number, volume in enumerate(pod.spec.get("volumes") or []):
        place = (*pod.place, "spec", "volumes", number)
        if "persistentVolumeClaim" in volume:
            at = (*place, "persistentVolumeClaim", "claimName")
            yield from _refer(pod.document, at, "PersistentVolumeClaim", claims)
        for field, name, kind, names in (
            ("configMap", "name", "ConfigMap", maps),
            ("secret", "secretName", "Secret", secrets),
        ):
            if source := volume.get(field):
                items = enumerate(source.get("items") or [])
                keys = [((*place, field, "items", n, "key"), str(item.get("key"))) for n, item in items]
                yield from _refer(pod.document, (*place, field, name), kind, names, keys=keys)


def _environment(pod: Pod, maps: Keys, secrets: Keys) -> Iterator[Problem]:
    document = pod.document
    for place, container in pod.containers:
        for number, source in enumerate(container.get("envFrom") or []):
            for field, kind, names in (("configMapRef", "ConfigMap", maps), ("secretRef", "Secret", secrets)):
                if field in source:
                    yield from _refer(document, (*place, "envFrom", number, field, "name"), kind, names)
        for number, variable in enumerate(container.get("env") or []):
            at = (*place, "env", number, "valueFrom")
            yield from _value_from(document, at, variable.get("valueFrom"), maps, secrets)


def _value_from(document: Document, place: Place, source: Any, maps: Keys, secrets: Keys) -> Iterator[Problem]:
    for field, kind, names in (("configMapKeyRef", "ConfigMap", maps), ("secretKeyRef", "Secret", secrets)):
        if reference := (source or {}).get(field):
            keys = [((*place, field, "key"), str(reference.get("key")))]
            yield from _refer(document, (*place, field, "name"), kind, names, keys=keys)


def _redis(documents: Sequence[Document], secrets: Keys) -> Iterator[Problem]:
    for document in documents:
        for base in (("spec",), ("spec", "rayClusterSpec"), ("spec", "rayClusterConfig")):
            options = (*base, "gcsFaultToleranceOptions")
            for name in ("redisPassword", "redisUsername"):
                place = (*options, name, "valueFrom")
                yield from _value_from(document, place, document.get(*place), {}, secrets)


def _urls(documents: Sequence[Document]) -> Iterator[Problem]:
    """Addresses in ConfigMaps, in variables and of Redis: of a Service that is there, at a port that it has."""
    services: dict[str, list[str]] = {}
    for service in named(documents, "Service"):
        services[service.name] = [str(port.get("port")) for port in service.get("spec", "ports") or []]
    for service in named(documents, "RayService"):  # by the operator
        services[f"{service.name}-serve-svc"] = ["8000"]
        services[f"{service.name}-head-svc"] = ["6379", "8000", "8080", "8265"]
    for document, place in _addresses(documents):
        found = URL.match(str(document.get(*place)))
        if found is None or found[1] == "localhost":
            continue
        if found[1] not in services:
            yield document.problem(place, f"no Service {found[1]!r} is defined{nearest(found[1], services)}")
        elif found[2] not in services[found[1]]:
            message = f"Service {found[1]} has no port {found[2]}{nearest(found[2], services[found[1]])}"
            yield document.problem(place, message)


def _addresses(documents: Sequence[Document]) -> Iterator[tuple[Document, Place]]:
    for document in documents:
        if document.kind == "ConfigMap":
            yield from ((document, ("data", key)) for key in document.get("data") or {})
        for base in (("spec",), ("spec", "rayClusterSpec"), ("spec", "rayClusterConfig")):
            yield document, (*base, "gcsFaultToleranceOptions", "redisAddress")
    for pod in pods_in(documents):
        for place, container in pod.containers:
            variables = enumerate(container.get("env") or [])
            yield from ((pod.document, (*place, "env", n, "value")) for n, one in variables if "value" in one)


def _selectors(documents: Sequence[Document], pods: Sequence[Pod]) -> Iterator[Problem]:
    check: Mapping[str, Callable[[Document, Sequence[Pod]], Iterator[Problem]]] = {
        "Service": _service,
        "Deployment": _deployment,
        "PodDisruptionBudget": _budget,
        "PodMonitor": _monitor,
        "NetworkPolicy": _policy,
    }
    for document in documents:
        if document.kind in check:
            yield from check[document.kind](document, pods)


def _chosen(document: Document, place: Place, pods: Sequence[Pod]) -> tuple[list[Pod], list[Problem]]:
    """Pods that a label selector takes, and the problem that there are none."""
    selector = document.get(*place) or {}
    wanted = selector.get("matchLabels") or {}
    kept = [pod for pod in pods if pod.has_labels({k: v for k, v in wanted.items() if k not in DRAWN_LABELS})]
    for expression in selector.get("matchExpressions") or []:
        kept = [pod for pod in kept if _fits(pod, expression)]
    if kept:
        return kept, []
    for key, value in wanted.items():
        values = {pod.labels[key] for pod in pods if key in pod.labels}
        keys = {key for pod in pods for key in pod.labels}
        if key not in keys:
            return [], [document.problem((*place, "matchLabels", key), f"no pod has this label{nearest(key, keys)}")]
        if value not in values:
            message = f"no pod has this label{nearest(value, values)}"
            return [], [document.problem((*place, "matchLabels", key), message)]
    return [], [document.problem(place, "selects no pod")]


def _fits(pod: Pod, expression: Mapping[str, Any]) -> bool:
    key, values = str(expression.get("key")), expression.get("values") or []
    is_there = key in pod.labels or (key in DRAWN_LABELS and bool(pod.group))
    operator = expression.get("operator")
    if operator in ("Exists", "DoesNotExist"):
        return is_there == (operator == "Exists")
    return (pod.labels.get(key) in values) == (operator == "In")


def _service(document: Document, pods: Sequence[Pod]) -> Iterator[Problem]:
    selector = document.get("spec", "selector") or {}
    wrapped = Document(document.file, document.content | {"selector": {"matchLabels": selector}})
    chosen, problems = _chosen(wrapped, ("selector",), pods)
    yield from (document.problem(("spec", "selector", *one.place[2:]), one.message) for one in problems)
    for number, port in enumerate(document.get("spec", "ports") or []):
        target = port.get("targetPort", port.get("port"))
        for pod in chosen:
            if not pod.has_port(target):
                names = [str(one.get("name")) for one in pod.ports]
                message = f"no container of the pods listens there{nearest(str(target), names)}"
                yield document.problem(("spec", "ports", number, "targetPort"), message, target)


def _deployment(document: Document, pods: Sequence[Pod]) -> Iterator[Problem]:
    own = [pod for pod in pods if pod.document == document]
    _, problems = _chosen(document, ("spec", "selector"), own)
    yield from problems


def _budget(document: Document, pods: Sequence[Pod]) -> Iterator[Problem]:
    chosen, problems = _chosen(document, ("spec", "selector"), pods)
    yield from problems
    if document.get("spec", "minAvailable") is not None and document.get("spec", "maxUnavailable") is not None:
        yield document.problem(("spec", "maxUnavailable"), "and minAvailable exclude each other; leave one out")
    if not any(pod.group for pod in chosen):
        return
    if document.get("spec", "maxUnavailable") is not None:
        message = "counts by a controller's scale, which a Ray cluster has not; use minAvailable with a number"
        yield document.problem(("spec", "maxUnavailable"), message)
    least, most = document.get("spec", "minAvailable"), sum(pod.replicas for pod in chosen)
    if isinstance(least, int) and least >= most:
        message = f"never lets go of one of the {most} pods it selects: no node of theirs can be drained"
        yield document.problem(("spec", "minAvailable"), message)


def _monitor(document: Document, pods: Sequence[Pod]) -> Iterator[Problem]:
    chosen, problems = _chosen(document, ("spec", "selector"), pods)
    yield from problems
    for number, endpoint in enumerate(document.get("spec", "podMetricsEndpoints") or []):
        missing = [pod for pod in chosen if not pod.has_port(str(endpoint.get("port")))]
        for pod in missing[:1]:
            names = [str(one.get("name")) for one in pod.ports]
            message = f"a pod of {'/'.join(pod.document.subject)} has no port of this name"
            message += nearest(str(endpoint.get("port")), names)
            yield document.problem(("spec", "podMetricsEndpoints", number, "port"), message)


def _policy(document: Document, pods: Sequence[Pod]) -> Iterator[Problem]:
    chosen, problems = _chosen(document, ("spec", "podSelector"), pods)
    yield from problems
    for number, rule in enumerate(document.get("spec", "ingress") or []):
        for at, peer in enumerate(rule.get("from") or []):
            if "podSelector" in peer and "namespaceSelector" not in peer:
                yield from _chosen(document, ("spec", "ingress", number, "from", at, "podSelector"), pods)[1]
        for at, port in enumerate(rule.get("ports") or []):
            if chosen and not any(pod.has_port(port.get("port")) for pod in chosen):
                message = "none of the pods listens there"
                yield document.problem(("spec", "ingress", number, "ports", at, "port"), message)
