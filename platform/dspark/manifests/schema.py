"""Manifests against JSON Schemas (Draft 7) of their kinds, each error with its place and the nearest valid name."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from dspark.config import UNKNOWN, nearest
from dspark.manifests.documents import Document, Place, Problem, shown

API_VERSIONS = {
    "RayCluster": "ray.io/v1",
    "RayJob": "ray.io/v1",
    "RayService": "ray.io/v1",
    "ConfigMap": "v1",
    "Namespace": "v1",
    "PersistentVolumeClaim": "v1",
    "Service": "v1",
    "Deployment": "apps/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "PrometheusRule": "monitoring.coreos.com/v1",
    "Kustomization": "kustomize.config.k8s.io/v1beta1",
    "Component": "kustomize.config.k8s.io/v1alpha1",
}
SECRET = "values of Secrets do not stand in files; create it by hand and name it in external.yaml"


class Schemas:
    """Those of a folder: `ray.json` and `core.yaml`, whose `$defs` refer to each other."""

    def __init__(self, folder: Path) -> None:
        ray = json.loads((folder / "ray.json").read_text(encoding="utf-8"))
        core = yaml.safe_load((folder / "core.yaml").read_text(encoding="utf-8"))
        self._definitions: dict[str, Any] = ray["$defs"] | core["$defs"]

    def problems(self, document: Document) -> Iterator[Problem]:
        """What is wrong with its kind, its version, and its fields by the kind's schema."""
        kind = document.kind
        if kind not in API_VERSIONS:
            message = SECRET if kind == "Secret" else f"unknown kind{nearest(kind, API_VERSIONS)}"
            yield document.problem(("kind",), message)
            return
        if document.get("apiVersion") != API_VERSIONS[kind]:
            yield document.problem(("apiVersion",), f"a {kind} is of {API_VERSIONS[kind]!r}")
        if "metadata" in document.content or kind not in ("Kustomization", "Component"):
            metadata = document.content.get("metadata") or {}
            yield from _found(document, self._validator("metadata"), metadata, ("metadata",))
        yield from _found(document, self._validator(kind), document.content, ())
        yield from (document.problem(place, "is empty; fill it, or leave it out") for place in _gaps(document.content))

    @cache  # noqa: B019  # one per kind, as long as the schemas live
    def _validator(self, definition: str) -> jsonschema.Draft7Validator:
        return jsonschema.Draft7Validator({"$ref": f"#/$defs/{definition}", "$defs": self._definitions})


def _found(document: Document, validator: jsonschema.Draft7Validator, content: Any, place: Place) -> Iterator[Problem]:
    for error in validator.iter_errors(content):
        at = (*place, *error.absolute_path)
        if error.validator == "additionalProperties" and isinstance(error.schema, dict):
            known = error.schema.get("properties", {})
            for key in error.instance.keys() - known.keys():
                value = error.instance[key]
                yield document.problem((*at, key), f"{UNKNOWN}{nearest(key, known)}", value)
        else:
            yield document.problem(at, _message(error), error.instance)


def _gaps(node: Any, place: Place = ()) -> Iterator[Place]:
    """Places in lists at which nothing stands."""
    if node is None and place and isinstance(place[-1], int):
        yield place
    for key, child in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from _gaps(child, (*place, key))


def _message(error: jsonschema.ValidationError) -> str:
    if error.validator == "enum":
        allowed = [str(value) for value in error.validator_value]
        return f"must be one of {', '.join(allowed)}{nearest(str(error.instance), allowed)}"
    if error.validator == "type":
        types = error.validator_value
        return f"must be of type {types if isinstance(types, str) else ' or '.join(types)}"
    if error.validator == "required":
        missing = [name for name in error.validator_value if name not in error.instance]
        return f"{', '.join(missing)} is required"
    if error.validator == "pattern":
        return f"must match {error.validator_value}"
    return f"{error.message[:120]} ({error.validator} {shown(error.validator_value)})"
