"""Attention of packed blocks: each to the context of its own sequence before its anchor, and both ways to itself.

Legend: A blocks of all sequences, G block size, T context tokens of all sequences, H query heads, K key/value heads,
R = H/K query heads per key/value head, D head width, W sliding window; of a window: n blocks, t context tokens.
Two forms of one function, chosen by device: gathered windows, and FlexAttention. Source: ALGORITHMS §3 "packing".
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dspark.drafters.base import PackedBatch

# Context keys and values [T, K, D]; queries [A, G, H, D], keys and values of the blocks [A, G, K, D] -> [A, G, H, D].
PackedAttend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

BLOCKS_PER_WINDOW = 32  # fewer cost more calls, more see more that is masked; 16 to 64 measured alike on two cores
LARGEST_WASTE = 2.0  # computed scores per needed one, up to which a block joins a window


def packed_attention(batch: PackedBatch, sliding_window: int | None, *, scaling: float) -> PackedAttend:
    """The attention of a batch, for every layer of it: FlexAttention on a GPU, gathered windows elsewhere.

    scaling: factor on query-key products.
    """
    if batch.anchors.is_cuda:
        mask = packed_block_mask(batch, sliding_window)
        return functools.partial(flex_attend, mask, _compiled_flex_attention(), scaling=scaling)
    return functools.partial(window_attend, gather_windows(batch, sliding_window), scaling=scaling)


@dataclass(frozen=True)
class Window:
    """Blocks [first, last) and the rows [start, stop) of the context that hold all they see.

    hidden: [n, G or 1, 1, t] bool, true where a slot does not see a row; G only with a sliding window.
    """

    first: int
    last: int
    start: int
    stop: int
    hidden: Tensor


def gather_windows(batch: PackedBatch, sliding_window: int | None) -> list[Window]:
    """Neighbouring blocks, grouped as long as what they see overlaps enough to be computed together."""
    starts, stops = batch.context_starts.tolist(), batch.context_stops.tolist()
    windows, first = [], 0
    while first < len(starts):
        last, start, stop, needed = first, starts[first], stops[first], 0
        for block in range(first, min(first + BLOCKS_PER_WINDOW, len(starts))):
            lowest, highest = min(start, starts[block]), max(stop, stops[block])
            needed += stops[block] - starts[block]
            if (block - first + 1) * (highest - lowest) > LARGEST_WASTE * needed:
                break
            last, start, stop = block + 1, lowest, highest
        windows.append(_window(batch, first, last, start, stop, sliding_window))
        first = last
    return windows


def window_attend(
    windows: list[Window],
    context_keys: Tensor,
    context_values: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scaling: float,
) -> Tensor:
    """[A, G, H, D]; `PackedAttend` once the windows are given. No key or value is copied."""
    num_kv_heads = keys.shape[2]
    queries = (queries * scaling).unflatten(2, (num_kv_heads, -1))  # [A, G, K, R, D]
    queries, keys, values = queries.permute(2, 0, 1, 3, 4), keys.permute(2, 0, 1, 3), values.permute(2, 0, 1, 3)
    context_keys, context_values = context_keys.transpose(0, 1), context_values.transpose(0, 1)
    mixed = []
    for window in windows:
        blocks, rows = slice(window.first, window.last), slice(window.start, window.stop)
        context = (context_keys[:, rows], context_values[:, rows])
        mixed.append(_attend(queries[:, blocks], *context, keys[:, blocks], values[:, blocks], window.hidden))
    return torch.cat(mixed, dim=1).permute(1, 2, 0, 3, 4).flatten(2, 3)


def packed_block_mask(batch: PackedBatch, sliding_window: int | None) -> BlockMask:
    """Which of the keys [context; blocks] each slot sees, for FlexAttention: A*G queries, T + A*G keys."""
    num_queries, num_rows = batch.previous_ids.numel(), batch.context_positions.numel()
    create = _compiled_create_block_mask() if batch.anchors.is_cuda else create_block_mask
    sees = packed_mask(batch, sliding_window)
    return create(sees, None, None, num_queries, num_rows + num_queries, device=batch.anchors.device)


def packed_mask(batch: PackedBatch, sliding_window: int | None) -> Callable[..., Tensor]:
    """(b, h, query, key) -> whether the slot sees the key; a slot's number is block * G + j."""
    starts, stops = batch.context_starts, batch.context_stops
    num_rows, block_size = batch.context_positions.numel(), batch.previous_ids.shape[1]

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block, slot = query // block_size, query % block_size
        before_anchor = (key >= starts[block]) & (key < stops[block])
        if sliding_window is not None:
            before_anchor = before_anchor & (stops[block] + slot - key < sliding_window)
        return before_anchor | ((key >= num_rows) & ((key - num_rows) // block_size == block))

    return sees


def flex_attend(
    mask: BlockMask,
    attention: Callable[..., Any],
    context_keys: Tensor,
    context_values: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scaling: float,
) -> Tensor:
    """[A, G, H, D]; `PackedAttend` once the mask and `flex_attention`, compiled or not, are given."""
    heads_first = (x.flatten(0, 1).transpose(0, 1) for x in (queries, keys, values))  # [H or K, A*G, D]
    flat, own_keys, own_values = heads_first
    seen_keys = torch.cat([context_keys.transpose(0, 1), own_keys], dim=1)
    seen_values = torch.cat([context_values.transpose(0, 1), own_values], dim=1)
    mixed = attention(flat[None], seen_keys[None], seen_values[None], block_mask=mask, scale=scaling, enable_gqa=True)
    return mixed[0].transpose(0, 1).view_as(queries)


def _window(batch: PackedBatch, first: int, last: int, start: int, stop: int, sliding_window: int | None) -> Window:
    rows = torch.arange(start, stop)
    starts, stops = (bounds[first:last, None, None, None] for bounds in (batch.context_starts, batch.context_stops))
    hidden = (rows < starts) | (rows >= stops)
    if sliding_window is not None:
        slots = torch.arange(batch.previous_ids.shape[1])[:, None, None]
        hidden = hidden | (stops + slots - rows >= sliding_window)
    return Window(first, last, start, stop, hidden)


def _attend(
    queries: Tensor, context_keys: Tensor, context_values: Tensor, keys: Tensor, values: Tensor, hidden: Tensor
) -> Tensor:
    """[K, n, G, R, D]. queries: the same, scaled; context_*: [K, t, D]; keys, values: [K, n, G, D].

    One softmax over context and block; the two parts of the scores are computed apart, so that blocks do not pay for
    each other's keys.
    """
    shape, num_rows = queries.shape[1:4], context_keys.shape[1]
    own = queries.flatten(2, 3)  # [K, n, G*R, D]
    on_context = (own.flatten(1, 2) @ context_keys.transpose(1, 2)).float().unflatten(1, shape)
    on_context = on_context.masked_fill(hidden, -torch.inf)
    on_block = (own @ keys.transpose(2, 3)).float().unflatten(2, shape[1:])
    weights = torch.cat([on_context, on_block], dim=-1).softmax(dim=-1).to(values.dtype)
    context_weights, block_weights = weights.split([num_rows, keys.shape[2]], dim=-1)
    mixed = (context_weights.flatten(1, 3) @ context_values).unflatten(1, shape)
    return mixed + (block_weights.flatten(2, 3) @ values).unflatten(2, shape[1:])


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)


@functools.cache
def _compiled_create_block_mask() -> Callable[..., Any]:
    return torch.compile(create_block_mask, dynamic=True)
