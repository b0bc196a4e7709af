"""Mixed precision in training: bf16 for the backbone, float32 for logits and losses."""

import torch
from torch import Tensor, nn

from dspark.drafters import TrainedDrafter
from dspark.drafters.base import BlockBatch, PackedBatch, SlotRows


class Autocast(nn.Module):
    """A drafter whose backbone runs in bf16 while its weights stay float32; gives what its heads are given."""

    def __init__(self, drafter: TrainedDrafter, *, enabled: bool) -> None:
        super().__init__()
        self.drafter = drafter
        self.enabled = enabled

    def forward(self, batch: BlockBatch | PackedBatch, slots: Tensor) -> SlotRows:
        """`slot_rows` of the drafter: the states in bf16 when enabled, all else in float32."""
        with torch.autocast(slots.device.type, torch.bfloat16, enabled=self.enabled):
            return self.drafter.slot_rows(batch, slots)
