"""Anchors per second of a training step, against padded batches with eager losses and against DeepSpec's step.

    python benchmarks/training_step.py [--cache runs/demo/cache] [--rounds 5] [--threads 2]

The shapes are the demo's: 2 layers, d = 576, V = 49,152, blocks of 7, 64 anchors a sequence, 8 sequences a step. Every
round takes one step of every subject on the same sequences and anchors, in turn, so that a slower minute of the machine
hits all of them; ratios are taken within a round. Freed memory is kept by the process, as this package's training does,
unless --memory default; DeepSpec's step is taken twice, with that setting and, in a process of its own, without. The
last line of stdout is one JSON object. The eager forms need about 8 GB.
"""

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from dspark.data.target_cache import CachedSample, TargetCache
from dspark.drafters.config import DrafterConfig
from dspark.drafters.dspark import DSparkDrafter
from dspark.numerics import use_fast_float32_products
from dspark.training.batches import step_samples
from dspark.training.trainer import KEEP_FREED_MEMORY
from public_process import PublicProcess
from public_step import PublicShape
from subjects import Clock, PackedFused, PaddedEager, PublicStep, Subject

VOCABULARY, REDUCED, NUM_ANCHORS, PER_STEP, NUM_FEATURES = 49_152, 8_192, 64, 8, 4
# (prompt, answer) tokens of chats with a small model: mean 280, a few answers too short for 64 anchors.
LENGTHS = (
    (38, 41), (52, 60), (45, 110), (61, 124), (70, 131), (48, 176), (83, 150), (57, 190), (66, 198), (92, 181),
    (49, 232), (71, 222), (60, 241), (88, 220), (54, 256), (75, 250), (63, 272), (97, 251), (58, 301), (81, 292),
    (69, 330), (90, 346), (64, 399), (77, 452),
)  # fmt: skip
PARTS = ("data", "backbone", "head and loss", "backward", "optimiser")


def synthetic_samples(config: DrafterConfig) -> list[CachedSample]:
    """Random states of the fixed lengths; log Z as if a tenth of the target's mass lay outside V'."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for number, (prompt, answer) in enumerate(LENGTHS):
        length = prompt + answer
        samples.append(
            CachedSample(
                id=f"synthetic-{number}",
                input_ids=torch.randint(0, config.vocab_size, (length,), generator=generator),
                loss_mask=torch.tensor([0] * prompt + [1] * answer, dtype=torch.uint8),
                hidden=torch.randn(length, config.feature_size, generator=generator).bfloat16(),
                last_hidden=torch.randn(answer, config.hidden_size, generator=generator).bfloat16(),
                log_z=torch.full((answer,), math.log(config.vocab_size) + 0.5 * 0.04 * config.hidden_size),
            )
        )
    return samples


def demo_config(num_features: int, draft_vocab_size: int) -> DrafterConfig:
    """The demo's drafter for SmolLM2-135M."""
    return DrafterConfig(
        architecture="dspark",
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        max_position_embeddings=8192,
        vocab_size=VOCABULARY,
        valid_vocab_size=VOCABULARY,
        draft_vocab_size=draft_vocab_size,
        target_layer_ids=tuple(range(num_features)),
        num_target_layers=30,
        block_size=7,
        mask_token_id=VOCABULARY - 1,
        markov_rank=64,
        enable_confidence_head=True,
        confidence_head_with_markov=True,
    )


def new_drafter(config: DrafterConfig) -> DSparkDrafter:
    """Random weights, the same for every subject; frozen ones as a bf16 target has them."""
    torch.manual_seed(0)
    drafter = DSparkDrafter(config)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.nn.init.normal_(parameter, std=0.02))
        for frozen in (drafter.backbone.embed_tokens, drafter.backbone.lm_head):
            frozen.weight.copy_((frozen.weight * 10.0).bfloat16())
    return drafter


def gradient_difference(samples: Sequence[CachedSample], config: DrafterConfig) -> float:
    """Largest difference of a gradient of packed + fused from that of padded + eager, over its largest; float32."""
    found = []
    for kind in (PackedFused, PaddedEager):
        drafter = new_drafter(config)
        options = {} if kind is PackedFused else {"only_supervised": False}
        kind("float32", drafter, num_anchors=NUM_ANCHORS, bf16=False, **options).backward(samples, 0, Clock())
        found.append({name: p.grad for name, p in drafter.named_parameters() if p.grad is not None})
    packed, padded = found
    assert packed.keys() == padded.keys()
    return max(float((packed[name] - padded[name]).abs().max() / padded[name].abs().max()) for name in padded)


