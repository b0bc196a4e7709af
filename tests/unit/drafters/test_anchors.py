"""Where blocks start, what their slots are taught and how much each slot weighs."""

import math

import torch

from dspark.drafters.anchors import block_targets, sample_anchors, slot_weights

TWO_TURNS = torch.tensor([0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 0])


def mask_of(first: int, last: int, length: int) -> torch.Tensor:
    mask = torch.zeros(length, dtype=torch.uint8)
    mask[first : last + 1] = 1
    return mask


def drawn(mask: torch.Tensor, num_anchors: int, **changes: int | str) -> list[int]:
    key = {"seed": 3, "epoch": 0, "sample_id": "a"} | changes
    return sample_anchors(mask, num_anchors, **key).tolist()  # type: ignore[arg-type]


def supervised(mask: torch.Tensor, anchors: list[int], block_size: int) -> list[list[int]]:
    rows = torch.tensor([anchors])
    targets = block_targets(
        torch.arange(len(mask))[None], mask[None], rows, torch.ones_like(rows, dtype=torch.bool), block_size
    )
    return targets.supervised[0].int().tolist()


def test_anchors_are_a_function_of_seed_epoch_and_sample_id_alone():
    mask = mask_of(10, 200, 220)
    first = drawn(mask, 12)
    torch.manual_seed(99)
    assert drawn(mask, 12) == first
    for change in ({"seed": 4}, {"epoch": 1}, {"sample_id": "b"}):
        assert drawn(mask, 12, **change) != first


def test_anchors_ascend_without_replacement():
    anchors = drawn(mask_of(10, 200, 220), 50)
    assert len(anchors) == 50
    assert anchors == sorted(set(anchors))


def test_an_anchor_and_the_token_after_it_carry_loss():
    assert drawn(TWO_TURNS, 100) == [3, 4, 5, 10, 11]


def test_the_first_token_of_every_turn_can_be_an_anchor_and_teaches_the_second_at_slot_0():
    input_ids = torch.arange(100, 100 + len(TWO_TURNS))[None]
    anchors = torch.tensor([[3, 10]])
    targets = block_targets(input_ids, TWO_TURNS[None], anchors, torch.ones(1, 2, dtype=torch.bool), 4)
    assert set(anchors[0].tolist()) <= set(drawn(TWO_TURNS, 100))
    assert targets.supervised[0, :, 0].tolist() == [True, True]
    assert targets.labels[0, :, 0].tolist() == [104, 111]
    assert targets.positions[0, :, 0].tolist() == [3, 10]


def test_a_block_that_runs_out_of_the_answer_is_taught_up_to_its_end():
    assert supervised(mask_of(8, 39, 60), [37], 4) == [[1, 1, 0, 0]]


def test_a_block_that_runs_out_of_the_sequence_is_taught_up_to_its_end():
    assert supervised(mask_of(8, 39, 40), [37, 38], 4) == [[1, 1, 0, 0], [1, 0, 0, 0]]


def test_supervision_is_a_prefix_even_when_the_next_turn_lies_inside_the_block():
    assert supervised(TWO_TURNS, [5], 7) == [[1, 0, 0, 0, 0, 0, 0]]


def test_a_padding_anchor_teaches_nothing():
    anchors, mask = torch.tensor([[5, 0]]), torch.tensor([[True, False]])
    ones = torch.ones(1, 20)
    targets = block_targets(torch.arange(20)[None], ones, anchors, mask, 3)
    assert targets.supervised[0].tolist() == [[True] * 3, [False] * 3]


def test_slot_0_weighs_1_and_later_slots_decay():
    weights = slot_weights(torch.tensor([True, True, True, False]), 4.0)
    expected = torch.tensor([1.0, math.exp(-0.25), math.exp(-0.5), 0.0])
    assert weights[0] == 1.0
    torch.testing.assert_close(weights, expected)
