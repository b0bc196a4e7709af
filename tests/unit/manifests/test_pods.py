"""Pods as manifests and operators make them."""

from decimal import Decimal

import pytest

from dspark.manifests.documents import Document
from dspark.manifests.pods import pods_of, quantity


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("500m", "0.5"),
        ("2", "2"),
        (2, "2"),
        ("1.5", "1.5"),
        ("4Gi", str(4 * 2**30)),
        ("5Ti", str(5 * 2**40)),
        ("3k", "3000"),
    ],
)
def test_quantities_are_read_as_kubernetes_does(text: str | int, amount: str) -> None:
    assert quantity(text) == Decimal(amount)


@pytest.mark.parametrize("text", ["", "4Gib", "four", "-1", "1e", None])
def test_what_is_no_quantity_is_none(text: str | None) -> None:
    assert quantity(text) is None


def test_pods_of_ray_have_the_operators_labels_and_their_own() -> None:
    template = {"metadata": {"labels": {"own": "x", "app.kubernetes.io/name": "mine"}}, "spec": {"containers": [{}]}}
    spec = {"headGroupSpec": {"template": template}}
    spec["workerGroupSpecs"] = [{"groupName": "g", "maxReplicas": 3, "template": template}]  # type: ignore[assignment]
    head, worker = pods_of(Document("f", {"kind": "RayCluster", "spec": spec}))
    assert head.has_labels({"ray.io/node-type": "head", "own": "x", "app.kubernetes.io/name": "mine"})
    assert (worker.labels["ray.io/group"], worker.labels["ray.io/node-type"], worker.replicas) == ("g", "worker", 3)


def test_the_longest_mount_holds_a_path() -> None:
    mounts = [{"name": "a", "mountPath": "/app"}, {"name": "b", "mountPath": "/app/runs"}]
    template = {"spec": {"containers": [{"volumeMounts": mounts}]}}
    (pod,) = pods_of(Document("f", {"kind": "Deployment", "spec": {"template": template}}))
    found = [pod.mount_of(path) for path in ("/app/runs/demo", "/app/jobs", "/application")]
    assert [mount and mount["name"] for mount in found] == ["b", "a", None]
