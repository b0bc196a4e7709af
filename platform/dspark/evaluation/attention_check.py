"""Random paged attention, by an entry and by the reference in float64: what a device computes, against the formula."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.attention.choice import as_capturable
from dspark.attention.entry import AttentionEntry, StepPlan
from dspark.attention.flat_batch import FlatBatch, Piece, flatten
from dspark.attention.kv_cache import LayerShape, PagedKVCache
from dspark.attention.page_pool import PageTable
from dspark.attention.paged import PagedStep, attend_pieces

# Tokens stored before, and new, per request: decodes, verifications, a prompt's beginning and one behind a context.
MIXED = ((70, 1), (0, 9), (129, 8), (0, 1), (3, 150), (64, 1))
DECODING = ((70, 1), (21, 6), (129, 8), (0, 1), (64, 1))
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2**-6, torch.float16: 2**-8}
PADDING_ROWS = 5


@dataclass(frozen=True)
class AttentionShape:
    """Of one layer: query heads, key/value heads, widths, and what its attention does."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    softcap: float | None = None


SHAPES = {
    "shared keys": AttentionShape(6, 2, 64, 64),
    "one head for all": AttentionShape(12, 1, 64, 64),
    "window": AttentionShape(4, 2, 32, 32, window=37),
    "soft cap": AttentionShape(4, 4, 64, 64, softcap=0.5),
    "wide": AttentionShape(4, 2, 128, 128, window=90, softcap=2.0),
    "values of another width": AttentionShape(4, 2, 64, 32),
}


class PagedProblem:
    """Requests with some tokens in scattered pages, and the next of each; the same ones whenever it is made.

    The memory has a page that nobody holds at its end.
    """

    def __init__(
        self,
        shape: AttentionShape,
        *,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        lengths: Sequence[tuple[int, int]] = MIXED,
    ) -> None:
        self.shape, self.page_size, self.dtype = shape, page_size, dtype
        self._device, self._lengths = torch.device(device), lengths
        generator = torch.Generator().manual_seed(0)
        needed = [-(-(start + length) // page_size) for start, length in lengths]
        self.num_pages = sum(needed) + 3
        pages = torch.randperm(self.num_pages, generator=generator).tolist()
        self._tables = [PageTable([pages.pop() for _ in range(number)], page_size) for number in needed]
        for table, (start, _) in zip(self._tables, lengths, strict=True):
            table.num_tokens = start
        num_rows, num_slots = sum(length for _, length in lengths), (self.num_pages + 1) * page_size

        def random(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator).to(dtype).to(self._device)

        self._queries = random(num_rows, shape.num_heads, shape.key_dim)
        self._new = tuple(random(num_rows, shape.num_kv_heads, width) for width in (shape.key_dim, shape.value_dim))
        self._held = tuple(random(shape.num_kv_heads, num_slots, width) for width in (shape.key_dim, shape.value_dim))

    @property
    def _options(self) -> dict[str, Any]:
        return {"scaling": None, "sliding_window": self.shape.window, "softcap": self.shape.softcap}

    def memory(self, dtype: torch.dtype | None = None) -> PagedKVCache:
        """What is stored before the step, in memory of its own."""
        shape = self.shape
        kv_cache = PagedKVCache(
            [LayerShape(shape.num_kv_heads, shape.key_dim, shape.value_dim)],
            num_slots=self._held[0].shape[1],
            dtype=dtype or self.dtype,
            device=self._device,
        )
        kv_cache.keys[0].copy_(self._held[0])
        kv_cache.values[0].copy_(self._held[1])
        return kv_cache

    def batch(self) -> FlatBatch:
        pieces = [Piece(table, [0] * n, n) for table, (_, n) in zip(self._tables, self._lengths, strict=True)]
        return flatten(pieces, self._device)

    def by_reference(self) -> Tensor:
        """[B, H, D_v] float64."""
        step = PagedStep(self.batch(), self.memory(torch.float64))
        query, key, value = (part.double().transpose(0, 1) for part in (self._queries, *self._new))
        return attend_pieces(step, 0, query, key, value, **self._options)

    def by_entry(self, entry: AttentionEntry, kv_cache: PagedKVCache) -> Tensor:
        """[B, H, D_v] as a step computes it. kv_cache: a fresh `memory`, for which the entry was made."""
        batch = self.batch()
        plan = entry.plan(batch)
        if plan is None:
            query, key, value = (part.transpose(0, 1) for part in (self._queries, *self._new))
            return attend_pieces(PagedStep(batch, kv_cache), 0, query, key, value, **self._options)
        return self._attend(plan, kv_cache, 0)

    def by_fixed_plan(self, entry: AttentionEntry, kv_cache: PagedKVCache) -> Tensor:
        """The same through a plan for more rows, requests and pages than there are, used twice."""
        capturable = as_capturable(entry)
        assert capturable is not None, f"attention {entry.name} cannot be captured"
        batch = self.batch()
        spans = [(piece.start, piece.stop) for piece in batch.pieces]
        scratch = torch.full((PADDING_ROWS,), self.num_pages * self.page_size, device=self._device)
        plan = capturable.fixed_plan(
            num_tokens=batch.num_tokens + PADDING_ROWS, num_requests=len(spans) + 2, max_pages=self.num_pages
        )
        slots = torch.cat([batch.slot_mapping, scratch])
        plan.fill(self._tables[:1], spans[:1], slots)  # what it leaves behind must not matter
        self._attend(plan, self.memory(), PADDING_ROWS)
        plan.fill(self._tables, spans, slots)
        return self._attend(plan, kv_cache, PADDING_ROWS)[: batch.num_tokens]

    def _attend(self, plan: StepPlan, kv_cache: PagedKVCache, num_padding: int) -> Tensor:
        queries, keys, values = (_padded(part, num_padding) for part in (self._queries, *self._new))
        held = kv_cache.keys[0], kv_cache.values[0]
        shape = self.shape
        return plan.attend(queries, (keys, values), held, window=shape.window, softcap=shape.softcap)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest value; of what is no number, infinite."""
    difference = (found.double() - expected).abs().max() / expected.abs().max()
    return float(difference.nan_to_num(torch.inf))


def _padded(rows: Tensor, number: int) -> Tensor:
    return torch.cat([rows, rows.new_ones(number, *rows.shape[1:])])
