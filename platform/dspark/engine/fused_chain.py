"""EAGLE-3 and MTP of one module: all passes of a round in one call of the CPU kernels (`kernels/chain.h`).

The slow twin is `PagedAutoregressiveRunner`'s chain. Which drafters run so is read off the classes of their parts:
EAGLE-3, and MTP whose layer is of a class that `fused_layers` knows. Those of several modules, other layers and other
types than bfloat16 go pass by pass, and so do rounds with seeded requests or sparse proposals.

Legend: R requests, n new rows of the contexts, d hidden size, D head width.
"""

import ctypes
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from dspark import native
from dspark.attention import cpu
from dspark.attention.cpu import AttentionPlan
from dspark.attention.kv_cache import PagedKVCache
from dspark.drafters.autoregressive import AutoregressiveDrafter
from dspark.drafters.eagle3 import Eagle3Backbone
from dspark.drafters.mtp import MTPBackbone
from dspark.engine.draft_runner import DraftRequest
from dspark.engine.fused_draws import FusedDraws
from dspark.engine.fused_layers import MODELS, WINDOW_OF, FusedLayer, epsilon, fused_layer, packed_call
from dspark.engine.fused_parts import Angles, addresses, checked_ids, draft_ids, flat_features, is_plain
from dspark.numerics import PackedLinear
from dspark.speculation.proposal import Proposal

FIXED_ANGLES = ("default", "linear", "llama3", "yarn")  # of the library's kinds, those that a position alone decides


class FusedChain:
    """One drafter by the addresses of its weights, over the pages that its runner's context lies in."""

    def __init__(self, drafter: AutoregressiveDrafter, layer: FusedLayer, kv_cache: PagedKVCache) -> None:
        backbone: Any = drafter.backbone
        self._kept = drafter, layer, kv_cache
        self._d2t = draft_ids(backbone.d2t, drafter.config.draft_vocab_size)
        self._vocab_size = backbone.config.vocab_size
        self._feature_size = backbone.config.feature_size
        self._size = backbone.embed_tokens.weight.shape[1]
        self._angles = Angles(_rotary(backbone))
        self._keys, self._values = kv_cache.keys[0], kv_cache.values[0]
        norms = _norms(backbone)
        self._weights = native.ChainDrafter(
            head=packed_call(backbone.lm_head, drafter.config.draft_vocab_size),
            token_norm=norms[0].weight.data_ptr(),
            state_norm=norms[1].weight.data_ptr(),
            norm=norms[2].weight.data_ptr(),
            embedding=backbone.embed_tokens.weight.data_ptr(),
            layer=layer.address,
            eps=epsilon(norms[0]),
            size=self._size,
        )
        if isinstance(backbone, Eagle3Backbone):
            self._weights.fc = packed_call(backbone.fc)
        else:
            self._weights.join = packed_call(backbone.layers[0].eh_proj)

    @staticmethod
    def of(drafter: AutoregressiveDrafter, kv_cache: PagedKVCache) -> "FusedChain | None":
        """None where a part of the drafter is none that the kernels know."""
        backbone = drafter.backbone
        if not cpu.is_served(kv_cache) or drafter.training or drafter.config.num_modules != 1:
            return None
        available = native.kernels()
        if available is None or not available.has_products:
            return None
        layer = _fused_layer(backbone)
        if layer is None:
            return None
        known: Any = backbone
        linears = [known.lm_head, known.fc if isinstance(backbone, Eagle3Backbone) else known.layers[0].eh_proj]
        norms = _norms(known)
        tensors = [known.embed_tokens.weight, *(norm.weight for norm in norms), *kv_cache.keys, *kv_cache.values]
        is_known = (
            all(isinstance(linear, PackedLinear) and linear.is_in_panels for linear in linears)
            and all(is_plain(tensor) for tensor in tensors)
            and len({epsilon(norm) for norm in norms}) == 1
        )
        return FusedChain(drafter, layer, kv_cache) if is_known else None

    def draws(self, requests: Sequence[DraftRequest]) -> bool:
        """Whether it draws these requests' tokens itself."""
        return FusedDraws.serve(requests, self._d2t.numel())

    def propose(
        self,
        requests: Sequence[DraftRequest],
        plan: AttentionPlan,
        parts: Sequence[Sequence[Tensor]],
        ids: Sequence[Sequence[int]],
        held: Sequence[Tensor | None],
    ) -> tuple[list[Proposal], Tensor]:
        """A proposal per request, and the state at the newest row of each context: [R, d].

        Per request: parts: features of its new rows, [rows, m*d] each; ids: the token behind each; held: the state [d]
        at its newest row, of one without new rows. plan: of its new rows and of a row per token but the last.
        """
        draws = FusedDraws(requests, self._d2t, vocab_size=self._vocab_size)
        flat = flat_features(chain.from_iterable(parts), self._feature_size)
        num_new = [len(own) for own in ids]
        assert sum(num_new) == sum(part.shape[0] for part in flat), "a feature per row"
        counts = array("i", chain(num_new, (part.shape[0] for part in flat)))
        told = checked_ids(list(chain.from_iterable(ids)), self._vocab_size)
        self._angles.reach(max(request.memory.num_rows for request in requests) + max(draws.lengths))
        newest = torch.empty(len(requests), self._size, dtype=torch.bfloat16)
        part_addresses = addresses([part.data_ptr() for part in flat])
        held_addresses = addresses([_address(one, count) for one, count in zip(held, num_new, strict=True)])
        call = native.ChainCall(
            drafter=ctypes.addressof(self._weights),
            keys=self._keys.data_ptr(),
            values=self._values.data_ptr(),
            cos=self._angles.cos.data_ptr(),
            sin=self._angles.sin.data_ptr(),
            parts=ctypes.addressof(part_addresses),
            part_rows=counts.buffer_info()[0] + counts.itemsize * len(requests),
            num_new=counts.buffer_info()[0],
            ids=told.buffer_info()[0],
            held=ctypes.addressof(held_addresses),
            newest=newest.data_ptr(),
            num_slots=self._keys.shape[1],
            choice=draws.choice,
        )
        available = native.kernels()
        assert available is not None
        available.chain(call, plan.batch)
        return draws.proposals(), newest


