"""Manifests as they are checked, and what is found in them: in which file, where in it, which value."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from dspark.config import read_documents
from dspark.errors import one_line

Place: TypeAlias = tuple[str | int, ...]
"""Keys and indices on the way to a value."""

MAX_SHOWN = 80


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. shown: the value as text, None where there is none."""

    file: str
    place: Place
    shown: str | None
    message: str
    subject: tuple[str, str] = ("", "")
    """Kind and name of the manifest."""

    def __str__(self) -> str:
        kind = f"{'/'.join(self.subject)}: " if self.subject[0] else ""
        what = " = ".join(part for part in (dotted(self.place), self.shown) if part)
        return f"{self.file}: {kind}{what}: {self.message}" if what else f"{self.file}: {kind}{self.message}"


def dotted(place: Place) -> str:
    """`spec.containers[0].image`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")


def shown(value: Any) -> str:
    """A value in one short line."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


@dataclass(frozen=True)
class Document:
    """One manifest. file: where it was read from, or the overlay it was rendered from."""

    file: str
    content: dict[str, Any]

    @property
    def kind(self) -> str:
        return str(self.content.get("kind"))

    @property
    def name(self) -> str:
        return str(self.get("metadata", "name"))

    @property
    def subject(self) -> tuple[str, str]:
        return self.kind, self.name

    def get(self, *place: str | int) -> Any:
        """The value at a place; None where there is none."""
        return value_at(self.content, place)

    def problem(self, place: Place, message: str, value: Any = None, *, hidden: bool = False) -> Problem:
        """A problem with what lies at the place, or with `value` where it is given. hidden: the value is not shown."""
        found = self.get(*place) if value is None else value
        text = None if found is None or hidden else shown(found)
        return Problem(self.file, place, text, message, self.subject)


def value_at(node: Any, place: Sequence[str | int]) -> Any:
    """What lies at the place, None where nothing does."""
    for part in place:
        if not depth(node, (part,)):
            return None
        node = node[part]
    return node


def depth(node: Any, place: Sequence[str | int]) -> int:
    """How many leading parts of the place there are."""
    for number, part in enumerate(place):
        is_there = part in node if isinstance(node, dict) else isinstance(node, list) and part in range(len(node))
        if not is_there:
            return number
        node = node[part]
    return len(place)


def read_manifests(path: Path, root: Path) -> tuple[list[dict[str, Any]], list[Problem]]:
    """The mappings in a YAML file, and what keeps it from being read."""
    contents, problems = read_yaml(path, root)
    file = str(path.relative_to(root))
    odd = [content for content in contents if not isinstance(content, dict)]
    problems += [
        Problem(file, (), shown(content), "is no manifest: a mapping with apiVersion and kind") for content in odd
    ]
    return [content for content in contents if isinstance(content, dict)], problems


def read_yaml(path: Path, root: Path) -> tuple[list[Any], list[Problem]]:
    """The documents of a YAML file, or what keeps it from being read."""
    file = str(path.relative_to(root))
    try:
        return [content for content in read_documents(path.read_text(encoding="utf-8")) if content is not None], []
    except OSError as error:
        return [], [Problem(file, (), None, f"cannot be read: {error.strerror}")]
    except yaml.YAMLError as error:
        return [], [Problem(file, (), None, f"is not valid YAML: {one_line(error)}")]


def in_file(problem: Problem, file: str) -> Problem:
    return replace(problem, file=file)


def named(documents: Sequence[Document], kind: str) -> Iterator[Document]:
    """The documents of a kind."""
    return (document for document in documents if document.kind == kind)
