"""A trained drafter is timed at lengths of the block that it was not trained with."""

from pathlib import Path

import pytest

from dspark.config import build_config
from dspark.drafters.checkpoint import load_drafter
from dspark.evaluation.round_time import RoundTimeConfig, _with_block, measure
from dspark.targets import TargetConfig
from tiny_drafter import make_tiny_drafter


@pytest.mark.parametrize("anchor_fusion", [False, True])
@pytest.mark.parametrize("block_size", [2, 4, 9])
def test_a_drafter_takes_any_length_of_the_block(
    block_size: int, anchor_fusion: bool, tmp_path: Path, tiny_target: Path
) -> None:
    folder = make_tiny_drafter(tmp_path / "drafter", tiny_target, anchor_fusion=anchor_fusion)
    for _ in range(2):  # what an earlier run left is no hindrance
        changed = load_drafter(_with_block(str(folder), block_size, tmp_path / "other"), dtype=None, device="cpu")
        assert changed.block_size == block_size
    assert load_drafter(str(folder), dtype=None, device="cpu").block_size == 4


def test_every_kind_is_timed_at_every_length(tmp_path: Path, tiny_target: Path) -> None:
    folders = {
        "dspark": str(make_tiny_drafter(tmp_path / "dspark", tiny_target, anchor_fusion=True)),
        "eagle3": str(make_tiny_drafter(tmp_path / "eagle3", tiny_target, architecture="eagle3")),
    }
    config = build_config(RoundTimeConfig, {"block_sizes": [2, 5], "requests": 2, "repeats": 5, "threads": 1})
    target = TargetConfig(name=str(tiny_target), dtype="float32", device="cpu")
    variants = measure(config, target, folders, tmp_path / "scratch")["variants"]
    assert {(one["kind"], one["block_size"]) for one in variants} == {(k, n) for k in folders for n in (2, 5)}
    assert all(len(one["draft_s"]) == 5 and min(one["draft_s"] + one["verify_s"]) > 0 for one in variants)
