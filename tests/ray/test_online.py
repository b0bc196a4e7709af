"""Target workers on a local cluster: they feed trainer workers what the cache would hold, also when one dies."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from dspark.config import build_config
from dspark.data import target_pool
from dspark.data.capture import CacheConfig, CaptureWorker, PlannedSample, plan_cache
from dspark.data.capture_request import resolve_capture
from dspark.data.captured import CapturedGroup
from dspark.data.online import DataConfig
from dspark.data.target_cache import TargetCache, TargetCacheWriter
from dspark.data.target_pool import RayTargets, TargetPool, TargetWorker
from dspark.errors import DsparkError
from dspark.training.config import TrainConfig
from dspark.training.progress import read_history
from local_cluster import start_local_cluster
from tiny_answers import make_tiny_answers

pytestmark = pytest.mark.ray

STEPS, PER_STEP = 10, 6
LAYER_IDS = (0, 2)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    start_local_cluster()
    return make_tiny_answers(tmp_path_factory.mktemp("answers"), tiny_target, ok=14, empty=1, short=1)


@pytest.fixture(scope="module")
def cache(answers: Path, tmp_path_factory: pytest.TempPathFactory) -> TargetCache:
    """What jobs/cache.py makes of the answers, made in this process."""
    output = tmp_path_factory.mktemp("cache")
    config = CacheConfig(answers=str(answers), output=str(output), dtype="float32", target_layer_ids=LAYER_IDS)
    capture = resolve_capture(config.answers, config)
    plan = plan_cache(capture.answers, config, hidden_size=capture.hidden_size, num_layers=2)
    target = capture.target.model_dump()
    worker, writer = CaptureWorker(target, LAYER_IDS, str(output), 4096, 1), TargetCacheWriter(output)
    writer.begin(capture.record, fresh=False)
    worker({"shard": [0], "samples": [json.dumps([asdict(one) for shard in plan.shards for one in shard])]})
    writer.finish(capture.record, 1, {"target_config": target})
    return TargetCache(output)


@pytest.fixture(scope="module")
def pool(tiny_target: Path) -> Iterator[TargetPool]:
    """Two target workers that keep what they captured."""
    start_local_cluster()
    config = DataConfig(mode="online", answers="a", target_workers=2, keep_bytes=10**7)
    with TargetPool(config, target_of(tiny_target), LAYER_IDS) as started:
        yield started


def target_of(folder: Path) -> dict[str, Any]:
    return {"name": str(folder), "dtype": "float32", "device": "cpu"}


def config_for(output: Path, **source: Any) -> TrainConfig:
    content = {
        "output": str(output),
        "drafter": {"num_layers": 1, "block_size": 4, "draft_vocab_size": 200, "mask_token": "system"},
        "anchors_per_sequence": 4,
        "sequences_per_step": PER_STEP,
        "sequences_per_micro_batch": 2,
        "steps": STEPS,
        "learning_rate": 3e-3,
        "precision": "float32",
        "num_workers": 2,
        "validate_every": 5,
        "max_worker_failures": 0,
        "tracking": {"enabled": False},
    }
    return build_config(TrainConfig, content | source)


def losses_of(config: TrainConfig) -> list[float]:
    return [row.get("heldout", row)["loss"] for row in read_history(config.output)]


def mortal(mark: Path, *, dies_at: int) -> type:
    """A target worker whose process ends without a word at its n-th request, once."""

    class Mortal(TargetWorker):
        def capture(self, planned: list[PlannedSample]) -> CapturedGroup:
            self.asked = getattr(self, "asked", 0) + 1
            if self.asked == dies_at and not mark.exists():
                mark.touch()
                os._exit(1)
            return super().capture(planned)

    return Mortal


def planned(name: str, length: int) -> PlannedSample:
    ids = torch.randint(3, 300, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    return PlannedSample(name, "train", "chat", ids, [0] * 4 + [1] * (length - 4))


def test_online_losses_are_the_cache_s_although_a_target_worker_dies(
    cache: TargetCache, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    offline = config_for(tmp_path / "offline", cache=str(cache.folder))
    train.run(offline)
    mark = tmp_path / "died"
    monkeypatch.setattr(target_pool, "TargetWorker", mortal(mark, dies_at=8))
    data = {
        "mode": "online",
        "answers": str(answers),
        "dtype": "float32",
        "target_layer_ids": LAYER_IDS,
        "target_workers": 2,
        "steps_ahead": 2,
    }
    online = config_for(tmp_path / "online", data=data)
    result = train.run(online)
    assert mark.exists()
    assert losses_of(online) == pytest.approx(losses_of(offline), abs=1e-4)
    # What goes in comes out or is counted, answer by answer and sample by sample.
    assert result["answers"] == result["answers_kept"] + sum(result["rejected"].values()) == 16
    assert result["rejected"] == {"answer empty": 1, "under 14 supervised tokens": 1}
    assert result["samples"] + result["samples_not_finite"] == STEPS * PER_STEP
    assert 0 < result["data_wait_s"] <= result["step_s"]
    assert result["target_s"] > 0
    written = {path.name for path in Path(online.output).rglob("*") if path.is_file()}
    assert not any(name.startswith("shard-") for name in written)


def test_requests_are_spread_over_the_target_workers(pool: TargetPool):
    targets = RayTargets(pool.actors, rank=0, by_id=False)
    tickets = [targets.submit([planned(f"a{n}", 20 + n), planned(f"b{n}", 30)]) for n in range(4)]
    assert sorted(number for [(_, number, _)] in tickets[:2]) == [0, 1]
    for n, ticket in enumerate(tickets):
        found = targets.result(ticket)
        assert [found.sample(place).id for place in (0, 1)] == [f"a{n}", f"b{n}"]


def test_kept_states_are_captured_once_for_all_trainer_workers(pool: TargetPool):
    samples = [planned(f"s{n}", 20 + n) for n in range(6)]
    first, second = (RayTargets(pool.actors, rank=rank, by_id=True) for rank in (0, 1))
    captured = first.result(first.submit(samples))
    again = second.result(second.submit(samples[::-1]))
    assert (captured.num_captured, again.num_captured) == (6, 0)
    for place in range(6):
        a, b = captured.sample(place), again.sample(5 - place)
        assert a.id == b.id == f"s{place}"
        assert torch.equal(a.hidden, b.hidden)
        assert torch.equal(a.log_z, b.log_z)


def test_a_target_worker_that_dies_too_often_ends_the_run_in_one_line(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    start_local_cluster()
    monkeypatch.setattr(target_pool, "TargetWorker", mortal(tmp_path / "died", dies_at=1))
    config = DataConfig(mode="online", answers="a", max_target_restarts=0)
    with TargetPool(config, target_of(tiny_target), LAYER_IDS) as started:
        targets = RayTargets(started.actors, rank=0, by_id=False)
        with pytest.raises(DsparkError, match=r"died more often than data\.max_target_restarts allows"):
            targets.result(targets.submit([planned("a", 20)]))


def test_a_target_that_cannot_be_loaded_says_why(tiny_target: Path):
    start_local_cluster()
    config, target = DataConfig(mode="online", answers="a"), target_of(tiny_target / "nothing")
    with pytest.raises(DsparkError, match=r"target folder not found.*nothing"), TargetPool(config, target, LAYER_IDS):
        pass
