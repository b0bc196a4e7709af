"""Attention of a flat batch over paged KV memory, under a name that Hugging Face models can be told to use.

Legend: H query heads, K key/value heads, B batch tokens, n tokens of a piece, S keys a piece sees, D head width.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from dspark.attention.cpu import AttentionPlan
from dspark.attention.entry import StepPlan
from dspark.attention.flat_batch import FlatBatch
from dspark.attention.kv_cache import LayerShape, PagedKVCache

NAME = "dspark_paged"


@dataclass
class PagedStep:
    """What the attention of one forward pass works on; travels through the model as the keyword `paged_step`.

    plan: of the entry that computes; None lets PyTorch compute, piece by piece, for which it needs the batch.
    """

    batch: FlatBatch | None
    kv_cache: PagedKVCache
    plan: StepPlan | None = None


@dataclass
class AttentionCalls:
    """Takes a PagedStep's place to note what each layer's attention is called with, which it does not compute.

    windows: by layer, None where all is seen; with_sinks: the layers that have attention sinks.
    """

    windows: dict[int, int | None] = field(default_factory=dict)
    with_sinks: set[int] = field(default_factory=set)
    _keys: dict[int, Tensor] = field(default_factory=dict)
    _values: dict[int, Tensor] = field(default_factory=dict)

    def add(self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
        """Zeros for what the layer would compute: [1, B, H, D_v]."""
        self._keys[layer], self._values[layer], self.windows[layer] = key, value, window
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def shapes(self) -> list[LayerShape]:
        """What each layer stores per token, nothing where it did not attend. A layer that was given the keys of one
        before it shares that one's memory."""
        shapes: list[LayerShape] = []
        first: dict[int, int] = {}
        for layer in range(max(self._keys, default=-1) + 1):
            if layer not in self._keys:
                shapes.append(LayerShape(0, 0, 0))
                continue
            key, value = self._keys[layer], self._values[layer]
            source = first.setdefault(key.data_ptr(), layer)  # all keys are held, so no address is used twice
            shared_with = None if source == layer else source
            widths = key.shape[3], value.shape[3]
            shapes.append(LayerShape(key.shape[1], *widths, key.device, shared_with, layer in self.with_sinks))
        return shapes


def plan_of(batch: FlatBatch) -> AttentionPlan:
    """The CPU kernel's view of a batch."""
    spans = [(piece.start, piece.stop) for piece in batch.pieces]
    return AttentionPlan([piece.table for piece in batch.pieces], spans, batch.slot_mapping)


def register() -> None:
    """Make `attn_implementation="dspark_paged"` known. Without the mask entry the library would pass None silently."""
    AttentionInterface.register(NAME, paged_attention)
    AttentionMaskInterface.register(NAME, _no_mask)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged_step: PagedStep | AttentionCalls | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Store the new keys and values, then let each piece attend to its own request's: [1, B, H, D].

    query: [1, H, B, D]; key, value: [1, K, B, D]; s_aux: [H], attention sinks. What else a model may ask for, the
    runner's probe finds.
    """
    if paged_step is None:
        raise ValueError(f"{type(module).__name__} is not handed the keyword arguments of the model's call")
    layer: int = module.layer_idx  # type: ignore[assignment]
    if isinstance(paged_step, AttentionCalls):
        if s_aux is not None:
            paged_step.with_sinks.add(layer)
        return paged_step.add(layer, query, key, value, sliding_window), None
    if paged_step.plan is None:
        mixed = attend_pieces(
            paged_step,
            layer,
            *(query[0], key[0], value[0]),
            scaling=scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=s_aux,
        )
    else:
        kv_cache = paged_step.kv_cache
        mixed = paged_step.plan.attend(
            query[0].transpose(0, 1),
            (key[0].transpose(0, 1), value[0].transpose(0, 1)),
            (kv_cache.keys[layer], kv_cache.values[layer]),
            scaling=scaling,
            window=sliding_window,
            softcap=softcap,
            sinks=s_aux,
        )
    return mixed.unsqueeze(0), None


def attend_pieces(
    paged_step: PagedStep,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[B, H, D], one piece after the other. query: [H, B, D]; key, value: [K, B, D], which are stored first."""
    batch, kv_cache = paged_step.batch, paged_step.kv_cache
    assert batch is not None, "without a plan attention needs the batch"
    kv_cache.write(layer, batch.slot_mapping, key, value)
    outputs = []
    for i, piece in enumerate(batch.pieces):
        first = 0 if sliding_window is None else max(0, piece.start - sliding_window + 1)
        keys, values = kv_cache.read(layer, piece.table, first, piece.stop)
        queries = query[:, batch.cu_seqlens_q[i] : batch.cu_seqlens_q[i + 1]]
        mask = _mask(batch, i, sliding_window, queries)
        outputs.append(attend(queries, keys, values, mask, scaling=scaling, softcap=softcap, sinks=sinks))
    return torch.cat(outputs, dim=1).transpose(0, 1)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    *,
    scaling: float | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[H, n, D]. queries: [H, n, D]; keys, values: [K, S, D]; mask: [n, S], 0 or -inf, None = all is seen.

    Query heads that share keys are laid side by side as further queries, so that nothing is repeated.
    softcap c: scores s become c tanh(s / c). sinks: [H], the score of a further key per head, whose value is zero.
    """
    num_heads, n, _ = queries.shape
    group = num_heads // keys.shape[0]
    folded = queries.reshape(keys.shape[0], group * n, -1)
    if mask is not None:
        mask = mask.repeat(group, 1)
    if softcap is not None or sinks is not None:
        scores = (folded @ keys.transpose(1, 2)).float() * (queries.shape[2] ** -0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        if mask is not None:
            scores = scores + mask
        if sinks is not None:
            sink = sinks.float().repeat_interleave(n).view(keys.shape[0], group * n, 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = scores.softmax(-1)[..., : keys.shape[1]].to(values.dtype)
        return (weights @ values).reshape(num_heads, n, -1)
    mixed = F.scaled_dot_product_attention(folded[None], keys[None], values[None], attn_mask=mask, scale=scaling)
    return mixed[0].reshape(num_heads, n, -1)


def causal_mask(
    start: int, stop: int, first: int, *, sliding_window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[stop - start, stop - first]: 0 where the query at a row's position sees the key at a column's, else -inf."""
    queries = torch.arange(start, stop, device=device).unsqueeze(1)
    keys = torch.arange(first, stop, device=device)
    seen = keys <= queries
    if sliding_window is not None:
        seen &= queries - keys < sliding_window
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, -torch.inf)


def _mask(batch: FlatBatch, index: int, sliding_window: int | None, queries: Tensor) -> Tensor | None:
    """The piece's mask, made once per step and not once per layer."""
    piece = batch.pieces[index]
    if len(piece.token_ids) == 1:
        return None
    key = (index, sliding_window, queries.device)
    if key not in batch.masks:
        first = 0 if sliding_window is None else max(0, piece.start - sliding_window + 1)
        batch.masks[key] = causal_mask(
            piece.start,
            piece.stop,
            first,
            sliding_window=sliding_window,
            dtype=queries.dtype,
            device=queries.device,
        )
    return batch.masks[key]


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """Each piece makes its own mask."""
