"""Drafters that say what a test tells them to, on the real contract: they check the context they are handed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.drafters.base import BlockBatch, BlockOutput
from dspark.speculation.proposal import Proposal


@dataclass
class ScriptedState:
    """Number of context positions and the features seen, [num_tokens, m*d]."""

    num_tokens: int = 0
    hidden: Tensor | None = None


class ScriptedDrafter:
    """Proposes the true continuation for `num_right` tokens and a wrong token from there on.

    sequence: prompt and greedy continuation of the target. Beyond its end the drafter proposes token 3.
    """

    def __init__(self, sequence: Sequence[int], *, block_size: int, num_right: int, layer_ids: tuple[int, ...] = (0,)):
        self.sequence = list(sequence)
        self.block_size = block_size
        self.num_right = num_right
        self.target_layer_ids = layer_ids
        self.proposed_lengths: list[int] = []
        self.states: list[ScriptedState] = []

    def forward(self, batch: BlockBatch, slots: Tensor) -> BlockOutput:
        raise AssertionError("a scripted drafter is not trained")

    def new_state(self) -> ScriptedState:
        self.states.append(ScriptedState())
        return self.states[-1]

    def extend_context(self, state: ScriptedState, target_hidden: Tensor) -> None:
        state.num_tokens += target_hidden.shape[0]
        state.hidden = target_hidden if state.hidden is None else torch.cat([state.hidden, target_hidden])

    def propose(
        self,
        state: ScriptedState,
        anchor_id: int,
        *,
        max_tokens: int,
        temperature: float,
        generator: torch.Generator | None = None,
    ) -> Proposal:
        position = state.num_tokens
        if position < len(self.sequence):
            assert self.sequence[position] == anchor_id, "the anchor does not sit at position state.num_tokens"
        true_ids = (self.sequence[position + 1 : position + 1 + max_tokens] + [3] * max_tokens)[:max_tokens]
        ids = [token_id if k < self.num_right else token_id ^ 1 for k, token_id in enumerate(true_ids)]
        self.proposed_lengths.append(max_tokens)
        return Proposal(torch.tensor(ids, dtype=torch.long), None, None)


class FixedDistributionDrafter:
    """Draws every slot from the same distribution, whatever came before. probs: [V]."""

    def __init__(self, probs: Tensor, *, block_size: int, with_confidence: bool = False) -> None:
        self.probs = probs.float()
        self.block_size = block_size
        self.target_layer_ids = (0,)
        self.with_confidence = with_confidence

    def forward(self, batch: BlockBatch, slots: Tensor) -> BlockOutput:
        raise AssertionError("a scripted drafter is not trained")

    def new_state(self) -> ScriptedState:
        return ScriptedState()

    def extend_context(self, state: Any, target_hidden: Tensor) -> None:
        state.num_tokens += target_hidden.shape[0]

    def propose(
        self,
        state: Any,
        anchor_id: int,
        *,
        max_tokens: int,
        temperature: float,
        generator: torch.Generator | None = None,
    ) -> Proposal:
        ids = torch.multinomial(self.probs, max_tokens, replacement=True, generator=generator)
        confidence = torch.zeros(max_tokens) if self.with_confidence else None
        return Proposal(ids, self.probs.expand(max_tokens, -1), confidence)
