"""Decoder layers of Llama's kind on a CPU kernel, for drafters one by one, for a target all in one call.

Which layers those are is read off their class, never guessed; all others stay as they are, and so do these wherever
they are called without paged attention. bfloat16 only: in float32 a target must equal the library to the last token.

Legend: B rows (batch tokens), d hidden size, D head width, K key/value heads, S slots.
"""

import ctypes
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

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
# Models that are an embedding, layers one behind the other under one set of angles, and a norm.
MODELS = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model")
NORM_SUFFIX = "RMSNorm"
SILU = ("SiLUActivation", "SiLU", "NoneType")  # a drafter's feed-forward names none
COMPUTED = "computed"  # option of a layer's call: what it has given already
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
        self.head_dim = layer.head_dim
        self.address = ctypes.addressof(layer)


def run_layers(
    layers: Sequence[FusedLayer],
    hidden: Tensor,
    cos: Tensor,
    sin: Tensor,
    plan: AttentionPlan,
    memories: Sequence[tuple[Tensor, Tensor]],
    kept: Collection[int] = (),
) -> list[Tensor]:
    """What the last layer gives, as hidden: [..., d] of B rows; before it what the layers in `kept` give, in order.

    cos, sin: [..., D] bfloat16 or float32. memories: each layer's keys and values, [K, S, D]. kept: not the last layer.
    """
    num_slots = memories[0][0].shape[1]
    assert hidden.numel() == plan.num_tokens * hidden.shape[-1], "a plan of another batch"
    assert cos.numel() == sin.numel() == plan.num_tokens * layers[0].head_dim, "angles of another batch"
    assert len(memories) == len(layers), "a memory for each layer"
    assert all(memory.dtype == torch.bfloat16 and memory.shape[1] == num_slots for pair in memories for memory in pair)
    assert hidden.dtype == torch.bfloat16
    hidden, cos, sin = hidden.contiguous(), cos.contiguous(), sin.contiguous()
    out = torch.empty_like(hidden)
    outs = {number: torch.empty_like(hidden) for number in sorted(kept)}
    addresses = ctypes.c_void_p * len(layers)
    call = native.LayersCall(
        hidden=hidden.data_ptr(),
        out=out.data_ptr(),
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
        layers=ctypes.addressof(chosen := addresses(*(layer.address for layer in layers))),
        keys=ctypes.addressof(keys := addresses(*(pair[0].data_ptr() for pair in memories))),
        values=ctypes.addressof(values := addresses(*(pair[1].data_ptr() for pair in memories))),
        outs=ctypes.addressof(
            own := addresses(*(outs[i].data_ptr() if i in outs else None for i in range(len(layers))))
        ),
        num_slots=num_slots,
        num_layers=len(layers),
        has_float_angles=int(cos.dtype == torch.float32),
    )
    available = native.kernels()
    assert available is not None
    available.layers(call, plan.batch)
    del chosen, keys, values, own  # the call holds their addresses only
    return [*outs.values(), out]


