"""How products are computed in training: bf16 for the backbone, exact float32 for logits and losses."""

import torch
from torch import Tensor, nn

from dspark.drafters.base import BlockBatch, BlockOutput


class Autocast(nn.Module):
    """A drafter whose backbone runs in bf16 while its weights stay float32. The drafter's head opts out by itself."""

    def __init__(self, drafter: nn.Module, *, enabled: bool) -> None:
        super().__init__()
        self.drafter = drafter
        self.enabled = enabled

    def forward(self, batch: BlockBatch, slots: Tensor) -> BlockOutput:
        """As the drafter's."""
        with torch.autocast(slots.device.type, torch.bfloat16, enabled=self.enabled):
            return self.drafter(batch, slots)


def use_fast_float32_products() -> None:
    """Let float32 products on a CPU go through oneDNN where that loses nothing: about twice as fast.

    The setting allows reduced precision on some processors, so the result is checked before it is kept.
    """
    if torch.cuda.is_available():
        return
    torch.set_float32_matmul_precision("medium")
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 512, generator=generator) for _ in range(2))
    exact = a.double() @ b.double().T
    if float(((a @ b.T) - exact).abs().max()) > 1e-3:
        torch.set_float32_matmul_precision("highest")
