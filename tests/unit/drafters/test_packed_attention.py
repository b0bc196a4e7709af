"""Every form of packed attention is the dense mask's, values and gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from dense_attention import dense_packed_attention, packed_visibility
from dspark.drafters import packed_attention as module
from dspark.drafters.base import PackedBatch
from dspark.drafters.packed_attention import (
    flex_attend,
    gather_windows,
    packed_attention,
    packed_block_mask,
    packed_mask,
    window_attend,
)
from random_drafter import packed, random_batch, small_config

ANCHORS = [[1, 2, 5, 19, 20, 21], [30], [3, 9, 22], [2]]
WINDOWS = [None, 1, 2, 7]
SCALING = 0.6  # neither D^-1/2 nor 1: it has to be the one that is given
every_window = pytest.mark.parametrize("window", WINDOWS)


def batch_with(window: int | None) -> PackedBatch:
    config = small_config(sliding_window=window)
    return packed(random_batch(config, ANCHORS, num_tokens=40), config)


def tensors(batch: PackedBatch, *, device: str = "cpu") -> list[Tensor]:
    """Context keys and values, then queries, keys and values of the blocks; 4 query heads over 2 of width 16."""
    generator = torch.Generator().manual_seed(0)
    blocks, context = tuple(batch.previous_ids.shape), batch.context_positions.shape
    shapes = [(*context, 2, 16), (*context, 2, 16), (*blocks, 4, 16), (*blocks, 2, 16), (*blocks, 2, 16)]
    return [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]


def outcome(attend: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The mixed values, and the gradient of each input."""
    mixed = attend(*inputs)
    return [mixed.detach(), *torch.autograd.grad(mixed.sin().sum(), inputs)]


@every_window
@pytest.mark.parametrize("blocks_per_window", [1, 2, 32])
@pytest.mark.parametrize("waste", [1.0, 100.0])
def test_gathered_windows_agree_with_the_dense_mask(
    monkeypatch: pytest.MonkeyPatch, window: int | None, blocks_per_window: int, waste: float
):
    monkeypatch.setattr(module, "BLOCKS_PER_WINDOW", blocks_per_window)
    monkeypatch.setattr(module, "LARGEST_WASTE", waste)
    batch = batch_with(window)
    found = outcome(packed_attention(batch, window, scaling=SCALING), tensors(batch))
    expected = outcome(lambda *inputs: dense_packed_attention(batch, window, *inputs, scaling=SCALING), tensors(batch))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)  # float32, sums in another order


@every_window
def test_every_block_is_in_one_window_that_holds_all_it_sees(window: int | None):
    batch = batch_with(window)
    windows = gather_windows(batch, window)
    assert [block for one in windows for block in range(one.first, one.last)] == list(range(len(batch.anchors)))
    for one in windows:
        assert one.start <= int(batch.context_starts[one.first : one.last].min())
        assert one.stop >= int(batch.context_stops[one.first : one.last].max())


def test_long_sequences_do_not_share_a_window():
    config = small_config()
    batch = packed(random_batch(config, [[500, 510], [505, 511]], num_tokens=600), config)
    assert [(one.first, one.last) for one in gather_windows(batch, None)] == [(0, 2), (2, 4)]


@every_window
def test_the_flex_mask_is_the_dense_mask(window: int | None):
    batch = batch_with(window)
    expected = packed_visibility(batch, window)
    queries, keys = (torch.arange(size) for size in expected.shape)
    zero = torch.tensor(0)
    assert torch.equal(packed_mask(batch, window)(zero, zero, queries[:, None], keys), expected)


@every_window
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_agrees_with_the_dense_mask(window: int | None):
    batch = batch_with(window)
    with torch.no_grad():  # FlexAttention has no backward on a CPU
        inputs = tensors(batch)
        mask = packed_block_mask(batch, window)
        found = flex_attend(mask, flex_attention, *(x.detach() for x in inputs), scaling=SCALING)
        torch.testing.assert_close(
            found, dense_packed_attention(batch, window, *inputs, scaling=SCALING), atol=1e-5, rtol=1e-5
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_window
def test_compiled_flex_attention_agrees_with_gathered_windows(window: int | None):
    batch = batch_with(window)
    expected = outcome(
        lambda *inputs: window_attend(gather_windows(batch, window), *inputs, scaling=SCALING), tensors(batch)
    )
    found = outcome(
        packed_attention(batch.to(torch.device("cuda")), window, scaling=SCALING), tensors(batch, device="cuda")
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, atol=1e-4, rtol=1e-4)
