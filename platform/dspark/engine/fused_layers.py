"""Decoder layers of Llama's kind as one call of a CPU kernel each, for the target and for drafters.

Which layers those are is read off their class, never guessed; all others stay as they are, and so do these wherever
they are called without paged attention. bfloat16 only: in float32 a target must equal the library to the last token.

Legend: B rows (batch tokens), d hidden size, D head width, K key/value heads, S slots.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dspark import native
from dspark.attention.cpu import AttentionPlan
from dspark.attention.entry import StepPlan
from dspark.attention.paged import PagedStep
from dspark.drafters.layers import DraftLayer, SwiGLU
from dspark.numerics import PackedLinear

# Per class of the library, the window of its attention.
WINDOW_OF: dict[str, Callable[[Any], int | None]] = {
    "LlamaDecoderLayer": lambda attention: None,
    "MistralDecoderLayer": lambda attention: attention.config.sliding_window,
    "Qwen2DecoderLayer": lambda attention: attention.sliding_window,
    "Qwen3DecoderLayer": lambda attention: attention.sliding_window,
}
NORM_SUFFIX = "RMSNorm"
SILU = ("SiLUActivation", "SiLU", "NoneType")  # a drafter's feed-forward names none
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class BlockAttention:
    """What a drafter's layer attends to: the context and the block in a layer's paged memory, [K, S, D] each."""

    plan: StepPlan
    keys: Tensor
    values: Tensor
    scaling: float

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[R, G, H, D], the block's keys and values being stored. queries: [R, G, H, D]; keys, values: [R, G, K, D]."""
        new = keys.flatten(0, 1), values.flatten(0, 1)
        mixed = self.plan.attend(queries.flatten(0, 1), new, (self.keys, self.values), scaling=self.scaling)
        return mixed.view(queries.shape)


class FusedLayer:
    """The weights of one layer, by address; `kept` holds what the addresses point to."""

    def __init__(self, layer: native.Layer, kept: list[Tensor]) -> None:
        self._layer, self._kept = layer, kept

    def __call__(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, plan: AttentionPlan, keys: Tensor, values: Tensor
    ) -> Tensor:
        """The layer's output, as hidden: [..., d] of B rows. cos, sin: [..., D] bfloat16 or float32."""
        assert hidden.numel() == plan.num_tokens * hidden.shape[-1], "a plan of another batch"
        assert cos.numel() == sin.numel() == plan.num_tokens * self._layer.head_dim, "angles of another batch"
        assert hidden.dtype == keys.dtype == values.dtype == torch.bfloat16
        hidden, cos, sin = hidden.contiguous(), cos.contiguous(), sin.contiguous()
        out = torch.empty_like(hidden)
        call = native.LayerCall(
            hidden=hidden.data_ptr(),
            out=out.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            num_slots=keys.shape[1],
            has_float_angles=int(cos.dtype == torch.float32),
        )
        available = native.kernels()
        assert available is not None
        available.layer(self._layer, call, plan.batch)
        return out


class TargetLayer:
    """Stands in for `forward` of a target's layer."""

    def __init__(self, module: nn.Module, fused: FusedLayer, number: int) -> None:
        self._module, self._fused, self._number = module, fused, number

    def __call__(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        step: PagedStep | None = options.get("paged_step")
        if step is None or not isinstance(step.plan, AttentionPlan) or hidden_states.dtype != torch.bfloat16:
            return type(self._module).forward(self._module, hidden_states, *args, **options)
        cos, sin = options["position_embeddings"]
        kv_cache = step.kv_cache
        return self._fused(
            hidden_states, cos, sin, step.plan, kv_cache.keys[self._number], kv_cache.values[self._number]
        )


class FusedDraftLayer:
    """Stands in for `forward_flat` of a drafter's layer."""

    def __init__(self, module: DraftLayer, fused: FusedLayer) -> None:
        self._module, self._fused = module, fused

    def __call__(self, h: Tensor, cos: Tensor, sin: Tensor, attend: Any) -> Tensor:
        is_ours = isinstance(attend, BlockAttention) and isinstance(attend.plan, AttentionPlan)
        if not is_ours or h.dtype != torch.bfloat16:
            return DraftLayer.forward_flat(self._module, h, cos, sin, attend)
        return self._fused(h, cos, sin, attend.plan, attend.keys, attend.values)


def fuse_layers(model: nn.Module) -> int:
    """Let a target's layers run fused where their class is known; how many do. A second time changes nothing."""
    num_fused = 0
    module: Any
    for module in model.modules():
        name = type(module).__name__
        if name not in WINDOW_OF or not type(module).__module__.startswith("transformers.models."):
            continue
        window = WINDOW_OF[name](module.self_attn)
        fused = _fused(module, module.self_attn.scaling, window)
        if fused is not None:
            vars(module)["forward"] = TargetLayer(module, fused, module.self_attn.layer_idx)
            num_fused += 1
    return num_fused


def fuse_draft_layers(layers: nn.ModuleList) -> int:
    """Let a drafter's layers run fused where they are plain; how many do."""
    num_fused = 0
    module: Any
    for module in layers:
        if type(module) is not DraftLayer or type(module.mlp) is not SwiGLU:
            continue
        attention = module.self_attn
        if module.attn_hc or module.ffn_hc or attention.v_proj is None or attention.value_eps is not None:
            continue
        fused = _fused(module, attention.scaling, None)
        if fused is not None:
            vars(module)["forward_flat"] = FusedDraftLayer(module, fused)
            num_fused += 1
    return num_fused


def _fused(module: Any, scaling: float, window: int | None) -> FusedLayer | None:
    """The layer's weights for the kernel; None where one is not what it takes."""
    available, attention = native.kernels(), module.self_attn
    if available is None or not available.has_products or module.training:
        return None
    linears = [getattr(attention, name) for name in PROJECTIONS]
    linears += [module.mlp.gate_proj, module.mlp.up_proj, module.mlp.down_proj]
    norms = [module.input_layernorm, module.post_attention_layernorm]
    head_norms = [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    is_silu = type(getattr(module.mlp, "act_fn", None)).__name__ in SILU
    is_packed = all(isinstance(linear, PackedLinear) and linear.is_in_panels for linear in linears)
    is_normed = all(type(norm).__name__.endswith(NORM_SUFFIX) for norm in [*norms, *head_norms])
    epsilons = {_epsilon(norm) for norm in [*norms, *head_norms]}
    if not (is_silu and is_packed and is_normed) or len(epsilons) != 1 or len(head_norms) == 1:
        return None
    head_dim = attention.head_dim
    kept = [tensor for linear in linears for tensor in (linear.packed, linear.bias) if tensor is not None]
    kept += [norm.weight for norm in [*norms, *head_norms]]
    is_per_head = all(norm.weight.numel() == head_dim for norm in head_norms)
    if not is_per_head or any(tensor.dtype != torch.bfloat16 for tensor in kept):
        return None
    layer = native.Layer(
        *(_linear(linear) for linear in linears),
        *(norm.weight.data_ptr() for norm in norms),
        *([norm.weight.data_ptr() for norm in head_norms] or [None, None]),
        epsilons.pop(),
        scaling,
        linears[0].out_features // head_dim,
        linears[1].out_features // head_dim,
        head_dim,
        window or 0,
    )
    return FusedLayer(layer, kept)


def _epsilon(norm: nn.Module) -> float:
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)  # type: ignore[arg-type]


def _linear(linear: PackedLinear) -> native.Linear:
    bias = None if linear.bias is None else linear.bias.data_ptr()
    return native.Linear(linear.packed.data_ptr(), bias, linear.in_features, linear.out_features)
