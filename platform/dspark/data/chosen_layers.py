"""Some of the captured layers, out of the stored states of all of them.

Legend: T tokens of a shard, m captured layers, n chosen ones, d hidden size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dspark.errors import Mismatch


class ChosenLayers:
    """layer_ids: those to read, in this order; None reads all. captured: ids that are stored; None where not recorded.

    Raises: Mismatch naming a layer that is not stored.
    """

    def __init__(self, layer_ids: Sequence[int] | None, captured: Sequence[int] | None, *, source: str) -> None:
        stored = list((layer_ids if captured is None else captured) or ())
        wanted = stored if layer_ids is None else list(layer_ids)
        for layer_id in wanted:
            if layer_id not in stored:
                raise Mismatch(
                    f"{source} holds no states of layer {layer_id}, only of {stored}; capture them with "
                    "jobs/cache.py --fresh"
                )
        self._num_stored = len(stored)
        self._places = None if wanted == stored else [stored.index(layer_id) for layer_id in wanted]

    def read(self, stored: Any, tokens: slice) -> Tensor:
        """States of a range of tokens: [tokens, n*d]. stored: a safetensors slice, [T, m*d]."""
        if self._places is None:
            whole: Tensor = stored[tokens]
            return whole
        size = stored.get_shape()[1] // self._num_stored
        return torch.cat([stored[tokens, place * size : (place + 1) * size] for place in self._places], dim=1)
