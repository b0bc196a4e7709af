"""Tests of the slots and of the attention that reads them."""

from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen3Config, Qwen3NextConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dspark.data.slot_cache import SlotCache, single_query_attention, supports_slots

HEADS, GROUPS, SIZE = 6, 2, 8


def states(rows: int, tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, GROUPS, tokens, SIZE, generator=torch.Generator().manual_seed(seed))


def filled(lengths: list[int], *, max_slots: int = 8, max_tokens: int = 4096) -> tuple[SlotCache, torch.Tensor]:
    """One layer with rows of these lengths, and what was written, [rows, G, longest, D]."""
    slots = SlotCache(1, max_slots=max_slots, max_tokens=max_tokens)
    written = states(len(lengths), max(lengths), seed=1)
    slots.begin_read(lengths)
    slots.update(written, -written, 0)
    slots.end_read(keep=True)
    return slots, written


def test_a_decoded_token_lands_behind_its_own_row() -> None:
    slots, written = filled([3, 7, 5])
    positions = slots.begin_decode(torch.device("cpu"))
    token = states(3, 1, seed=2)
    keys, values = slots.update(token, -token, 0)
    assert positions.tolist() == [3, 7, 5]
    for row, length in enumerate([3, 7, 5]):
        torch.testing.assert_close(keys[row, :, :length], written[row, :, :length])
        torch.testing.assert_close(keys[row, :, length], token[row, :, 0])
    torch.testing.assert_close(values, -keys)


def test_the_mask_ends_with_each_row() -> None:
    slots, _ = filled([3, 7])
    slots.begin_decode(torch.device("cpu"))
    assert (slots.mask(dtype=torch.float32)[:, 0, 0] == 0).sum(-1).tolist() == [4, 8]


def test_the_last_row_moves_into_a_freed_slot() -> None:
    slots, written = filled([3, 7, 5])
    slots.drop(0)
    assert slots.lengths == [5, 7]
    torch.testing.assert_close(slots.layers[0].keys[0, :, :5], written[2, :, :5])


def test_rows_survive_growing_and_shrinking() -> None:
    slots, written = filled([3, 150])
    assert slots.slot_tokens == 192
    slots.drop(1)
    slots.begin_decode(torch.device("cpu"))
    slots.update(states(1, 1, seed=3), states(1, 1, seed=3), 0)
    assert slots.slot_tokens == 64
    torch.testing.assert_close(slots.layers[0].keys[0, :, :3], written[0, :, :3])


def test_long_rows_get_fewer_slots() -> None:
    slots, _ = filled([100], max_slots=8, max_tokens=512)
    assert (slots.num_slots, slots.slot_tokens) == (4, 128)


def test_a_read_that_failed_leaves_nothing_behind() -> None:
    slots, _ = filled([3])
    slots.begin_read([5, 6])
    slots.end_read(keep=False)
    assert slots.lengths == [3]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_single_query_attention_equals_the_fused_kernel(dtype: torch.dtype, tolerance: float) -> None:
    slots, _ = filled([3, 90, 41])
    slots.begin_decode(torch.device("cpu"))
    keys, values = slots.update(states(3, 1, seed=2), states(3, 1, seed=3), 0)
    query = torch.randn(3, HEADS, 1, SIZE, generator=torch.Generator().manual_seed(4)).to(dtype)
    module = torch.nn.Module()
    module.num_key_value_groups = HEADS // GROUPS  # type: ignore[assignment]
    arguments: Any = (module, query, keys.to(dtype), values.to(dtype), slots.mask(dtype=dtype))
    found, _ = single_query_attention(*arguments, scaling=0.3)
    expected, _ = sdpa_attention_forward(*arguments, scaling=0.3)
    # bfloat16: scores are rounded to 8 bits before the softmax here, and not in the kernel
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig(), True),
        (Qwen3Config(), True),
        (MistralConfig(sliding_window=None), True),
        (MistralConfig(sliding_window=8), False),
        (Gemma3TextConfig(), False),
        (Qwen3NextConfig(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_plain_attention_is_kept_in_slots(config: Any, expected: bool) -> None:
    assert supports_slots(config) is expected
