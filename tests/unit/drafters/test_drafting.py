"""Drawing a draft token, and distributions back on target ids."""

import pytest
import torch

from dspark.drafters.drafting import check_length, draw, on_target_ids

LOGITS = torch.tensor([0.0, 3.0, -torch.inf, 1.0])


def test_temperature_0_takes_the_argmax_and_gives_no_distribution():
    assert draw(LOGITS, 0.0, None) == (1, None)


def test_a_token_is_drawn_from_the_distribution_that_is_returned():
    generator = torch.Generator().manual_seed(0)
    drawn = [draw(LOGITS, 2.0, generator) for _ in range(4000)]
    probs = drawn[0][1]
    assert probs is not None
    torch.testing.assert_close(probs, torch.softmax(LOGITS / 2.0, dim=-1))
    counts = torch.bincount(torch.tensor([token for token, _ in drawn]), minlength=4) / 4000
    torch.testing.assert_close(counts, probs, atol=0.03, rtol=0)  # four standard deviations
    assert counts[2] == 0


def test_a_distribution_of_bf16_logits_is_float32():
    _, probs = draw(LOGITS.bfloat16(), 1.0, torch.Generator().manual_seed(0))
    assert probs is not None
    assert probs.dtype == torch.float32


def test_a_reduced_distribution_is_scattered_to_target_ids():
    full = on_target_ids([torch.tensor([0.25, 0.75])], torch.tensor([1, 4]), 6)
    assert full.tolist() == [[0.0, 0.25, 0.0, 0.0, 0.75, 0.0]]


def test_a_whole_distribution_stays_as_it_is():
    probs = torch.rand(4)
    assert torch.equal(on_target_ids([probs], torch.arange(4), 4)[0], probs)


@pytest.mark.parametrize("length", [-1, 5])
def test_a_length_outside_the_block_is_an_error(length: int):
    with pytest.raises(ValueError, match=f"asked for {length} draft tokens; the drafter's block holds 4"):
        check_length(length, 4)
