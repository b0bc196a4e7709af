"""Parts of a draft layer: norms, rotary positions, attention over context and own block, SwiGLU.

Legend: B sequences, L context tokens, A anchors, G block size, d hidden, H query heads, K key/value heads,
R = H/K query heads per key/value head, D head width.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dspark.drafters.config import DrafterConfig
from dspark.drafters.mhc import HyperConnection, plain_residual

SCALED_ROPE_TYPES = ("linear", "llama3", "yarn")

# Queries [R, G, H, D], keys and values of the block [R, G, K, D] -> mixed values [R, G, H, D].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, the mean taken in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, eps=self.eps).to(x.dtype) * self.weight.to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Rotary position angles in float32, whatever the dtype of the model.

    Raises: ValueError for a rope type that is not understood, rather than a silent default base.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        inv_freq, scaling = _inverse_frequencies(config)
        self._inv_freq = inv_freq.float()  # no buffer: a cast of the module to bf16 must not round it
        self._scaling = scaling

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [..., D] float32. positions: [...] int64."""
        angles = positions.float().unsqueeze(-1) * self._inv_freq.to(positions.device)
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos() * self._scaling, angles.sin() * self._scaling


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x turned by its position; computed in float32, returned in x's dtype. cos, sin broadcast against x."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


def _inverse_frequencies(config: DrafterConfig) -> tuple[Tensor, float]:
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    base = rope.get("rope_theta")
    if base is None:
        raise ValueError(f"rope_parameters {rope} has no rope_theta; take it from the target's config")
    if kind == "proportional":
        return _proportional_frequencies(rope, config.head_dim), 1.0
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"rope_parameters {rope}: partial_rotary_factor is not supported, draft layers turn whole heads"
        )
    if kind == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return 1.0 / base**exponents, 1.0
    if kind not in SCALED_ROPE_TYPES:
        raise ValueError(f"rope_type {kind!r} is not supported; supported: default, {', '.join(SCALED_ROPE_TYPES)}")
    shape: dict[str, Any] = config.model_dump(
        include={"hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings"}
    )
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](
        PretrainedConfig(**shape | {"rope_parameters": rope}), torch.device("cpu")
    )
    return inv_freq, float(scaling)


