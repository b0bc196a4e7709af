"""A complete target cache of a tiny target's own greedy continuations, as jobs/cache.py leaves it."""

from pathlib import Path
from typing import Any

import torch

from dspark.chat import ChatConfig
from dspark.data.capture import CaptureWorker, PlannedSample
from dspark.data.target_cache import TargetCache, TargetCacheWriter
from dspark.drafters.base import final_state_id
from dspark.targets import TargetConfig, load_target, target_identity

LAYER_IDS = (0, 2)
NUM_LAYERS = 4
PROMPT_TOKENS = 6


def make_tiny_cache(
    folder: str | Path,
    target_folder: str | Path,
    *,
    train: int = 12,
    heldout: int = 3,
    layer_ids: tuple[int, ...] = LAYER_IDS,
    final_states: tuple[str, ...] = (),
    **asked: Any,
) -> TargetCache:
    """Write a cache of `train` + `heldout` samples of 26 and more tokens in two shards into `folder`; opens it.

    asked: more of what its request says.
    """
    target_config = TargetConfig(name=str(target_folder), dtype="float32", device="cpu")
    layer_ids = (*layer_ids, *(final_state_id(name, NUM_LAYERS) for name in final_states))
    worker = CaptureWorker(target_config.model_dump(), layer_ids, str(folder), batch_tokens=2000, threads=1)
    planned = _planned(target_config, train, heldout)
    request: dict[str, Any] = {
        "answers_fingerprint": "0123456789abcdef",
        "target": target_identity(target_config),
        "chat": ChatConfig().model_dump(),
        "target_layer_ids": list(layer_ids),
    } | asked
    writer = TargetCacheWriter(folder)
    writer.begin(request, fresh=False)
    for shard, samples in enumerate((planned[::2], planned[1::2])):
        of = {sample.id: sample for sample in samples}
        captured = list(worker.capture(samples))
        writer.write_shard(shard, ((one, of[one.id].split, of[one.id].domain) for one in captured))
    writer.finish(request, 2, {"target_config": target_config.model_dump(), "result": {}})
    return TargetCache(folder)


def _planned(target_config: TargetConfig, train: int, heldout: int) -> list[PlannedSample]:
    target = load_target(target_config)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 300, (train + heldout, PROMPT_TOKENS), generator=generator)
    longest = 20 + train + heldout
    ids = target.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        max_new_tokens=longest,
        min_new_tokens=longest,
    ).tolist()
    samples = []
    for number, row in enumerate(ids):
        length = PROMPT_TOKENS + 20 + number
        mask = [0] * PROMPT_TOKENS + [1] * (length - PROMPT_TOKENS)
        split = "train" if number < train else "heldout"
        samples.append(PlannedSample(f"sample-{number}", split, "chat", row[:length], mask))
    return samples
