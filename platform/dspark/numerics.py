"""How matrix products are computed on a CPU."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SMALLEST_PACKED = 64  # outputs; below it a product costs less than the call
ROWS_PACKED_FOR = 8  # a hint to the layout: the batches of a decode step, and its measured speed hardly depends on it


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


class PackedLinear(nn.Linear):
    """A bfloat16 linear layer for inference on a CPU, its weight also kept in the layout of oneDNN's kernels.

    Without it oneDNN reorders the weight on each call, which for a few rows costs more than the product: 1.3 to 3.8
    times as long at 1 row, 1.1 at 512. The price is a second copy of the weight. What it was not packed for (other
    types, gradients) is computed as `nn.Linear` does.
    """

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.train(linear.training)
        with torch.inference_mode():
            self._packed: Tensor = _mkldnn()._reorder_linear_weight(linear.weight.detach(), ROWS_PACKED_FOR)

    def forward(self, x: Tensor) -> Tensor:
        """[..., out_features]. x: [..., in_features]."""
        wants_gradient = torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad)
        if wants_gradient or not x.dtype == self.weight.dtype == torch.bfloat16 or x.numel() == 0:
            return F.linear(x, self.weight, self.bias)
        product: Tensor = _mkldnn()._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return product


def pack_linears(model: nn.Module) -> int:
    """Replace the plain linear layers of a model that only infers by packed ones; how many were.

    That is 0 where nothing is gained: off the CPU, in other types than bfloat16, without oneDNN's kernels for it. The
    weights must not be written to afterwards.
    """
    if not (torch.backends.mkldnn.is_available() and _mkldnn()._is_mkldnn_bf16_supported()):
        return 0
    num_packed = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and _is_packable(child.weight):
                setattr(parent, name, PackedLinear(child))
                num_packed += 1
    return num_packed


def _is_packable(weight: Tensor) -> bool:
    is_bfloat16 = weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
    return is_bfloat16 and weight.shape[0] >= SMALLEST_PACKED


def _mkldnn() -> Any:
    return torch.ops.mkldnn
