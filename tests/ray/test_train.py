"""The train job with DeepSpeed on a local cluster: complete, killed and resumed, refused."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from dspark.config import build_config
from dspark.data.target_cache import TargetCache
from dspark.drafters.checkpoint import load_drafter
from dspark.errors import Mismatch
from dspark.tracking import TrackingConfig
from dspark.training.config import TrainConfig
from dspark.training.progress import read_history
from local_cluster import start_job, start_local_cluster
from tiny_cache import make_tiny_cache

pytestmark = pytest.mark.ray

STEPS, CHECKPOINT_EVERY = 30, 6


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> TargetCache:
    start_local_cluster()
    return make_tiny_cache(tmp_path_factory.mktemp("cache"), tiny_target)


def config_for(cache: TargetCache, output: Path, **changes: Any) -> TrainConfig:
    content = {
        "cache": str(cache.folder),
        "output": str(output),
        "drafter": {
            "num_layers": 1,
            "block_size": 4,
            "draft_vocab_size": 200,
            "mask_token": "system",
            "markov_rank": 8,
            "anchor_fusion": True,
            "learned_mask_embedding": True,
            "warm_start": True,
        },
        "anchors_per_sequence": 4,
        "sequences_per_step": 6,
        "steps": STEPS,
        "learning_rate": 3e-3,
        "num_workers": 2,
        "checkpoint_every": CHECKPOINT_EVERY,
        "validate_every": 10,
        "max_worker_failures": 0,
        "tracking": {"uri": f"sqlite:///{output.parent / 'mlflow.db'}", "experiment": "test", "run_name": output.name},
    }
    return build_config(TrainConfig, content | changes)


def losses_of(output: str | Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_history(output) if "heldout" not in row}


def mlflow_status(config: TrainConfig) -> tuple[str, dict[str, float]]:
    import mlflow

    run_id = json.loads((Path(config.output) / "mlflow_run.json").read_text())["run_id"]
    run = mlflow.MlflowClient(str(config.tracking.uri)).get_run(run_id)
    return run.info.status, run.data.metrics


@pytest.fixture(scope="module")
def finished(cache: TargetCache, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, dict[str, Any]]:
    """A run of two workers that nothing interrupted."""
    config = config_for(cache, tmp_path_factory.mktemp("train") / "drafter")
    return config, train.run(config)


def test_a_run_leaves_a_drafter_and_says_where_it_comes_from(finished, cache):
    config, result = finished
    output = Path(config.output)
    drafter = load_drafter(output)
    assert drafter.config.anchor_fusion
    assert all(bool(value.isfinite().all()) for value in drafter.state_dict().values())
    provenance = json.loads((output / "provenance.json").read_text())
    assert provenance["target"] == cache.request["target"]
    assert json.loads((output / "result.json").read_text()) == result
    assert (result["stage"], result["steps"], result["skipped_micro_batches"]) == ("train", STEPS, 0)
    assert result["validation"]["expected_accepted_length"] >= 1.0


def test_every_step_is_in_the_history_and_the_loss_falls(finished):
    losses = losses_of(finished[0].output)
    assert list(losses) == list(range(1, STEPS + 1))
    assert losses[STEPS] < 0.9 * losses[1]


def test_the_run_is_finished_in_mlflow_with_its_curves(finished):
    status, metrics = mlflow_status(finished[0])
    assert status == "FINISHED"
    assert metrics["train/loss"] == pytest.approx(losses_of(finished[0].output)[STEPS])
    assert "heldout/expected_accepted_length" in metrics


def test_training_moved_what_is_trained_and_nothing_else(finished):
    output = Path(finished[0].output)
    before, after = load_drafter(output / "initial").state_dict(), load_drafter(output).state_dict()
    moved = {name for name in before if not torch.equal(before[name].bfloat16(), after[name].bfloat16())}
    assert {"backbone.fc.weight", "backbone.mask_embedding", "markov_head.markov_w1.weight"} <= moved
    # The row of the mask token is stored in the embedding, so that one is moved there too.
    changed_rows = before["backbone.embed_tokens.weight"].bfloat16() != after["backbone.embed_tokens.weight"].bfloat16()
    mask_row = load_drafter(output).config.mask_token_id
    assert changed_rows.any(dim=1).nonzero().flatten().tolist() == [mask_row]
    assert "backbone.lm_head.weight" not in moved


def test_a_second_run_trains_nothing_and_says_the_same(finished):
    config, result = finished
    assert train.run(config) == result | {"skipped": True}


def test_another_request_is_refused_by_field_name(finished):
    config, _ = finished
    with pytest.raises(Mismatch, match=r"learning_rate is 0\.003 but 0\.1 is asked for; use --fresh or another output"):
        train.run(config.with_changes(learning_rate=0.1))


def test_the_number_of_workers_changes_no_loss(finished, cache, tmp_path):
    config = config_for(cache, tmp_path / "alone", num_workers=1, steps=STEPS, sequences_per_micro_batch=3)
    config = config.with_changes(checkpoint_every=STEPS)
    train.run(config)
    two, one = losses_of(finished[0].output), losses_of(config.output)
    # bf16 products round sums in another order; after a few steps of AdamW that is all there is between the two.
    assert [one[step] for step in range(1, 6)] == pytest.approx([two[step] for step in range(1, 6)], abs=5e-3)


def test_a_killed_run_goes_on_at_its_last_checkpoint_with_the_same_losses(finished, cache, tmp_path):
    config = config_for(cache, tmp_path / "drafter")
    path = tmp_path / "train.yaml"
    path.write_text(config.model_dump_json())  # JSON is YAML
    checkpoints = Path(config.output) / "checkpoints"
    noted = checkpoints / "checkpoint_manager_snapshot.json"
    job = start_job("train", "--config", str(path), log=tmp_path / "log.txt")
    try:
        deadline = time.monotonic() + 300
        while not (noted.is_file() and f"step-{2 * CHECKPOINT_EVERY:06d}" in noted.read_text()):
            assert job.poll() is None, (tmp_path / "log.txt").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        job.send_signal(signal.SIGKILL)
        job.wait()
    assert not (Path(config.output) / "result.json").exists()
    time.sleep(2.0)  # the cluster ends the dead driver's workers
    before = {row["step"]: row for row in read_history(config.output) if "heldout" not in row}
    (checkpoints / "step-999999").mkdir()  # what a kill during an upload would leave
    (checkpoints / "step-999999" / "state").write_bytes(b"half")

    result = train.run(config)
    assert result["steps"] == STEPS
    after = {row["step"]: row for row in read_history(config.output) if "heldout" not in row}
    assert list(after) == list(range(1, STEPS + 1))
    kept = [step for step, row in after.items() if row == before.get(step)]
    assert kept[:CHECKPOINT_EVERY] == list(range(1, CHECKPOINT_EVERY + 1))
    assert len(kept) % CHECKPOINT_EVERY == 0
    assert len(kept) < STEPS
    uninterrupted, resumed = losses_of(finished[0].output), losses_of(config.output)
    assert [resumed[step] for step in after] == pytest.approx([uninterrupted[step] for step in after], abs=1e-4)
    trained, expected = (load_drafter(one).state_dict() for one in (config.output, finished[0].output))
    for name, value in expected.items():
        torch.testing.assert_close(trained[name], value, atol=1e-2, rtol=1e-2, msg=name)  # both rounded to bf16
    status, _ = mlflow_status(config)
    assert status == "FINISHED"


def test_a_dry_run_trains_nothing(cache, tmp_path):
    config = config_for(cache, tmp_path / "drafter", tracking=TrackingConfig(enabled=False).model_dump())
    plan = train.run(config, dry_run=True)
    assert plan["dry_run"]
    assert (plan["train_samples"], plan["heldout_samples"], plan["epochs"]) == (12, 3, STEPS * 6 / 12)
    assert not Path(config.output).exists()
