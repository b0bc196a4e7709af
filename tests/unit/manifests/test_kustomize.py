"""Kustomizations are read with all they refer to, and a problem is found again in the file that says it."""

from pathlib import Path

import pytest

from dspark.errors import DsparkError
from dspark.manifests.documents import Document, Problem, dotted
from dspark.manifests.kustomize import Tree, read_tree, render
from dspark.manifests.schema import Schemas

ROOT = Path(__file__).resolve().parents[3]
HEAD = "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
MAP = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndata: {x: base, y: base}\n"


@pytest.fixture
def overlay(tmp_path: Path) -> Path:
    files = {
        "base/kustomization.yaml": f"{HEAD}resources: [map.yaml]\n",
        "base/map.yaml": MAP,
        "over/kustomization.yaml": f"{HEAD}resources: [../base]\npatches:\n  - path: merge.yaml\n"
        "  - {path: json.yaml, target: {kind: ConfigMap, name: a.*}}\n",
        "over/merge.yaml": "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndata: {y: merged}\n",
        "over/json.yaml": "- {op: add, path: /data/z~1w, value: added}\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path / "over"


def read(overlay: Path, schemas: Schemas) -> Tree:
    return read_tree(overlay, overlay.parent, schemas)


@pytest.mark.parametrize(
    ("place", "file"),
    [
        (("data", "x"), "base/map.yaml"),
        (("data", "y"), "over/merge.yaml"),
        (("data", "z/w"), "over/json.yaml"),
        (("kind",), "over/merge.yaml"),  # both say it: the later one
    ],
)
def test_the_last_file_that_says_the_most_of_a_place_is_told(
    overlay: Path, schemas: Schemas, place: tuple[str, ...], file: str
) -> None:
    tree = read(overlay, schemas)
    assert tree.problems == []
    assert tree.origin(Problem("over", place, None, "m", ("ConfigMap", "a"))).file == file
    assert tree.origin(Problem("over", place, None, "m", ("ConfigMap", "b"))).file == "over"


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("base/kustomization.yaml", "map.yaml", "mapp.yaml", "resources[0] = 'mapp.yaml': .*did you mean 'map.yaml'"),
        ("over/kustomization.yaml", "merge.yaml", "mrge.yaml", "patches[0].path = 'mrge.yaml': .*'merge.yaml'"),
        ("over/kustomization.yaml", "patches", "patchs", "patchs = .*did you mean 'patches'"),
        ("over/kustomization.yaml", "[../base]", "../base", "resources = '../base': must be of type array"),
        ("base/map.yaml", "\ndata:", "\nkind: X\ndata:", "key 'kind' stands twice"),
        ("base/map.yaml", MAP, "- a\n", "['a']: is no manifest"),
    ],
)
def test_what_is_wrong_in_a_kustomization_is_told(
    overlay: Path, schemas: Schemas, name: str, old: str, new: str, message: str
) -> None:
    path = overlay.parent / name
    path.write_text(path.read_text().replace(old, new))
    first, _, second = message.partition(".*")
    told = [str(problem) for problem in read(overlay, schemas).problems]
    assert any(one.startswith(name) and first in one and second in one for one in told), told


def test_rendering_applies_every_patch(overlay: Path, rendered: dict[str, list[Document]]) -> None:
    (document,) = render(overlay, overlay.parent)
    assert document.file == "over"
    assert document.content["data"] == {"x": "base", "y": "merged", "z/w": "added"}
    (overlay / "json.yaml").write_text("- {op: remove, path: /data/none}\n")
    with pytest.raises(DsparkError, match="over: kubectl kustomize refuses"):
        render(overlay, overlay.parent)


def test_places_are_written_as_people_do() -> None:
    assert dotted(("spec", "containers", 0, "image")) == "spec.containers[0].image"
    assert dotted(()) == ""
