"""What drafting a block and verifying it cost, by kind of drafter and length of the block, on one copy of the target.

A drafter's time does not depend on its weights, and a block's length not on its weights' shape: each trained drafter
is timed at every length under a config of its own.
"""

import logging
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from pydantic import Field
from safetensors.torch import load_file, save_file

from dspark.config import Config
from dspark.drafters.checkpoint import from_deepspec, load_drafter, to_deepspec
from dspark.engine.config import EngineConfig
from dspark.engine.loading import paged_runner, target_runner
from dspark.engine.step_timer import NEW_TOKENS, BatchShape, StepTimer, page_tables
from dspark.provenance import read_json, write_json
from dspark.targets import TargetConfig, load_target, load_tokenizer, vocabulary_size

PAGE_SIZE = 16
WEIGHTS, SLOT_EMBEDDING = "model.safetensors", "anchor_fusion.slot_embedding"

log = logging.getLogger("dspark.round_time")


class RoundTimeConfig(Config):
    """Rounds to time."""

    kinds: tuple[str, ...] = ("dspark", "dspark-rnn", "dflash", "eagle3")
    """Drafters by name; one that is not among those trained is left out."""
    block_sizes: tuple[int, ...] = Field((3, 7, 15), min_length=1)
    """Draft tokens of a round."""
    requests: int = Field(8, ge=1)
    """Requests that draft and verify at once."""
    context_tokens: int = Field(256, ge=1)
    repeats: int = Field(15, ge=5)
    """Sweeps over all variants of a length, each in another order."""
    threads: int = Field(2, ge=1)


def measure(
    config: RoundTimeConfig, target: TargetConfig, folders: Mapping[str, str], scratch: Path, *, seed: int = 0
) -> dict[str, Any]:
    """{"requests", "context_tokens", "repeats", "variants": [{"kind", "block_size", "draft_s", "verify_s"}]}.

    draft_s, verify_s: seconds of each sweep, which times every kind of one length; folders: by kind. scratch: gets
    the configs that differ from the trained ones.
    """
    torch.set_num_threads(config.threads)
    model: Any = load_target(target)
    vocabulary = vocabulary_size(load_tokenizer(target))
    variants: list[dict[str, Any]] = []
    for size in config.block_sizes:
        timers = {
            kind: _timer(config, model, vocabulary, _with_block(folders[kind], size, scratch / f"{kind}-{size}"), size)
            for kind in config.kinds
            if kind in folders
        }
        timed = _sweeps(config, timers, size, random.Random(seed + size))
        variants += [{"kind": kind, "block_size": size} | seconds for kind, seconds in timed.items()]
        for kind, seconds in timed.items():
            shown = (1000 * median(seconds[name]) for name in ("draft_s", "verify_s"))
            log.info("%s, %d draft tokens: drafting %.2f ms, verifying %.2f ms", kind, size, *shown)
    common = config.model_dump(mode="json", include={"requests", "context_tokens", "repeats", "threads"})
    return common | {"variants": variants}


def _sweeps(
    config: RoundTimeConfig, timers: Mapping[str, StepTimer], block_size: int, order: random.Random
) -> dict[str, dict[str, list[float]]]:
    """One sweep before is not counted. Verifying is the target's work, whoever drafted."""
    shape = BatchShape((block_size + 1,) * config.requests)
    seconds: dict[str, dict[str, list[float]]] = {kind: {"draft_s": [], "verify_s": []} for kind in timers}
    for sweep in range(config.repeats + 1):
        for kind in order.sample(list(timers), len(timers)):
            draft_s, verify_s = timers[kind].draft_s(config.requests), timers[kind].verify_s(shape)
            if sweep:
                seconds[kind]["draft_s"].append(draft_s)
                seconds[kind]["verify_s"].append(verify_s)
    return seconds


def _timer(config: RoundTimeConfig, model: Any, vocabulary: int, folder: str, block_size: int) -> StepTimer:
    drafter = load_drafter(folder, dtype=model.dtype, device=str(model.device))
    needed = config.context_tokens + max(block_size + NEW_TOKENS * (config.repeats + 1), block_size + 1)
    tables = page_tables([needed] * config.requests, PAGE_SIZE)
    engine = EngineConfig(
        page_size=PAGE_SIZE,
        kv_tokens=PAGE_SIZE * sum(len(table.pages) for table in tables),
        max_running_requests=config.requests,
        max_batch_tokens=max(config.context_tokens, config.requests * (block_size + 1)),
    )
    drafts = paged_runner(drafter, num_pages=engine.num_pages, page_size=PAGE_SIZE)
    target = target_runner(model, drafts, config=engine, vocabulary_size=vocabulary)
    return StepTimer(target, drafts, tables, context_tokens=config.context_tokens, seed=0)


def _with_block(folder: str, block_size: int, scratch: Path) -> str:
    """The drafter under a config with this block: its own folder, or one with its weights.

    What it has for each slot is cut, or goes on as in its last slot.
    """
    content = read_json(f"{folder}/config.json")
    shape = from_deepspec(content)
    if shape.block_size == block_size:
        return folder
    changed = shape.model_copy(update={"block_size": block_size})
    write_json(scratch / "config.json", to_deepspec(changed, dtype=str(content.get("dtype", "bfloat16"))))
    weights = load_file(Path(folder) / WEIGHTS)
    if SLOT_EMBEDDING in weights:
        slots = torch.arange(block_size).clamp_max(shape.block_size - 1)
        weights[SLOT_EMBEDDING] = weights[SLOT_EMBEDDING][slots]
    (scratch / WEIGHTS).unlink(missing_ok=True)  # a link to another file would have that one written over
    save_file(weights, scratch / WEIGHTS)
    return str(scratch)


def shares(variants: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Median ms of drafting and verifying by variant, for a table."""
    return [
        {"kind": one["kind"], "block_size": one["block_size"]}
        | {f"{name}_ms": 1000 * median(one[f"{name}_s"]) for name in ("draft", "verify")}
        for one in variants
    ]
