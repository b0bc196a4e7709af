"""A drafter whose folder is in an object store: begun, recorded, published, loaded, calibrated, profiled."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dspark.config import build_config
from dspark.data.target_cache import TargetCache
from dspark.drafters.checkpoint import load_drafter, save_drafter
from dspark.engine.drafter_folder import check_drafter, drafter_sha256, drafter_target, is_drafter_folder
from dspark.errors import Mismatch, MissingInput
from dspark.speculation.calibration import Calibration
from dspark.speculation.cost_curve import CostCurve
from dspark.storage import locate, sizes_in
from dspark.training.config import TrainConfig
from dspark.training.progress import History, read_history
from dspark.training.trainer import prepare, publish
from random_drafter import random_drafter
from remote_store import folder_store
from tiny_cache import make_tiny_cache


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_HOME", str(tmp_path / "home"))


@pytest.fixture(params=["memory", "folder"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://{tmp_path.name}/place" if request.param == "memory" else folder_store(tmp_path / "place")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> TargetCache:
    return make_tiny_cache(tmp_path_factory.mktemp("cache"), tiny_target, train=4, heldout=1)


def config_for(cache: TargetCache, output: str, **changes: Any) -> TrainConfig:
    drafter = {"num_layers": 1, "block_size": 3, "mask_token": "system", "markov_rank": 4, "draft_vocab_size": 40}
    content = {"cache": str(cache.folder), "output": output, "drafter": drafter, "steps": 4}
    return build_config(TrainConfig, content | changes)


def test_a_drafter_in_a_store_is_the_one_on_disk(place: str, tmp_path: Path) -> None:
    drafter = random_drafter(draft_vocab_size=30)
    for folder in (place, tmp_path / "disk"):
        save_drafter(drafter, folder, dtype=torch.float32)
    assert (locate(place) / "model.safetensors").read_bytes() == (tmp_path / "disk/model.safetensors").read_bytes()
    remote, local = load_drafter(place), load_drafter(tmp_path / "disk")
    assert remote.config == local.config == drafter.config
    assert all(torch.equal(value, local.state_dict()[name]) for name, value in remote.state_dict().items())
    with pytest.raises(MissingInput, match=f"no drafter at {place}/nowhere"):
        load_drafter(f"{place}/nowhere")


def test_a_run_in_a_store_is_begun_once_and_published(place: str, cache: TargetCache, tiny_target: Path) -> None:
    config = config_for(cache, place)
    initial = prepare(config, cache, fresh=False)
    assert prepare(config, cache, fresh=False) == initial
    with pytest.raises(Mismatch, match=r"learning_rate is .* is asked for; use --fresh or another output"):
        prepare(config_for(cache, place, learning_rate=0.5), cache, fresh=False)
    final = Path(shutil.copytree(_local_copy(initial), cache.folder / f"final-{hash(place)}"))
    result = publish(config, cache, final, {"steps": 4})
    assert result["parameters"] > 0
    assert is_drafter_folder(place)
    target = drafter_target(place)
    assert check_drafter(place, target)["training"]["steps"] == 4
    assert drafter_sha256(place) == drafter_sha256(final)
    prepare(config_for(cache, place, learning_rate=0.5), cache, fresh=True)
    assert "result.json" not in sizes_in(locate(place))


def _local_copy(folder: Any) -> Path:
    from dspark.transfer import local_folder

    copy = local_folder(folder, ("config.json", "model.safetensors"))
    assert load_file(str(copy / "model.safetensors"))
    return copy


def test_a_history_in_a_store_is_there_up_to_the_last_checkpoint(place: str) -> None:
    metrics = dict.fromkeys(
        ("loss", "ce", "tv", "expected_accepted_length", "learning_rate", "blocks", "supervised_slots", "tokens"), 1.0
    )
    run = {"output": place, "tracking_uri": "", "run_id": None}
    history = History(run, start_step=0)
    for step in (1, 2, 3):
        history.add_step(step, 9, metrics, log_line=False)
        if step == 2:
            history.flush()  # the checkpoint of step 2; then the process dies
    assert [row["step"] for row in read_history(place)] == [1, 2]
    again = History(run, start_step=2)
    assert again.totals["tokens"] == 2.0
    again.add_step(3, 9, metrics, log_line=False)
    again.close()
    assert [row["step"] for row in read_history(place)] == [1, 2, 3]


def test_calibration_and_cost_curves_lie_beside_it(place: str) -> None:
    folder = locate(place)
    assert Calibration.load(folder / "calibration.json") == Calibration()
    Calibration().save(folder / "calibration.json")
    assert Calibration.load(f"{place}/calibration.json") == Calibration()
    for target in ("one", "two"):
        curve = CostCurve.measured({1: [0.1], 2: [0.2]}, {1: [0.01]}, fingerprint={"target": target})
        curve.save(f"{place}/cost_curve.json")
    assert CostCurve.load(folder / "cost_curve.json", {"target": "one"}).fingerprint == {"target": "one"}
