"""The steps of a run on one rank, with a plain optimiser in the engine's place."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray.train
import torch
from torch import Tensor, nn

from dspark.config import build_config
from dspark.data.capture import PlannedSample
from dspark.data.online import CapturedGroup, OnlineSamples, OwnTarget, SampleTable
from dspark.data.target_cache import CachedSample, TargetCache, TargetCacheWriter
from dspark.drafters.checkpoint import load_drafter, save_drafter
from dspark.drafters.moe import routers
from dspark.errors import TrainingDiverged
from dspark.training import loop as loop_module
from dspark.training.config import TrainConfig
from dspark.training.loop import TrainLoop
from dspark.training.progress import read_history
from dspark.training.trainer import prepare
from random_autoregressive import AUTOREGRESSIVE_VARIANTS, random_autoregressive_drafter
from random_drafter import VARIANTS, random_drafter, random_sample
from tiny_cache import LAYER_IDS, make_tiny_cache

SHAPE = random_drafter(draft_vocab_size=40).config


class PlainEngine:
    """What the loop asks of a DeepSpeed engine, with AdamW and nothing distributed."""

    def __init__(self, model: nn.Module, *, micro_batches: int, schedule: Callable[[int], float], **options: Any):
        self.model, self.micro_batches, self.options = model, micro_batches, options
        self.trainable = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trainable, lr=options["learning_rate"])
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, schedule)
        self.num_backward, self.grad_norm = 0, 0.0

    def __call__(self, *inputs: Any) -> Any:
        return self.model(*inputs)

    def backward(self, loss: Tensor) -> None:
        (loss / self.micro_batches).backward()
        self.num_backward += 1

    def step(self) -> None:
        if self.num_backward % self.micro_batches:
            return
        self.grad_norm = float(nn.utils.clip_grad_norm_(self.trainable, self.options["max_grad_norm"]))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def get_lr(self) -> list[float]:
        return self.scheduler.get_last_lr()

    def get_global_grad_norm(self) -> float:
        return self.grad_norm


class OneRank:
    def get_world_rank(self) -> int:
        return 0

    def get_world_size(self) -> int:
        return 1


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """No Ray and no DeepSpeed; returns what is reported."""
    reports: list[dict[str, Any]] = []
    monkeypatch.setattr(ray.train, "get_context", OneRank)
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: None)
    monkeypatch.setattr(ray.train, "report", lambda metrics, **options: reports.append(metrics | options))
    monkeypatch.setattr(loop_module, "start_engine", PlainEngine)
    monkeypatch.setattr(loop_module, "save_engine", lambda engine, folder, state: None)
    return reports


def samples_of(count: int) -> list[CachedSample]:
    return [random_sample(SHAPE, f"s{k}", 14 + k, seed=k) for k in range(count)]


def loop_over(
    folder: Path,
    samples: list[CachedSample],
    *,
    heldout: int = 0,
    shape: Any = None,
    drafter: Any = None,
    **changes: Any,
) -> TrainLoop:
    """A loop over a cache of these samples, the last `heldout` of them held out."""
    writer = TargetCacheWriter(folder / "cache")
    writer.begin({}, fresh=False)
    first_heldout = len(samples) - heldout
    writer.write_shard(0, ((s, "heldout" if k >= first_heldout else "train", "chat") for k, s in enumerate(samples)))
    writer.finish({}, 1, {})
    drafter = drafter or random_drafter(draft_vocab_size=40, **shape or {})
    save_drafter(drafter, folder / "initial", dtype=torch.float32)
    content = {
        "cache": str(folder / "cache"),
        "output": str(folder),
        "drafter": {},
        "steps": 4,
        "sequences_per_step": 4,
        "sequences_per_micro_batch": 2,
        "anchors_per_sequence": 3,
        "learning_rate": 1e-2,
        "precision": "float32",
        "log_every": 1,
    }
    run = {"initial": str(folder / "initial"), "output": str(folder), "tracking_uri": "", "run_id": None}
    return TrainLoop(build_config(TrainConfig, content | changes), run)


def spoilt(sample: CachedSample) -> CachedSample:
    return replace(sample, log_z=torch.full_like(sample.log_z, torch.nan))


def test_a_run_takes_its_steps_and_leaves_a_drafter(tmp_path: Path, alone: list[dict[str, Any]], monkeypatch):
    final: list[Any] = []
    kept = ray.train.Checkpoint.from_directory
    monkeypatch.setattr(
        ray.train.Checkpoint, "from_directory", lambda folder: final.append(_final_of(folder)) or kept(folder)
    )
    loop = loop_over(tmp_path, samples_of(8), heldout=2, validate_every=2, checkpoint_every=3)
    before = {name: value.clone() for name, value in loop.drafter.state_dict().items()}
    figures = loop.run()
    assert figures["steps"] == 4
    assert figures["skipped_micro_batches"] == 0
    rows = read_history(tmp_path)
    assert [row["step"] for row in rows if "heldout" not in row] == [1, 2, 3, 4]
    assert [row["step"] for row in rows if "heldout" in row] == [0, 2, 4]
    assert all(math.isfinite(row["loss"]) for row in rows if "heldout" not in row)
    assert figures["validation"] == next(row["heldout"] for row in reversed(rows) if "heldout" in row)
    assert [report["checkpoint_dir_name"] for report in alone] == ["step-000003", "step-000004"]
    moved = {name for name, value in loop.drafter.state_dict().items() if not torch.equal(value, before[name])}
    assert {"backbone.fc.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight"} <= moved
    assert not moved & {"backbone.embed_tokens.weight", "backbone.lm_head.weight"}
    assert final[0] is None
    assert torch.equal(final[1].backbone.fc.weight, loop.drafter.backbone.fc.weight.bfloat16().float())


def _final_of(folder: str) -> Any:
    path = Path(folder) / loop_module.FINAL
    return load_drafter(path) if path.exists() else None


@pytest.mark.parametrize("per_micro_batch", [1, 2, 4])
def test_the_size_of_micro_batches_changes_no_loss(tmp_path: Path, alone: list[dict[str, Any]], per_micro_batch: int):
    losses = []
    for size, folder in ((4, tmp_path / "a"), (per_micro_batch, tmp_path / "b")):
        loop_over(folder, samples_of(6), sequences_per_micro_batch=size).run()
        losses.append([row["loss"] for row in read_history(folder)])
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)


@pytest.mark.parametrize("shape", AUTOREGRESSIVE_VARIANTS.values(), ids=AUTOREGRESSIVE_VARIANTS)
def test_autoregressive_drafters_take_the_same_steps(tmp_path: Path, alone: list[dict[str, Any]], shape):
    drafter = random_autoregressive_drafter(**shape)
    samples = [random_sample(drafter.config, f"s{k}", 14 + k, seed=k) for k in range(5)]
    phases = [{"until": 1.0, "ce": 1.0, "tv": 0.0, "confidence": 0.0, "soft_labels": True}]
    loop = loop_over(tmp_path, samples, heldout=1, drafter=drafter, steps=8, loss_phases=phases)
    before = {name: value.clone() for name, value in loop.drafter.state_dict().items()}
    loop.run()
    rows = read_history(tmp_path)
    losses = [row["loss"] for row in rows if "heldout" not in row]
    assert losses[-1] < losses[0]
    assert {"expected_accepted_length", "acceptance_1", "acceptance_4"} <= rows[0]["heldout"].keys()
    kept = {name for name, value in loop.drafter.state_dict().items() if torch.equal(value, before[name])}
    assert kept == {"backbone.embed_tokens.weight", "backbone.lm_head.weight"}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_losses_fall(tmp_path: Path, alone: list[dict[str, Any]], precision: str):
    loop_over(tmp_path, samples_of(4), steps=15, precision=precision, checkpoint_every=100).run()
    losses = [row["loss"] for row in read_history(tmp_path)]
    assert losses[-1] < 0.9 * losses[0]


def test_a_micro_batch_that_is_not_finite_is_skipped_and_counted(tmp_path: Path, alone: list[dict[str, Any]]):
    good = samples_of(7)
    loop = loop_over(tmp_path, [*good, spoilt(random_sample(SHAPE, "bad", 30))], sequences_per_micro_batch=1)
    figures = loop.run()
    assert figures["skipped_micro_batches"] == 2  # four steps of four are two epochs over eight samples
    assert all(bool(p.isfinite().all()) for p in loop.drafter.parameters())
    assert all(math.isfinite(row["loss"]) for row in read_history(tmp_path))


def test_too_many_micro_batches_that_are_not_finite_end_the_run(tmp_path: Path, alone: list[dict[str, Any]]):
    loop = loop_over(tmp_path, [spoilt(sample) for sample in samples_of(4)], max_skipped=3, sequences_per_micro_batch=1)
    with pytest.raises(TrainingDiverged, match=r"4 micro-batches had a non-finite loss \(max_skipped 3\); lower learn"):
        loop.run()


def test_nothing_to_learn_from_ends_the_run(tmp_path: Path, alone: list[dict[str, Any]]):
    empty = [
        replace(s, loss_mask=torch.zeros_like(s.loss_mask), last_hidden=s.last_hidden[:0], log_z=s.log_z[:0])
        for s in samples_of(4)
    ]
    with pytest.raises(TrainingDiverged, match="no supervised token in 4 sequences"):
        loop_over(tmp_path, empty).run()


def test_a_gradient_that_is_not_finite_ends_the_run_before_it_is_saved(
    tmp_path: Path, alone: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    loop = loop_over(tmp_path, samples_of(4), max_skipped=0, checkpoint_every=100, steps=6)
    with torch.no_grad():
        loop.drafter.backbone.fc.weight[0, 0] = torch.nan
    with pytest.raises(TrainingDiverged):
        loop.run()
    assert alone == []


def test_held_out_figures_do_not_depend_on_the_size_of_micro_batches(tmp_path: Path, alone: list[dict[str, Any]]):
    found = []
    for size in (1, 3):
        loop = loop_over(tmp_path / str(size), samples_of(7), heldout=5, sequences_per_micro_batch=size)
        found.append(loop._validate())
    assert found[0] == pytest.approx(found[1], abs=1e-5)
    assert found[0]["tokens"] == sum(14 + k for k in range(2, 7))


@pytest.mark.parametrize("balancing", [{"topk_method": "noaux_tc"}, {"topk_method": "greedy", "aux_loss_alpha": 0.1}])
def test_experts_are_balanced_and_their_loads_logged_however_a_step_is_cut(
    tmp_path: Path, alone: list[dict[str, Any]], balancing: dict[str, Any]
):
    shape = VARIANTS["production"] | {"moe": VARIANTS["production"]["moe"] | balancing}
    found = []
    for size, folder in ((4, tmp_path / "a"), (1, tmp_path / "b")):
        loop = loop_over(folder, samples_of(6), heldout=2, shape=shape, sequences_per_micro_batch=size)
        loop.run()
        found.append([row for row in read_history(folder) if "heldout" not in row])
        router = routers(loop.drafter)[0]
        assert (router.e_score_correction_bias is None) == (balancing["topk_method"] == "greedy")
        if router.e_score_correction_bias is not None:
            assert bool(router.e_score_correction_bias.any())
    for one, other in zip(*found, strict=True):
        assert sum(one["expert_loads"][0]) == 4 * 3 * 4 * 2  # sequences, anchors, slots, experts per token
        assert one["expert_loads"] == other["expert_loads"]
        assert one["expert_load_max_0"] >= 1.0 >= one["expert_load_min_0"]
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-4)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)


def test_without_held_out_samples_there_is_no_validation(tmp_path: Path, alone: list[dict[str, Any]]):
    assert loop_over(tmp_path, samples_of(4)).run()["validation"] == {}


class Watched:
    """The target in this process; how many samples were asked for and not yet answered, at most."""

    def __init__(self, target_config: dict[str, Any]) -> None:
        self._own = OwnTarget(target_config, LAYER_IDS, 2000)
        self.asked: list[list[str]] = []
        self.pending = self.most_pending = 0

    def submit(self, planned: list[PlannedSample]) -> list[PlannedSample]:
        self.asked.append([one.id for one in planned])
        self.pending += len(planned)
        self.most_pending = max(self.most_pending, self.pending)
        return self._own.submit(planned)

    def result(self, ticket: list[PlannedSample]) -> CapturedGroup:
        self.pending -= len(ticket)
        return self._own.result(ticket)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> TargetCache:
    return make_tiny_cache(tmp_path_factory.mktemp("cache"), tiny_target, train=7, heldout=2)


def tiny_config(output: Path, **source: Any) -> TrainConfig:
    content = {
        "output": str(output),
        "drafter": {"num_layers": 1, "block_size": 3, "mask_token": "system", "markov_rank": 4, "draft_vocab_size": 40},
        "steps": 6,
        "sequences_per_step": 4,
        "sequences_per_micro_batch": 2,
        "anchors_per_sequence": 4,
        "learning_rate": 1e-2,
        "precision": "float32",
        "validate_every": 3,
    }
    return build_config(TrainConfig, content | source)


def online_loop(
    cache: TargetCache, folder: Path, monkeypatch: pytest.MonkeyPatch, *, steps_ahead: int
) -> tuple[TrainLoop, Watched]:
    """A loop over the cache's samples, their states captured anew."""
    planned = [
        PlannedSample(entry.id, entry.split, entry.domain, *(column.tolist() for column in cache.tokens(index)))
        for index, entry in enumerate(cache.entries)
    ]
    targets = Watched(cache.target_config)
    source = OnlineSamples(
        SampleTable.of(planned),
        targets,
        folder="answers",
        request=cache.request,
        target_config=cache.target_config,
        steps_ahead=steps_ahead,
    )
    monkeypatch.setattr(loop_module, "rank_samples", lambda config, shared, **options: source)
    config = tiny_config(folder, data={"mode": "online", "answers": "answers", "steps_ahead": steps_ahead})
    initial = prepare(config, source, fresh=False)
    assert targets.asked  # the initial drafter saw a few
    targets.asked.clear()
    return TrainLoop(
        config, {"initial": str(initial), "output": str(folder), "tracking_uri": "", "run_id": None}
    ), targets


