"""What manifests are checked against, beside each other."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dspark.config import Config, load_config

APP_FOLDER = "/app"
"""Where the image has the repository, and a job starts."""
EXTERNAL = "external.yaml"


class External(Config):
    """The file of what manifests refer to and others make."""

    secrets: dict[str, tuple[str, ...]] = {}
    """Keys of each Secret by its name; () for any."""


@dataclass(frozen=True)
class Surroundings:
    """root: the repository. secrets: keys by name. job_configs: the config class of each job."""

    root: Path
    ray_version: str
    secrets: Mapping[str, Sequence[str]] = field(default_factory=dict)
    job_configs: Mapping[str, type[Config]] = field(default_factory=dict)


def surroundings(root: Path, manifests: Path, job_configs: Mapping[str, type[Config]]) -> Surroundings:
    """Of this repository. Raises: ValueError where one of its files does not say what it should."""
    pinned = re.search(r"^ray==(\S+)$", (root / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    if pinned is None:
        raise ValueError("constraints.txt: names no version of ray; add a line ray==…")
    external = load_config(External, manifests / EXTERNAL)
    return Surroundings(root, pinned[1], external.secrets, job_configs)
