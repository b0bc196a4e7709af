"""The repository's own manifests, rendered once, for tests that change one thing in them."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from check_config import job_configs
from dspark.manifests.documents import Document, Problem
from dspark.manifests.kustomize import read_tree, render
from dspark.manifests.schema import Schemas
from dspark.manifests.surroundings import Surroundings, surroundings

ROOT = Path(__file__).resolve().parents[3]
K8S = ROOT / "k8s"
OVERLAYS = ("kind", "gpu", "autoscaling", "gcs-fault-tolerance")


class RememberingSchemas(Schemas):
    """One manifest is checked once: tests change one of two dozen."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._told: dict[int, tuple[Document, list[Problem]]] = {}

    def problems(self, document: Document) -> Iterator[Problem]:
        if id(document) not in self._told:  # the document is kept, so that no other gets its id
            self._told[id(document)] = document, list(super().problems(document))
        return iter(self._told[id(document)][1])


@pytest.fixture(scope="session")
def schemas() -> Schemas:
    return RememberingSchemas(K8S / "schemas")


@pytest.fixture(scope="session")
def known() -> Surroundings:
    return surroundings(ROOT, K8S, job_configs())


@pytest.fixture(scope="session")
def rendered(schemas: Schemas) -> dict[str, list[Document]]:
    """What each overlay would apply, monitoring with it; changed by nobody."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    monitoring = read_tree(K8S / "monitoring", ROOT, schemas).documents
    return {name: [*render(K8S / "overlays" / name, ROOT), *monitoring] for name in OVERLAYS}
