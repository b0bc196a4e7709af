"""Paged attention through PyTorch's FlexAttention, whose blocks of keys are our pages; its twin: `paged.attend_pieces`.

Legend: B rows (batch tokens), N tiles of T rows, H = K * G query heads on K key/value heads, S slots, P pages, D width.
The G heads that share keys are laid side by side as further rows of a tile, so nothing is repeated.

On CUDA one compiled kernel visits the pages that a tile's row of the page table lists. Without compilation the library
looks at all S slots instead, and so does its twin here: then the mask must say which pages are the tile's own.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dspark.attention.block_tables import NOTHING, Ints, Spans, Tiles, num_tiles, tiles_of
from dspark.attention.flat_batch import FlatBatch
from dspark.attention.kv_cache import PagedKVCache
from dspark.attention.page_pool import PageTable

SHORT_TILE, LONG_TILE = 16, 128  # rows: of decodes and verifications, of prompts
QUERY_BLOCK = 128
MOST_KINDS = 64  # of layers and tiles that are compiled for in one process
MIN_WIDTH = 16  # of a head: what a tensor core takes
WIDE_BYTES = 256  # of a key from which a block of 64 does not leave room for the next in shared memory

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def unserved(kv_cache: PagedKVCache, page_size: int) -> str | None:
    """Why it does not serve this memory; None where it does."""
    held = kv_cache.held
    if kv_cache.has_sinks:
        return "it knows no attention sinks"
    if len({memory.device for memory in held}) > 1:
        return "layers lie on several devices"
    if page_size < 16 or page_size & (page_size - 1):
        return f"page_size {page_size} is no power of two from 16"
    if min(memory.shape[2] for memory in held) < MIN_WIDTH:
        return f"heads are narrower than {MIN_WIDTH}"
    return None


class FlexEntry:
    """Needs one device for all layers. attention: called as `flex_attention` is; None takes the compiled one on CUDA
    and its twin elsewhere.
    """

    name = "flex"

    def __init__(self, kv_cache: PagedKVCache, page_size: int, attention: Callable[..., Any] | None = None) -> None:
        memory = kv_cache.keys[0]
        self.page_size, self.device = page_size, memory.device
        self.is_compiled = memory.device.type == "cuda"
        self.attention = attention or (_compiled() if self.is_compiled else attend_everywhere)
        self._num_pages = memory.shape[1] // page_size
        self._logical = torch.zeros(self._num_pages, dtype=torch.int32, device=memory.device)

    def plan(self, batch: FlatBatch) -> "FlexPlan":
        spans = [(piece.start, piece.stop) for piece in batch.pieces]
        return self.plan_of([piece.table for piece in batch.pieces], spans, batch.slot_mapping)

    def plan_of(
        self, tables: Sequence[PageTable], spans: Spans, slot_mapping: Tensor, *, is_causal: bool = True
    ) -> "FlexPlan":
        """A plan of its own; all plans share which of its request's pages each page is."""
        longest = max(stop - start for start, stop in spans)
        tile_rows = SHORT_TILE if longest <= SHORT_TILE else LONG_TILE
        tiles = tiles_of(tables, spans, tile_rows=tile_rows, is_causal=is_causal)
        plan = FlexPlan(self, tiles.rows.shape[0], tile_rows, tiles.page_table.shape[1], len(tiles.places))
        plan.take(tiles, slot_mapping)
        return plan

    def fixed_plan(self, *, num_tokens: int, num_requests: int, max_pages: int) -> "FlexPlan":
        return FlexPlan(self, min(num_tokens, num_requests), SHORT_TILE, max_pages, num_tokens)

    def note_pages(self, pages: Ints, logical: Ints) -> None:
        """A page that stands in no table is visited by no tile, so what is said of it does not matter."""
        index = torch.from_numpy(pages).to(self.device, torch.long)
        self._logical.index_copy_(0, index, torch.from_numpy(logical).to(self.device))

    @property
    def logical(self) -> Tensor:
        """[P] int32: which of its request's pages a page is."""
        return self._logical


