"""The CPU kernels of `kernels/`: compiled once per machine into the cache folder, then called by address.

`DSPARK_NATIVE=0` turns them off. Where they cannot be built, what PyTorch has serves instead, and the log says so.
"""

import ctypes
import logging
import os
import re
import subprocess
from array import array
from ctypes import POINTER, Structure, byref, c_double, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.kernel_build import built, first_error
from dspark.storage import cache_folder

SWITCH = "DSPARK_NATIVE"

log = logging.getLogger("dspark.native")


class Batch(Structure):
    """`common.h: Batch`."""

    _fields_ = [
        *((name, c_int32) for name in ("num_pieces", "num_tokens", "page_size", "is_causal", "num_threads", "unused")),
        *((name, c_void_p) for name in ("cu_seqlens", "starts", "stops", "first_pages", "pages", "slots")),
    ]


class Attention(Structure):
    """`attention.h: Attention`."""

    _fields_ = [
        *((name, c_void_p) for name in ("queries", "new_keys", "new_values", "keys", "values", "out")),
        *((name, c_int64) for name in ("query_token", "query_head", "key_token", "key_head")),
        *((name, c_int64) for name in ("value_token", "value_head", "num_slots")),
        *((name, c_int32) for name in ("num_heads", "num_kv_heads", "key_dim", "value_dim", "window", "is_bf16")),
        *((name, c_float) for name in ("scaling", "softcap")),
        ("sinks", c_void_p),
    ]


class Linear(Structure):
    """`linear.h: Linear`."""

    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("in_features", c_int32), ("out_features", c_int32)]


