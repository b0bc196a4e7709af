"""The parallel backbone of DSpark and DFlash: all slots of a block in one pass over the target's features.

Legend: B sequences, L context tokens, A anchors per sequence, G block size, d hidden, m captured layers,
V' draft vocabulary, K key/value heads, D head width.
Source: DSpark §3.1; DFlash.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from dspark.drafters.base import BlockBatch, PackedBatch
from dspark.drafters.config import DrafterConfig
from dspark.drafters.gemma4 import Gemma4Layer
from dspark.drafters.layers import Attend, DraftLayer, RMSNorm, RotaryEmbedding
from dspark.drafters.mhc import HyperHead
from dspark.drafters.moe import MoE, feed_forward
from dspark.drafters.packed_attention import packed_attention


@dataclass
class BackboneState:
    """Context of one request: keys and values per layer, each [1, n, K, D], and the newest feature [d].

    n is num_tokens; a layer with a sliding window holds the newest window only.
    """

    num_tokens: int = 0
    keys_values: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    newest_feature: Tensor | None = None


class AnchorFusion(nn.Module):
    """Adds the anchor and the newest context feature to every block input; an extension of ours.

    Slot 0 already holds the anchor's embedding; the mask slots would see it only through attention. Zero at start.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.anchor_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.mask_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.slot_embedding = nn.Parameter(torch.zeros(config.block_size, config.hidden_size))
        nn.init.zeros_(self.anchor_proj.weight)
        nn.init.zeros_(self.mask_proj.weight)

    def forward(self, inputs: Tensor, feature: Tensor) -> Tensor:
        """[B, A, G, d]. inputs: [B, A, G, d], slot 0 = anchor embedding; feature: [B, A, d], C[p-1]."""
        seen = torch.cat([inputs[:, :, 0], feature], dim=-1)
        shift = torch.cat(
            [
                self.anchor_proj(seen).unsqueeze(2),
                self.mask_proj(seen).unsqueeze(2).expand(-1, -1, inputs.shape[2] - 1, -1),
            ],
            dim=2,
        )
        return inputs + shift + self.slot_embedding


