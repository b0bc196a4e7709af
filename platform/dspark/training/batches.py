"""Which samples make up a training step, on how many ranks it may run, and the tensors of a micro-batch.

Legend: A blocks of all sequences, G block size, N supervised slots, P positions they share, d hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dspark.data.target_cache import CachedSample
from dspark.drafters.anchors import block_targets, sample_anchors, slot_weights
from dspark.drafters.base import PackedBatch
from dspark.training.packing import AnchoredSequence, pack_blocks


@dataclass(frozen=True)
class StepSample:
    """A sample's number in the cache and the epoch it is drawn in."""

    index: int
    epoch: int


def step_samples(indices: Sequence[int], step: int, per_step: int, seed: int) -> list[StepSample]:
    """The samples of a step: consecutive entries of a stream of per-epoch permutations.

    A function of its arguments alone, so the data position after a resume is the step number.
    """
    chosen = []
    for position in range(step * per_step, (step + 1) * per_step):
        epoch, offset = divmod(position, len(indices))
        chosen.append(StepSample(indices[int(_permutation(len(indices), seed, epoch)[offset])], epoch))
    return chosen


def step_seed(seed: int, step: int, rank: int) -> int:
    """Seed of a rank's random numbers in one step."""
    return int(np.random.default_rng([seed, step, rank]).integers(2**62))


def deal(lengths: Sequence[int], per_micro_batch: int, world_size: int) -> list[list[list[int]]]:
    """Places in the step, as [rank][micro-batch][place]: micro-batches of similar length, dealt in turn.

    Every rank gets the same number of micro-batches (perhaps empty ones), so that collectives stay in step.
    """
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    micro = [order[start : start + per_micro_batch] for start in range(0, len(order), per_micro_batch)]
    while len(micro) % world_size:
        micro.append([])
    return [micro[rank::world_size] for rank in range(world_size)]


@dataclass(frozen=True)
class MicroBatch:
    """Blocks of some sequences and what their supervised slots are taught.

    slots: [A, G] bool; weights, ce_weights: [N] float32 (ce_weights is zero where the label is outside the draft
    vocabulary); labels: [N] draft ids; last_hidden: [P, d], log_z: [P]: the target's at every position that some slot
    is taught by, once however many blocks overlap there; target_rows: [N], each slot's row among them;
    num_tokens: context tokens, those left out of the packing included.
    """

    blocks: PackedBatch
    slots: Tensor
    weights: Tensor
    ce_weights: Tensor
    labels: Tensor
    last_hidden: Tensor
    log_z: Tensor
    target_rows: Tensor
    num_tokens: int

    @property
    def num_blocks(self) -> int:
        return self.slots.shape[0]


def make_micro_batch(
    samples: Sequence[tuple[CachedSample, int]],
    *,
    num_anchors: int,
    block_size: int,
    position_decay: float,
    target_to_draft: Tensor,
    seed: int,
    device: torch.device,
    sliding_window: int | None = None,
) -> MicroBatch | None:
    """Tensors of some samples (each with its epoch); None when they hold no anchor at all.

    target_to_draft: [V] draft id of every target id, -1 outside the draft vocabulary. sliding_window: the drafter's.
    """
    anchored = []
    for sample, epoch in samples:
        anchors = sample_anchors(sample.loss_mask, num_anchors, seed=seed, epoch=epoch, sample_id=sample.id)
        if anchors.numel():
            anchored.append((sample, anchors))
    if not anchored:
        return None
    blocks = pack_blocks(
        [AnchoredSequence(sample.input_ids, sample.hidden, anchors) for sample, anchors in anchored],
        block_size=block_size,
        sliding_window=sliding_window,
    )
    taught = [_what_is_taught(sample, anchors, block_size) for sample, anchors in anchored]
    slots = torch.cat([one.slots for one in taught])
    weights = slot_weights(slots, position_decay)[slots]
    labels = target_to_draft[torch.cat([one.labels for one in taught])]
    first_rows = np.cumsum([0] + [one.log_z.numel() for one in taught])
    target_rows = torch.cat([one.target_rows + int(first) for one, first in zip(taught, first_rows, strict=False)])
    return MicroBatch(
        blocks=blocks.to(device),
        slots=slots.to(device),
        weights=weights.to(device),
        ce_weights=(weights * (labels >= 0)).to(device),
        labels=labels.to(device),
        last_hidden=torch.cat([one.last_hidden for one in taught]).to(device),
        log_z=torch.cat([one.log_z for one in taught]).to(device),
        target_rows=target_rows.to(device),
        num_tokens=sum(sample.input_ids.numel() for sample, _ in samples),
    )


class _Taught(NamedTuple):
    """What the blocks of one sequence are taught; as in MicroBatch, labels as target ids."""

    slots: Tensor
    labels: Tensor
    last_hidden: Tensor
    log_z: Tensor
    target_rows: Tensor


def _what_is_taught(sample: CachedSample, anchors: Tensor, block_size: int) -> _Taught:
    targets = block_targets(
        sample.input_ids[None], sample.loss_mask[None], anchors[None], torch.ones_like(anchors[None]).bool(), block_size
    )
    slots = targets.supervised[0]
    stored = sample.loss_mask.long().cumsum(0) - 1  # token position -> row among the supervised ones
    rows, target_rows = stored[targets.positions[0][slots]].unique(return_inverse=True)
    return _Taught(slots, targets.labels[0][slots], sample.last_hidden[rows], sample.log_z[rows], target_rows)


def _permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(size)
