"""What fused drafters hand to the CPU kernels beside their weights. Legend: D head width, P positions."""

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

FEWEST_ANGLES = 512


class Angles:
    """Cosines and sines of all positions up to the furthest that was asked for: [P, D] float32 each.

    rotary: gives those of positions [P], each [P, D].
    """

    def __init__(self, rotary: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        self._rotary = rotary
        self.cos, self.sin = self._upto(FEWEST_ANGLES)

    def reach(self, stop: int) -> None:
        """Let there be those of all positions before `stop`."""
        if stop > self.cos.shape[0]:
            self.cos, self.sin = self._upto(max(stop, 2 * self.cos.shape[0]))

    def _upto(self, stop: int) -> tuple[Tensor, Tensor]:
        cos, sin = self._rotary(torch.arange(stop))
        return cos.float().contiguous(), sin.float().contiguous()


def is_plain(tensor: Tensor) -> bool:
    """Whether the kernels read it as it is."""
    return tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu" and tensor.is_contiguous()


def plain(tensor: Tensor) -> Tensor:
    """The tensor as the kernels read it."""
    return tensor if is_plain(tensor) else tensor.to(torch.bfloat16).contiguous()


def addresses(values: Sequence[int | None]) -> "ctypes.Array[ctypes.c_void_p]":
    """They are to be held as long as what they are told to looks at them."""
    return (ctypes.c_void_p * len(values))(*values)
