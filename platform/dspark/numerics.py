"""How matrix products are computed on a CPU."""

import contextlib
import mmap
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark import native

SMALLEST_PACKED = 64  # outputs; below it a product costs less than the call
HUGE_PAGE_BYTES = 1 << 21
PANEL = 32  # outputs beside each other, see `kernels/linear.h`
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
    """A bfloat16 linear layer for inference on a CPU, its weight also kept in the layout its kernel reads.

    That kernel is our own where it exists (`native.Kernels.has_products`): a row's result is then the same to the last
    bit whatever rows it is computed with. Else it is oneDNN's, which without this would reorder the weight on each
    call: for a few rows that costs more than the product. The price is a second copy of the weight. What it was not
    packed for (other types, gradients) is computed as `nn.Linear` does.
    """

    def __init__(self, linear: nn.Linear, memory: "WeightMemory | None" = None) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.train(linear.training)
        self.is_in_panels = _is_for_panels(linear.weight)
        with torch.inference_mode():
            weight = linear.weight.detach()
            self.packed: Tensor
            if self.is_in_panels:
                panels = in_panels(weight)
                self.packed = panels if memory is None else memory.keep(panels)
            else:
                self.packed = _mkldnn()._reorder_linear_weight(weight, ROWS_PACKED_FOR)

    def forward(self, x: Tensor) -> Tensor:
        """[..., out_features]. x: [..., in_features]."""
        wants_gradient = torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad)
        if wants_gradient or not x.dtype == self.weight.dtype == torch.bfloat16 or x.numel() == 0:
            return F.linear(x, self.weight, self.bias)
        if self.is_in_panels:
            return self._product(x.contiguous())
        product: Tensor = _mkldnn()._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return product

    def _product(self, x: Tensor) -> Tensor:
        available = native.kernels()
        assert available is not None
        assert x.shape[-1] == self.in_features, f"{x.shape[-1]} inputs to a layer of {self.in_features}"
        out = torch.empty(*x.shape[:-1], self.out_features, dtype=x.dtype)
        available.linear(self.packed, self.bias, x, out)
        return out


def argmax(rows: Tensor) -> Tensor:
    """The first of each row's largest numbers: [N]. rows: [N, V], none of them NaN.

    `torch.argmax` over the last dimension is its slow twin.

    On a CPU torch's takes 1 to 3 ns an element, ours a tenth.
    """
    available = (
        native.kernels() if rows.device.type == "cpu" and rows.dtype in (torch.float32, torch.bfloat16) else None
    )
    if available is None or not rows.is_contiguous():
        return rows.argmax(dim=-1)
    return available.argmax(rows)


def in_panels(weight: Tensor) -> Tensor:
    """[ceil(out / 32), in / 2, 32, 2]: pairs of inputs, 32 outputs beside each other. weight: [out, in], in even."""
    padded = F.pad(weight, (0, 0, 0, _padded_outputs(weight) - weight.shape[0]))
    return padded.view(-1, PANEL, weight.shape[1] // 2, 2).transpose(1, 2).contiguous()


class WeightMemory:
    """Room for the packed weights of a model in pages of 2 MiB.

    A step reads all weights once, and in pages of 4 KiB an address has to be looked up every 64 lines: a sixth of the
    time of products with one row.
    """

    def __init__(self, num_elements: int) -> None:
        num_bytes = (2 * num_elements // HUGE_PAGE_BYTES + 2) * HUGE_PAGE_BYTES  # wherever a first whole one begins
        region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux; elsewhere it is plain memory
            with contextlib.suppress(OSError):  # a kernel without such pages
                region.madvise(mmap.MADV_HUGEPAGE)
        self._free = torch.frombuffer(region, dtype=torch.bfloat16)

    def keep(self, packed: Tensor) -> Tensor:
        """A copy in here."""
        num_elements = packed.numel()
        kept, self._free = self._free[:num_elements].view(packed.shape), self._free[num_elements:]
        return kept.copy_(packed)


def pack_linears(model: nn.Module) -> int:
    """Replace the plain linear layers of a model that only infers by packed ones; how many were.

    That is 0 where nothing is gained: off the CPU, in other types than bfloat16, without kernels for it. The weights
    must not be written to afterwards.
    """
    if not (torch.backends.mkldnn.is_available() and _mkldnn()._is_mkldnn_bf16_supported()):
        return 0
    chosen = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and _is_packable(child.weight)
    ]
    sizes = [_padded_outputs(c.weight) * c.in_features for _, _, c in chosen if _is_for_panels(c.weight)]
    memory = WeightMemory(sum(sizes)) if sizes else None
    for parent, name, child in chosen:
        setattr(parent, name, PackedLinear(child, memory))
    return len(chosen)


def _is_packable(weight: Tensor) -> bool:
    is_bfloat16 = weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
    return is_bfloat16 and weight.shape[0] >= SMALLEST_PACKED


def _is_for_panels(weight: Tensor) -> bool:
    available = native.kernels()
    return available is not None and available.has_products and weight.shape[1] % 2 == 0


def _padded_outputs(weight: Tensor) -> int:
    return -(-weight.shape[0] // PANEL) * PANEL


def _mkldnn() -> Any:
    return torch.ops.mkldnn
