"""An exported drafter on disk: which layouts are asked for, what its target is, and a folder written whole."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pydantic
import torch
from safetensors.torch import save_file
from torch import Tensor

from dspark.config import Config
from dspark.drafters.export_formats import Exported
from dspark.drafters.stored import CONFIG, WEIGHTS
from dspark.errors import Mismatch
from dspark.provenance import read_json, temporary_sibling, write_bytes, write_json
from dspark.speculation.calibration import Calibration
from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.sglang_tables import lost_shifts, sps_content, sts_content
from dspark.targets import TargetConfig, load_target, load_target_config, resolve_target
from dspark.tracking import TrackingConfig

Format = Literal["dspark", "deepspec", "sglang", "vllm", "speculators"]
OWN: Format = "dspark"
FORMATS: tuple[Format, ...] = (OWN, "deepspec", "sglang", "vllm", "speculators")
CARD, SPS = "README.md", "sps.json"


class ExportConfig(Config):
    """The export stage: a trained drafter for other engines, one folder for each of them."""

    drafter: str
    """Folder made by jobs/train.py or jobs/adopt.py."""
    output: str
    """Gets a folder of each format's name."""
    formats: tuple[Format, ...] = pydantic.Field(FORMATS, min_length=1)
    """"dspark" keeps everything; "deepspec" is what most engines read; "sglang" and "vllm" leave out what these take
    from the target; "speculators" is for `vllm serve FOLDER`. What an engine cannot load is refused by name."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type of the weights. The format dspark keeps the stored one, since calibrations hold for just those weights."""
    license: str
    """Licence of the drafter for its model card, as the hub spells it, such as apache-2.0 or mit."""
    target_name: str | None = None
    """What other engines are told to load as the target: a hub id or a path. None takes what the drafter was trained
    for, which for a bundled target is a folder of this machine."""
    evaluation: str | None = None
    """Folder made by jobs/evaluate.py, whose accepted lengths the model card shows."""
    tracking: TrackingConfig = TrackingConfig()


class RecordedTarget:
    """The target a drafter was trained for; nothing of it is loaded before it is needed. See `FrozenTarget`."""

    def __init__(self, config: TargetConfig, name: str | None) -> None:
        self._config = config
        self._name = name

    @property
    def name(self) -> str:
        """What an engine is told to load."""
        return self._name or resolve_target(self._config)

    @property
    def architectures(self) -> tuple[str, ...]:
        """Classes in its `config.json`."""
        return tuple(load_target_config(self._config).architectures or ())

    def head(self) -> Tensor:
        """[V, d]; loads the target."""
        weight: Tensor = load_target(self._config).get_output_embeddings().weight
        return weight.detach().cpu()


def engine_tables(calibration: Calibration, curves: list[CostCurve]) -> tuple[dict[str, Any], list[str]]:
    """SGLang's JSON files by name, and notes on what they cannot hold.

    One STS file for each mode of decoding; one SPS file for each hardware, numbered where there are several.
    """
    tables = {f"sts_{mode}.json": sts_content(calibration, mode) for mode in calibration.scales}
    names = [SPS] if len(curves) == 1 else [f"sps_{number}.json" for number in range(len(curves))]
    tables |= {name: sps_content(curve) for name, curve in zip(names, curves, strict=True)}
    notes = [lost] if (lost := lost_shifts(calibration)) else []
    for name, curve in zip(names, curves, strict=True):
        hardware = ", ".join(
            f"{key} {curve.fingerprint[key]}" for key in ("processor", "device") if key in curve.fingerprint
        )
        notes.append(
            f"{name} was measured in dspark's own engine ({hardware}); profile SGLang itself for its own costs"
        )
        if curve.buckets:
            notes.append(f"{name} has no place for the sizes that batches are padded to: {list(curve.buckets)}")
    return tables, notes


def write_folder(folder: Path, exported: Exported, tables: Mapping[str, Any], card: str) -> None:
    """Write config, weights, tables and model card; a reader sees the old folder or the new one."""
    temporary = temporary_sibling(folder)
    temporary.mkdir(parents=True)
    save_file(exported.tensors, str(temporary / WEIGHTS), metadata={"format": "pt"})
    (temporary / WEIGHTS).chmod(0o644)
    for name, content in {CONFIG: exported.content, **tables}.items():
        write_json(temporary / name, content)
    write_bytes(temporary / CARD, card.encode())
    _replace(folder, temporary)


def copy_folder(folder: Path, files: list[Path], card: str) -> None:
    """The same for a format that keeps files as they are."""
    temporary = temporary_sibling(folder)
    temporary.mkdir(parents=True)
    for path in files:
        shutil.copyfile(path, temporary / path.name)
    write_bytes(temporary / CARD, card.encode())
    _replace(folder, temporary)


def num_bytes(exported: Exported) -> int:
    """Size of the weights file, its header left out."""
    return sum(tensor.numel() * tensor.element_size() for tensor in exported.tensors.values())


def accepted_lengths(evaluation: str | Path, drafter_sha256: str) -> list[tuple[str, str, float]]:
    """(mode, domain, accepted length) of an evaluation's figures.

    Raises: Mismatch when another drafter was evaluated.
    """
    metrics = read_json(Path(evaluation) / "metrics.json")
    if metrics["drafter"]["sha256"] != drafter_sha256:
        raise Mismatch(
            f"evaluation {evaluation} is of drafter {metrics['drafter']['sha256']}, but {drafter_sha256} is to be "
            "exported; run jobs/evaluate.py for this drafter"
        )
    return [
        (mode, domain, figures["accepted_length"])
        for mode, content in metrics["modes"].items()
        for domain, figures in [*content["domains"].items(), ("overall", content["overall"])]
        if figures["accepted_length"] is not None
    ]


def read_curves(path: Path) -> list[CostCurve]:
    """Every hardware's curve in a drafter's `cost_curve.json`; none without the file."""
    return [CostCurve.from_dict(entry) for entry in json.loads(path.read_text())] if path.is_file() else []


def torch_dtype(name: str) -> torch.dtype:
    """The dtype called so."""
    found: torch.dtype = getattr(torch, name)
    return found


def _replace(folder: Path, temporary: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    temporary.replace(folder)
