"""A drafter as it lies in its folder: the content of `config.json` and the tensors by their stored names."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from dspark.drafters import build_drafter
from dspark.drafters.checkpoint import BACKBONE, EXCHANGE_ARCHITECTURE, from_deepspec
from dspark.drafters.mtp import MTPConfig
from dspark.errors import Mismatch, MissingInput
from dspark.provenance import read_json

CONFIG, WEIGHTS = "config.json", "model.safetensors"
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class StoredDrafter:
    """What a checkpoint of DeepSpec's form holds; its ids map (`d2t`) only where the vocabulary is reduced."""

    content: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def architecture(self) -> str:
        """The class named in `config.json`."""
        return ", ".join(self.content.get("architectures") or ["none"])

    @property
    def is_reduced(self) -> bool:
        """Whether it drafts a part of the vocabulary."""
        return "d2t" in self.tensors


def read_stored(folder: str | Path) -> StoredDrafter:
    """Raises: MissingInput without a checkpoint in one safetensors file."""
    folder = Path(folder)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise MissingInput(f"no drafter at {folder} ({name} is missing); make one with jobs/train.py")
    content, tensors = read_json(folder / CONFIG), load_file(str(folder / WEIGHTS))
    tensors.pop("t2d", None)  # for training only: the inverse of d2t
    if not content.get("draft_vocab_size") or content["draft_vocab_size"] >= content.get("vocab_size", 0):
        tensors.pop("d2t", None)
    return StoredDrafter(content, tensors)


def check_tensors(stored: StoredDrafter, folder: str | Path) -> None:
    """Compare names and shapes with what `config.json` asks for, where possible without memory for them.

    Raises: Mismatch naming the first tensor that is missing, unknown or of another shape.
    """
    config = from_deepspec(stored.content)
    if isinstance(config, MTPConfig):
        state = build_drafter(config).state_dict()  # its layer is run once to learn what it stores: not without memory
    else:
        # The rotary has no weights, and computing a scaled one needs a real device.
        plain_rope = {"rope_type": "default", "rope_theta": 1.0}
        with torch.device("meta"):
            state = build_drafter(config.with_changes(rope_parameters=plain_rope)).state_dict()
    expected = {name.removeprefix(BACKBONE): list(value.shape) for name, value in state.items()}
    expected.pop("mask_embedding", None)  # stored as a row of the embedding
    if config.has_reduced_vocabulary:
        expected["d2t"] = [config.draft_vocab_size]
    found = {name: list(value.shape) for name, value in stored.tensors.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise Mismatch(
                f"drafter {folder}: tensor {name} is {found.get(name, 'absent')} in {WEIGHTS}, "
                f"{CONFIG} asks for {expected.get(name, 'none')}"
            )


def is_exchange_format(stored: StoredDrafter) -> bool:
    """Whether it is a DSpark or DFlash drafter of the public form, without an extension of ours."""
    return stored.architecture == EXCHANGE_ARCHITECTURE
