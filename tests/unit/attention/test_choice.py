"""Which entries serve which memory, in which order, and what is said of the others."""

import sys
from typing import Any

import pytest
import torch

from dspark import native
from dspark.attention import choice
from dspark.attention.choice import as_capturable, choose_entries, named_entry
from dspark.attention.kv_cache import LayerShape, PagedKVCache


@pytest.fixture(autouse=True)
def _without_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)


def memory(width: int = 16, device: str = "cpu", **options: Any) -> PagedKVCache:
    shapes = [LayerShape(1, width, width, **options)]
    return PagedKVCache(shapes, num_slots=32, dtype=torch.float32, device=device)


def test_on_a_cpu_our_kernel_comes_before_the_reference():
    names = [entry.name for entry in choose_entries(memory(), 16).entries]
    assert names == (["cpu", "torch"] if native.kernels() is not None else ["torch"])


@pytest.mark.parametrize(("width", "page_size", "names"), [(16, 16, ["flex", "torch"]), (16, 4, ["torch"])])
def test_on_cuda_what_does_not_serve_is_left_out_with_its_reason(monkeypatch, width, page_size, names):
    kv_cache = memory(width, "meta")  # neither is asked to compute
    kv_cache.keys[0], kv_cache.values[0] = _OnCuda(kv_cache.keys[0]), _OnCuda(kv_cache.values[0])  # type: ignore[call-overload]
    monkeypatch.setattr(choice.flex, "FlexEntry", lambda kv_cache, page_size: _Named("flex"))
    chosen = choose_entries(kv_cache, page_size)
    assert [entry.name for entry in chosen.entries] == names
    assert chosen.left_out["flash"] == "flash_attn is not installed"
    assert ("flex" in chosen.left_out) == (page_size == 4)


@pytest.mark.parametrize("name", ["flash", "flex"])
def test_attention_sinks_are_left_to_who_knows_them(name):
    kv_cache = memory(has_sinks=True)
    with pytest.raises(ValueError, match=f"'{name}' does not serve here: it knows no attention sinks"):
        named_entry(name, kv_cache, 256)
    assert named_entry("torch", kv_cache, 256).name == "torch"


def test_layers_without_attention_of_their_own_do_not_count():
    shapes = [LayerShape(0, 0, 0), LayerShape(1, 16, 16), LayerShape(1, 16, 16, shared_with=1)]
    kv_cache = PagedKVCache(shapes, num_slots=32, dtype=torch.float32, device="cpu")
    assert named_entry("flex", kv_cache, 16).name == "flex"


class _Named:
    def __init__(self, name: str) -> None:
        self.name = name


class _OnCuda:
    """A tensor's sizes, said to be on CUDA."""

    device = torch.device("cuda")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype


def test_an_entry_can_be_asked_for_by_name():
    assert named_entry("flex", memory(), 16).name == "flex"
    assert named_entry("torch", memory(), 3).plan(None) is None  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="attention 'xyz' is not known; use one of cpu, flash"):
        named_entry("xyz", memory(), 16)
    with pytest.raises(ValueError, match="'flex' does not serve here: page_size 3 is no power of two"):
        named_entry("flex", memory(), 3)
    with pytest.raises(ValueError, match="'flash' does not serve here: flash_attn is not installed"):
        named_entry("flash", memory(), 256)


def test_the_reference_cannot_be_captured():
    assert as_capturable(named_entry("torch", memory(), 16)) is None
    assert as_capturable(named_entry("flex", memory(), 16)) is not None
