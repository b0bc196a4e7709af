"""Strict, frozen configs: YAML in, validated objects out, unknown keys refused by nearest name."""

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

import pydantic
import yaml

try:
    from yaml import CSafeLoader as SafeLoader  # ten times as fast
except ImportError:  # PyYAML was built without libyaml
    from yaml import SafeLoader  # type: ignore[assignment]

from dspark.errors import one_line

UNKNOWN, REQUIRED = "unknown key", "is required"

C = TypeVar("C", bound="Config")


class Config(pydantic.BaseModel):
    """Base of every config class: frozen, and any key it does not declare is an error."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    def with_changes(self: C, **changes: Any) -> C:
        """A validated copy with some fields replaced; what was left to its default stays so."""
        return type(self).model_validate(self.model_dump(exclude_unset=True) | changes)


class _StrictLoader(SafeLoader):
    """The safe loader, but a key that stands twice in one mapping is an error, not the last one's victory."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        twice = sorted({key for key in keys if isinstance(key, str) and keys.count(key) > 1})
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"key {twice[0]!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


def load_config(config_class: type[C], path: str | Path, overrides: Sequence[str] = ()) -> C:
    """The config in a YAML file with `key.path=value` overrides applied on top.

    Raises: ValueError in one line for a missing file, bad YAML, an unknown key (with the nearest
    valid one) or a value out of range.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"config file not found: {path}; pass --config with an existing YAML file")
    try:
        content = read_content(path.read_text(encoding="utf-8"), overrides)
    except yaml.YAMLError as error:
        raise ValueError(f"config file is not valid YAML: {path}: {one_line(error)}") from None
    except TypeError as error:
        raise ValueError(f"config file must hold a mapping: {path} holds a {error}") from None
    return build_config(config_class, content, source=str(path))


def read_content(text: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The mapping that a YAML text holds, overrides applied.

    Raises: yaml.YAMLError, TypeError with what it holds instead, or ValueError for an override.
    """
    content = yaml.load(text, _StrictLoader)
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise TypeError(type(content).__name__)
    for override in overrides:
        _apply_override(content, override)
    return content


def read_documents(text: str) -> list[Any]:
    """What the documents of a YAML text hold. Raises: yaml.YAMLError, also for a key that stands twice."""
    return list(yaml.load_all(text, _StrictLoader))


@dataclass(frozen=True)
class ConfigProblem:
    """One thing that a config class refuses."""

    location: tuple[str | int, ...]
    """Keys and indices on the way to it; () for what several fields say together."""
    value: Any
    message: str

    @property
    def name(self) -> str:
        return ".".join(str(part) for part in self.location)


def config_problems(config_class: type[C], content: dict[str, Any]) -> list[ConfigProblem]:
    """Everything that is wrong with `content` as a `config_class`; [] if nothing is."""
    try:
        config_class.model_validate(content)
    except pydantic.ValidationError as error:
        return [_problem(config_class, problem) for problem in error.errors()]
    return []


def build_config(config_class: type[C], content: dict[str, Any], *, source: str = "config") -> C:
    """`content` validated as `config_class`. Raises: ValueError in one line."""
    try:
        return config_class.model_validate(content)
    except pydantic.ValidationError as error:
        problems = "; ".join(_describe(_problem(config_class, problem)) for problem in error.errors())
        raise ValueError(f"{source}: {problems}") from None


def _apply_override(content: dict[str, Any], override: str) -> None:
    key_path, separator, raw_value = override.partition("=")
    if not separator or not key_path:
        raise ValueError(f"override {override!r} is not of the form key.path=value")
    try:
        value = yaml.safe_load(raw_value)
    except yaml.YAMLError as error:
        raise ValueError(f"override {override!r} is not valid YAML: {one_line(error)}") from None
    *parents, last = key_path.split(".")
    node: Any = content
    for name in parents:
        key = _key_in(node, name, override)
        if isinstance(node, dict) and node.get(key) is None:
            node[key] = {}
        node = node[key]
    node[_key_in(node, last, override)] = value


def _key_in(node: Any, key: str, override: str) -> str | int:
    """The key as a mapping or a list takes it. Raises: ValueError where nothing can have that key."""
    if isinstance(node, dict):
        return key
    if not isinstance(node, list):
        raise ValueError(f"override {override!r}: {key!r} has no place, what holds it is {node!r}")
    if not key.isdecimal() or int(key) >= len(node):
        raise ValueError(f"override {override!r}: {key!r} is no index into a list of {len(node)}")
    return int(key)


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean …?` with the most similar of the known names; nothing where none is known."""
    found = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)
    return f"; did you mean {found[0]!r}?" if found else ""


def _problem(config_class: type[Config], problem: Any) -> ConfigProblem:
    location, value = problem["loc"], problem["input"]
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        message = f"{UNKNOWN}{nearest(str(location[-1]), _known_keys(config_class, location[:-1]))}"
    elif problem["type"] == "missing":
        message, value = REQUIRED, None
    elif problem["type"] == "literal_error" and isinstance(value, str):
        message += nearest(value, re.findall(r"'([^']*)'", problem["ctx"]["expected"]))
    return ConfigProblem(location, value, message)


def _describe(problem: ConfigProblem) -> str:
    if problem.message.startswith(UNKNOWN):
        return f"{UNKNOWN} {problem.name!r}{problem.message.removeprefix(UNKNOWN)}"
    if problem.message == REQUIRED:
        return f"{problem.name} {REQUIRED}"
    shown = repr(problem.value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return f"{problem.name} = {shown}: {problem.message}" if problem.location else problem.message


def _known_keys(config_class: type[Config], parents: Sequence[Any]) -> list[str]:
    """Field names of the config class found by walking `parents` down from `config_class`."""
    for parent in parents:
        field = config_class.model_fields.get(str(parent))
        if field is not None:
            config_class = _config_class_in(field.annotation) or config_class
    return list(config_class.model_fields)


def _config_class_in(annotation: Any) -> type[Config] | None:
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return annotation
    for argument in get_args(annotation):
        found = _config_class_in(argument)
        if found is not None:
            return found
    return None
