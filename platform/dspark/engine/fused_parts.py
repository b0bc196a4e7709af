"""What fused drafters hand to the CPU kernels beside their weights. Legend: D head width, P positions."""

import ctypes
from array import array
from collections.abc import Callable, Iterable, Sequence

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


def flat_features(parts: Iterable[Tensor], width: int) -> list[Tensor]:
    """Parts of features, [rows, width] each, as the kernels read them."""
    flat = [part if is_plain(part) else part.to(torch.bfloat16).contiguous() for part in parts]
    assert all(part.shape[1] == width for part in flat), f"features of another width than {width}"
    return flat


def checked_ids(token_ids: Sequence[int], vocab_size: int) -> "array[int]":
    """The ids as the kernels read them, who look each up where it says."""
    assert not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size), f"ids beyond {vocab_size} tokens"
    return array("q", token_ids)


def draft_ids(d2t: Tensor, draft_vocab_size: int) -> Tensor:
    """[V'] target ids as the kernels read them: one for each column of the head."""
    assert d2t.shape == (draft_vocab_size,), f"{d2t.numel()} target ids for {draft_vocab_size} draft ids"
    assert d2t.dtype == torch.long, "target ids of another type"
    return d2t.contiguous()


def is_plain(tensor: Tensor) -> bool:
    """Whether the kernels read it as it is."""
    return tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu" and tensor.is_contiguous()


def addresses(values: Sequence[int | None]) -> "ctypes.Array[ctypes.c_void_p]":
    """They are to be held as long as what they are told to looks at them."""
    return (ctypes.c_void_p * len(values))(*values)
