"""DSpark: parallel backbone, sequential head, confidence head.

Legend: see `drafters/base.py`.
Source: DSpark §3.
"""

import torch
from torch import Tensor, nn

from dspark.drafters.backbone import Backbone, BackboneState
from dspark.drafters.base import BlockBatch, BlockOutput, PackedBatch, SlotRows
from dspark.drafters.config import DrafterConfig
from dspark.drafters.drafting import check_length, draw, on_target_ids
from dspark.drafters.heads import ConfidenceHead, build_sequential_head
from dspark.speculation.proposal import Proposal


class DSparkDrafter(nn.Module):
    """p_k(v) ∝ exp(U_k(v) + B_k(v)): base logits of all slots at once, the head's bias slot by slot."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.block_size = config.block_size
        self.target_layer_ids = config.target_layer_ids
        self.backbone = Backbone(config)
        self.markov_head = build_sequential_head(config, self.backbone.head_rows) if config.markov_rank else None
        self.confidence_head = (
            ConfidenceHead(config.hidden_size, config.markov_rank if config.confidence_head_with_markov else 0)
            if config.enable_confidence_head
            else None
        )

    def forward(self, batch: BlockBatch | PackedBatch, slots: Tensor) -> BlockOutput:
        """Teacher-forced logits and confidences of the chosen slots: slot k is told the true token before it."""
        rows = self.slot_rows(batch, slots)
        return BlockOutput(self._logits(rows.h, rows.embedded), rows.confidence_logits)

    def slot_rows(self, batch: BlockBatch | PackedBatch, slots: Tensor) -> SlotRows:
        """What the heads are given for the chosen slots; computed as `forward` does, without the logits."""
        blocks = self.backbone.block_states(batch)
        h = blocks[slots]
        with torch.autocast(h.device.type, enabled=False):
            wide = h.to(self.backbone.lm_head.weight.dtype)
            if self.markov_head is None:
                return SlotRows(h, None, self._confidence(wide, None))
            embedded = self.markov_head.embed(previous_ids(batch, self.block_size))
            vectors = self.markov_head.unroll(blocks, embedded)  # of whole blocks: a slot may hang on those before it
            return SlotRows(h, vectors[slots], self._confidence(wide, embedded[slots]))

    def bias_weight(self) -> Tensor | None:
        """W_2: [V', r], or None without a Markov head."""
        return None if self.markov_head is None else self.markov_head.markov_w2.weight[: self.config.draft_vocab_size]

    def embed_previous(self, ids: Tensor) -> Tensor | None:
        """W_1[x_{k-1}]: [..., r], or None without a Markov head."""
        return None if self.markov_head is None else self.markov_head.embed(ids)

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
        """Draft left to right after the anchor at position `state.num_tokens`; see `Drafter.propose`."""
        check_length(max_tokens, self.block_size)
        h = self.backbone.draft_states(state, anchor_id)[:max_tokens]
        base = self.backbone.base_logits(h)
        token_ids: list[int] = []
        probs: list[Tensor] = []
        confidences: list[Tensor] = []
        previous, head_state = anchor_id, None
        for slot in range(max_tokens):
            logits, row = base[slot], h[slot : slot + 1]
            embedded = self.embed_previous(torch.tensor([previous], device=h.device))
            if self.markov_head is not None and embedded is not None:
                vector, head_state = self.markov_head.step(row, embedded, head_state)
                logits = logits + self._bias(vector)[0].float()
            if self.confidence_head is not None:
                confidences.append(self.confidence_head(row, embedded))
            draft_id, distribution = draw(logits, temperature, generator)
            if distribution is not None:
                probs.append(distribution)
            previous = int(self.backbone.d2t[draft_id])
            token_ids.append(previous)
        return Proposal(
            token_ids=torch.tensor(token_ids, dtype=torch.long, device=h.device),
            probs=on_target_ids(probs, self.backbone.d2t, self.config.vocab_size) if probs else None,
            confidence_logits=torch.cat(confidences) if confidences else None,
        )

    def _logits(self, h: Tensor, vector: Tensor | None) -> Tensor:
        base = self.backbone.base_logits(h)
        return base if vector is None else base + self._bias(vector).float()

    def _bias(self, vector: Tensor) -> Tensor:
        assert self.markov_head is not None
        return self.markov_head.bias(vector)[..., : self.config.draft_vocab_size]

    def _confidence(self, h: Tensor, embedded: Tensor | None) -> Tensor | None:
        return None if self.confidence_head is None else self.confidence_head(h, embedded)


def previous_ids(batch: BlockBatch | PackedBatch, block_size: int) -> Tensor:
    """x_{k-1} of every slot, target ids: [B, A, G] or [A, G]; the anchor for slot 0, then the true tokens."""
    if isinstance(batch, PackedBatch):
        return batch.previous_ids
    slots = batch.anchors.unsqueeze(-1) + torch.arange(block_size, device=batch.anchors.device)
    slots = slots.clamp_max(batch.input_ids.shape[1] - 1)
    return batch.input_ids.gather(1, slots.flatten(1)).view_as(slots)
