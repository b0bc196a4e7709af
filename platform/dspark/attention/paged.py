"""Attention of a flat batch over paged KV memory, under a name that Hugging Face models can be told to use.

Legend: H query heads, K key/value heads, B batch tokens, n tokens of a piece, S keys a piece sees, D head width.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from dspark.attention.cpu import AttentionPlan
from dspark.attention.entry import StepPlan
from dspark.attention.flat_batch import FlatBatch
from dspark.attention.kv_cache import PagedKVCache

NAME = "dspark_paged"
UNSUPPORTED = ("s_aux",)  # attention sinks; what else differs, the runner's probe finds


@dataclass
class PagedStep:
    """What the attention of one forward pass works on; travels through the model as the keyword `paged_step`.

    plan: of the entry that computes; None lets PyTorch compute, piece by piece, for which it needs the batch.
    """

    batch: FlatBatch | None
    kv_cache: PagedKVCache
    plan: StepPlan | None = None


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
    paged_step: PagedStep,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Store the new keys and values, then let each piece attend to its own request's: [1, B, H, D].

    query: [1, H, B, D]; key, value: [1, K, B, D].
    Raises: ValueError for a kind of attention this does not compute (sinks, …), by its name.
    """
    for name in UNSUPPORTED:
        if options.get(name) is not None:
            raise ValueError(f"attention option {name} of {type(module).__name__} is not supported by paged attention")
    layer: int = module.layer_idx  # type: ignore[assignment]
    if paged_step.plan is None:
        new = query[0], key[0], value[0]
        mixed = attend_pieces(paged_step, layer, *new, scaling=scaling, sliding_window=sliding_window, softcap=softcap)
    else:
        kv_cache = paged_step.kv_cache
        mixed = paged_step.plan.attend(
            query[0].transpose(0, 1),
            (key[0].transpose(0, 1), value[0].transpose(0, 1)),
            (kv_cache.keys[layer], kv_cache.values[layer]),
            scaling=scaling,
            window=sliding_window,
            softcap=softcap,
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
        outputs.append(attend(queries, keys, values, mask, scaling=scaling, softcap=softcap))
    return torch.cat(outputs, dim=1).transpose(0, 1)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    *,
    scaling: float | None,
    softcap: float | None = None,
) -> Tensor:
    """[H, n, D]. queries: [H, n, D]; keys, values: [K, S, D]; mask: [n, S], 0 or -inf, None = all is seen.

    Query heads that share keys are laid side by side as further queries, so that nothing is repeated.
    softcap c: scores s become c tanh(s / c).
    """
    num_heads, n, _ = queries.shape
    group = num_heads // keys.shape[0]
    folded = queries.reshape(keys.shape[0], group * n, -1)
    if mask is not None:
        mask = mask.repeat(group, 1)
    if softcap is not None:
        scores = (folded @ keys.transpose(1, 2)).float() * (scaling or queries.shape[2] ** -0.5)
        scores = softcap * (scores / softcap).tanh()
        weights = (scores if mask is None else scores + mask).softmax(-1).to(values.dtype)
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
