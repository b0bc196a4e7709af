"""Keys and values of many requests in one piece of memory, addressed by slot (page * page_size + offset).

Legend: K key/value heads, S slots, D head width, n tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.attention.page_pool import PageTable


@dataclass(frozen=True)
class LayerShape:
    """What one layer stores per token, and where: of a model spread over devices, layers differ in that.

    shared_with: an earlier layer whose keys and values are this one's too. has_sinks: its attention counts one more key
    per head, which is not stored.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    device: torch.device | None = None
    shared_with: int | None = None
    has_sinks: bool = False


class PagedKVCache:
    """Per layer, keys and values [K, S, D]: a head's tokens are neighbours, so a request's are read in one sweep."""

    def __init__(
        self, shapes: Sequence[LayerShape], *, num_slots: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.has_sinks = any(shape.has_sinks for shape in shapes)
        for shape in shapes:
            if shape.shared_with is not None:
                self.keys.append(self.keys[shape.shared_with])
                self.values.append(self.values[shape.shared_with])
                continue
            self.keys.append(_zeros(shape, num_slots, shape.key_dim, dtype, device))
            self.values.append(_zeros(shape, num_slots, shape.value_dim, dtype, device))

    @property
    def held(self) -> list[Tensor]:
        """Keys and values of all layers that store any."""
        return [memory for memory in [*self.keys, *self.values] if memory.shape[0]]

    @property
    def num_bytes(self) -> int:
        held = {id(t): t for t in [*self.keys, *self.values]}
        return sum(t.numel() * t.element_size() for t in held.values())

    def write(self, layer: int, slot_mapping: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store n tokens. slot_mapping: [n] int64; keys, values: [K, n, D]."""
        slot_mapping = slot_mapping.to(self.keys[layer].device)
        self.keys[layer].index_copy_(1, slot_mapping, keys)
        self.values[layer].index_copy_(1, slot_mapping, values)

    def read(self, layer: int, table: PageTable, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of positions start … stop-1: [K, n, D] each; views where the pages are neighbours."""
        keys, values = self.keys[layer], self.values[layer]
        runs = table.runs(start, stop)
        if len(runs) == 1:
            first, last = runs[0]
            return keys[:, first:last], values[:, first:last]
        # A request has few runs, and copying ranges costs a third to two thirds of gathering slot by slot.
        parts = [(keys[:, first:last], values[:, first:last]) for first, last in runs]
        return torch.cat([part[0] for part in parts], dim=1), torch.cat([part[1] for part in parts], dim=1)


def _zeros(shape: LayerShape, num_slots: int, width: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    return torch.zeros(shape.num_kv_heads, num_slots, width, dtype=dtype, device=shape.device or device)
