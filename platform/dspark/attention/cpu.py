"""Paged attention of a whole batch in one call of our CPU kernel; its slow twin is `paged.attend_pieces`.

Legend: R pieces, B rows (batch tokens), H query heads, K key/value heads, S slots, D head width.
"""

from array import array
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from dspark import native
from dspark.attention.kv_cache import PagedKVCache
from dspark.attention.page_pool import PageTable

TYPES = (torch.float32, torch.bfloat16)


def is_served(kv_cache: PagedKVCache) -> bool:
    """Whether the kernel is there and takes this memory."""
    held = [*kv_cache.keys, *kv_cache.values]
    fits = all(memory.device.type == "cpu" and memory.dtype in TYPES for memory in held)
    return fits and native.kernels() is not None


class AttentionPlan:
    """What all layers of a forward pass share: whose rows see which pages.

    spans: the positions start … stop-1 that a table's rows have. Rows see their request up to themselves, or all of
    it up to stop where is_causal is false. slot_mapping: [B] int64, where each row's key and value are stored.
    """

    def __init__(
        self,
        tables: Sequence[PageTable],
        spans: Sequence[tuple[int, int]],
        slot_mapping: Tensor,
        *,
        is_causal: bool = True,
    ) -> None:
        page_size = tables[0].page_size
        pages = [table.pages[: -(-stop // page_size)] for table, (_, stop) in zip(tables, spans, strict=True)]
        num_pieces = len(tables)
        self.num_tokens = sum(stop - start for start, stop in spans)
        assert slot_mapping.shape == (self.num_tokens,), "a plan needs a slot per row"
        self._slots = slot_mapping.contiguous()
        self._numbers = array("i", [0])  # boundaries of rows, starts, stops, boundaries of pages, pages
        self._numbers.extend(accumulate(stop - start for start, stop in spans))
        self._numbers.extend(start for start, _ in spans)
        self._numbers.extend(stop for _, stop in spans)
        self._numbers.append(0)
        self._numbers.extend(accumulate(len(own) for own in pages))
        for own in pages:
            self._numbers.extend(own)
        address, width = self._numbers.buffer_info()[0], self._numbers.itemsize
        rows, starts = address, address + (num_pieces + 1) * width
        first_pages = starts + 2 * num_pieces * width
        self.batch = native.Batch(
            num_pieces=num_pieces,
            num_tokens=self.num_tokens,
            page_size=page_size,
            is_causal=int(is_causal),
            num_threads=torch.get_num_threads(),
            cu_seqlens=rows,
            starts=starts,
            stops=starts + num_pieces * width,
            first_pages=first_pages,
            pages=first_pages + (num_pieces + 1) * width,
            slots=self._slots.data_ptr(),
        )

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
        """Store the rows' keys and values, then attend: [B, H, D_v].

        queries: [B, H, D]; new: keys and values of the rows, [B, K, D] each; held: a layer's memory, [K, S, D] each;
        sinks: [H], the score of a further key per head, whose value is zero.
        """
        sinks = None if sinks is None else sinks.float().contiguous()
        queries, (new_keys, new_values) = _in_rows(queries), (_in_rows(part) for part in new)
        keys, values = held
        num_heads, num_kv_heads = queries.shape[1], keys.shape[0]
        assert queries.shape[0] == new_keys.shape[0] == self.num_tokens and num_heads % num_kv_heads == 0  # noqa: PT018
        assert {part.dtype for part in (queries, new_keys, new_values)} == {keys.dtype}, "attention in a mix of types"
        widths = new_keys.shape[1:] + new_values.shape[1:]
        assert widths == (num_kv_heads, keys.shape[2], num_kv_heads, values.shape[2]), "keys of another shape than held"
        assert sinks is None or sinks.shape == (num_heads,), "attention needs a sink per head"
        out = torch.empty(self.num_tokens, num_heads, values.shape[2], dtype=queries.dtype)
        layer = native.Attention(
            queries=queries.data_ptr(),
            new_keys=new_keys.data_ptr(),
            new_values=new_values.data_ptr(),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            out=out.data_ptr(),
            query_token=queries.stride(0),
            query_head=queries.stride(1),
            key_token=new_keys.stride(0),
            key_head=new_keys.stride(1),
            value_token=new_values.stride(0),
            value_head=new_values.stride(1),
            num_slots=keys.shape[1],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            key_dim=keys.shape[2],
            value_dim=values.shape[2],
            window=window or 0,
            is_bf16=int(keys.dtype == torch.bfloat16),
            scaling=keys.shape[2] ** -0.5 if scaling is None else scaling,
            softcap=softcap or 0.0,
            sinks=None if sinks is None else sinks.data_ptr(),
        )
        available = native.kernels()
        assert available is not None, "a plan was made without kernels to run it"
        available.attention(self.batch, layer)
        return out


def _in_rows(x: Tensor) -> Tensor:
    """x with the elements of a head beside each other, as the kernel reads them."""
    return x if x.stride(-1) == 1 else x.contiguous()