class FlexPlan:
    """Tensors of a fixed size, taken from `Tiles` that may be smaller; what is left over is padding."""

    def __init__(self, entry: FlexEntry, num_tiles: int, tile_rows: int, max_pages: int, num_rows: int) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=entry.device)

        self._entry, self._tile_rows = entry, tile_rows
        self._rows = zeros(num_tiles, tile_rows, dtype=torch.long)
        self._positions = zeros(num_tiles, tile_rows)
        self._places = zeros(num_rows, dtype=torch.long)
        self._page_table = zeros(num_tiles, max_pages)
        self._num_pages = zeros(num_tiles)
        self._slots = zeros(num_rows, dtype=torch.long)
        self._owned = zeros(num_tiles, len(entry.logical), dtype=torch.bool) if not entry.is_compiled else None
        self._blocks: dict[int, tuple[Tensor, Tensor]] = {}
        self._masks: dict[tuple[int, int | None], BlockMask] = {}

    def holds(self, spans: Spans) -> bool:
        most = max(-(-stop // self._entry.page_size) for _, stop in spans)
        num_rows = sum(stop - start for start, stop in spans)
        fits = num_tiles(spans, self._tile_rows) <= self._rows.shape[0] and num_rows <= self._places.shape[0]
        return fits and most <= self._page_table.shape[1]

    def fill(self, tables: Sequence[PageTable], spans: Spans, slot_mapping: Tensor) -> None:
        assert self.holds(spans), "a step does not fit its plan"
        self.take(tiles_of(tables, spans, tile_rows=self._tile_rows), slot_mapping)

    def take(self, tiles: Tiles, slot_mapping: Tensor) -> None:
        """slot_mapping: [B] of all rows, padding included."""
        self._entry.note_pages(tiles.pages, tiles.logical)
        number, width = tiles.page_table.shape
        for whole, part, rest in (
            (self._rows, tiles.rows, 0),
            (self._positions, tiles.positions, NOTHING),
            (self._places, tiles.places, 0),
            (self._num_pages, tiles.num_pages, 0),
        ):
            whole[: len(part)].copy_(torch.from_numpy(part))
            whole[len(part) :] = rest
        self._page_table[:number, :width].copy_(torch.from_numpy(tiles.page_table))
        self._slots.copy_(slot_mapping)
        if self._owned is not None:
            self._owned.copy_(self.listed_pages())
        for blocks in self._blocks:
            self._list_pages(blocks)

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
        (keys, values), tile_rows = held, self._tile_rows
        for memory, rows in zip(held, new, strict=True):
            memory.index_copy_(1, self._slots, rows.transpose(0, 1))
        num_kv_heads, group = keys.shape[0], queries.shape[1] // keys.shape[0]
        number = self._rows.shape[0]
        tiles = queries[self._rows.flatten()].view(number, tile_rows, num_kv_heads, group, -1)
        mixed: Tensor = self._entry.attention(
            tiles.permute(0, 2, 3, 1, 4).reshape(number, num_kv_heads, group * tile_rows, -1),
            keys[None],
            values[None],
            score_mod=None if softcap is None else _capped(softcap),
            block_mask=self.block_mask(group, window, keys.shape[1]),
            scale=scaling,
            kernel_options=_kernel_options(keys, self._entry.page_size) if self._entry.is_compiled else None,
        )
        rows = mixed.view(number, num_kv_heads, group, tile_rows, -1).permute(0, 3, 1, 2, 4)
        return rows.reshape(number * tile_rows, num_kv_heads * group, -1)[self._places]

    def block_mask(self, group: int, window: int | None, num_slots: int) -> BlockMask:
        """Which slots the rows of a tile see: each of T positions, `group` times. Made once per kind of layer."""
        if (group, window) not in self._masks:
            blocks = -(-group * self._tile_rows // QUERY_BLOCK)
            if blocks not in self._blocks:
                number, width = self._page_table.shape
                counts = self._num_pages.new_empty(number, 1, blocks)
                self._blocks[blocks] = counts, self._page_table.new_empty(number, 1, blocks, width)
                self._list_pages(blocks)
            self._masks[group, window] = BlockMask.from_kv_blocks(
                *self._blocks[blocks],
                BLOCK_SIZE=(QUERY_BLOCK, self._entry.page_size),
                mask_mod=self.mask(window),
                seq_lengths=(group * self._tile_rows, num_slots),
                compute_q_blocks=False,
            )
        return self._masks[group, window]

    def mask(self, window: int | None) -> Mask:
        """Whether a row of a tile sees a slot."""
        positions, logical, page_size = self._positions, self._entry.logical, self._entry.page_size
        tile_rows = self._tile_rows

        def sees(tile: Tensor, head: Tensor, row: Tensor, slot: Tensor) -> Tensor:
            own = positions[tile, row % tile_rows]
            other = logical[slot // page_size] * page_size + slot % page_size
            return other <= own if window is None else (other <= own) & (own - other < window)

        owned = self._owned
        if owned is None:
            return sees
        return lambda tile, head, row, slot: sees(tile, head, row, slot) & owned[tile, slot // page_size]

    def _list_pages(self, blocks: int) -> None:
        """The page table once for each block of a tile's rows, in tensors that masks refer to."""
        counts, pages = self._blocks[blocks]
        counts.copy_(self._num_pages[:, None, None].expand_as(counts))
        pages.copy_(self._page_table[:, None, None].expand_as(pages))

    def listed_pages(self) -> Tensor:
        """[N, P] bool: the pages that a tile's row of the page table lists."""
        number, width = self._page_table.shape
        listed = torch.arange(width, device=self._page_table.device) < self._num_pages[:, None]
        counts = torch.zeros(number, self._entry.logical.shape[0], dtype=torch.int32, device=listed.device)
        return counts.scatter_add_(1, self._page_table.long(), listed.int()) > 0


def attend_everywhere(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    score_mod: Callable[..., Tensor] | None,
    block_mask: BlockMask,
    scale: float | None,
    kernel_options: dict[str, Any] | None = None,
) -> Tensor:
    """What `flex_attention` computes, with the mask asked for every slot: [N, K, rows, D_v]; 0 for rows that see none.

    queries: [N, K, rows, D]; keys, values: [1, K, S, D].
    """
    (number, _, num_rows, width), num_slots = queries.shape, keys.shape[2]
    tile, row, slot = (torch.arange(n, device=queries.device) for n in (number, num_rows, num_slots))
    tile, row = tile[:, None, None, None], row[:, None]
    scores = (queries.float() @ keys.float().transpose(2, 3)) * (width**-0.5 if scale is None else scale)
    if score_mod is not None:
        scores = score_mod(scores, tile, tile, row, slot)
    seen = block_mask.mask_mod(tile, tile, row, slot)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0).to(values.dtype) @ values


@cache
def _compiled() -> Callable[..., Any]:
    """Sizes of batches and tables are no constants in it; kinds of layers are.

    It must never fall back to the library's function without compilation, which looks at pages that no table lists.
    """
    import torch._dynamo.config as dynamo  # heavy, and needed on CUDA alone

    dynamo.recompile_limit = max(dynamo.recompile_limit, MOST_KINDS)
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True, fullgraph=True)
    return compiled


@cache
def _capped(softcap: float) -> Callable[..., Tensor]:
    def cap(score: Tensor, *_: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


def _kernel_options(keys: Tensor, page_size: int) -> dict[str, Any]:
    """Blocks that divide a page and QUERY_BLOCK, and fit the shared memory for wide keys."""
    is_wide = keys.shape[2] * keys.element_size() > WIDE_BYTES
    return {"BLOCK_M": 32 if is_wide else 64, "BLOCK_N": min(page_size, 32 if is_wide else 64), "num_stages": 2}
