"""A drafter as another tool leaves it: DeepSpec's two files and nothing that only we write."""

from pathlib import Path
from typing import Any

from dspark.provenance import read_json, write_json
from tiny_drafter import make_tiny_drafter

OURS_ALONE = ("valid_vocab_size", "draft_vocab_size", "learned_mask_embedding", "dropout", "is_causal")
THEIRS_ALONE = {"num_anchors": 512, "initializer_range": 0.02, "use_cache": True, "transformers_version": "5.10.2"}


def make_foreign_drafter(folder: str | Path, target_folder: str | Path, **shape: Any) -> Path:
    """An untrained drafter for a tiny target; returns `folder`. It has no provenance.json."""
    folder = make_tiny_drafter(folder, target_folder, **shape)
    (folder / "provenance.json").unlink()
    content = read_json(folder / "config.json")
    for name in OURS_ALONE:
        content.pop(name, None)
    write_json(folder / "config.json", content | THEIRS_ALONE)
    return folder
