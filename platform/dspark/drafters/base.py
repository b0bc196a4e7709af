"""The contract every drafter answers to, in training and in drafting.

Legend: B sequences, L context tokens, A anchors per sequence, G block size (gamma), d hidden size,
m captured target layers, V target vocabulary, V' draft vocabulary (V' = V when not reduced). In a packed batch
A counts the blocks of all sequences together and T the context tokens that any of them sees.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from dspark.speculation.proposal import Proposal

FinalState = Literal["before_norm", "after_norm"]


def final_state_id(name: str, num_target_layers: int) -> int:
    """The id, among target_layer_ids, of the target's state at its final norm; a decoder layer has a lower one.

    name: "before_norm", what the norm is given, or "after_norm", what the head is given.
    """
    return num_target_layers + {"before_norm": 0, "after_norm": 1}[name]


@dataclass(frozen=True)
class PackedBatch:
    """Blocks of many sequences, packed densely: the input of a training step. Nothing is padded.

    anchors: [A] int64, position p of each block in its own sequence; previous_ids: [A, G] int64, the token each slot
    is told: the anchor, then the true tokens after it; target_hidden: [T, m*d]; context_positions, context_ids: [T]
    int64, place and token of each context row.
    Which context a block sees is a range of rows, [context_starts, context_stops), both [A] int64; the last row of it
    is position p - 1, and rows of one range are neighbours in their sequence. Through a sliding window of W tokens,
    slot j sees row t of it when context_stops + j - t < W.
    """

    anchors: Tensor
    previous_ids: Tensor
    target_hidden: Tensor
    context_positions: Tensor
    context_ids: Tensor
    context_starts: Tensor
    context_stops: Tensor

    def to(self, device: torch.device) -> "PackedBatch":
        """The same batch on another device."""
        return PackedBatch(**{name: tensor.to(device) for name, tensor in vars(self).items()})


@dataclass(frozen=True)
class BlockBatch:
    """The same as padded rows, one per sequence: the plain form of it, for a few sequences at hand.

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

    h: [N, d] as the backbone gives it, in bf16 under autocast; embedded: [N, r], what the sequential head puts in front
    of W_2 when told the true tokens before (W_1 of the last one in the vanilla head), or None without a head;
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

    def forward(self, batch: BlockBatch | PackedBatch, slots: Tensor) -> BlockOutput:
        """Teacher-forced logits and confidences of the chosen slots, in row-major order.

        slots: bool, [B, A, G], or [A, G] of a packed batch.
        """
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


@runtime_checkable
class ReadsTokens(Protocol):
    """A drafter whose context is tokens as well as features: it is told the committed ids before their features."""

    def extend_ids(self, state: Any, ids: Sequence[int]) -> None:
        """Append committed tokens, the anchor included: first the prompt's, then those of every round."""
        ...
