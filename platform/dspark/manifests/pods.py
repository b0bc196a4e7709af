"""The pods that manifests describe, with what the operators add to them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any

from dspark.manifests.documents import Document, Place

CLUSTER_OF: dict[str, Place] = {
    "RayCluster": ("spec",),
    "RayJob": ("spec", "rayClusterSpec"),
    "RayService": ("spec", "rayClusterConfig"),
}
"""Where a manifest of a kind has its Ray cluster."""
DRAWN_LABELS = frozenset({"ray.io/cluster", "ray.io/identifier"})
"""Labels that the operator gives to pods of Ray with values that nobody knows before."""
GPU = "nvidia.com/gpu"
UNITS = {"m": Decimal("0.001"), "": Decimal(1), "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9)} | {
    "T": Decimal(10**12), "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30), "Ti": Decimal(2**40),
}  # fmt: skip


@dataclass(frozen=True)
class Pod:
    """A pod's template. place: of the template. group: of Ray's workers, `head`, or "" for pods that are not Ray's."""

    document: Document
    place: Place
    labels: Mapping[str, str]
    group: str = ""
    replicas: int = 1

    @property
    def spec(self) -> dict[str, Any]:
        return self.document.get(*self.place, "spec") or {}

    @property
    def containers(self) -> list[tuple[Place, dict[str, Any]]]:
        """Place and content of each, of those that run before the others too."""
        found: list[tuple[Place, dict[str, Any]]] = []
        for key in ("initContainers", "containers"):
            for number, container in enumerate(self.spec.get(key) or []):
                found.append(((*self.place, "spec", key, number), container))
        return found

    @property
    def ports(self) -> list[dict[str, Any]]:
        return [port for _, container in self.containers for port in container.get("ports") or []]

    def mount_of(self, path: str) -> dict[str, Any] | None:
        """The mount that a path of the first container lies on; None where it is in the image."""
        containers = self.spec.get("containers") or [{}]
        holding = [
            mount
            for mount in containers[0].get("volumeMounts") or []
            if PurePosixPath(path).is_relative_to(str(mount.get("mountPath")))
        ]
        return max(holding, key=lambda mount: len(str(mount.get("mountPath"))), default=None)

    def volume_of(self, path: str) -> dict[str, Any] | None:
        """The volume that a path of the first container lies on; None where it is in the image."""
        name = (self.mount_of(path) or {}).get("name")
        return next((volume for volume in self.spec.get("volumes") or [] if volume.get("name") == name), None)

    def has_port(self, port: str | int) -> bool:
        """Whether a container says that it listens there, by name or number."""
        return any(port in (one.get("name"), one.get("containerPort")) for one in self.ports)

    def has_labels(self, wanted: Mapping[str, str]) -> bool:
        return all(self.labels.get(key) == value for key, value in wanted.items())

    def amount(self, resource: str) -> Decimal:
        """Of a resource, by the limits of the first container, as Ray takes it; 0 where there is none."""
        limits = value_of_first(self.spec.get("containers"), "resources", "limits")
        return quantity(limits.get(resource, 0)) or Decimal(0)


def pods_in(documents: Sequence[Document]) -> list[Pod]:
    """All pods of the manifests."""
    return [pod for document in documents for pod in pods_of(document)]


def pods_of(document: Document) -> Iterator[Pod]:
    """The pods of one manifest."""
    if document.kind == "Deployment":
        yield _pod(document, ("spec", "template"), {}, replicas=document.get("spec", "replicas") or 1)
    if document.kind == "RayJob" and document.get("spec", "submitterPodTemplate"):
        yield _pod(document, ("spec", "submitterPodTemplate"), {})
    yield from ray_pods(document)


def ray_pods(document: Document) -> Iterator[Pod]:
    """Of a Ray cluster: the head first, then a pod for each group of workers. replicas: the most there may be."""
    base = CLUSTER_OF.get(document.kind)
    if base is None or not isinstance(document.get(*base), dict):
        return
    added = {
        "ray.io/is-ray-node": "yes",
        "app.kubernetes.io/name": "kuberay",
        "app.kubernetes.io/created-by": "kuberay-operator",
    }
    head = added | {"ray.io/node-type": "head", "ray.io/group": "headgroup"}
    yield _pod(document, (*base, "headGroupSpec", "template"), head, group="head")
    for number, worker in enumerate(document.get(*base, "workerGroupSpecs") or []):
        name = str(worker.get("groupName"))
        labels = added | {"ray.io/node-type": "worker", "ray.io/group": name}
        most = worker.get("maxReplicas") or worker.get("replicas") or 0
        place = (*base, "workerGroupSpecs", number, "template")
        yield _pod(document, place, labels, group=name, replicas=most if isinstance(most, int) else 0)


def _pod(document: Document, place: Place, added: Mapping[str, str], *, group: str = "", replicas: int = 1) -> Pod:
    own = document.get(*place, "metadata", "labels")
    return Pod(document, place, {**added, **(own if isinstance(own, dict) else {})}, group, replicas)


def value_of_first(containers: Any, *keys: str) -> dict[str, Any]:
    """A mapping within the first container; {} where it is not there."""
    node = containers[0] if isinstance(containers, list) and containers else {}
    for key in keys:
        node = node.get(key) if isinstance(node, dict) else None
    return node if isinstance(node, dict) else {}


def quantity(value: Any) -> Decimal | None:
    """Of `500m`, `2`, `4Gi`, in units; None for what is none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([a-zA-Z]*)", str(value))
    if found is None or found[2] not in UNITS:
        return None
    return Decimal(found[1]) * UNITS[found[2]]
