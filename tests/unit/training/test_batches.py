"""Which samples a step has, how they are dealt, and the tensors of a micro-batch."""

from collections import Counter

import pytest
import torch

from dspark.data.target_cache import CachedSample
from dspark.drafters.anchors import sample_anchors
from dspark.training.batches import MicroBatch, deal, make_micro_batch, step_samples
from random_drafter import random_drafter, random_sample, target_to_draft

DRAFTER = random_drafter()
SAMPLES = [random_sample(DRAFTER.config, f"s{k}", 14 + 3 * k) for k in range(5)]


def micro_of(samples: list[CachedSample], *, epoch: int = 0, num_anchors: int = 6, **shape: int) -> MicroBatch | None:
    drafter = random_drafter(**shape) if shape else DRAFTER
    return make_micro_batch(
        [(sample, epoch) for sample in samples],
        num_anchors=num_anchors,
        block_size=4,
        position_decay=4.0,
        target_to_draft=target_to_draft(drafter),
        seed=7,
        device=torch.device("cpu"),
    )


def without_loss(sample: CachedSample) -> CachedSample:
    empty = torch.zeros_like(sample.loss_mask)
    return CachedSample(sample.id, sample.input_ids, empty, sample.hidden, sample.last_hidden[:0], sample.log_z[:0])


def test_every_sample_comes_once_an_epoch():
    indices = [3, 5, 8, 13, 21, 34, 55]
    stream = [s for step in range(21) for s in step_samples(indices, step, 3, seed=0)]
    assert [sample.epoch for sample in stream] == [position // 7 for position in range(63)]
    for epoch in range(9):
        assert sorted(s.index for s in stream if s.epoch == epoch) == indices


def test_epochs_come_in_different_orders():
    orders = {tuple(s.index for s in step_samples(range(20), epoch, 20, seed=0)) for epoch in range(4)}
    assert len(orders) == 4


def test_a_step_is_a_function_of_its_number_and_the_seed():
    assert step_samples(range(9), 5, 4, seed=1) == step_samples(range(9), 5, 4, seed=1)
    assert step_samples(range(9), 5, 4, seed=1) != step_samples(range(9), 5, 4, seed=2)


def test_steps_do_not_depend_on_how_many_samples_one_has():
    by_four = [s for step in range(6) for s in step_samples(range(10), step, 4, seed=0)]
    by_eight = [s for step in range(3) for s in step_samples(range(10), step, 8, seed=0)]
    assert by_four == by_eight


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("per_micro_batch", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 7, 16])
def test_every_rank_has_as_many_micro_batches_and_every_place_comes_once(
    world_size: int, per_micro_batch: int, count: int
):
    lengths = [(17 * place) % 23 + 1 for place in range(count)]
    dealt = deal(lengths, per_micro_batch, world_size)
    assert len(dealt) == world_size
    assert len({len(micro_batches) for micro_batches in dealt}) == 1
    places = Counter(place for rank in dealt for micro in rank for place in micro)
    assert places == Counter(range(count))
    assert all(len(micro) <= per_micro_batch for rank in dealt for micro in rank)


def test_a_micro_batch_holds_samples_of_similar_length():
    dealt = deal([10, 90, 11, 91, 12, 92], 2, 1)[0]
    assert [sorted(micro) for micro in dealt] == [[3, 5], [1, 4], [0, 2]]


def test_anchors_do_not_depend_on_the_grouping():
    together = micro_of(SAMPLES)
    assert together is not None
    alone = [micro_of([sample]) for sample in SAMPLES]
    assert together.blocks.anchors.tolist() == [p for micro in alone if micro for p in micro.blocks.anchors.tolist()]
    assert together.num_blocks == 6 * len(SAMPLES)


def test_another_epoch_has_other_anchors():
    first, second = micro_of(SAMPLES, epoch=0), micro_of(SAMPLES, epoch=1)
    assert first is not None
    assert second is not None
    assert not torch.equal(first.blocks.anchors, second.blocks.anchors)


def test_every_slot_has_the_targets_state_at_its_position():
    micro = micro_of(SAMPLES)
    assert micro is not None
    blocks, slots = torch.nonzero(micro.slots, as_tuple=True)
    for n, (block, slot) in enumerate(zip(blocks.tolist(), slots.tolist(), strict=True)):
        sample = SAMPLES[block // 6]
        position = int(micro.blocks.anchors[block]) + slot
        stored = int(sample.loss_mask[:position].sum())  # supervised tokens before it
        assert torch.equal(micro.last_hidden[micro.target_rows[n]], sample.last_hidden[stored])
        assert micro.log_z[micro.target_rows[n]] == sample.log_z[stored]
        assert micro.labels[n] == sample.input_ids[position + 1]
        torch.testing.assert_close(micro.weights[n], torch.exp(torch.tensor(-slot / 4.0)))


def test_a_position_shared_by_several_blocks_is_held_once():
    micro = micro_of(SAMPLES)
    assert micro is not None
    starts = 100 * torch.arange(len(SAMPLES)).repeat_interleave(6)
    positions = (starts + micro.blocks.anchors).unsqueeze(1) + torch.arange(4)
    assert len(micro.last_hidden) == len(positions[micro.slots].unique()) < len(micro.labels)
    assert torch.equal(micro.target_rows.unique(), torch.arange(len(micro.last_hidden)))


def test_labels_are_draft_ids_and_outside_ones_weigh_nothing_in_ce():
    micro = micro_of(SAMPLES, draft_vocab_size=30)
    assert micro is not None
    outside = micro.labels < 0
    assert 0 < int(outside.sum()) < len(outside)
    assert not micro.ce_weights[outside].any()
    assert torch.equal(micro.ce_weights[~outside], micro.weights[~outside])
    assert (micro.weights > 0).all()


def test_an_answer_of_one_token_more_than_needed_gives_one_anchor():
    sample = random_sample(DRAFTER.config, "a", 8, prompt=6)
    micro = micro_of([sample])
    assert micro is not None
    assert (
        micro.blocks.anchors.tolist()
        == [6]
        == sample_anchors(sample.loss_mask, 6, seed=7, epoch=0, sample_id="a").tolist()
    )
    assert micro.slots[0].tolist() == [True, False, False, False]


def test_nothing_to_learn_from_is_no_micro_batch():
    assert micro_of([]) is None
    assert micro_of([without_loss(SAMPLES[0])]) is None


def test_a_sample_without_loss_leaves_the_others_as_they_are():
    mixed, alone = micro_of([without_loss(SAMPLES[3]), SAMPLES[1]]), micro_of([SAMPLES[1]])
    assert mixed is not None
    assert alone is not None
    assert torch.equal(mixed.labels, alone.labels)
    assert torch.equal(mixed.last_hidden, alone.last_hidden)
    assert torch.equal(mixed.blocks.target_hidden, alone.blocks.target_hidden)
    assert mixed.num_blocks == alone.num_blocks == 6


def test_tokens_are_counted_without_padding():
    micro = micro_of(SAMPLES)
    assert micro is not None
    assert micro.num_tokens == sum(len(sample.input_ids) for sample in SAMPLES)
