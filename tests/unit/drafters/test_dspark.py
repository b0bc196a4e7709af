"""DSpark: training and drafting compute the same, and proposals stay inside the vocabulary."""

from typing import Any

import pytest
import torch

from dspark.drafters.base import BlockBatch
from dspark.drafters.dflash import DFlashDrafter
from dspark.drafters.dspark import DSparkDrafter, previous_ids
from dspark.speculation.proposal import Proposal
from random_drafter import VARIANTS, random_batch, random_drafter

every_variant = pytest.mark.parametrize("shape", VARIANTS.values(), ids=VARIANTS)
ANCHOR = 9


def propose(
    drafter: DSparkDrafter | DFlashDrafter, batch: BlockBatch, *, temperature: float, max_tokens: int | None = None
) -> Proposal:
    """A draft from position ANCHOR of the batch's only sequence."""
    state = drafter.new_state()
    drafter.extend_context(state, batch.target_hidden[0, :ANCHOR])
    return drafter.propose(
        state,
        int(batch.input_ids[0, ANCHOR]),
        max_tokens=drafter.block_size if max_tokens is None else max_tokens,
        temperature=temperature,
        generator=torch.Generator().manual_seed(0),
    )


def teacher_forced(drafter: DSparkDrafter | DFlashDrafter, batch: BlockBatch, proposal: Proposal) -> Any:
    """Training's output for all slots at ANCHOR, told the tokens that were drafted."""
    batch.input_ids[0, ANCHOR + 1 : ANCHOR + 1 + proposal.num_tokens] = proposal.token_ids
    return drafter(batch, torch.ones(1, 1, drafter.block_size, dtype=torch.bool))


@every_variant
def test_training_logits_of_every_slot_are_drafting_logits_after_the_same_prefix(shape: dict[str, Any]):
    drafter = random_drafter(**shape)
    batch = random_batch(drafter.config, [[ANCHOR]])
    proposal = propose(drafter, batch, temperature=1.0)
    output = teacher_forced(drafter, batch, proposal)
    assert proposal.probs is not None
    drafted = proposal.probs[:, drafter.backbone.d2t].log()
    trained = torch.log_softmax(output.logits, dim=-1)
    torch.testing.assert_close(trained, drafted, atol=1e-4, rtol=0)
    if proposal.confidence_logits is not None:
        torch.testing.assert_close(output.confidence_logits, proposal.confidence_logits, atol=1e-4, rtol=0)


@every_variant
def test_greedy_drafting_takes_the_argmax_of_training_logits_slot_by_slot(shape: dict[str, Any]):
    drafter = random_drafter(**shape)
    batch = random_batch(drafter.config, [[ANCHOR]])
    proposal = propose(drafter, batch, temperature=0.0)
    output = teacher_forced(drafter, batch, proposal)
    assert proposal.probs is None
    assert proposal.token_ids.tolist() == drafter.backbone.d2t[output.logits.argmax(dim=-1)].tolist()


@every_variant
def test_a_shorter_proposal_is_the_beginning_of_a_longer_one(shape: dict[str, Any]):
    drafter = random_drafter(**shape)
    batch = random_batch(drafter.config, [[ANCHOR]])
    longest = propose(drafter, batch, temperature=0.0)
    for length in range(drafter.block_size):
        shorter = propose(drafter, batch, temperature=0.0, max_tokens=length)
        assert shorter.token_ids.tolist() == longest.token_ids[:length].tolist()


@every_variant
def test_proposed_distributions_sum_to_1_over_target_ids(shape: dict[str, Any]):
    drafter = random_drafter(**shape)
    batch = random_batch(drafter.config, [[ANCHOR]])
    probs = propose(drafter, batch, temperature=0.7).probs
    assert probs is not None
    assert probs.shape == (drafter.block_size, drafter.config.vocab_size)
    assert probs.dtype == torch.float32
    torch.testing.assert_close(probs.sum(dim=-1), torch.ones(drafter.block_size))