class Layer(Structure):
    """`layer.h: Layer`."""

    _fields_ = [
        *((name, Linear) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *((name, c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((name, c_float) for name in ("eps", "scaling")),
        *((name, c_int32) for name in ("num_heads", "num_kv_heads", "head_dim", "window")),
    ]


class LayersCall(Structure):
    """`layer.h: LayersCall`."""

    _fields_ = [
        *((name, c_void_p) for name in ("hidden", "out", "cos", "sin", "layers", "keys", "values", "outs")),
        ("num_slots", c_int64),
        *((name, c_int32) for name in ("num_layers", "has_float_angles")),
    ]


class Choice(Structure):
    """`draw.h: Choice`."""

    _fields_ = [
        *((name, c_void_p) for name in ("lengths", "temperatures", "uniforms", "d2t", "columns", "token_ids", "probs")),
        ("num_ids", c_int64),
    ]


class Drafter(Structure):
    """`draft_call.h: Drafter`."""

    _fields_ = [
        *((name, Linear) for name in ("fc", "anchor_shift", "mask_shift", "head", "gate", "bias")),
        *((name, c_void_p) for name in ("hidden_norm", "norm", "embedding", "mask", "slot_shift", "previous")),
        *((name, c_void_p) for name in ("confidence", "layers")),
        *((name, c_float) for name in ("eps", "embedding_scale", "logit_scale", "confidence_bias")),
        *((name, c_int32) for name in ("num_layers", "block_size", "is_confidence_told_ids", "unused")),
    ]


class DraftCall(Structure):
    """`draft_call.h: DraftCall`."""

    _fields_ = [
        *((name, c_void_p) for name in ("drafter", "keys", "values", "cos", "sin", "parts", "part_rows")),
        *((name, c_void_p) for name in ("num_pending", "held", "newest", "anchors", "states", "confidences")),
        ("num_slots", c_int64),
        ("choice", Choice),
    ]


class ChainDrafter(Structure):
    """`chain.h: ChainDrafter`."""

    _fields_ = [
        *((name, Linear) for name in ("fc", "join", "head")),
        *((name, c_void_p) for name in ("token_norm", "state_norm", "norm", "embedding", "layer")),
        ("eps", c_float),
        ("size", c_int32),
    ]


class ChainCall(Structure):
    """`chain.h: ChainCall`."""

    _fields_ = [
        *((name, c_void_p) for name in ("drafter", "keys", "values", "cos", "sin", "parts", "part_rows", "num_new")),
        *((name, c_void_p) for name in ("ids", "held", "newest")),
        ("num_slots", c_int64),
        ("choice", Choice),
    ]


class Schedule(Structure):
    """`schedule.h: Schedule`."""

    _fields_ = [
        *((name, c_int32) for name in ("num_requests", "prefill_tokens")),
        *((name, c_void_p) for name in ("survival", "offsets", "fixed", "weights", "verify_s", "padded")),
        ("others_s", c_double),
    ]


class Search(Structure):
    """`schedule.h: Search`."""

    _fields_ = [
        *((name, c_void_p) for name in ("is_free", "draft_s")),
        ("min_gain", c_double),
        *((name, c_int64) for name in ("capacity", "floor")),
        *((name, c_int32) for name in ("max_drafted", "most_tried")),
    ]


class Kernels:
    """The loaded kernels. They trust their arguments: the callers check types, devices, shapes and strides.

    has_products: those for bfloat16 weights are there, which take a processor with AVX512-BF16. Where it also has AMX
    they are not used: oneDNN's are faster there.
    """

    def __init__(self, library: Path) -> None:
        _share_openmp()
        functions: Any = ctypes.CDLL(str(library))
        self._attention = functions.dspark_attention
        self._attention.argtypes, self._attention.restype = [POINTER(Batch), POINTER(Attention)], None
        self._argmax = functions.dspark_argmax
        self._argmax.argtypes, self._argmax.restype = [c_void_p, c_int32, c_int64, c_int64, c_void_p, c_int32], None
        self._allocate, self._choose_drafting = functions.dspark_allocate, functions.dspark_choose_drafting
        self._allocate.argtypes = [POINTER(Schedule), c_double, c_int64, c_int64, c_void_p]
        self._choose_drafting.argtypes = [POINTER(Schedule), POINTER(Search), c_void_p, c_void_p]
        self._allocate.restype = self._choose_drafting.restype = c_int32
        self.has_products = bool(functions.dspark_has_bf16_dot()) and not torch.cpu._is_amx_tile_supported()
        if not self.has_products:
            return
        self._linear, self._layers = functions.dspark_linear, functions.dspark_layers
        self._draft, self._chain = functions.dspark_draft, functions.dspark_chain
        self._linear.argtypes = [c_void_p, c_void_p, c_int32, c_int32, c_void_p, c_int64, c_void_p, c_int32]
        self._layers.argtypes = [POINTER(LayersCall), POINTER(Batch)]
        self._draft.argtypes = [POINTER(DraftCall), POINTER(Batch)]
        self._chain.argtypes = [POINTER(ChainCall), POINTER(Batch)]
        self._linear.restype = self._layers.restype = self._draft.restype = self._chain.restype = None

    def attention(self, batch: Batch, layer: Attention) -> None:
        """Store the new keys and values of a layer, then attend."""
        self._attention(byref(batch), byref(layer))

    def argmax(self, rows: Tensor) -> Tensor:
        """The first of each row's largest numbers: [N] int64. rows: [N, V] float32 or bfloat16, contiguous."""
        num_rows, columns = rows.shape
        out = torch.empty(num_rows, dtype=torch.long)
        is_bf16 = int(rows.dtype == torch.bfloat16)
        self._argmax(rows.data_ptr(), is_bf16, num_rows, columns, out.data_ptr(), torch.get_num_threads())
        return out

    def linear(self, panels: Tensor, bias: Tensor | None, x: Tensor, out: Tensor) -> None:
        """out = x W^T + b. panels: W as `numerics.in_panels` lays it out; x: [..., in], out: [..., out], contiguous."""
        in_features, out_features = x.shape[-1], out.shape[-1]
        self._linear(
            panels.data_ptr(),
            None if bias is None else bias.data_ptr(),
            in_features,
            out_features,
            x.data_ptr(),
            x.numel() // in_features,
            out.data_ptr(),
            torch.get_num_threads(),
        )

    def allocate(self, step: Schedule, *, draft_s: float, capacity: int | None, floor: int) -> list[int] | None:
        """`PrefixScheduler.allocate`; None when a row or a fixed length is not sound."""
        lengths = array("i", bytes(4 * step.num_requests))
        most = -1 if capacity is None else max(0, capacity)
        is_sound = self._allocate(byref(step), draft_s, most, floor, lengths.buffer_info()[0])
        return lengths.tolist() if is_sound else None

    def choose_drafting(self, step: Schedule, search: Search) -> tuple[list[bool], list[int]] | None:
        """`drafting_choice.choose_drafting`; None as above."""
        drafted, lengths = array("B", bytes(step.num_requests)), array("i", bytes(4 * step.num_requests))
        addresses = drafted.buffer_info()[0], lengths.buffer_info()[0]
        is_sound = self._choose_drafting(byref(step), byref(search), *addresses)
        return ([bool(is_drafted) for is_drafted in drafted], lengths.tolist()) if is_sound else None

    def layers(self, call: LayersCall, batch: Batch) -> None:
        """Decoder layers, from what the first is given to what the last gives."""
        self._layers(byref(call), byref(batch))

    def draft(self, call: DraftCall, batch: Batch) -> None:
        """A drafter's round: its context, its block and its tokens."""
        self._draft(byref(call), byref(batch))

    def chain(self, call: ChainCall, batch: Batch) -> None:
        """A round of a drafter that goes on from its own states, token by token."""
        self._chain(byref(call), byref(batch))


@cache
def kernels() -> Kernels | None:
    """The kernels, built at the first call on a machine (seconds); None where that fails, with a line in the log."""
    if os.environ.get(SWITCH) == "0":
        log.info("%s=0: the CPU kernels are off", SWITCH)
        return None
    try:
        return Kernels(built(cache_folder() / "kernels"))
    except (OSError, subprocess.CalledProcessError) as error:
        reason = first_error(error.stderr) if isinstance(error, subprocess.CalledProcessError) else error
        log.warning(
            "the CPU kernels cannot be built (%s): PyTorch's own serve, slower; install g++ 11 or later, or set %s=0",
            reason,
            SWITCH,
        )
        return None


def _share_openmp() -> None:
    """Let the kernels run on PyTorch's own threads: a second OpenMP would bring a second pool onto the same cores."""
    maps = Path("/proc/self/maps")
    found = re.findall(r"(/\S*lib(?:gomp|iomp5|omp)\S*\.so\S*)", maps.read_text()) if maps.exists() else []
    for path in dict.fromkeys(found):
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
