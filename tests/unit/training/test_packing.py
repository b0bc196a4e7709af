"""Packed blocks are the padded ones without the padding: values, gradients, and what no block sees is left out."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.drafters.base import BlockBatch, PackedBatch
from dspark.drafters.dflash import DFlashDrafter
from dspark.drafters.dspark import DSparkDrafter
from dspark.training.packing import AnchoredSequence, pack_blocks, seen_positions
from random_drafter import VARIANTS, packed, random_batch, random_drafter

SHAPES: dict[str, dict[str, Any]] = VARIANTS | {
    "window_of_one": {"sliding_window": 1, "anchor_fusion": True},
    "learned_mask": {"learned_mask_embedding": True, "anchor_fusion": True},
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
ANCHORS = [[1, 4, 5, 20], [2], [3, 9, 22]]
FLOAT32 = {"atol": 1e-5, "rtol": 1e-5}  # sums in another order


def slots_of(batch: BlockBatch, block_size: int) -> Tensor:
    """Some slots of every block, none of the padding: [B, A, G]."""
    chosen = torch.rand(*batch.anchors.shape, block_size, generator=torch.Generator().manual_seed(3)) < 0.7
    return chosen & batch.anchor_mask.unsqueeze(-1)


def outcome(
    drafter: DSparkDrafter | DFlashDrafter, batch: BlockBatch | PackedBatch, slots: Tensor
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Logits and confidences of the slots, and the gradients of a smooth function of them."""
    drafter.zero_grad()
    output = drafter(batch, slots)
    values = [output.logits] + ([] if output.confidence_logits is None else [output.confidence_logits])
    sum(value.sin().mean() for value in values).backward()
    gradients = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
    return [value.detach() for value in values], gradients


@every_shape
def test_packed_and_padded_batches_give_the_same_values_and_gradients(shape: dict[str, Any]):
    drafter = random_drafter(**shape)
    padded = random_batch(drafter.config, ANCHORS)
    slots = slots_of(padded, drafter.block_size)
    expected_values, expected_gradients = outcome(drafter, padded, slots)
    values, gradients = outcome(drafter, packed(padded, drafter.config), slots[padded.anchor_mask])
    for value, expected in zip(values, expected_values, strict=True):
        torch.testing.assert_close(value, expected, **FLOAT32)
    assert gradients.keys() == expected_gradients.keys()
    for name, expected in expected_gradients.items():
        torch.testing.assert_close(gradients[name], expected, **FLOAT32, msg=lambda text, name=name: f"{name}: {text}")


@every_shape
def test_a_sequence_gives_the_same_states_alone_and_among_others(shape: dict[str, Any]):
    drafter = random_drafter(**shape)
    together = drafter.backbone.block_states(packed(random_batch(drafter.config, ANCHORS), drafter.config))
    rows = vars(random_batch(drafter.config, ANCHORS))
    first = 0
    for row, anchors in enumerate(ANCHORS):
        one = BlockBatch(**{name: tensor[row : row + 1] for name, tensor in rows.items()})
        alone = drafter.backbone.block_states(packed(one, drafter.config))
        torch.testing.assert_close(together[first : first + len(anchors)], alone, **FLOAT32)
        first += len(anchors)


@every_shape
def test_states_from_an_anchor_on_cannot_move_its_block_however_close_the_next_anchor(shape: dict[str, Any]):
    drafter = random_drafter(block_size=7, **shape)
    batch = packed(random_batch(drafter.config, [[4, 7, 10]]), drafter.config)
    before = drafter.backbone.block_states(batch)
    batch.target_hidden[batch.context_positions >= 7] = 1e4
    after = drafter.backbone.block_states(batch)
    assert torch.equal(after[:2], before[:2])
    assert not torch.equal(after[2], before[2])


def test_a_block_at_the_very_start_sees_itself_alone():
    drafter = random_drafter(anchor_fusion=True)
    padded = random_batch(drafter.config, [[0, 5], [0]])
    states = drafter.backbone.block_states(packed(padded, drafter.config))
    torch.testing.assert_close(states, drafter.backbone.block_states(padded)[padded.anchor_mask], **FLOAT32)


def test_what_no_block_sees_is_left_out():
    def positions(anchors: list[int], window: int | None) -> list[int]:
        return seen_positions(torch.tensor(anchors), window).tolist()

    assert positions([3, 6], None) == [0, 1, 2, 3, 4, 5]
    assert positions([4, 7], 3) == [2, 3, 5, 6]
    assert positions([1, 5], 3) == [0, 3, 4]
    assert positions([4, 7], 1) == [3, 6]  # the feature before an anchor enters the block's input
    assert positions([0], None) == positions([0], 4) == [0]


def test_the_rows_of_a_block_are_the_context_it_may_see():
    config = random_drafter(sliding_window=6).config
    batch = packed(random_batch(config, ANCHORS), config)
    for block, anchor in enumerate(p for row in ANCHORS for p in row):
        rows = slice(int(batch.context_starts[block]), int(batch.context_stops[block]))
        assert batch.context_positions[rows].tolist() == list(range(max(0, anchor - 5), anchor))


def test_a_sequence_without_an_anchor_leaves_no_trace():
    config = random_drafter().config
    rows = random_batch(config, [[3, 9], [4, 8]])
    one = AnchoredSequence(rows.input_ids[0], rows.target_hidden[0], rows.anchors[0])
    none = AnchoredSequence(rows.input_ids[1], rows.target_hidden[1], rows.anchors[1][:0])
    with_it, without = pack_blocks([none, one, none], block_size=4), pack_blocks([one], block_size=4)
    for name, tensor in vars(without).items():
        assert torch.equal(getattr(with_it, name), tensor), name
    with pytest.raises(ValueError, match="none of 2 sequences has an anchor; leave such micro-batches out"):
        pack_blocks([none, none], block_size=4)
