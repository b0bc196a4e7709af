"""Small EAGLE-3 and MTP drafters with random weights everywhere; no target behind them."""

from typing import Any

import torch
import transformers

from dspark.drafters import build_drafter
from dspark.drafters.autoregressive import AutoregressiveDrafter
from dspark.drafters.eagle3 import Eagle3Config
from dspark.drafters.mtp import MTPConfig, one_layer_config

# Every property has to hold for all of them.
AUTOREGRESSIVE_VARIANTS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle3_reduced_vocabulary": {"draft_vocab_size": 30},
    "eagle3_padded_vocabulary": {"valid_vocab_size": 50},
    "mtp_one_module": {"architecture": "mtp"},
    "mtp_modules": {"architecture": "mtp", "num_modules": 4},
    "mtp_reduced_vocabulary": {"architecture": "mtp", "draft_vocab_size": 30},
}


def autoregressive_config(**changes: Any) -> Eagle3Config | MTPConfig:
    """Hidden 16, 4 heads over 2 key/value heads, vocabulary 61, 4 draft tokens."""
    if changes.get("architecture") == "mtp":
        return mtp_config(**changes)
    fields: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 128,
        "vocab_size": 61,
        "target_layer_ids": (0, 2),
        "num_target_layers": 4,
        "block_size": 4,
    } | changes
    fields.setdefault("valid_vocab_size", fields["vocab_size"])
    fields.setdefault("draft_vocab_size", fields["valid_vocab_size"])
    return Eagle3Config(**fields)


def mtp_config(**changes: Any) -> MTPConfig:
    """The same sizes around a Llama layer."""
    llama = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    fields: dict[str, Any] = {
        "hidden_size": 16,
        "vocab_size": 61,
        "target_layer_ids": (5,),
        "num_target_layers": 4,
        "block_size": 4,
        "block": one_layer_config(llama),
    } | changes
    fields.setdefault("valid_vocab_size", fields["vocab_size"])
    fields.setdefault("draft_vocab_size", fields["valid_vocab_size"])
    return MTPConfig(**fields)


def random_autoregressive_drafter(*, seed: int = 0, **changes: Any) -> AutoregressiveDrafter:
    """A drafter of `autoregressive_config(**changes)`; a reduced vocabulary maps to ascending ids."""
    drafter = build_drafter(autoregressive_config(**changes))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1.0 + 0.2 * noise if name.endswith("norm.weight") else 0.3 * noise)
    config = drafter.config
    if config.draft_vocab_size < config.valid_vocab_size:
        chosen = torch.randperm(config.valid_vocab_size, generator=generator)[: config.draft_vocab_size]
        drafter.backbone.d2t = chosen.sort().values
    return drafter.eval()
