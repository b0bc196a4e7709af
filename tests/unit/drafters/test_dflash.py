"""DFlash: slots are drafted independently; what it shares with DSpark is tested there."""

import torch

from random_drafter import VARIANTS, random_batch, random_drafter

DFLASH = VARIANTS["dflash"]
ALL_SLOTS = torch.ones(1, 1, 4, dtype=torch.bool)


def test_no_slot_depends_on_the_tokens_drafted_before_it():
    drafter = random_drafter(**DFLASH)
    batch = random_batch(drafter.config, [[9]])
    before = drafter(batch, ALL_SLOTS).logits
    batch.input_ids[0, 10:] = 1
    assert torch.equal(drafter(batch, ALL_SLOTS).logits, before)


def test_it_is_dspark_without_its_heads():
    dspark, dflash = random_drafter(), random_drafter(**DFLASH)
    dflash.backbone.load_state_dict(dspark.backbone.state_dict())
    batch = random_batch(dflash.config, [[9]])
    with torch.no_grad():
        dspark.markov_head.markov_w2.weight.zero_()
    torch.testing.assert_close(dspark(batch, ALL_SLOTS).logits, dflash(batch, ALL_SLOTS).logits)


def test_it_gives_no_confidence():
    drafter = random_drafter(**DFLASH)
    batch = random_batch(drafter.config, [[9]])
    state = drafter.new_state()
    drafter.extend_context(state, batch.target_hidden[0, :9])
    assert drafter.propose(state, 3, max_tokens=4, temperature=0.0).confidence_logits is None
    assert drafter(batch, ALL_SLOTS).confidence_logits is None
