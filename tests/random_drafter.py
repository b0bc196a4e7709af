"""Small drafters with random weights everywhere, and batches to run them on; no target behind them."""

import math
from typing import Any

import torch
from torch import Tensor

from dspark.data.target_cache import CachedSample
from dspark.drafters import build_drafter
from dspark.drafters.base import BlockBatch, PackedBatch
from dspark.drafters.config import DrafterConfig
from dspark.drafters.dflash import DFlashDrafter
from dspark.drafters.dspark import DSparkDrafter
from dspark.training.packing import AnchoredSequence, pack_blocks

# What changes the shape of a drafter's attention, input or vocabulary; every property has to hold for all of them.
MOE = {"n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "routed_scaling_factor": 1.5}
HYPER = {"hc_mult": 4}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "anchor_fusion": {"anchor_fusion": True},
    "sliding_window": {"sliding_window": 6},
    "mixed_windows": {"sliding_window": 6, "layer_types": ("sliding_attention", "full_attention")},
    "moe": {"moe": MOE | {"scoring_func": "softmax", "topk_method": "greedy", "aux_loss_alpha": 0.01}},
    "hyper_connections": {"hyper_connections": HYPER},
    "production": {
        "moe": MOE,
        "mlp_layer_types": ("dense", "sparse"),
        "hyper_connections": HYPER,
        "sliding_window": 6,
        "anchor_fusion": True,
    },
    "reduced_vocabulary": {"draft_vocab_size": 30},
    "padded_vocabulary": {"valid_vocab_size": 50},
    "no_markov": {"markov_rank": 0, "confidence_head_with_markov": False},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "bent_head": {"embedding_scale": 3.0, "logit_scale": 0.5, "final_logit_softcapping": 4.0, "lm_head_bias": True},
    "gemma4": {
        "model_type": "gemma4_text",
        "num_key_value_heads": 1,
        "attention_k_eq_v": True,
        "rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        "embedding_scale": 4.0,
        "final_logit_softcapping": 5.0,
    },
    "dflash": {
        "architecture": "dflash",
        "markov_rank": 0,
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
    },
}


def small_config(**changes: Any) -> DrafterConfig:
    """A two-layer DSpark shape: hidden 16, 4 heads over 2 key/value heads, vocabulary 61, blocks of 4."""
    fields: dict[str, Any] = {
        "architecture": "dspark",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 128,
        "vocab_size": 61,
        "target_layer_ids": (0, 2),
        "num_target_layers": 4,
        "block_size": 4,
        "mask_token_id": 60,
        "markov_rank": 5,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    } | changes
    fields.setdefault("valid_vocab_size", fields["vocab_size"])
    fields.setdefault("draft_vocab_size", fields["valid_vocab_size"])
    return DrafterConfig(**fields)


def random_drafter(*, seed: int = 0, **changes: Any) -> DSparkDrafter | DFlashDrafter:
    """A drafter of `small_config(**changes)`; every weight is random, a reduced vocabulary maps to ascending ids."""
    drafter = build_drafter(small_config(**changes))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1.0 + 0.2 * noise if name.endswith("norm.weight") else 0.3 * noise)
        for name, buffer in drafter.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("layer_scalar"):
                buffer.fill_(0.8)
    config = drafter.config
    if config.has_reduced_vocabulary:
        chosen = torch.randperm(config.valid_vocab_size, generator=generator)[: config.draft_vocab_size]
        drafter.backbone.d2t = chosen.sort().values
    return drafter.eval()


def random_batch(config: DrafterConfig, anchors: list[list[int]], *, num_tokens: int = 24, seed: int = 1) -> BlockBatch:
    """Random tokens and features with the given anchors; a shorter row of anchors is padded."""
    generator = torch.Generator().manual_seed(seed)
    most = max(len(row) for row in anchors)
    return BlockBatch(
        input_ids=torch.randint(0, config.valid_vocab_size, (len(anchors), num_tokens), generator=generator),
        target_hidden=torch.randn(len(anchors), num_tokens, config.feature_size, generator=generator),
        anchors=torch.tensor([row + [0] * (most - len(row)) for row in anchors]),
        anchor_mask=torch.tensor([[True] * len(row) + [False] * (most - len(row)) for row in anchors]),
    )


def packed(batch: BlockBatch, config: DrafterConfig) -> PackedBatch:
    """The same blocks without the padding."""
    rows = zip(batch.input_ids, batch.target_hidden, batch.anchors, batch.anchor_mask, strict=True)
    sequences = [AnchoredSequence(ids, hidden, anchors[mask]) for ids, hidden, anchors, mask in rows]
    return pack_blocks(sequences, block_size=config.block_size, sliding_window=config.widest_window)


def random_sample(config: DrafterConfig, name: str, length: int, *, prompt: int = 4, seed: int = 0) -> CachedSample:
    """Random states in bf16 as the cache stores them; all tokens after the prompt are supervised.

    log Z is that of a head which gives random logits, so the target's probabilities on V' sum to about a half.
    """
    generator = torch.Generator().manual_seed(1000 * seed + length)
    mask = torch.zeros(length, dtype=torch.uint8)
    mask[prompt:] = 1
    num_supervised = int(mask.sum())
    return CachedSample(
        id=name,
        input_ids=torch.randint(0, config.valid_vocab_size, (length,), generator=generator),
        loss_mask=mask,
        hidden=torch.randn(length, config.feature_size, generator=generator).bfloat16(),
        last_hidden=torch.randn(num_supervised, config.hidden_size, generator=generator).bfloat16(),
        log_z=torch.full((num_supervised,), math.log(2.0 * config.valid_vocab_size)),
    )


def target_to_draft(drafter: DSparkDrafter | DFlashDrafter) -> Tensor:
    """Draft id of every target id, -1 outside the draft vocabulary: [V]."""
    mapping = torch.full((drafter.config.vocab_size,), -1)
    mapping[drafter.backbone.d2t] = torch.arange(drafter.config.draft_vocab_size)
    return mapping
