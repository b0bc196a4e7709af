"""DFlash: the parallel backbone alone; slots are drafted independently of each other."""

import torch
from torch import Tensor, nn

from dspark.drafters.backbone import Backbone, BackboneState
from dspark.drafters.base import BlockBatch, BlockOutput, PackedBatch, SlotRows
from dspark.drafters.config import DrafterConfig
from dspark.drafters.drafting import check_length, draw, on_target_ids
from dspark.speculation.proposal import Proposal


class DFlashDrafter(nn.Module):
    """p_k(v) ∝ exp(U_k(v)): one pass, no sequential part."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.block_size = config.block_size
        self.target_layer_ids = config.target_layer_ids
        self.backbone = Backbone(config)

    def forward(self, batch: BlockBatch | PackedBatch, slots: Tensor) -> BlockOutput:
        """Logits of the chosen slots."""
        return BlockOutput(self.backbone.base_logits(self.slot_rows(batch, slots).h), None)

    def slot_rows(self, batch: BlockBatch | PackedBatch, slots: Tensor) -> SlotRows:
        """What the head is given for the chosen slots."""
        return SlotRows(self.backbone.block_states(batch)[slots], None, None)

    def bias_weight(self) -> None:
        """No Markov head."""
        return

    def new_state(self) -> BackboneState:
        """Empty memory for one request."""
        return BackboneState()

    def extend_context(self, state: BackboneState, target_hidden: Tensor) -> None:
        """Append target features of the next committed positions. target_hidden: [n, m*d]."""
        self.backbone.extend(state, target_hidden)

    @torch.no_grad()
    def propose(
        self,
        state: BackboneState,
        anchor_id: int,
        *,
        max_tokens: int,
        temperature: float,
        generator: torch.Generator | None = None,
    ) -> Proposal:
        """Draft after the anchor at position `state.num_tokens`; see `Drafter.propose`."""
        check_length(max_tokens, self.block_size)
        base = self.backbone.base_logits(self.backbone.draft_states(state, anchor_id)[:max_tokens])
        drawn = [draw(row, temperature, generator) for row in base]
        probs = [distribution for _, distribution in drawn if distribution is not None]
        draft_ids = torch.tensor([draft_id for draft_id, _ in drawn], dtype=torch.long, device=base.device)
        return Proposal(
            token_ids=self.backbone.d2t[draft_ids],
            probs=on_target_ids(probs, self.backbone.d2t, self.config.vocab_size) if probs else None,
            confidence_logits=None,
        )
