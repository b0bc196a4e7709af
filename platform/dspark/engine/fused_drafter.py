"""A drafter's whole round in one call of the CPU kernels (`kernels/draft.h`); its slow twin is `PagedDraftRunner`'s.

Which drafters run so is read off the classes of their parts; all others stay as they are.

    tokens and all       DSpark with a vanilla or a gated head or none, DFlash: greedy tokens, and such as are drawn
                         from the whole draft vocabulary with the request's own random numbers
    up to the states     an RNN head or one too narrow to be packed, a soft cap on logits; seeded requests, sparse
                         proposals
    not at all           windows, mixtures of experts, hyper-connections, Gemma's layers; other types than bfloat16

Legend: R requests, G block size, N tokens to draft in all, l slots, V' draft vocabulary, d hidden size.
"""

import ctypes
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dspark import native
from dspark.attention import cpu
from dspark.attention.cpu import AttentionPlan
from dspark.attention.kv_cache import PagedKVCache
from dspark.drafters.backbone import Backbone
from dspark.drafters.dflash import DFlashDrafter
from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.heads import GatedMarkovHead, VanillaMarkovHead
from dspark.drafters.layers import RMSNorm
from dspark.engine.draft_memory import DraftMemory
from dspark.engine.draft_runner import DraftRequest
from dspark.engine.fused_draws import FusedDraws
from dspark.engine.fused_layers import FusedDraftLayer, packed_call
from dspark.engine.fused_parts import Angles, addresses, checked_ids, draft_ids, flat_features, is_plain
from dspark.numerics import PackedLinear
from dspark.speculation.proposal import Proposal


class FusedDrafter:
    """One drafter by the addresses of its weights, over the pages that its runner's context lies in."""

    def __init__(self, drafter: DSparkDrafter | DFlashDrafter, kv_cache: PagedKVCache) -> None:
        assert is_served(drafter, kv_cache), "a drafter that the kernels do not know"
        config, (markov_head, confidence_head) = drafter.config, _heads(drafter)
        self._vocab_size, self._feature_size = config.vocab_size, config.feature_size
        self._hidden_size, self._block_size = config.hidden_size, config.block_size
        self._has_confidence = confidence_head is not None
        self._draws_tokens = _is_chain_known(markov_head) and config.final_logit_softcapping is None
        self._d2t = draft_ids(drafter.backbone.d2t, config.draft_vocab_size)
        self._angles = Angles(drafter.backbone.rotary)
        self._weights, self._kept = _weights(drafter, has_chain=self._draws_tokens)
        self._keys = addresses([keys.data_ptr() for keys in kv_cache.keys])
        self._values = addresses([values.data_ptr() for values in kv_cache.values])
        self._num_slots = kv_cache.keys[0].shape[1]
        self._kv_cache = kv_cache

    def draws(self, requests: Sequence[DraftRequest]) -> bool:
        """Whether it draws these requests' tokens itself."""
        return self._draws_tokens and FusedDraws.serve(requests, self._d2t.numel())

    def states(self, requests: Sequence[DraftRequest], plan: AttentionPlan, num_slots: int) -> Tensor:
        """The first l hidden states of every block, [R, l, d], the context being stored first."""
        states = torch.empty(len(requests), num_slots, self._hidden_size, dtype=torch.bfloat16)
        numbers = array("i", [num_slots] * len(requests)), array("f", [0.0] * len(requests))
        lengths, temperatures = (part.buffer_info()[0] for part in numbers)
        choice = native.Choice(lengths=lengths, temperatures=temperatures)
        self._run(requests, plan, native.DraftCall(states=states.data_ptr(), choice=choice))
        return states

    def propose(self, requests: Sequence[DraftRequest], plan: AttentionPlan) -> list[Proposal]:
        """A proposal per request, as long as it asked for; all of them must be such as it `draws`."""
        draws = FusedDraws(requests, self._d2t, vocab_size=self._vocab_size)
        confidences = torch.empty(draws.num_tokens) if self._has_confidence else None
        address = None if confidences is None else confidences.data_ptr()
        self._run(requests, plan, native.DraftCall(choice=draws.choice, confidences=address))
        return draws.proposals(confidences)

    def _run(self, requests: Sequence[DraftRequest], plan: AttentionPlan, call: native.DraftCall) -> None:
        """Complete the call and make it; then the context of every request is stored. plan: of their blocks."""
        assert plan.num_tokens == len(requests) * self._block_size, "a plan of other blocks"
        memories: list[DraftMemory] = [request.memory for request in requests]
        parts = flat_features((part for memory in memories for part in memory.pending.parts), self._feature_size)
        num_pending = [memory.pending.num_rows for memory in memories]
        stops = [memory.num_tokens + count for memory, count in zip(memories, num_pending, strict=True)]
        self._angles.reach(max(stops) + self._block_size)
        held = [None if count else _newest(memory) for memory, count in zip(memories, num_pending, strict=True)]
        newest = torch.empty(len(memories), self._hidden_size, dtype=torch.bfloat16)
        counts = array("i", chain(num_pending, (part.shape[0] for part in parts)))
        anchors = checked_ids([request.anchor_id for request in requests], self._vocab_size)
        call.num_pending = counts.buffer_info()[0]
        call.part_rows = call.num_pending + counts.itemsize * len(requests)
        call.parts = ctypes.addressof(part_addresses := addresses([part.data_ptr() for part in parts]))
        call.held = ctypes.addressof(held_addresses := addresses(held))
        call.anchors = anchors.buffer_info()[0]
        call.drafter = ctypes.addressof(self._weights)
        call.keys, call.values = ctypes.addressof(self._keys), ctypes.addressof(self._values)
        call.cos, call.sin = self._angles.cos.data_ptr(), self._angles.sin.data_ptr()
        call.newest, call.num_slots = newest.data_ptr(), self._num_slots
        available = native.kernels()
        assert available is not None
        available.draft(call, plan.batch)
        del part_addresses, held_addresses, parts  # the call holds their addresses only
        for memory, stop, feature in zip(memories, stops, newest.unbind(), strict=True):
            memory.note_stored(stop, feature)