def measure(subjects: Sequence[Subject], batches: Sequence[Sequence[CachedSample]]) -> dict[str, list[Clock]]:
    """A clock per subject and round; the first batch warms up and is not counted."""
    clocks: dict[str, list[Clock]] = {subject.name: [] for subject in subjects}
    for epoch, samples in enumerate(batches):
        anchors = set()
        for subject in subjects:
            clock = Clock()
            anchors.add(subject.step(samples, epoch, clock))
            if epoch:
                clocks[subject.name].append(clock)
        assert len(anchors) == 1, f"subjects saw different numbers of anchors: {anchors}"
        for subject in subjects if epoch else ():
            clocks[subject.name][-1].num_anchors = max(anchors)
    return clocks


def report(clocks: dict[str, list[Clock]]) -> dict[str, dict[str, float]]:
    """Prints a row per subject; returns anchors/s (median) and each part's share in ms."""
    print(f"{'':34} {'anchors/s':>22}  " + "".join(f"{part:>15}" for part in PARTS) + "   (ms, median)")
    rows = {}
    for name, own in clocks.items():
        rates = [clock.rate for clock in own]
        parts = {part: 1e3 * statistics.median(clock.seconds[part] for clock in own) for part in PARTS}
        spread = f"{statistics.median(rates):8.1f} ({min(rates):.0f}-{max(rates):.0f})"
        print(f"{name:34} {spread:>22}  " + "".join(f"{parts[part]:15.1f}" for part in PARTS))
        rows[name] = {"anchors_per_s": statistics.median(rates)} | parts
    return rows


def ratio(clocks: dict[str, list[Clock]], ours: str, rival: str) -> dict[str, float]:
    """Median and spread of the ratio within a round, printed and returned."""
    ratios = [a.rate / b.rate for a, b in zip(clocks[ours], clocks[rival], strict=True)]
    print(f"{ours} / {rival}: {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")
    return {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, help="folder made by jobs/cache.py; without it, fixed synthetic lengths")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--per-step", type=int, default=PER_STEP, help="sequences a step; fewer only for a quick look")
    parser.add_argument("--memory", choices=("kept", "default"), default="kept", help="what becomes of freed memory")
    options = parser.parse_args()
    if options.memory == "kept" and KEEP_FREED_MEMORY.items() - os.environ.items():  # read when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEP_FREED_MEMORY)
    torch.set_num_threads(options.threads)
    use_fast_float32_products()

    cache = None if options.cache is None else TargetCache(options.cache)
    num_features = NUM_FEATURES if cache is None else len(cache.request["target_layer_ids"])
    whole, reduced = (demo_config(num_features, size) for size in (VOCABULARY, REDUCED))
    samples = synthetic_samples(whole) if cache is None else [cache.load(i) for i in cache.indices("train")[:256]]
    steps = [step_samples(range(len(samples)), step, options.per_step, 0) for step in range(options.rounds + 1)]
    batches = [[samples[sample.index] for sample in step] for step in steps]
    print(f"{len(samples)} sequences, {sum(len(s.input_ids) for s in samples) / len(samples):.0f} tokens on average")

    difference = gradient_difference(batches[0][:2], whole)
    print(f"gradients, packed + fused against padded + eager in float32: {difference:.1e} of the largest apart")
    shape = PublicShape(VOCABULARY, num_features)
    subjects: list[Subject] = [
        PackedFused("packed, fused", new_drafter(whole), num_anchors=NUM_ANCHORS),
        PaddedEager("padded, eager", new_drafter(whole), num_anchors=NUM_ANCHORS, only_supervised=False),
        PaddedEager(
            "padded, eager, supervised slots", new_drafter(whole), num_anchors=NUM_ANCHORS, only_supervised=True
        ),
        PackedFused(f"packed, fused, {REDUCED} ids", new_drafter(reduced), num_anchors=NUM_ANCHORS),
        PublicProcess("DeepSpec's step", shape, options.threads, without=KEEP_FREED_MEMORY),
        PublicStep(f"DeepSpec's step, memory {options.memory}", shape),
    ]
    clocks = measure(subjects, batches)
    figures = report(clocks)
    names = [subject.name for subject in subjects]
    ratios = {
        "padded": ratio(clocks, names[0], names[1]),
        "padded_supervised": ratio(clocks, names[0], names[2]),
        "public": ratio(clocks, names[3], names[4]),
        "public_memory_kept": ratio(clocks, names[3], names[5]),
    }
    print(json.dumps({"subjects": figures, "ratios": ratios, "gradient_difference": difference}))


if __name__ == "__main__":
    main()
