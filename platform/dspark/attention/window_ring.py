"""Keys and values of one request in layers that see a window only: a ring that its newest tokens write round and round.

Legend: K key/value heads, S slots of the ring, D head width, n tokens.

    position p lies in slot p mod S; what is read behind `stop` are the newest S positions in the order of their slots.

It belongs to the request and is freed with it, so its size does not depend on how long contexts get.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.attention.kv_cache import LayerShape


class WindowRing:
    """Per layer, keys and values [K, S, D]. The order of the slots does not matter to attention: keys are rotated."""

    def __init__(
        self, shapes: Sequence[LayerShape], *, num_slots: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.num_slots = num_slots
        self._device = device
        self.keys = [torch.empty(s.num_kv_heads, num_slots, s.key_dim, dtype=dtype, device=device) for s in shapes]
        self.values = [torch.empty(s.num_kv_heads, num_slots, s.value_dim, dtype=dtype, device=device) for s in shapes]

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Store the tokens at positions start, start+1, …, at most S of them. keys, values: [K, n, D]."""
        slots = torch.arange(start, start + keys.shape[1], device=self._device) % self.num_slots
        self.keys[layer].index_copy_(1, slots, keys)
        self.values[layer].index_copy_(1, slots, values)

    def read(self, layer: int, stop: int) -> tuple[Tensor, Tensor]:
        """Views of the newest positions before `stop`: [K, n, D] each, n = min(stop, S). All have to be written."""
        n = min(stop, self.num_slots)
        return self.keys[layer][:, :n], self.values[layer][:, :n]

    def positions(self, stop: int) -> Tensor:
        """[n] int64: the position in each slot that `read` gives."""
        slots = torch.arange(min(stop, self.num_slots), device=self._device)
        return stop - 1 - (stop - 1 - slots) % self.num_slots
