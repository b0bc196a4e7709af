"""Experts over two ranks train as on one: DeepSpeed on gloo, two processes, no Ray cluster."""

import json
import os
import shutil
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from safetensors.torch import load_file

from dspark.config import build_config
from dspark.data.target_cache import TargetCacheWriter
from dspark.drafters.checkpoint import load_drafter, save_drafter
from dspark.training.config import TrainConfig
from dspark.training.loop import TrainLoop
from dspark.training.progress import read_history
from random_drafter import VARIANTS, random_drafter, random_sample

SHAPE = VARIANTS["production"] | {"moe": {**VARIANTS["production"]["moe"], "n_routed_experts": 6}}
STEPS, KEPT = 6, 3
# name: (expert parallel size, ZeRO stage, the run whose middle checkpoint it goes on from)
RUNS: dict[str, tuple[int, int, str | None]] = {
    "whole": (1, 1, None),
    "spread": (2, 1, None),
    "spread_zero_2": (2, 2, None),
    "resumed": (2, 2, "spread_zero_2"),
}


class Ranks:
    def get_world_rank(self) -> int:
        return dist.get_rank()

    def get_world_size(self) -> int:
        return dist.get_world_size()


def work(rank: int, folder: str, port: int) -> None:
    """One of the two processes: all runs, one after another."""
    import ray.train

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "DS_ACCELERATOR": "cpu"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    ray.train.get_context = Ranks  # type: ignore[assignment, misc]
    for name, (size, stage, earlier) in RUNS.items():
        kept = None if earlier is None else Path(folder) / earlier / f"step-{KEPT:06d}"
        ray.train.get_checkpoint = lambda kept=kept: kept and ray.train.Checkpoint(str(kept))  # type: ignore[misc]
        ray.train.report = lambda metrics, *, checkpoint, checkpoint_dir_name, name=name: shutil.copytree(  # type: ignore[misc]
            checkpoint.path, Path(folder) / name / checkpoint_dir_name, dirs_exist_ok=True
        )
        output = Path(folder) / name
        output.mkdir(exist_ok=True)
        if rank == 0 and earlier is not None:
            shutil.copyfile(Path(folder) / earlier / "history.jsonl", output / "history.jsonl")
        dist.barrier()
        run = {"initial": str(Path(folder) / "initial"), "output": str(output), "tracking_uri": "", "run_id": None}
        figures = TrainLoop(config_of(folder, size, stage), run).run()
        if rank == 0:
            (output / "figures.json").write_text(json.dumps(figures))
        dist.barrier()
    dist.destroy_process_group()


def config_of(folder: str, size: int, stage: int) -> TrainConfig:
    """Three sequences a step on two ranks: one rank is left without, and works as a stand-in."""
    content = {
        "cache": str(Path(folder) / "cache"),
        "output": folder,
        "drafter": {},
        "steps": STEPS,
        "sequences_per_step": 3,
        "anchors_per_sequence": 3,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.5,
        "precision": "float32",
        "num_workers": 2,
        "zero_stage": stage,
        "expert_parallel_size": size,
        "checkpoint_every": KEPT,
    }
    return build_config(TrainConfig, content)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a subfolder per run."""
    folder = tmp_path_factory.mktemp("runs")
    drafter = random_drafter(**SHAPE)
    save_drafter(drafter, folder / "initial", dtype=torch.float32)
    writer = TargetCacheWriter(folder / "cache")
    writer.begin({}, fresh=False)
    samples = [random_sample(drafter.config, f"s{k}", 14 + k, seed=k) for k in range(8)]
    writer.write_shard(0, ((s, "heldout" if k > 4 else "train", "chat") for k, s in enumerate(samples)))
    writer.finish({}, 1, {})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[3])  # the new processes find this module by its whole name
        torch.multiprocessing.spawn(work, args=(str(folder), port), nprocs=2)
    return folder


def rows_of(folder: Path, run: str, *names: str) -> list[list[float]]:
    return [[row[name] for name in names] for row in read_history(folder / run) if "heldout" not in row]


@pytest.mark.parametrize("run", ["spread", "spread_zero_2"])
def test_losses_and_gradient_norms_are_those_of_experts_in_one_place(runs: Path, run: str):
    found, expected = (rows_of(runs, name, "loss", "ce", "grad_norm") for name in (run, "whole"))
    assert len(expected) == STEPS
    assert max(norm for _, _, norm in expected) > 0.5  # clipping takes part
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("run", ["spread", "spread_zero_2"])
def test_tokens_are_counted_once(runs: Path, run: str):
    loads = [row["expert_loads"] for row in read_history(runs / "whole") if "heldout" not in row]
    assert loads == [row["expert_loads"] for row in read_history(runs / run) if "heldout" not in row]
    assert sum(loads[0][0]) == 3 * 3 * 4 * 2  # sequences, anchors, slots, experts per token


def test_held_out_figures_are_those_of_experts_in_one_place(runs: Path):
    whole, spread = (json.loads((runs / name / "figures.json").read_text()) for name in ("whole", "spread"))
    assert spread["validation"] == pytest.approx(whole["validation"], abs=1e-4)


def test_the_export_is_one_file_with_all_experts(runs: Path):
    whole, spread = (runs / name / f"step-{STEPS:06d}" / "final" for name in ("whole", "spread_zero_2"))
    assert load_drafter(spread).config == load_drafter(whole).config
    expected, found = (load_file(str(folder / "model.safetensors")) for folder in (whole, spread))
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-2, rtol=1e-2)  # bfloat16, Adam's signs near zero
    moved = (
        found["layers.1.mlp.experts.down_proj"]
        - load_drafter(runs / "initial").backbone.layers[1].mlp.experts.down_proj
    )
    assert bool((moved.abs().amax(dim=(1, 2)) > 1e-2).all())  # every expert has learnt, on whichever rank it lay


def test_a_resumed_run_goes_on_as_if_nothing_had_been(runs: Path):
    found, expected = (rows_of(runs, name, "step", "loss", "grad_norm") for name in ("resumed", "spread_zero_2"))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-5, rtol=1e-5)
