"""The target's features of all tokens in KV memory, kept on the host in the same pages.

A draft replica that was lost gets its contexts again from here, and a request that shares pages with another finds
their features in them. The memory is as long as the KV memory: nothing grows with time.
"""

import torch
from torch import Tensor

from dspark.attention.page_pool import PageTable


class FeatureStore:
    """Features [S, m*d], one row per slot (page * page_size + offset). device: where they come from."""

    def __init__(
        self, *, num_pages: int, page_size: int, feature_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._device = device
        # Memory of the system that copies from a GPU need not wait for; pages nobody writes to take none of it.
        is_pinned = device.type == "cuda"
        self._rows = torch.empty(num_pages * page_size, feature_size, dtype=dtype, pin_memory=is_pinned)

    @property
    def num_bytes(self) -> int:
        return self._rows.nbytes

    @property
    def dtype(self) -> torch.dtype:
        return self._rows.dtype

    def write(self, table: PageTable, start: int, features: Tensor) -> None:
        """Keep those of the tokens from position `start` on. features: [n, m*d]."""
        done = 0
        for first, last in table.runs(start, start + features.shape[0]):
            self._rows[first:last].copy_(features[done : done + last - first], non_blocking=True)
            done += last - first

    def read(self, table: PageTable, start: int, stop: int) -> Tensor:
        """Those of positions start … stop-1: [n, m*d] on the host, in memory of their own."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # until what was written is there
        if start >= stop:
            return self._rows[:0].clone()
        return torch.cat([self._rows[first:last] for first, last in table.runs(start, stop)])