class Backbone(nn.Module):
    """Features of the target and an anchor in, hidden states of all slots out.

    `embed_tokens` and `lm_head` are copies of the target's and frozen; the mask slots' input is row
    `mask_token_id` of the embedding, trainable as `mask_embedding` when the config says so.
    """

    d2t: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        d = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, d)
        self.lm_head = nn.Linear(d, self.head_rows, bias=config.lm_head_bias)
        self.embed_tokens.requires_grad_(False)
        self.lm_head.requires_grad_(False)
        self.mask_embedding = nn.Parameter(torch.zeros(d), requires_grad=config.learned_mask_embedding)
        self.fc = nn.Linear(config.feature_size, d, bias=False)
        self.hidden_norm = RMSNorm(d, config.rms_norm_eps)
        self.layers = nn.ModuleList(draft_layer(config, layer) for layer in range(config.num_hidden_layers))
        self.hc_head = HyperHead(config) if config.hyper_connections else None
        self.target_head = config.target_head
        self.norm = RMSNorm(d, config.rms_norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.rotary = RotaryEmbedding(config)
        self.anchor_fusion = AnchorFusion(config) if config.anchor_fusion else None
        self.register_buffer("d2t", torch.arange(config.draft_vocab_size), persistent=False)

    @property
    def head_rows(self) -> int:
        """Rows of the stored head: V' when reduced, else all of the target's, padding rows included."""
        config = self.config
        return config.draft_vocab_size if config.has_reduced_vocabulary else config.vocab_size

    def head_weight(self) -> Tensor:
        """[V', d]: rows of the frozen head that can be proposed."""
        return self.lm_head.weight[: self.config.draft_vocab_size]

    def head_bias(self) -> Tensor | None:
        """[V']: what the frozen head adds to its products, None in most."""
        return None if self.lm_head.bias is None else self.lm_head.bias[: self.config.draft_vocab_size]

    def base_logits(self, h: Tensor) -> Tensor:
        """U of eq. 4: [..., V'] float32. h: [..., d].

        As one matrix: oneDNN takes six times as long for [1, G, d] that was cut from a longer block.
        """
        rows = h.reshape(-1, h.shape[-1]).to(self.lm_head.weight.dtype)
        logits = self.lm_head(rows)[:, : self.config.draft_vocab_size].float()
        return self.target_head.logits(logits).view(*h.shape[:-1], self.config.draft_vocab_size)

    def context_features(self, target_hidden: Tensor) -> Tensor:
        """C = RMSNorm(W_c [H^l1; …; H^lm]): [..., d]. target_hidden: [..., m*d]."""
        return self.hidden_norm(self.fc(target_hidden.to(self.fc.weight.dtype)))

    def context_keys_values(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Per layer, keys and values of context tokens, each [..., n, K, D]. features: [..., n, d]; positions: [n]."""
        cos, sin = self.rotary(positions)
        return [layer.self_attn.keys_values(features, cos, sin) for layer in self.layers]  # type: ignore[union-attr, operator]

    def block_states(self, batch: BlockBatch | PackedBatch) -> Tensor:
        """Hidden states of all slots of all blocks, after the final norm: [B, A, G, d], or [A, G, d] when packed."""
        if isinstance(batch, PackedBatch):
            return self._packed_states(batch)
        features = self.dropout(self.context_features(batch.target_hidden))
        positions = torch.arange(features.shape[1], device=features.device)
        keys_values = self.context_keys_values(features, positions)
        newest = (batch.anchors - 1).clamp_min(0)
        feature = features.gather(1, newest.unsqueeze(-1).expand(-1, -1, features.shape[-1]))
        anchor_ids = batch.input_ids.gather(1, batch.anchors)
        counted = batch.anchor_mask.unsqueeze(-1).expand(-1, -1, self.config.block_size)
        return self._run(anchor_ids, batch.anchors, feature, keys_values, features.shape[1], counted)

    def _packed_states(self, batch: PackedBatch) -> Tensor:
        features = self.dropout(self.context_features(batch.target_hidden))
        keys_values = self.context_keys_values(features, batch.context_positions)
        windows = [self.config.window_of(layer) for layer in range(len(self.layers))]
        scaling = self.config.attention_scaling
        attends = {window: packed_attention(batch, window, scaling=scaling) for window in dict.fromkeys(windows)}
        newest = batch.context_stops - (batch.anchors > 0).long()  # the row of p - 1; nothing comes before position 0
        return self.draft_states_flat(
            batch.previous_ids[:, 0],
            batch.anchors,
            features[newest],
            lambda layer: partial(attends[windows[layer]], *keys_values[layer]),
        )

    def extend(self, state: BackboneState, target_hidden: Tensor) -> None:
        """Append the features of the next committed positions to a request's context. target_hidden: [n, m*d]."""
        if target_hidden.shape[0] == 0:
            return
        features = self.context_features(target_hidden.unsqueeze(0))
        positions = torch.arange(state.num_tokens, state.num_tokens + features.shape[1], device=features.device)
        added = self.context_keys_values(features, positions)
        if state.keys_values:
            added = [
                (torch.cat([old[0], new[0]], dim=1), torch.cat([old[1], new[1]], dim=1))
                for old, new in zip(state.keys_values, added, strict=True)
            ]
        state.num_tokens += features.shape[1]
        state.newest_feature = features[0, -1]
        for layer, (keys, values) in enumerate(added):
            window = self.config.window_of(layer)
            if window is not None:
                # Slot 0 sits at position num_tokens and sees the last window - 1 context tokens.
                first = max(0, keys.shape[1] - window + 1)
                added[layer] = keys[:, first:], values[:, first:]
        state.keys_values = added

    def draft_states(self, state: BackboneState, anchor_id: int) -> Tensor:
        """Hidden states of the block whose anchor sits at position `state.num_tokens`: [G, d]."""
        assert state.newest_feature is not None, "a request's context must hold a token before it is drafted for"
        device = state.newest_feature.device
        anchors = torch.tensor([[state.num_tokens]], device=device)
        anchor_ids = torch.tensor([[anchor_id]], device=device)
        feature = state.newest_feature.view(1, 1, -1)
        return self._run(anchor_ids, anchors, feature, state.keys_values, state.num_tokens)[0, 0]

    def draft_states_flat(
        self, anchor_ids: Tensor, anchors: Tensor, feature: Tensor, attend: Callable[[int], Attend]
    ) -> Tensor:
        """Hidden states of one block per request: [R, G, d]; `draft_states` is its twin for one request.

        anchor_ids, anchors (positions): [R]; feature: [R, d], C[p-1]. attend(layer): attention over the request's
        context strictly before the anchor and its own block.
        """
        h = self._block_inputs(anchor_ids.unsqueeze(0), feature.unsqueeze(0))[0]
        cos, sin = self.rotary(anchors.unsqueeze(-1) + torch.arange(self.config.block_size, device=anchors.device))
        for index, layer in enumerate(self.layers):
            h = layer.forward_flat(h, cos, sin, attend(index))  # type: ignore[operator]
        return self._collapsed(h)

    def _block_inputs(self, anchor_ids: Tensor, feature: Tensor) -> Tensor:
        """[B, A, G, d]: the anchor's embedding, then the mask slots'; with hyper-connections n times, [B, A, G, n, d].

        anchor_ids: [B, A]; feature: [B, A, d].
        """
        masks = self.mask_embedding.to(feature.dtype).expand(*anchor_ids.shape, self.config.block_size - 1, -1)
        h = torch.cat([self.embed_tokens(anchor_ids).to(feature.dtype).unsqueeze(2), masks], dim=2)
        if self.config.embedding_scale != 1.0:
            h = h * self.config.embedding_scale
        h = h if self.anchor_fusion is None else self.anchor_fusion(h, feature)
        streams = self.config.hyper_connections
        return h if streams is None else h.unsqueeze(-2).expand(*h.shape[:-1], streams.hc_mult, -1)

    def _collapsed(self, h: Tensor) -> Tensor:
        """The final norm of the residual stream, or of what the head makes of several."""
        return self.norm(h if self.hc_head is None else self.hc_head(h))

    def _run(
        self,
        anchor_ids: Tensor,
        anchors: Tensor,
        feature: Tensor,
        keys_values: list[tuple[Tensor, Tensor]],
        num_tokens: int,
        counted: Tensor | None = None,
    ) -> Tensor:
        """anchor_ids, anchors: [B, A]; feature: [B, A, d]; keys_values: per layer the newest of num_tokens context
        tokens, [B, L, K, D]; counted: [B, A, G] bool, slots whose routing is counted."""
        h = self._block_inputs(anchor_ids, feature)
        slots = anchors.unsqueeze(-1) + torch.arange(self.config.block_size, device=anchors.device)  # positions
        cos, sin = self.rotary(slots)
        masks: dict[tuple[int, int | None], Tensor] = {}
        for index, (layer, context_kv) in enumerate(zip(self.layers, keys_values, strict=True)):
            held, window = context_kv[0].shape[1], self.config.window_of(index)
            if (held, window) not in masks:
                positions = torch.arange(num_tokens - held, num_tokens, device=anchors.device)
                masks[held, window] = _context_mask(slots, positions, window)
            routing = {"counted": counted} if isinstance(layer.mlp, MoE) else {}
            h = layer(h, context_kv, cos, sin, masks[held, window], **routing)
        return self._collapsed(h)


def draft_layer(config: DrafterConfig, layer: int) -> DraftLayer | Gemma4Layer:
    """The untrained layer of the config's type at this depth."""
    return Gemma4Layer(config) if config.is_gemma4 else DraftLayer(config, feed_forward(config, layer))


def _context_mask(slots: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """[B, A, G, L] bool, true = seen. slots: [B, A, G] positions, the anchor first; positions: [L] of the context."""
    mask = (positions < slots[..., :1].unsqueeze(-1)).expand(*slots.shape, -1)
    return mask if window is None else mask & (slots.unsqueeze(-1) - positions < window)