def _fused_layer(backbone: Any) -> FusedLayer | None:
    """The one layer of a known backbone, its weights being packed; None of any other."""
    layer: Any
    if type(backbone) is Eagle3Backbone:
        layer = backbone.layers[0]
        return fused_layer(layer, layer.self_attn.head_dim**-0.5, None)
    if type(backbone) is not MTPBackbone:
        return None
    decoder: Any = backbone.layers[0].decoder
    layer = decoder.layers[0]
    is_librarys = type(decoder).__module__.startswith("transformers.models.")
    if type(decoder).__name__ not in MODELS or type(layer).__name__ not in WINDOW_OF or not is_librarys:
        return None
    if WINDOW_OF[type(layer).__name__](layer.self_attn) is not None or decoder.rotary_emb.rope_type not in FIXED_ANGLES:
        return None
    return fused_layer(layer, layer.self_attn.scaling, None)


def _norms(backbone: Any) -> list[Any]:
    """Of the token's embedding, of the state beside it, and of what the head is given."""
    layer = backbone.layers[0]
    if isinstance(backbone, Eagle3Backbone):
        return [layer.input_layernorm, layer.hidden_norm, backbone.norm]
    return [layer.enorm, layer.hnorm, layer.decoder.norm]


def _rotary(backbone: Any) -> Any:
    """Gives the angles of positions [P]: cosines and sines, [P, D] each."""
    if isinstance(backbone, Eagle3Backbone):
        return backbone.rotary
    decoder = backbone.layers[0].decoder

    def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = decoder.rotary_emb(backbone.embed_tokens.weight[:1], position_ids=positions[None])
        return cos[0], sin[0]

    return angles


def _address(held: Tensor | None, num_new: int) -> int | None:
    if num_new:
        return None
    assert held is not None, "a request is drafted for before its context holds a token"
    return held.data_ptr()
