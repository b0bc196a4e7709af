"""An unroll of many anchors is the drafting from each, and no row sees what lies behind it."""

from typing import Any

import pytest
import torch
from transformers import Gemma2Config, GraniteConfig, PretrainedConfig

from dspark.drafters.autoregressive import AutoregressiveDrafter, ids_ahead
from dspark.drafters.base import BlockBatch
from dspark.drafters.initialize import DrafterShape
from dspark.drafters.initialize_autoregressive import autoregressive_config
from random_autoregressive import AUTOREGRESSIVE_VARIANTS, random_autoregressive_drafter
from random_drafter import packed, random_batch

TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
ANCHORS = [[3, 4, 9, 13], [1, 6, 2, 5]]
LENGTHS = (18, 12)

every_variant = pytest.mark.parametrize("shape", AUTOREGRESSIVE_VARIANTS.values(), ids=AUTOREGRESSIVE_VARIANTS)


def batch_of(drafter: AutoregressiveDrafter, *, seed: int = 1) -> BlockBatch:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), max(LENGTHS))
    input_ids = torch.randint(0, drafter.config.valid_vocab_size, shape, generator=generator)
    hidden = torch.randn(*shape, drafter.config.feature_size, generator=generator)
    anchors = torch.tensor(ANCHORS)
    return BlockBatch(input_ids, hidden, anchors, torch.ones_like(anchors, dtype=torch.bool))


@every_variant
def test_drafting_says_what_training_says_on_the_same_prefix(shape: dict[str, Any]):
    drafter = random_autoregressive_drafter(**shape)
    batch = batch_of(drafter)
    for row, anchors in enumerate(ANCHORS):
        for anchor in anchors:
            state, ids = drafter.new_state(), batch.input_ids[row, : anchor + 1].tolist()
            for start in range(0, anchor, 4):  # in pieces, as serving gives it
                stop = min(start + 4, anchor)
                drafter.extend_ids(state, ids[start + bool(start) : stop + 1])
                drafter.extend_context(state, batch.target_hidden[row, start:stop])
            generator = torch.Generator().manual_seed(anchor)
            proposal = drafter.propose(state, ids[-1], max_tokens=4, temperature=0.7, generator=generator)
            drafted = torch.tensor([ids + proposal.token_ids.tolist()])
            hidden = torch.zeros(1, drafted.shape[1], drafter.config.feature_size)
            hidden[0, :anchor] = batch.target_hidden[row, :anchor]
            taught = BlockBatch(drafted, hidden, torch.tensor([[anchor]]), torch.ones(1, 1, dtype=torch.bool))
            logits = drafter(taught, torch.ones(1, 1, 4, dtype=torch.bool)).logits
            expected = torch.softmax(logits / 0.7, dim=-1)
            torch.testing.assert_close(proposal.probs[:, drafter.backbone.d2t], expected, **TOLERANCE)


@every_variant
def test_anchors_and_sequences_do_not_see_each_other(shape: dict[str, Any]):
    drafter = random_autoregressive_drafter(**shape)
    batch = batch_of(drafter)
    together = drafter.block_states(batch)
    for row, anchors in enumerate(ANCHORS):
        for number, anchor in enumerate(anchors):
            stop = min(anchor + 1 + drafter.block_size, LENGTHS[row])
            alone = BlockBatch(
                batch.input_ids[row : row + 1, :stop],
                batch.target_hidden[row : row + 1, :stop],
                torch.tensor([[anchor]]),
                torch.ones(1, 1, dtype=torch.bool),
            )
            inside = stop - 1 - anchor  # slots whose previous token is not past the end
            torch.testing.assert_close(
                drafter.block_states(alone)[0, 0, : inside + 1], together[row, number, : inside + 1], **TOLERANCE
            )


@every_variant
def test_packed_blocks_are_those_of_the_padded_rows(shape: dict[str, Any]):
    drafter = random_autoregressive_drafter(**shape)
    batch = random_batch(drafter.config, [[3, 4, 9, 13], [7], [2, 18], [1]])
    found = drafter.block_states(packed(batch, drafter.config))
    torch.testing.assert_close(found, drafter.block_states(batch)[batch.anchor_mask], **TOLERANCE)


@every_variant
def test_target_states_from_the_anchor_on_do_not_reach_its_slots(shape: dict[str, Any]):
    drafter = random_autoregressive_drafter(**shape)
    batch = batch_of(drafter)
    before = drafter.block_states(batch)
    for number, anchor in enumerate(ANCHORS[0]):
        hidden = batch.target_hidden.clone()
        hidden[0, anchor:] += 10.0
        changed = BlockBatch(batch.input_ids, hidden, batch.anchors, batch.anchor_mask)
        assert torch.equal(drafter.block_states(changed)[0, number], before[0, number])


@every_variant
def test_a_slot_sees_the_true_tokens_before_it_and_none_behind(shape: dict[str, Any]):
    drafter = random_autoregressive_drafter(**shape)
    batch = batch_of(drafter)
    before = drafter.block_states(batch)[0, 0]
    for step in range(drafter.block_size):
        input_ids = batch.input_ids.clone()
        input_ids[0, ANCHORS[0][0] + step] = (input_ids[0, ANCHORS[0][0] + step] + 1) % 50
        changed = BlockBatch(input_ids, batch.target_hidden, batch.anchors, batch.anchor_mask)
        after = drafter.block_states(changed)[0, 0]
        assert torch.equal(after[:step], before[:step])
        assert not torch.allclose(after[step], before[step])


def test_ids_ahead_are_zero_past_the_end():
    ids = torch.tensor([[5, 6, 7]])
    assert ids_ahead(ids, 2).tolist() == [[7, 0, 0]]
    assert ids_ahead(ids, 5).tolist() == [[0, 0, 0]]


def test_more_than_the_block_is_refused():
    drafter = random_autoregressive_drafter()
    state = drafter.new_state()
    drafter.extend_ids(state, [1, 2])
    drafter.extend_context(state, torch.randn(1, drafter.config.feature_size))
    with pytest.raises(ValueError, match=r"use 0\.\.4"):
        drafter.propose(state, 2, max_tokens=5, temperature=0.0)
    assert drafter.propose(state, 2, max_tokens=0, temperature=0.0).num_tokens == 0


@every_variant
def test_a_step_of_training_moves_what_is_trained_and_nothing_else(shape: dict[str, Any]):
    drafter = random_autoregressive_drafter(**shape).train()
    drafter(batch_of(drafter), torch.ones(2, 4, drafter.block_size, dtype=torch.bool)).logits.sum().backward()
    frozen = {name for name, p in drafter.named_parameters() if p.grad is None or not p.grad.any()}
    assert frozen == {"backbone.embed_tokens.weight", "backbone.lm_head.weight"}


@pytest.mark.parametrize("architecture", ["eagle3", "mtp"])
@pytest.mark.parametrize(
    "target",
    [GraniteConfig(logits_scaling=4.0), GraniteConfig(embedding_multiplier=2.0), Gemma2Config()],
    ids=["scaled logits", "scaled embeddings", "soft-capped logits"],
)
def test_a_target_whose_head_is_more_than_a_matrix_is_refused(architecture: str, target: PretrainedConfig):
    shape = DrafterShape(architecture=architecture)
    with pytest.raises(ValueError, match=r"scales, soft-caps or adds .* use dspark or dflash"):
        autoregressive_config(shape, target, target_layer_ids=(1,), valid_vocab_size=50, position_decay=4.0)
