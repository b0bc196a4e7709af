"""A kustomization as it is written, with all it refers to, and as `kubectl kustomize` renders it."""

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark.config import UNKNOWN, nearest, read_documents
from dspark.errors import DsparkError, one_line
from dspark.manifests.documents import Document, Place, Problem, depth, in_file, read_manifests, read_yaml
from dspark.manifests.schema import Schemas

FILE = "kustomization.yaml"
TIMEOUT_S = 60


@dataclass(frozen=True)
class Patch:
    """One change to the manifests whose kind and name match. at: where `content` goes, () for a whole manifest."""

    file: str
    kind: str
    name: str
    at: Place
    content: Any

    def fits(self, subject: tuple[str, str]) -> bool:
        patterns = (self.kind, self.name)
        return all(re.fullmatch(pattern, text) for pattern, text in zip(patterns, subject, strict=True))

    def depth(self, place: Place) -> int:
        """How many parts of the place this change itself says; 0 where it is about others."""
        if place[: len(self.at)] != self.at:
            return 0
        return len(self.at) + depth(self.content, place[len(self.at) :])


@dataclass
class Tree:
    """All that a kustomization is made of."""

    documents: list[Document] = field(default_factory=list)
    patches: list[Patch] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    _folders: set[Path] = field(default_factory=set)

    def origin(self, problem: Problem) -> Problem:
        """The problem in the file that says what is wrong: the last one that says the most of its place."""
        sources = [_whole(document) for document in self.documents]
        fitting = [source for source in (*sources, *self.patches) if source.fits(problem.subject)]
        if not fitting:
            return problem
        best = max(range(len(fitting)), key=lambda number: (fitting[number].depth(problem.place), number))
        return in_file(problem, fitting[best].file)


def read_tree(folder: Path, root: Path, schemas: Schemas) -> Tree:
    """The kustomization of a folder, and those it builds on; what cannot be read is among its problems."""
    tree = Tree()
    _read_folder(tree, folder, root, schemas)
    return tree


def render(folder: Path, root: Path) -> list[Document]:
    """What would be applied. Raises: DsparkError where kubectl is missing or refuses."""
    program = shutil.which("kubectl")
    if program is None:
        raise DsparkError("kubectl not found: overlays cannot be rendered; install it")
    done = subprocess.run([program, "kustomize", str(folder)], capture_output=True, text=True, timeout=TIMEOUT_S)
    file = str(folder.relative_to(root))
    if done.returncode:
        raise DsparkError(f"{file}: kubectl kustomize refuses: {one_line(Exception(done.stderr))}")
    return [Document(file, content) for content in read_documents(done.stdout) if content is not None]


def _read_folder(tree: Tree, folder: Path, root: Path, schemas: Schemas) -> None:
    if folder in tree._folders:
        return
    tree._folders.add(folder)
    contents, problems = read_manifests(folder / FILE, root)
    tree.problems += problems
    for content in contents[:1]:
        kustomization = Document(str((folder / FILE).relative_to(root)), content)
        refused = list(schemas.problems(kustomization))
        tree.problems += refused
        if any(not problem.message.startswith(UNKNOWN) for problem in refused):
            continue
        for key in ("resources", "components"):
            for number, name in enumerate(kustomization.get(key) or []):
                _read_resource(tree, kustomization, (key, number), folder / name, root, schemas)
        for number, _ in enumerate(kustomization.get("patches") or []):
            _read_patch(tree, kustomization, number, folder, root)
        _generate(tree, kustomization, folder)


def _read_resource(tree: Tree, kustomization: Document, place: Place, path: Path, root: Path, schemas: Schemas) -> None:
    if path.is_dir():
        _read_folder(tree, path.resolve(), root, schemas)
        return
    if not path.is_file():
        tree.problems.append(_absent(kustomization, place, path))
        return
    contents, problems = read_manifests(path, root)
    tree.problems += problems
    tree.documents += [Document(str(path.relative_to(root)), content) for content in contents]


def _read_patch(tree: Tree, kustomization: Document, number: int, folder: Path, root: Path) -> None:
    entry = kustomization.get("patches", number)
    path = folder / str(entry.get("path"))
    if not path.is_file():
        tree.problems.append(_absent(kustomization, ("patches", number, "path"), path))
        return
    contents, problems = read_yaml(path, root)
    tree.problems += problems
    target = entry.get("target") or {}
    for content in contents:
        tree.patches += _patches(str(path.relative_to(root)), content, target)


def _patches(file: str, content: Any, target: dict[str, str]) -> Iterator[Patch]:
    """A list holds JSON patches (RFC 6902), a mapping is merged."""
    kind, name = target.get("kind", ".*"), target.get("name", ".*")
    if isinstance(content, dict):
        yield Patch(file, kind, name, (), content) if target else _whole(Document(file, content))
        return
    for operation in content:
        yield Patch(file, kind, name, _place(operation["path"]), operation.get("value"))


def _whole(document: Document) -> Patch:
    """A manifest as if it were merged into itself."""
    return Patch(document.file, re.escape(document.kind), re.escape(document.name), (), document.content)


def _place(pointer: str) -> Place:
    """Of a JSON pointer (RFC 6901)."""
    parts = [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]
    return tuple(int(part) if part.isdecimal() else part for part in parts)


def _generate(tree: Tree, kustomization: Document, folder: Path) -> None:
    """ConfigMaps as they are generated, by name and keys."""
    for number, entry in enumerate(kustomization.get("configMapGenerator") or []):
        for at, name in enumerate(entry.get("files") or []):
            if not (folder / name).is_file():
                tree.problems.append(_absent(kustomization, ("configMapGenerator", number, "files", at), folder / name))
        metadata = {"name": entry.get("name"), "labels": (entry.get("options") or {}).get("labels") or {}}
        content = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
        content["data"] = {Path(name).name: "" for name in entry.get("files") or []}
        tree.documents.append(Document(kustomization.file, content))


def _absent(kustomization: Document, place: Place, path: Path) -> Problem:
    there = [other.name for other in path.parent.glob("*")] if path.parent.is_dir() else []
    return kustomization.problem(place, f"there is no such file{nearest(path.name, there)}")


def unused_files(folder: Path, trees: Sequence[Tree], root: Path) -> Iterator[Problem]:
    """YAML files below a folder that no kustomization takes."""
    used = {document.file for tree in trees for document in tree.documents}
    used |= {patch.file for tree in trees for patch in tree.patches}
    for path in sorted(folder.rglob("*.yaml")):
        file = str(path.relative_to(root))
        if path.name != FILE and file not in used:
            yield Problem(file, (), None, "no kustomization takes this file; name it in one, or remove it")
