"""A drafter as it lies in its folder: what has to be there, and what it was trained for."""

from pathlib import Path
from typing import Any

from dspark.config import build_config
from dspark.errors import MissingInput
from dspark.provenance import file_sha256, fingerprint, read_json, require_same
from dspark.storage import locate
from dspark.targets import TargetConfig, target_identity

NGRAM = "ngram"
TARGET_MTP = "mtp"
WITHOUT_FOLDER = (None, NGRAM, TARGET_MTP)
PROVENANCE = "provenance.json"
DRAFTER_FILES = ("config.json", "model.safetensors", PROVENANCE)
CALIBRATION, COST_CURVE = "calibration.json", "cost_curve.json"


def is_drafter_folder(folder: str | Path) -> bool:
    """Whether all files of a drafter are there."""
    return all((locate(folder) / name).is_file() for name in DRAFTER_FILES)


def check_drafter(folder: str, target: TargetConfig) -> dict[str, Any]:
    """The drafter's provenance. Raises: MissingInput when incomplete; Mismatch if trained for another target."""
    provenance = _provenance(folder)
    remedy = "use it with the target it was trained for, or train one with jobs/train.py"
    identity = target_identity(target)
    require_same(f"drafter {folder} and target {target.name}", identity, provenance["target"], remedy=remedy)
    return provenance


def draft_identity(folder: str | Path, target: TargetConfig) -> str:
    """What an engine and its draft replica must have in common."""
    return fingerprint([drafter_sha256(folder), target_identity(target)])


def drafter_target(folder: str) -> TargetConfig:
    """The target a drafter was trained for, as it was loaded then. Raises: MissingInput when it is incomplete."""
    content = _provenance(folder)["target_config"]
    return build_config(TargetConfig, content, source=f"{folder}/provenance.json")


def _provenance(folder: str) -> dict[str, Any]:
    for name in DRAFTER_FILES:
        if not (locate(folder) / name).is_file():
            adopt = "take it over with jobs/adopt.py, or " if name == PROVENANCE else ""
            raise MissingInput(
                f"no complete drafter at {folder} ({name} is missing); {adopt}make one with jobs/train.py"
            )
    content: dict[str, Any] = read_json(locate(folder) / PROVENANCE)
    return content


def drafter_sha256(folder: str | Path) -> str:
    """Of the files that decide what a drafter proposes."""
    return fingerprint([file_sha256(locate(folder) / name) for name in DRAFTER_FILES[:2]])
