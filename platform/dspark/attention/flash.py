"""Paged attention through flash-attn 2, of which all requests' pages are one call; its twin: `paged.attend_pieces`.

Legend: R pieces, B rows (batch tokens), H query heads, K key/value heads, S slots, P pages of memory, D head width.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dspark.attention.block_tables import Ints, Spans, boundaries, page_rows, visible_pages
from dspark.attention.flat_batch import FlatBatch
from dspark.attention.kv_cache import PagedKVCache
from dspark.attention.page_pool import PageTable

TYPES = (torch.float16, torch.bfloat16)
PAGE_TOKENS = 256  # a page must be a multiple of so many for flash-attn 2
MAX_WIDTH = 256

Attention = Callable[..., Tensor]


def installed() -> Attention | None:
    """flash-attn 2's function over batches of any lengths; None where it is not installed."""
    try:
        found: Attention = importlib.import_module("flash_attn").flash_attn_varlen_func
    except (ImportError, AttributeError):
        return None
    return found


def unserved(kv_cache: PagedKVCache, page_size: int) -> str | None:
    """Why it does not serve this memory; None where it does."""
    held = kv_cache.held
    if kv_cache.has_sinks:
        return "it knows no attention sinks"
    if installed() is None:
        return "flash_attn is not installed"
    if len({memory.device for memory in held}) > 1:
        return "layers lie on several devices"
    if held[0].dtype not in TYPES:
        return f"{held[0].dtype} is no half precision"
    if page_size % PAGE_TOKENS:
        return f"page_size {page_size} is no multiple of {PAGE_TOKENS}"
    widths = {memory.shape[2] for memory in held}
    if any(width > MAX_WIDTH or width % 8 for width in widths):
        return f"head widths {sorted(widths)} are not all multiples of 8 up to {MAX_WIDTH}"
    if any(k.shape[2] != v.shape[2] for k, v in zip(kv_cache.keys, kv_cache.values, strict=True)):
        return "keys and values have different widths"
    return None


class FlashEntry:
    """attention: called as `flash_attn.flash_attn_varlen_func` is."""

    name = "flash"

    def __init__(self, kv_cache: PagedKVCache, page_size: int, attention: Attention) -> None:
        self.page_size, self.device = page_size, kv_cache.keys[0].device
        self.attention = attention

    def plan(self, batch: FlatBatch) -> "FlashPlan":
        spans = [(piece.start, piece.stop) for piece in batch.pieces]
        return self.plan_of([piece.table for piece in batch.pieces], spans, batch.slot_mapping)

    def plan_of(
        self, tables: Sequence[PageTable], spans: Spans, slot_mapping: Tensor, *, is_causal: bool = True
    ) -> "FlashPlan":
        longest = max(stop - start for start, stop in spans), max(stop for _, stop in spans)
        width = max(len(own) for own in visible_pages(tables, spans))
        plan = FlashPlan(self, len(spans), width, slot_mapping.shape[0], longest, is_causal=is_causal)
        plan.fill(tables, spans, slot_mapping)
        return plan

    def fixed_plan(self, *, num_tokens: int, num_requests: int, max_pages: int) -> "FlashPlan":
        longest = num_tokens, max_pages * self.page_size
        return FlashPlan(self, min(num_tokens, num_requests), max_pages, num_tokens, longest, is_causal=True)


class FlashPlan:
    """Tensors of a fixed size for up to so many pieces; those that are not there have no rows and no keys.

    longest: the most rows of a piece and the most keys it sees, or more.
    """

    def __init__(
        self,
        entry: FlashEntry,
        num_pieces: int,
        max_pages: int,
        num_rows: int,
        longest: tuple[int, int],
        *,
        is_causal: bool,
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=entry.device)

        self._entry, self._longest, self._is_causal = entry, longest, is_causal
        self._cu_seqlens_q, self._cu_seqlens_k = zeros(num_pieces + 1), zeros(num_pieces + 1)
        self._page_table = zeros(num_pieces, max_pages)
        self._slots = zeros(num_rows, dtype=torch.long)

    def holds(self, spans: Spans) -> bool:
        number, width = self._page_table.shape
        most = max(-(-stop // self._entry.page_size) for _, stop in spans)
        num_rows = sum(stop - start for start, stop in spans)
        return len(spans) <= number and num_rows <= self._slots.shape[0] and most <= width

    def fill(self, tables: Sequence[PageTable], spans: Spans, slot_mapping: Tensor) -> None:
        assert self.holds(spans), "a step does not fit its plan"
        _extend(self._cu_seqlens_q, boundaries([stop - start for start, stop in spans]))
        _extend(self._cu_seqlens_k, boundaries([stop for _, stop in spans]))
        table = page_rows(visible_pages(tables, spans))
        self._page_table[: table.shape[0], : table.shape[1]].copy_(torch.from_numpy(table))
        self._slots.copy_(slot_mapping)

    def attend(
        self,
        queries: Tensor,
        new: tuple[Tensor, Tensor],
        held: tuple[Tensor, Tensor],
        *,
        scaling: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert sinks is None, "attention sinks"
        for memory, rows in zip(held, new, strict=True):
            memory.index_copy_(1, self._slots, rows.transpose(0, 1))
        options: dict[str, Any] = {} if softcap is None else {"softcap": softcap}  # versions before 2.6 know none
        return self._entry.attention(
            queries.contiguous(),
            *(_in_pages(memory, self._entry.page_size) for memory in held),
            cu_seqlens_q=self._cu_seqlens_q,
            cu_seqlens_k=self._cu_seqlens_k,
            max_seqlen_q=self._longest[0],
            max_seqlen_k=self._longest[1],
            softmax_scale=scaling,
            causal=self._is_causal,  # aligned to the end: a piece's last row sees its last key
            window_size=(-1, -1) if window is None else (window - 1, 0),
            block_table=self._page_table,
            **options,
        )


def _in_pages(memory: Tensor, page_size: int) -> Tensor:
    """A view of a layer's memory [K, S, D] as [P, page_size, K, D]."""
    return memory.view(memory.shape[0], -1, page_size, memory.shape[2]).permute(1, 2, 0, 3)


def _extend(whole: Tensor, part: Ints) -> None:
    """Boundaries of fewer pieces: those behind them are empty."""
    whole[: len(part)].copy_(torch.from_numpy(part))
    whole[len(part) :] = int(part[-1])
