"""Draft layers of Gemma4's type, and their place in DeepSpec's `config.json`.

Legend: B sequences, L context tokens, A anchors, R requests, G block size, d hidden size.
Source: DeepSpec; the attention's own part of it is in `layers.DraftAttention`.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.drafters.config import FULL, DrafterConfig
from dspark.drafters.layers import Attend, DraftAttention, RMSNorm

# What a Gemma4 target may have and its drafters do not.
SUPPORTED = {"hidden_activation": "gelu_pytorch_tanh", "enable_moe_block": False, "hidden_size_per_layer_input": 0}


class GeGLU(nn.Module):
    """down(gelu(gate x) * up x), gelu by tanh."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class Gemma4Layer(nn.Module):
    """Norms before and after each part, and a factor on the whole; the context enters through keys and values only."""

    layer_scalar: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.pre_feedforward_layernorm = RMSNorm(size, eps)
        self.mlp = GeGLU(config)
        self.post_feedforward_layernorm = RMSNorm(size, eps)
        self.dropout = nn.Dropout(config.dropout)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(
        self, h: Tensor, context_kv: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor, context_mask: Tensor
    ) -> Tensor:
        """[B, A, G, d], as h; arguments as `DraftLayer.forward` has them."""
        return self._add(h, self.self_attn(self.input_layernorm(h), context_kv, cos, sin, context_mask))

    def forward_flat(self, h: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """The same layer for R blocks in a row, whose context lies in paged memory or is packed: [R, G, d], as h."""
        attention = self.self_attn
        u = self.input_layernorm(h)
        mixed = attend(attention.queries(u, cos, sin), *attention.keys_values(u, cos, sin))
        return self._add(h, attention.o_proj(mixed.flatten(2)))

    def _add(self, h: Tensor, attended: Tensor) -> Tensor:
        h = h + self.dropout(self.post_attention_layernorm(attended))
        passed = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(h)))
        return (h + self.dropout(passed)) * self.layer_scalar.to(h.dtype)


def gemma4_sizes(content: dict[str, Any]) -> dict[str, Any]:
    """What a `config.json` of a Gemma4 target or drafter means for draft layers, which are all global ones.

    Raises: ValueError for a part that draft layers do not have.
    """
    for name, supported in SUPPORTED.items():
        if (content.get(name) or supported) != supported:
            raise ValueError(f"drafter config has {name} {content[name]!r}; only {supported!r} is supported")
    shares = bool(content.get("attention_k_eq_v"))
    num_global = content.get("num_global_key_value_heads") if shares else None
    return {
        "head_dim": content.get("global_head_dim") or content["head_dim"],
        "num_key_value_heads": num_global or content["num_key_value_heads"],
        "attention_k_eq_v": shares,
        "embedding_scale": content.get("embedding_scale") or math.sqrt(content["hidden_size"]),
    }


def gemma4_content(config: DrafterConfig) -> dict[str, Any]:
    """What a Gemma4-type drafter's `config.json` has beyond or instead of a Qwen3-type one's."""
    return {
        "model_type": config.model_type,
        "hidden_activation": SUPPORTED["hidden_activation"],
        "global_head_dim": config.head_dim,
        "num_global_key_value_heads": config.num_key_value_heads,
        "attention_k_eq_v": config.attention_k_eq_v,
        "final_logit_softcapping": config.final_logit_softcapping,
        "rope_parameters": {FULL: config.rope_parameters},
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 0,
    }
