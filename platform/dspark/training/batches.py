"""Which samples make up a training step, on how many ranks it may run, and the tensors of a micro-batch.

Legend: B sequences, L tokens of the longest, A anchors per sequence, G block size, m captured layers, d hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dspark.data.target_cache import CachedSample
from dspark.drafters.anchors import block_targets, sample_anchors, slot_weights
from dspark.drafters.base import BlockBatch


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
    """Blocks of some sequences and what their supervised slots are taught; N supervised slots.

    slots: [B, A, G] bool; weights, ce_weights: [N] float32 (ce_weights is zero where
    the label is outside the draft vocabulary); labels: [N] draft ids; last_hidden: [N, d]; log_z: [N];
    num_tokens: context tokens, padding left out.
    """

    blocks: BlockBatch
    slots: Tensor
    weights: Tensor
    ce_weights: Tensor
    labels: Tensor
    last_hidden: Tensor
    log_z: Tensor
    num_tokens: int

    @property
    def num_blocks(self) -> int:
        return int(self.blocks.anchor_mask.sum())


def make_micro_batch(
    samples: Sequence[tuple[CachedSample, int]],
    *,
    num_anchors: int,
    block_size: int,
    position_decay: float,
    target_to_draft: Tensor,
    seed: int,
    device: torch.device,
) -> MicroBatch | None:
    """Tensors of some samples (each with its epoch); None when they hold no anchor at all.

    target_to_draft: [V] draft id of every target id, -1 outside the draft vocabulary.
    """
    anchors = [
        sample_anchors(sample.loss_mask, num_anchors, seed=seed, epoch=epoch, sample_id=sample.id)
        for sample, epoch in samples
    ]
    if not samples or sum(a.numel() for a in anchors) == 0:
        return None
    padded_anchors = pad_sequence(anchors, batch_first=True)
    anchor_mask = pad_sequence([torch.ones_like(a, dtype=torch.bool) for a in anchors], batch_first=True)
    input_ids = pad_sequence([sample.input_ids for sample, _ in samples], batch_first=True)
    loss_mask = pad_sequence([sample.loss_mask for sample, _ in samples], batch_first=True)
    hidden = pad_sequence([sample.hidden for sample, _ in samples], batch_first=True)
    targets = block_targets(input_ids, loss_mask, padded_anchors, anchor_mask, block_size)
    weights = slot_weights(targets.supervised, position_decay)[targets.supervised]
    labels = target_to_draft[targets.labels[targets.supervised]]
    last_hidden, log_z = _target_rows(samples, targets.positions, targets.supervised)
    blocks = (input_ids, hidden, padded_anchors, anchor_mask)
    return MicroBatch(
        blocks=BlockBatch(*(tensor.to(device) for tensor in blocks)),
        slots=targets.supervised.to(device),
        weights=weights.to(device),
        ce_weights=(weights * (labels >= 0)).to(device),
        labels=labels.to(device),
        last_hidden=last_hidden.to(device),
        log_z=log_z.to(device),
        num_tokens=sum(sample.input_ids.numel() for sample, _ in samples),
    )


def _target_rows(
    samples: Sequence[tuple[CachedSample, int]], positions: Tensor, supervised: Tensor
) -> tuple[Tensor, Tensor]:
    """The target's last hidden state and log Z at every supervised slot's position, in row-major order."""
    hidden_rows, log_z_rows = [], []
    for row, (sample, _) in enumerate(samples):
        stored = sample.loss_mask.long().cumsum(0) - 1  # token position -> row among the supervised ones
        places = stored[positions[row][supervised[row]].clamp_max(stored.numel() - 1)]
        hidden_rows.append(sample.last_hidden[places])
        log_z_rows.append(sample.log_z[places])
    return torch.cat(hidden_rows), torch.cat(log_z_rows)


def _permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(size)