def test_online_samples_give_the_losses_of_the_cache(
    cache: TargetCache, tmp_path: Path, alone: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    config = tiny_config(tmp_path / "offline", cache=str(cache.folder))
    initial = prepare(config, cache, fresh=False)
    run = {"initial": str(initial), "output": config.output, "tracking_uri": "", "run_id": None}
    offline = TrainLoop(config, run).run()
    loop, _ = online_loop(cache, tmp_path / "online", monkeypatch, steps_ahead=2)
    online = loop.run()
    rows = [read_history(tmp_path / mode) for mode in ("offline", "online")]
    for a, b in zip(*rows, strict=True):
        a, b = a.get("heldout", a), b.get("heldout", b)
        assert b["loss"] == pytest.approx(a["loss"], abs=1e-4)
        assert (a["blocks"], a["tokens"]) == (b["blocks"], b["tokens"])
    for figures in (offline, online):
        assert (figures["samples"], figures["samples_not_finite"]) == (6 * 4, 0)
    for mode, target_ran in (("offline", False), ("online", True)):
        for row in (row for row in read_history(tmp_path / mode) if "heldout" not in row):
            assert 0 < row["data_wait_s"] < row["step_s"]
            assert (row["target_s"] > 0) == (row["samples_captured"] > 0) == target_ran


@pytest.mark.parametrize("steps_ahead", [0, 2])
def test_no_more_is_asked_for_than_the_steps_ahead_and_all_of_it_is_used(
    cache: TargetCache, tmp_path: Path, alone: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, steps_ahead: int
):
    loop, targets = online_loop(cache, tmp_path, monkeypatch, steps_ahead=steps_ahead)
    loop.run()
    heldout = len(cache.indices("heldout"))
    assert 4 * (1 + steps_ahead) <= targets.most_pending <= 4 * (1 + steps_ahead) + heldout
    assert targets.pending == 0
    assert sum(map(len, targets.asked)) == 6 * 4 + 3 * heldout


def test_a_resumed_run_asks_for_what_an_uninterrupted_one_asks_for(
    cache: TargetCache, tmp_path: Path, alone: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    whole, targets = online_loop(cache, tmp_path / "whole", monkeypatch, steps_ahead=0)
    whole.run()
    resumed, targets_after = online_loop(cache, tmp_path / "resumed", monkeypatch, steps_ahead=0)
    resumed.step = 4
    resumed.run()
    assert targets_after.asked == targets.asked[-len(targets_after.asked) :]
    assert sum(map(len, targets_after.asked)) == 2 * 4 + len(cache.indices("heldout"))