def is_served(drafter: DSparkDrafter | DFlashDrafter, kv_cache: PagedKVCache) -> bool:
    """Whether the kernels know every part of the drafter, whose layers are fused where they can be."""
    backbone = drafter.backbone
    if not cpu.is_served(kv_cache) or drafter.training or type(backbone) is not Backbone:
        return False
    available = native.kernels()
    if available is None or not available.has_products:
        return False
    if type(drafter) not in (DSparkDrafter, DFlashDrafter) or len(kv_cache.keys) != len(backbone.layers):
        return False
    layers = [vars(layer).get("forward_flat") for layer in backbone.layers]
    markov_head, confidence_head = _heads(drafter)
    linears: list[Any] = [backbone.fc, backbone.lm_head]
    plain: list[Any] = [backbone.hidden_norm.weight, backbone.norm.weight, backbone.embed_tokens.weight]
    plain.append(backbone.mask_embedding)
    if backbone.anchor_fusion is not None:
        linears += [backbone.anchor_fusion.anchor_proj, backbone.anchor_fusion.mask_proj]
        plain.append(backbone.anchor_fusion.slot_embedding)
    if markov_head is not None and _is_chain_known(markov_head):
        plain.append(markov_head.markov_w1.weight)
    if confidence_head is not None:
        plain += [confidence_head.proj.weight, confidence_head.proj.bias]
    return (
        all(type(layer) is FusedDraftLayer for layer in layers)
        and all(type(norm) is RMSNorm for norm in (backbone.hidden_norm, backbone.norm))
        and all(_is_in_panels(linear) for linear in linears)
        and all(is_plain(tensor) for tensor in [*plain, *kv_cache.keys, *kv_cache.values])
    )


def _weights(drafter: DSparkDrafter | DFlashDrafter, *, has_chain: bool) -> tuple[native.Drafter, list[Any]]:
    """The drafter as the kernels read it, and what its addresses point into. has_chain: with its sequential head."""
    config, backbone, fusion = drafter.config, drafter.backbone, drafter.backbone.anchor_fusion
    markov_head, confidence_head = _heads(drafter)
    layers = [vars(layer)["forward_flat"].fused for layer in backbone.layers]
    layer_addresses = addresses([layer.address for layer in layers])
    weights = native.Drafter(
        fc=packed_call(backbone.fc),
        head=packed_call(backbone.lm_head, config.draft_vocab_size),  # rows behind them are never proposed
        hidden_norm=backbone.hidden_norm.weight.data_ptr(),
        norm=backbone.norm.weight.data_ptr(),
        embedding=backbone.embed_tokens.weight.data_ptr(),
        mask=backbone.mask_embedding.data_ptr(),
        layers=ctypes.addressof(layer_addresses),
        eps=config.rms_norm_eps,
        embedding_scale=config.embedding_scale,
        logit_scale=config.logit_scale,
        num_layers=len(layers),
        block_size=config.block_size,
    )
    if fusion is not None:
        weights.anchor_shift, weights.mask_shift = packed_call(fusion.anchor_proj), packed_call(fusion.mask_proj)
        weights.slot_shift = fusion.slot_embedding.data_ptr()
    if has_chain and markov_head is not None:
        weights.bias = packed_call(markov_head.markov_w2, config.draft_vocab_size)
        weights.previous = markov_head.markov_w1.weight.data_ptr()
        if isinstance(markov_head, GatedMarkovHead):
            weights.gate = packed_call(markov_head.gate_proj)
    if confidence_head is not None:
        weights.confidence = confidence_head.proj.weight.data_ptr()
        weights.confidence_bias = float(confidence_head.proj.bias)
        weights.is_confidence_told_ids = int(confidence_head.with_markov)
    return weights, [drafter, layers, layer_addresses]


def _heads(drafter: DSparkDrafter | DFlashDrafter) -> tuple[Any, Any]:
    """Its sequential head and its confidence head."""
    return (drafter.markov_head, drafter.confidence_head) if isinstance(drafter, DSparkDrafter) else (None, None)


def _is_chain_known(markov_head: nn.Module | None) -> bool:
    if not isinstance(markov_head, VanillaMarkovHead | GatedMarkovHead):
        return markov_head is None
    linears = [markov_head.markov_w2, *([markov_head.gate_proj] if isinstance(markov_head, GatedMarkovHead) else [])]
    return type(markov_head) in (VanillaMarkovHead, GatedMarkovHead) and all(map(_is_in_panels, linears))


def _is_in_panels(linear: nn.Module) -> bool:
    return isinstance(linear, PackedLinear) and linear.is_in_panels


def _newest(memory: DraftMemory) -> int:
    """Where the newest feature of a request lies that has none to store."""
    assert memory.newest_feature is not None, "a request is drafted for before its context is stored"
    return memory.newest_feature.data_ptr()
