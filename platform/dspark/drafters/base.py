"""The contract every drafter answers to, in training and in drafting.

Legend: B sequences, L context tokens, A anchors per sequence, G block size (gamma), d hidden size,
m captured target layers, V target vocabulary, V' draft vocabulary (V' = V when not reduced).
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dspark.speculation.proposal import Proposal


@dataclass(frozen=True)
class BlockBatch:
    """Sequences with sampled anchors: the input of a training step.

    input_ids: [B, L] int64; target_hidden: [B, L, m*d]; anchors: [B, A] int64 positions p, ascending;
    anchor_mask: [B, A] bool, false for padding anchors (p = 0).
    """

    input_ids: Tensor
    target_hidden: Tensor
    anchors: Tensor
    anchor_mask: Tensor


@dataclass(frozen=True)
class BlockOutput:
    """What a drafter says about N slots, teacher forced.

    logits: [N, V'] float32; confidence_logits: [N] float32, or None without a head.
    """

    logits: Tensor
    confidence_logits: Tensor | None


@dataclass(frozen=True)
class SlotRows:
    """What the heads of a drafter are given for N slots, before the vocabulary comes in.

    h: [N, d] float32; embedded: [N, r], W_1 of the true token before, or None without a Markov head;
    confidence_logits: as in BlockOutput.
    """

    h: Tensor
    embedded: Tensor | None
    confidence_logits: Tensor | None


class DraftState(Protocol):
    """The drafter's memory of one request's context; `num_tokens` context positions are held."""

    num_tokens: int


class Drafter(Protocol):
    """A draft model. Token ids at its borders are always target ids."""

    block_size: int
    target_layer_ids: tuple[int, ...]

    def forward(self, batch: BlockBatch, slots: Tensor) -> BlockOutput:
        """Teacher-forced logits and confidences of the chosen slots, in row-major order. slots: [B, A, G] bool."""
        ...

    def new_state(self) -> DraftState:
        """Empty memory for one request."""
        ...

    def extend_context(self, state: DraftState, target_hidden: Tensor) -> None:
        """Append target features of the next committed positions. target_hidden: [n, m*d]."""
        ...

    def propose(
        self,
        state: DraftState,
        anchor_id: int,
        *,
        max_tokens: int,
        temperature: float,
        generator: torch.Generator | None = None,
    ) -> Proposal:
        """Draft tokens that follow the anchor, the token at position `state.num_tokens`.

        max_tokens: at most this many, 0..block_size. temperature 0 is greedy.
        Raises: ValueError if max_tokens exceeds block_size.
        """
        ...
