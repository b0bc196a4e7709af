"""The chunked head loss beside its eager twin: peak extra memory, time, and gradients against float64.

    python benchmarks/fused_loss.py [--positions 3584] [--vocabulary 49152] [--repeats 5] [--threads 2]

Each measurement of memory has a process of its own; times are taken in turn in one process. bf16 states and head rows,
Markov rank 64, blocks of 7 that begin 3 positions apart, as 64 anchors over an answer of 200 tokens do. The last line
of stdout is one JSON object.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dspark.numerics import use_fast_float32_products
from dspark.training.fused import HeadTargets, head_loss
from dspark.training.losses import slot_losses
from dspark.training.trainer import KEEP_FREED_MEMORY
from public_process import as_by_default

HIDDEN, RANK, BLOCK, APART = 576, 64, 7, 3

Problem = tuple[Tensor, Tensor, Tensor, Tensor, HeadTargets]


def problem(positions: int, vocabulary: int, *, distance: float) -> Problem:
    """(h, embedded, head, bias_weight, targets); `distance`: of the drafter's states from the target's."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    rows = (APART * torch.arange(positions // BLOCK + 1).unsqueeze(1) + torch.arange(BLOCK)).flatten()[:positions]
    head = (0.1 * random(vocabulary, HIDDEN)).bfloat16()
    last_hidden = random(int(rows.max()) + 1, HIDDEN).bfloat16()
    h = (last_hidden[rows].float() + distance * random(positions, HIDDEN)).bfloat16()
    log_z = torch.cat([(part.float() @ head.float().T).logsumexp(-1) for part in last_hidden.split(128)])
    labels = torch.randint(0, vocabulary, (positions,), generator=generator)
    scale = torch.full((positions,), 1.0 / positions)
    targets = HeadTargets(last_hidden, log_z, rows, labels, 0.1 * scale, 0.9 * scale)
    return h, 0.01 * random(positions, RANK), head.float(), 0.01 * random(vocabulary, RANK), targets


def fused(h: Tensor, embedded: Tensor, head: Tensor, bias_weight: Tensor, targets: HeadTargets) -> Tensor:
    return head_loss(h, embedded, head, bias_weight, targets)[0]


def eager(h: Tensor, embedded: Tensor, head: Tensor, bias_weight: Tensor, targets: HeadTargets) -> Tensor:
    with torch.no_grad():
        target_logits = targets.last_hidden[targets.rows].to(head.dtype) @ head.T
    logits = h.to(head.dtype) @ head.T + embedded @ bias_weight.T
    losses = slot_losses(logits, target_logits, targets.log_z[targets.rows], targets.labels, None)
    return (losses.ce * targets.ce_scale + losses.tv * targets.tv_scale).sum()


FORMS: dict[str, Callable[..., Tensor]] = {"fused": fused, "eager": eager}


def gradients(form: Callable[..., Tensor], given: Problem) -> list[Tensor]:
    """Of h, embedded and bias_weight."""
    h, embedded, head, bias_weight, targets = given
    learned = [x.detach().requires_grad_() for x in (h, embedded, bias_weight)]
    form(learned[0], learned[1], head, learned[2], targets).backward()
    return [x.grad for x in learned if x.grad is not None]


def extra_bytes(name: str, positions: int, vocabulary: int, threads: int) -> int:
    """Peak resident memory of one loss with its gradients, beyond what was resident before (Linux)."""
    torch.set_num_threads(threads)
    use_fast_float32_products()
    given = problem(positions, vocabulary, distance=0.1)
    gradients(FORMS[name], problem(64, 512, distance=0.1))  # libraries allocate at their first use
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status("VmRSS")
    gradients(FORMS[name], given)
    return _status("VmHWM") - before


def _status(field: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


def gradient_errors(vocabulary: int, *, positions: int = 28) -> tuple[float, dict[str, float]]:
    """(overlap of drafter and target, relative error of each gradient against float64), the drafter being close."""
    given = problem(positions, vocabulary, distance=0.016)
    h, embedded, head, bias_weight, targets = given
    bias_weight = 0.1 * bias_weight
    wide = replace(
        targets,
        last_hidden=targets.last_hidden.double(),
        log_z=targets.log_z.double(),
        ce_scale=targets.ce_scale.double(),
        tv_scale=targets.tv_scale.double(),
    )
    exact = gradients(eager, (h.double(), embedded.double(), head.double(), bias_weight.double(), wide))
    found = gradients(fused, (h, embedded, head, bias_weight, targets))
    tv = head_loss(h, embedded, head, bias_weight, targets)[2]
    names = ("h", "embedded", "bias_weight")
    errors = {
        name: float((one.double() - other).norm() / other.norm())
        for name, one, other in zip(names, found, exact, strict=True)
    }
    return float(1.0 - 0.5 * tv.mean()), errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=3584)
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    size = (options.positions, options.vocabulary)

    if KEEP_FREED_MEMORY.items() - os.environ.items():  # as in training; read when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEP_FREED_MEMORY)
    with as_by_default(KEEP_FREED_MEMORY), multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        peaks = {name: pool.apply(extra_bytes, (name, *size, options.threads)) for name in FORMS}
    for name, peak in peaks.items():
        print(f"{name}: {peak / 1e6:8.0f} MB beyond what was there, {size[0]} positions, vocabulary {size[1]}")
    print(f"memory, fused / eager: 1/{peaks['eager'] / peaks['fused']:.1f}")

    torch.set_num_threads(options.threads)
    use_fast_float32_products()
    given = problem(*size, distance=0.1)
    seconds: dict[str, list[float]] = {name: [] for name in FORMS}
    for repeat in range(options.repeats + 1):
        for name, form in FORMS.items():
            started = time.perf_counter()
            gradients(form, given)
            if repeat:
                seconds[name].append(time.perf_counter() - started)
    ratios = [slow / fast for fast, slow in zip(seconds["fused"], seconds["eager"], strict=True)]
    for name, own in seconds.items():
        print(f"{name}: {statistics.median(own):.3f} s ({min(own):.3f}-{max(own):.3f})")
    print(f"speed, fused / eager: {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")

    overlap, errors = gradient_errors(32_768)
    print(f"gradients at overlap {overlap:.3f}, V = 32,768, from float64: {errors}")
    print(json.dumps({"peak_bytes": peaks, "speed": statistics.median(ratios), "overlap": overlap, "errors": errors}))


if __name__ == "__main__":
    main()
