"""The parallel backbone: what a block sees, what it cannot see, and its incremental form."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from dense_attention import dense_block_states
from dspark.drafters.backbone import Backbone, BackboneState
from dspark.drafters.base import BlockBatch
from random_drafter import VARIANTS, random_batch, random_drafter

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "anchor_fusion": {"anchor_fusion": True},
    "sliding_window": {"sliding_window": 6},
    "window_of_one": {"sliding_window": 1},
    "one_layer": {"num_hidden_layers": 1},
    "mixed_windows": VARIANTS["mixed_windows"],
    "moe": VARIANTS["moe"],
    "hyper_connections": VARIANTS["hyper_connections"],
    "production": VARIANTS["production"],
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def backbone_of(**shape: Any) -> Backbone:
    return random_drafter(**shape).backbone


def drafted_states(backbone: Backbone, batch: BlockBatch, row: int, anchor: int, pieces: list[int]) -> torch.Tensor:
    """The block at an anchor as drafting computes it, the context given in pieces of these lengths."""
    state = BackboneState()
    start = 0
    for piece in pieces:
        backbone.extend(state, batch.target_hidden[row, start : start + piece])
        start += piece
    assert state.num_tokens == start == anchor
    return backbone.draft_states(state, int(batch.input_ids[row, anchor]))


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"sliding_window": 5},
        {"sliding_window": 1},
        VARIANTS["mixed_windows"],
        VARIANTS["moe"],
        VARIANTS["hyper_connections"],
        VARIANTS["production"] | {"anchor_fusion": False},
    ],
    ids=str,
)
def test_block_states_equal_those_of_a_dense_mask_over_context_and_blocks(shape: dict[str, Any]):
    backbone = backbone_of(**shape)
    batch = random_batch(backbone.config, [[1, 4, 5, 20], [2, 3, 9, 22]])
    torch.testing.assert_close(
        backbone.block_states(batch), dense_block_states(backbone, batch), atol=1e-5, rtol=0
    )  # float32, sums in another order


@every_shape
def test_tokens_from_the_anchor_on_cannot_move_its_block(shape: dict[str, Any]):
    backbone = backbone_of(**shape)
    batch = random_batch(backbone.config, [[4, 11]])
    hidden, input_ids = batch.target_hidden.clone(), batch.input_ids.clone()
    hidden[:, 11:] = 1e4
    input_ids[:, 12:] = 7
    changed = replace(batch, target_hidden=hidden, input_ids=input_ids)
    assert torch.equal(backbone.block_states(batch), backbone.block_states(changed))


@every_shape
def test_other_blocks_cannot_move_a_block(shape: dict[str, Any]):
    backbone = backbone_of(block_size=7, **shape)
    one, other = (random_batch(backbone.config, [[8, second, 14]], num_tokens=40) for second in (11, 30))
    states, others = backbone.block_states(one), backbone.block_states(other)
    # Experts take the tokens of all blocks in one product: other company, other kernels.
    tolerance = 1e-6 if "moe" in shape else 0.0
    torch.testing.assert_close(states[:, [0, 2]], others[:, [0, 2]], atol=tolerance, rtol=0)
    assert not torch.allclose(states[:, 1], others[:, 1], atol=1e-3)


@every_shape
def test_padding_tokens_cannot_move_a_block(shape: dict[str, Any]):
    backbone = backbone_of(**shape)
    batch = random_batch(backbone.config, [[3, 9, 15]], num_tokens=17)
    padded = random_batch(backbone.config, [[3, 9, 15]], num_tokens=30, seed=5)
    padded.input_ids[:, :17], padded.target_hidden[:, :17] = batch.input_ids, batch.target_hidden
    torch.testing.assert_close(
        backbone.block_states(padded), backbone.block_states(batch), atol=1e-5, rtol=0
    )  # another width, so other kernels
    other_padding = replace(padded, target_hidden=padded.target_hidden.clone())
    other_padding.target_hidden[:, 17:] = -3e4
    assert torch.equal(backbone.block_states(other_padding), backbone.block_states(padded))


def test_a_padding_anchor_leaves_no_nan():
    backbone = backbone_of()
    assert backbone.block_states(random_batch(backbone.config, [[5, 8], [3]])).isfinite().all()


def test_tokens_that_left_the_window_cannot_move_a_block():
    backbone = backbone_of(sliding_window=6)
    batch = random_batch(backbone.config, [[12]])
    hidden = batch.target_hidden.clone()
    hidden[:, :7] = 1e4  # slot 0 sits at 12 and sees 7…11
    assert torch.equal(backbone.block_states(replace(batch, target_hidden=hidden)), backbone.block_states(batch))
    hidden[:, 7] = 1e4
    assert not torch.equal(backbone.block_states(replace(batch, target_hidden=hidden)), backbone.block_states(batch))


@every_shape
def test_context_in_pieces_equals_context_at_once(shape: dict[str, Any]):
    backbone = backbone_of(**shape)
    batch = random_batch(backbone.config, [[15]])
    at_once = drafted_states(backbone, batch, 0, 15, [15])
    for pieces in ([1] * 15, [7, 0, 8], [3, 1, 4, 1, 5, 1]):
        torch.testing.assert_close(drafted_states(backbone, batch, 0, 15, pieces), at_once, atol=1e-5, rtol=1e-5)


@every_shape
def test_states_in_training_equal_states_in_drafting(shape: dict[str, Any]):
    backbone = backbone_of(**shape)
    anchors = [[1, 5, 6, 19], [2, 9, 12, 18]]
    batch = random_batch(backbone.config, anchors)
    trained = backbone.block_states(batch)
    for row, positions in enumerate(anchors):
        for number, anchor in enumerate(positions):
            drafted = drafted_states(backbone, batch, row, anchor, [anchor])
            torch.testing.assert_close(trained[row, number], drafted, atol=1e-5, rtol=0)


def test_a_sliding_window_holds_no_more_context_than_it_sees():
    backbone = backbone_of(sliding_window=6)
    batch = random_batch(backbone.config, [[20]])
    state = BackboneState()
    for start in range(0, 20, 4):
        backbone.extend(state, batch.target_hidden[0, start : start + 4])
        assert all(k.shape[1] <= 5 and v.shape[1] <= 5 for k, v in state.keys_values)
    assert state.num_tokens == 20


def test_only_layers_with_a_window_forget():
    backbone = backbone_of(sliding_window=6, layer_types=("full_attention", "sliding_attention"))
    batch = random_batch(backbone.config, [[20]])
    state = BackboneState()
    backbone.extend(state, batch.target_hidden[0, :20])
    assert [keys.shape[1] for keys, _ in state.keys_values] == [20, 5]


def test_embedding_and_head_are_frozen_and_the_mask_row_only_learns_when_asked_to():
    plain, learned = backbone_of(), backbone_of(learned_mask_embedding=True)
    frozen = {name for name, parameter in plain.named_parameters() if not parameter.requires_grad}
    assert frozen == {"embed_tokens.weight", "lm_head.weight", "mask_embedding"}
    assert learned.mask_embedding.requires_grad


def test_anchor_fusion_starts_without_effect():
    plain, fused = backbone_of(), backbone_of(anchor_fusion=True)
    assert fused.anchor_fusion is not None
    for parameter in fused.anchor_fusion.parameters():
        torch.nn.init.zeros_(parameter)
    fused.load_state_dict(plain.state_dict(), strict=False)
    batch = random_batch(plain.config, [[3, 8]])
    assert torch.equal(plain.block_states(batch), fused.block_states(batch))