def _proportional_frequencies(rope: dict[str, Any], head_dim: int) -> Tensor:
    """The first part of a whole head's frequencies, zero for the dimensions that are not turned: [D/2]."""
    num_turned = int(rope.get("partial_rotary_factor", 1.0) * head_dim // 2)
    exponents = torch.arange(0, 2 * num_turned, 2, dtype=torch.float32) / head_dim
    frequencies = torch.zeros(head_dim // 2)
    frequencies[:num_turned] = 1.0 / rope["rope_theta"] ** exponents / rope.get("factor", 1.0)
    return frequencies


class DraftAttention(nn.Module):
    """Block queries attend to the context strictly before the anchor and, both ways, to their own block.

    Gemma4's form: values normed (without a weight), no scaling of scores, and with `attention_k_eq_v` the raw keys as
    values.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = None if config.attention_k_eq_v else nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.scaling = config.attention_scaling
        self.value_eps = config.rms_norm_eps if config.is_gemma4 else None

    def keys_values(self, states: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (normed, rotated) and values, each [..., K, D]. states: [..., d]; cos, sin: [..., D]."""
        raw_keys = self._split(self.k_proj(states), self.num_kv_heads)
        values = raw_keys if self.v_proj is None else self._split(self.v_proj(states), self.num_kv_heads)
        if self.value_eps is not None:
            values = F.rms_norm(values.float(), (self.head_dim,), eps=self.value_eps).to(values.dtype)
        return rotate(self.k_norm(raw_keys), cos.unsqueeze(-2), sin.unsqueeze(-2)), values

    def queries(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Queries (normed, rotated), [..., H, D]. states: [..., d]; cos, sin: [..., D]."""
        queries = self.q_norm(self._split(self.q_proj(states), self.num_heads))
        return rotate(queries, cos.unsqueeze(-2), sin.unsqueeze(-2))

    def forward(
        self, u: Tensor, context_kv: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor, context_mask: Tensor
    ) -> Tensor:
        """[B, A, G, d]. u: [B, A, G, d]; context_kv: each [B, L, K, D]; context_mask: [B, A, G, L] bool, true = seen.

        The softmax runs over context and block together; the two score parts are computed apart, so that blocks
        never pay for each other's keys.
        """
        block = u.shape[2]
        queries = self.queries(u, cos, sin).unflatten(3, (self.num_kv_heads, -1))  # [B, A, G, K, R, D]
        queries = queries * self.scaling
        own_keys, own_values = (x.permute(0, 3, 1, 2, 4) for x in self.keys_values(u, cos, sin))  # [B, K, A, G, D]
        keys, values = (x.transpose(1, 2) for x in context_kv)  # [B, K, L, D]

        grouped = queries.permute(0, 3, 1, 4, 2, 5)  # [B, K, A, R, G, D]
        own_queries = grouped.flatten(3, 4)  # [B, K, A, R*G, D]
        flat = own_queries.flatten(2, 3)  # [B, K, A*R*G, D]
        on_context = (flat @ keys.transpose(-1, -2)).float().unflatten(2, grouped.shape[2:5])  # [B, K, A, R, G, L]
        hidden = ~context_mask.unsqueeze(1).unsqueeze(3)
        on_context = on_context.masked_fill(hidden, float("-inf"))
        on_block = (own_queries @ own_keys.transpose(-1, -2)).float().unflatten(3, grouped.shape[3:5])
        weights = torch.cat([on_context, on_block], dim=-1).softmax(dim=-1).to(values.dtype)
        context_weights, block_weights = weights.split([keys.shape[2], block], dim=-1)
        mixed = (context_weights.flatten(2, 4) @ values).unflatten(2, grouped.shape[2:5])
        mixed = mixed + (block_weights.flatten(3, 4) @ own_values).unflatten(3, grouped.shape[3:5])
        return self.o_proj(mixed.permute(0, 2, 4, 1, 3, 5).flatten(3))

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, self.head_dim))


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, config: DrafterConfig, width: int | None = None) -> None:
        super().__init__()
        width = config.intermediate_size if width is None else width
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """Pre-norm layer of Qwen3 type; the context enters through keys and values only.

    h is one residual stream, [..., d], or with hyper-connections n of them, [..., n, d].
    """

    def __init__(self, config: DrafterConfig, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp
        self.dropout = nn.Dropout(config.dropout)
        self.attn_hc = HyperConnection(config) if config.hyper_connections else None
        self.ffn_hc = HyperConnection(config) if config.hyper_connections else None

    def forward(
        self,
        h: Tensor,
        context_kv: tuple[Tensor, Tensor],
        cos: Tensor,
        sin: Tensor,
        context_mask: Tensor,
        counted: Tensor | None = None,
    ) -> Tensor:
        """[B, A, G, d], as h. counted: [B, A, G] bool, the slots whose routing is counted; None for all."""
        u, connect = (self.attn_hc or plain_residual)(h)
        h = connect(self.dropout(self.self_attn(self.input_layernorm(u), context_kv, cos, sin, context_mask)))
        return self._feed_forward(h, counted)

    def forward_flat(self, h: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """The same layer for R blocks in a row, whose context lies in paged memory or is packed: [R, G, d], as h."""
        attention = self.self_attn
        u, connect = (self.attn_hc or plain_residual)(h)
        u = self.input_layernorm(u)
        mixed = attend(attention.queries(u, cos, sin), *attention.keys_values(u, cos, sin))
        return self._feed_forward(connect(self.dropout(attention.o_proj(mixed.flatten(2)))), None)

    def _feed_forward(self, h: Tensor, counted: Tensor | None) -> Tensor:
        u, connect = (self.ffn_hc or plain_residual)(h)
        u = self.post_attention_layernorm(u)
        return connect(self.dropout(self.mlp(u) if counted is None else self.mlp(u, counted)))