@every_variant
def test_training_logits_are_the_draft_vocabulary_in_float32(shape: dict[str, Any]):
    drafter = random_drafter(**shape)
    batch = random_batch(drafter.config, [[3, 8], [5]])
    slots = batch.anchor_mask.unsqueeze(-1).repeat(1, 1, drafter.block_size)
    slots[0, 0, 2:] = False
    output = drafter(batch, slots)
    assert output.logits.shape == (10, drafter.config.draft_vocab_size)
    assert output.logits.dtype == torch.float32


@every_variant
def test_the_chosen_slots_come_out_in_row_major_order(shape: dict[str, Any]):
    drafter = random_drafter(**shape)
    batch = random_batch(drafter.config, [[3, 8], [5, 6]])
    everything = torch.ones(2, 2, drafter.block_size, dtype=torch.bool)
    slots = torch.rand(everything.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    torch.testing.assert_close(
        drafter(batch, slots).logits, drafter(batch, everything).logits.view(2, 2, drafter.block_size, -1)[slots]
    )


@pytest.mark.parametrize("temperature", [0.0, 50.0])
@pytest.mark.parametrize("shape", ["reduced_vocabulary", "padded_vocabulary"])
def test_only_ids_of_the_draft_vocabulary_are_proposed(shape: str, temperature: float):
    drafter = random_drafter(**VARIANTS[shape])
    allowed = set(drafter.backbone.d2t.tolist())
    assert max(allowed) < drafter.config.valid_vocab_size
    with torch.no_grad():  # what lies outside would win every time
        drafter.backbone.lm_head.weight[drafter.config.draft_vocab_size :] *= 100.0
    proposed: set[int] = set()
    for seed in range(30):
        batch = random_batch(drafter.config, [[ANCHOR]], seed=seed)
        proposed |= set(propose(drafter, batch, temperature=temperature).token_ids.tolist())
    assert proposed <= allowed


def test_the_markov_head_is_asked_with_target_ids():
    drafter = random_drafter(draft_vocab_size=30)
    assert isinstance(drafter, DSparkDrafter)
    asked: list[int] = []
    embed = drafter.embed_previous
    drafter.embed_previous = lambda ids: asked.extend(ids.tolist()) or embed(ids)  # type: ignore[func-returns-value,method-assign]
    batch = random_batch(drafter.config, [[ANCHOR]])
    proposal = propose(drafter, batch, temperature=0.0)
    assert asked == [int(batch.input_ids[0, ANCHOR]), *proposal.token_ids[:-1].tolist()]
    assert drafter.backbone.d2t[5] != 5  # so that draft ids would have been noticed


def test_the_token_before_slot_0_is_the_anchor_and_then_the_true_tokens():
    drafter = random_drafter()
    batch = random_batch(drafter.config, [[3, 22]])
    ids = batch.input_ids[0].tolist()
    assert previous_ids(batch, 4)[0].tolist() == [ids[3:7], [ids[22], ids[23], ids[23], ids[23]]]


@every_variant
def test_a_proposal_longer_than_the_block_is_an_error(shape: dict[str, Any]):
    drafter = random_drafter(**shape)
    with pytest.raises(ValueError, match="asked for 5 draft tokens"):
        propose(drafter, random_batch(drafter.config, [[ANCHOR]]), temperature=0.0, max_tokens=5)


@every_variant
def test_drafting_does_not_change_the_state(shape: dict[str, Any]):
    drafter = random_drafter(**shape)
    batch = random_batch(drafter.config, [[ANCHOR]])
    state = drafter.new_state()
    drafter.extend_context(state, batch.target_hidden[0, :ANCHOR])
    drafts = [drafter.propose(state, 5, max_tokens=4, temperature=0.0).token_ids.tolist() for _ in range(2)]
    assert drafts[0] == drafts[1]
    assert state.num_tokens == ANCHOR