class TargetLayer:
    """Stands in for `forward` of a target's layer."""

    def __init__(self, module: nn.Module, fused: FusedLayer, number: int) -> None:
        self._module, self.fused, self.number = module, fused, number

    def __call__(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        step: Any = options.get("paged_step")
        plan = _plan_of(step)
        if plan is None or hidden_states.dtype != torch.bfloat16:
            return type(self._module).forward(self._module, hidden_states, *args, **options)
        if COMPUTED in options:
            return options[COMPUTED]
        cos, sin = options["position_embeddings"]
        return run_layers([self.fused], hidden_states, cos, sin, plan, [_memory(step, self.number)])[-1]


class TargetLayers:
    """Stands in for `forward` of the library's model around the layers, where all of them are fused.

    They all run in one call. One that somebody listens to (a forward hook) is then called as the module it is, with
    what it was given and with what it has given.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, input_ids: Tensor | None = None, **options: Any) -> Any:
        module: Any = self._module
        step: Any = options.get("paged_step")
        plan = _plan_of(step)
        if plan is None or input_ids is None or module.dtype != torch.bfloat16:
            return type(module).forward(module, input_ids, **options)
        hidden = module.embed_tokens(input_ids)
        cos, sin = module.rotary_emb(hidden, position_ids=options["position_ids"])
        place = 0
        while place < len(module.layers):
            place, hidden = self._run_from(place, hidden, cos, sin, step)
        return BaseModelOutputWithPast(last_hidden_state=module.norm(hidden))

    def _run_from(self, first: int, hidden: Tensor, cos: Tensor, sin: Tensor, step: PagedStep) -> tuple[int, Tensor]:
        """The layers from `first` on, all or up to one whose listener has changed what it gave: where it stands
        then, and with what."""
        layers = list(self._module.layers)[first:]
        parts: list[TargetLayer] = [vars(layer)["forward"] for layer in layers]
        heard = [number for number, layer in enumerate(layers) if layer._forward_hooks]
        kept = sorted({place for number in heard for place in (number - 1, number)} - {-1, len(layers) - 1})
        memories = [_memory(step, part.number) for part in parts]
        plan = _plan_of(step)
        assert plan is not None
        given = run_layers([part.fused for part in parts], hidden, cos, sin, plan, memories, kept)
        outputs = dict(zip([*kept, len(layers) - 1], given, strict=True)) | {-1: hidden}
        for number in heard:
            own = {"position_embeddings": (cos, sin), "paged_step": step, COMPUTED: outputs[number]}
            told = layers[number](outputs[number - 1], **own)
            if told is not outputs[number]:
                return first + number + 1, told
        return first + len(layers), given[-1]


def _plan_of(step: Any) -> AttentionPlan | None:
    """The kernels' plan of a step in pages; None of any other call, which is the library's to compute."""
    return step.plan if isinstance(step, PagedStep) and isinstance(step.plan, AttentionPlan) else None


def _memory(step: PagedStep, number: int) -> tuple[Tensor, Tensor]:
    return step.kv_cache.keys[number], step.kv_cache.values[number]


class FusedDraftLayer:
    """Stands in for `forward_flat` of a drafter's layer."""

    def __init__(self, module: DraftLayer, fused: FusedLayer) -> None:
        self._module, self.fused = module, fused

    def __call__(self, h: Tensor, cos: Tensor, sin: Tensor, attend: Any) -> Tensor:
        is_ours = isinstance(attend, BlockAttention) and isinstance(attend.plan, AttentionPlan)
        if not is_ours or h.dtype != torch.bfloat16:
            return DraftLayer.forward_flat(self._module, h, cos, sin, attend)
        return run_layers([self.fused], h, cos, sin, attend.plan, [(attend.keys, attend.values)])[-1]


def fuse_layers(model: nn.Module) -> int:
    """Let a target's layers run fused where their class is known; how many do. A second time changes nothing."""
    num_fused = 0
    module: Any
    for module in model.modules():
        name = type(module).__name__
        if name not in WINDOW_OF or not type(module).__module__.startswith("transformers.models."):
            continue
        window = WINDOW_OF[name](module.self_attn)
        fused = fused_layer(module, module.self_attn.scaling, window)
        if fused is not None:
            vars(module)["forward"] = TargetLayer(module, fused, module.self_attn.layer_idx)
            num_fused += 1
    for module in model.modules():
        is_known = type(module).__name__ in MODELS and type(module).__module__.startswith("transformers.models.")
        if is_known and all("forward" in vars(layer) for layer in module.layers):
            vars(module)["forward"] = TargetLayers(module)
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
        fused = fused_layer(module, attention.scaling, None)
        if fused is not None:
            vars(module)["forward_flat"] = FusedDraftLayer(module, fused)
            num_fused += 1
    return num_fused


def fused_layer(module: Any, scaling: float, window: int | None) -> FusedLayer | None:
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
    epsilons = {epsilon(norm) for norm in [*norms, *head_norms]}
    if not (is_silu and is_packed and is_normed) or len(epsilons) != 1 or len(head_norms) == 1:
        return None
    head_dim = attention.head_dim
    kept = [tensor for linear in linears for tensor in (linear.packed, linear.bias) if tensor is not None]
    kept += [norm.weight for norm in [*norms, *head_norms]]
    is_per_head = all(norm.weight.numel() == head_dim for norm in head_norms)
    if not is_per_head or any(tensor.dtype != torch.bfloat16 for tensor in kept):
        return None
    layer = native.Layer(
        *(packed_call(linear) for linear in linears),
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


def epsilon(norm: nn.Module) -> float:
    """What a norm of this project's or the library's adds to the mean of squares."""
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)  # type: ignore[arg-type]


def packed_call(linear: nn.Linear, num_outputs: int | None = None) -> native.Linear:
    """A packed layer as the kernels read it; of its outputs the first so many alone where a number is given."""
    assert isinstance(linear, PackedLinear), "a layer that is not packed"
    bias = None if linear.bias is None else linear.bias.data_ptr()
    out_features = linear.out_features if num_outputs is None else num_outputs
    return native.Linear(linear.packed.data_ptr(), bias, linear.in_features, out_features)
