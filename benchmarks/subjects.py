"""What the training benchmark compares: ways to take one optimiser step on the same sequences and anchors.

Legend: B sequences, A anchors of each (padded), G block size, V vocabulary, V' draft vocabulary, N supervised slots.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from dspark.data.target_cache import CachedSample
from dspark.drafters.anchors import block_targets, sample_anchors, slot_weights
from dspark.drafters.base import BlockBatch
from dspark.drafters.dspark import DSparkDrafter, previous_ids
from dspark.training.batches import make_micro_batch
from dspark.training.losses import LossWeights, slot_losses
from dspark.training.objective import micro_batch_loss, weight_sums
from dspark.training.precision import Autocast
from public_step import MasterAdamW, PublicDrafter, PublicShape

FACTORS = LossWeights(ce=0.1, tv=0.9, confidence=1.0)
POSITION_DECAY, LEARNING_RATE, SEED = 4.0, 1e-4, 0
CPU = torch.device("cpu")


class Clock:
    """Seconds by part of the step; each part ends with `mark`. num_anchors: how many the step trained on."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.num_anchors = 0
        self._last = time.perf_counter()

    @property
    def rate(self) -> float:
        """Anchors per second over all parts."""
        return self.num_anchors / sum(self.seconds.values())

    def mark(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part] += now - self._last
        self._last = now


class Subject(Protocol):
    """One way to take a step."""

    name: str

    def step(self, samples: Sequence[CachedSample], epoch: int, clock: Clock) -> int:
        """Train on the samples once; returns the number of anchors."""
        ...


class PackedFused:
    """This package's step: packed blocks, chunked loss with closed-form gradients."""

    def __init__(self, name: str, drafter: DSparkDrafter, *, num_anchors: int, bf16: bool = True) -> None:
        self.name, self.drafter, self.num_anchors = name, drafter, num_anchors
        self.model = Autocast(drafter, enabled=bf16)
        self.optimizer = optimizer_of(drafter)

    def step(self, samples: Sequence[CachedSample], epoch: int, clock: Clock) -> int:
        num_blocks = self.backward(samples, epoch, clock)
        take_step(self.drafter, self.optimizer)
        clock.mark("optimiser")
        return num_blocks

    def backward(self, samples: Sequence[CachedSample], epoch: int, clock: Clock) -> int:
        """Gradients of the step's loss; returns the number of blocks."""
        config = self.drafter.config
        target_to_draft = torch.full((config.vocab_size,), -1)
        target_to_draft[self.drafter.backbone.d2t] = torch.arange(config.draft_vocab_size)
        micro = make_micro_batch(
            [(sample, epoch) for sample in samples],
            num_anchors=self.num_anchors,
            block_size=config.block_size,
            position_decay=POSITION_DECAY,
            target_to_draft=target_to_draft,
            seed=SEED,
            device=CPU,
            sliding_window=config.sliding_window,
        )
        assert micro is not None
        clock.mark("data")
        loss, _ = micro_batch_loss(TimedModel(self.model, clock), self.drafter, micro, weight_sums(micro), FACTORS)
        clock.mark("head and loss")
        loss.backward()
        clock.mark("backward")
        return micro.num_blocks


class TimedModel(nn.Module):
    """Marks the end of the backbone."""

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        super().__init__()
        self.model, self.clock = model, clock

    def forward(self, *inputs: object) -> object:
        rows = self.model(*inputs)
        self.clock.mark("backbone")
        return rows


