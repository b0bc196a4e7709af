"""bf16 is for the backbone alone."""

import pytest
import torch

from dspark.training.precision import Autocast
from random_drafter import VARIANTS, packed, random_batch, random_drafter


@pytest.mark.parametrize("shape", ["plain", "gated", "rnn", "gemma4"])
@pytest.mark.parametrize("enabled", [True, False])
def test_what_the_heads_are_given_is_float32_beside_the_states(enabled: bool, shape: str):
    drafter = random_drafter(**VARIANTS[shape])
    batch = packed(random_batch(drafter.config, [[3, 9]]), drafter.config)
    rows = Autocast(drafter, enabled=enabled)(batch, torch.ones(2, 4, dtype=torch.bool))
    assert rows.h.dtype == (torch.bfloat16 if enabled else torch.float32)
    assert rows.embedded is not None
    assert rows.embedded.dtype == torch.float32
    assert rows.confidence_logits is not None
    assert rows.confidence_logits.dtype == torch.float32


def test_bf16_products_move_the_states_by_rounding_only():
    drafter = random_drafter()
    batch, slots = random_batch(drafter.config, [[3, 9]]), torch.ones(1, 2, 4, dtype=torch.bool)
    exact, rounded = (Autocast(drafter, enabled=enabled)(batch, slots).h for enabled in (False, True))
    assert not torch.equal(exact, rounded)
    torch.testing.assert_close(
        rounded.float(), exact, atol=0.2, rtol=0.05
    )  # states of size 1 through two layers of bf16


def test_without_autocast_the_rows_are_the_drafters_own():
    drafter = random_drafter()
    batch, slots = random_batch(drafter.config, [[3, 9]]), torch.ones(1, 2, 4, dtype=torch.bool)
    assert torch.equal(Autocast(drafter, enabled=False)(batch, slots).h, drafter.slot_rows(batch, slots).h)
