"""An untrained drafter for a tiny target, in a folder as jobs/train.py leaves it."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from dspark.chat import ChatConfig
from dspark.drafters.base import BlockBatch
from dspark.drafters.checkpoint import save_drafter
from dspark.drafters.initialize import AUTOREGRESSIVE, DrafterShape, drafter_config, new_drafter
from dspark.drafters.initialize_autoregressive import autoregressive_config, new_autoregressive_drafter
from dspark.engine.hidden_states import HiddenStateCapture
from dspark.provenance import write_json
from dspark.targets import TargetConfig, load_target, load_tokenizer, target_identity, vocabulary_size


def make_tiny_drafter(
    folder: str | Path,
    target_folder: str | Path,
    *,
    layer_ids: tuple[int, ...] = (0, 2),
    chat: ChatConfig | None = None,
    **shape: Any,
) -> Path:
    """Write `config.json`, `model.safetensors` and `provenance.json` into `folder`; returns it."""
    folder = Path(folder)
    target_config = TargetConfig(name=str(target_folder), dtype="float32", device="cpu")
    target, tokenizer = load_target(target_config), load_tokenizer(target_config)
    is_parallel = shape.get("architecture") not in AUTOREGRESSIVE
    parallel = {"num_layers": 1, "mask_token": 0, "markov_rank": 8} if is_parallel else {}
    options = {"block_size": 4, "warm_start": True} | parallel | shape
    fields: dict[str, Any] = {"target_layer_ids": layer_ids, "valid_vocab_size": vocabulary_size(tokenizer)}
    config: Any
    if is_parallel:
        config = drafter_config(DrafterShape(**options), target.config, tokenizer, **fields)
    else:
        config = autoregressive_config(DrafterShape(**options), target.config, position_decay=4.0, **fields)
    build = new_drafter if is_parallel else new_autoregressive_drafter
    drafter = build(
        config,
        target,
        draft_to_target=torch.arange(config.draft_vocab_size),
        sample_features=torch.randn(32, config.feature_size),
        warm_start=options["warm_start"],
        seed=0,
    )
    save_drafter(drafter, folder, dtype=torch.float32)
    write_json(
        folder / "provenance.json",
        {
            "target": target_identity(target_config),
            "target_config": target_config.model_dump(),
            "chat": (chat or ChatConfig()).model_dump(),
        },
    )
    return folder


def learn_by_heart(drafter: Any, target: Any, prompt: list[int], answer: list[int], *, steps: int = 120) -> None:
    """Train the drafter on one answer of the target until it can say it."""
    tokens = prompt + answer
    ids = torch.tensor([tokens])
    with torch.no_grad(), HiddenStateCapture(target, drafter.target_layer_ids) as capture:
        target(ids)
        hidden = capture.hidden()
    anchors = torch.arange(len(prompt), len(tokens) - drafter.block_size)[None]
    batch = BlockBatch(ids, hidden, anchors, torch.ones_like(anchors, dtype=torch.bool))
    labels = ids[0][anchors[..., None] + 1 + torch.arange(drafter.block_size)]
    slots = torch.ones_like(labels, dtype=torch.bool)
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(steps):
        loss = F.cross_entropy(drafter(batch, slots).logits, labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