class PaddedEager:
    """Padded rows of sequences and anchors, and the plain losses under autograd; logits in float32 as ours.

    only_supervised: the losses see the N supervised slots alone, which padded code rarely troubles to do.
    """

    def __init__(
        self, name: str, drafter: DSparkDrafter, *, num_anchors: int, only_supervised: bool, bf16: bool = True
    ) -> None:
        self.name, self.drafter, self.num_anchors = name, drafter, num_anchors
        self.only_supervised, self.bf16 = only_supervised, bf16
        self.optimizer = optimizer_of(drafter)

    def step(self, samples: Sequence[CachedSample], epoch: int, clock: Clock) -> int:
        num_blocks = self.backward(samples, epoch, clock)
        take_step(self.drafter, self.optimizer)
        clock.mark("optimiser")
        return num_blocks

    def backward(self, samples: Sequence[CachedSample], epoch: int, clock: Clock) -> int:
        """Gradients of the step's loss; returns the number of blocks, padding left out."""
        drafter, block_size = self.drafter, self.drafter.block_size
        batch, loss_mask = padded_batch(samples, epoch, self.num_anchors)
        targets = block_targets(batch.input_ids, loss_mask, batch.anchors, batch.anchor_mask, block_size)
        slots = targets.supervised if self.only_supervised else torch.ones_like(targets.supervised)
        stored = (loss_mask.long().cumsum(1) - 1).clamp_min(0)
        rows = stored.gather(1, targets.positions.flatten(1)).view_as(slots)
        last_hidden = take_rows(pad_sequence([s.last_hidden for s in samples], batch_first=True), rows)[slots]
        log_z = take_rows(pad_sequence([s.log_z for s in samples], batch_first=True)[..., None], rows)[slots][..., 0]
        weights = slot_weights(targets.supervised, POSITION_DECAY)[slots]
        clock.mark("data")
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            h = drafter.backbone.block_states(batch)[slots]
        clock.mark("backbone")
        h = h.float()
        embedded = drafter.embed_previous(previous_ids(batch, block_size)[slots])
        bias = drafter.bias_weight()
        assert embedded is not None
        assert bias is not None
        assert drafter.confidence_head is not None
        head = drafter.backbone.head_weight()
        with torch.no_grad():
            target_logits = last_hidden.float() @ head.T
        logits = h @ head.T + embedded @ bias.T
        losses = slot_losses(logits, target_logits, log_z, targets.labels[slots], drafter.confidence_head(h, embedded))
        assert losses.confidence is not None
        per_slot = FACTORS.ce * losses.ce + FACTORS.tv * losses.tv + FACTORS.confidence * losses.confidence
        loss = (per_slot * weights).sum() / weights.sum()
        clock.mark("head and loss")
        loss.backward()
        clock.mark("backward")
        return int(batch.anchor_mask.sum())


class PublicStep:
    """DeepSpec's step as restated in `public_step.py`: its micro-batch is one sequence."""

    def __init__(self, name: str, shape: PublicShape) -> None:
        self.name, self.shape = name, shape
        self.drafter = PublicDrafter(shape).bfloat16()
        self.optimizer = MasterAdamW(self.drafter, LEARNING_RATE)

    def step(self, samples: Sequence[CachedSample], epoch: int, clock: Clock) -> int:
        num_blocks = 0
        for sample in samples:
            num_blocks += self._backward(sample, epoch, clock, share=1.0 / len(samples))
        self.optimizer.step()
        clock.mark("optimiser")
        return num_blocks

    def _backward(self, sample: CachedSample, epoch: int, clock: Clock, *, share: float) -> int:
        batch, loss_mask = padded_batch([sample], epoch, self.shape.num_anchors)
        anchors, keep, block_size = batch.anchors[0], batch.anchor_mask[0], self.shape.block_size
        targets = block_targets(batch.input_ids, loss_mask, batch.anchors, batch.anchor_mask, block_size)
        weights = slot_weights(targets.supervised, POSITION_DECAY).flatten()
        stored = (loss_mask[0].long().cumsum(0) - 1).clamp_min(0)
        target_states = sample.last_hidden[stored[targets.positions.flatten()]]
        previous = previous_ids(batch, block_size).flatten()
        clock.mark("data")
        h = self.drafter.states(sample.input_ids, sample.hidden, anchors, keep)[0]
        clock.mark("backbone")
        loss = self.drafter.losses(h, previous, targets.labels.flatten(), target_states, weights)
        clock.mark("head and loss")
        (loss * share).backward()
        clock.mark("backward")
        return int(keep.sum())


def padded_batch(samples: Sequence[CachedSample], epoch: int, num_anchors: int) -> tuple[BlockBatch, Tensor]:
    """(blocks padded to `num_anchors` a sequence, loss mask [B, L]); the very anchors of the packed step."""
    anchors = [sample_anchors(s.loss_mask, num_anchors, seed=SEED, epoch=epoch, sample_id=s.id) for s in samples]
    padded, mask = torch.zeros(len(samples), num_anchors, dtype=torch.long), torch.zeros(len(samples), num_anchors)
    for row, own in enumerate(anchors):
        padded[row, : len(own)], mask[row, : len(own)] = own, 1
    input_ids, hidden, loss_mask = (
        pad_sequence([getattr(sample, name) for sample in samples], batch_first=True)
        for name in ("input_ids", "hidden", "loss_mask")
    )
    return BlockBatch(input_ids, hidden, padded, mask.bool()), loss_mask


def take_rows(values: Tensor, rows: Tensor) -> Tensor:
    """values[b, rows[b]]: [B, A, G, k]. values: [B, S, k]; rows: [B, A, G]."""
    return values[torch.arange(len(values))[:, None, None], rows.clamp_max(values.shape[1] - 1)]


def optimizer_of(drafter: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=LEARNING_RATE, weight_decay=0.0)


def take_step(drafter: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Clip to norm 1, step, clear."""
    torch.nn.utils.clip_grad_norm_([p for p in drafter.parameters() if p.requires_grad], 1.0)
    optimizer.step()
    optimizer.zero_grad()
