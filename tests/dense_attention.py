"""The slow, obvious twin of a drafter's attention: one dense mask over all context and all blocks of a sequence."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.drafters.backbone import Backbone
from dspark.drafters.base import BlockBatch, PackedBatch
from dspark.drafters.layers import DraftAttention, RotaryEmbedding, rotate
from dspark.drafters.mhc import plain_residual


def dense_attention(
    attention: DraftAttention, u: Tensor, context: Tensor, slots: Tensor, seen: Tensor, rotary: RotaryEmbedding
) -> Tensor:
    """[A, G, d], a query head at a time. u: [A, G, d]; context: [L, d]; slots: [A, G] positions; seen: [A, G, L]."""
    num_blocks, block, _ = u.shape
    length = context.shape[0]
    cos, sin = rotary(torch.cat([torch.arange(length), slots.flatten()]))
    states = torch.cat([context, u.flatten(0, 1)])
    own = torch.block_diag(*[torch.ones(block, block)] * num_blocks).bool()
    mask = torch.cat([seen.flatten(0, 1), own], dim=1)

    def heads(projection: nn.Linear, x: Tensor) -> Tensor:
        return projection(x).unflatten(-1, (-1, attention.head_dim)).transpose(0, 1)

    queries = rotate(attention.q_norm(heads(attention.q_proj, u.flatten(0, 1))), cos[length:], sin[length:])
    keys = rotate(attention.k_norm(heads(attention.k_proj, states)), cos, sin)
    values = heads(attention.v_proj, states)
    shared = attention.num_heads // attention.num_kv_heads
    mixed = [
        F.scaled_dot_product_attention(queries[h], keys[h // shared], values[h // shared], attn_mask=mask)
        for h in range(attention.num_heads)
    ]
    return attention.o_proj(torch.cat(mixed, dim=-1)).unflatten(0, (num_blocks, block))


def seen_context(slots: Tensor, length: int, window: int | None) -> Tensor:
    """Which context tokens a slot may see, by the definition: [A, G, L]. slots: [A, G] positions, anchors first."""
    seen = torch.zeros(*slots.shape, length, dtype=torch.bool)
    for block, row in enumerate(slots.tolist()):
        for slot, position in enumerate(row):
            for t in range(length):
                seen[block, slot, t] = t < row[0] and (window is None or position - t < window)
    return seen


def dense_block_states(backbone: Backbone, batch: BlockBatch) -> Tensor:
    """What `Backbone.block_states` must give: [B, A, G, d]. Without anchor fusion."""
    config = backbone.config
    rows = []
    for input_ids, hidden, anchors in zip(batch.input_ids, batch.target_hidden, batch.anchors, strict=True):
        context = backbone.context_features(hidden)
        slots = anchors[:, None] + torch.arange(config.block_size)
        h = backbone.mask_embedding.expand(*slots.shape, -1).clone()
        h[:, 0] = backbone.embed_tokens(input_ids[anchors])
        if config.hyper_connections is not None:
            h = torch.stack([h] * config.hyper_connections.hc_mult, dim=-2)
        for index, layer in enumerate(backbone.layers):
            seen = seen_context(slots, len(input_ids), config.window_of(index))
            u, connect = (layer.attn_hc or plain_residual)(h)
            u = layer.input_layernorm(u)
            h = connect(dense_attention(layer.self_attn, u, context, slots, seen, backbone.rotary))
            u, connect = (layer.ffn_hc or plain_residual)(h)
            h = connect(layer.mlp(layer.post_attention_layernorm(u)))
        rows.append(backbone.norm(h if backbone.hc_head is None else backbone.hc_head(h)))
    return torch.stack(rows)


def packed_visibility(batch: PackedBatch, window: int | None) -> Tensor:
    """Which of the keys [context; blocks] a slot of a packed batch may see: [A*G, T + A*G] bool.

    From positions alone: a new sequence begins wherever the positions of the context fall back.
    """
    num_blocks, block = batch.previous_ids.shape
    sequence = torch.cat([torch.zeros(1), (batch.context_positions.diff() < 0).float().cumsum(0)])
    own = torch.block_diag(*[torch.ones(block, block)] * num_blocks).bool()
    rows = []
    for number, anchor in enumerate(batch.anchors.tolist()):
        same = (
            sequence == sequence[int(batch.context_starts[number]) if anchor == 0 else batch.context_stops[number] - 1]
        )
        for slot in range(block):
            seen = same & (batch.context_positions < anchor)
            if window is not None:
                seen &= anchor + slot - batch.context_positions < window
            rows.append(seen)
    return torch.cat([torch.stack(rows), own], dim=1)


def dense_packed_attention(
    batch: PackedBatch,
    window: int | None,
    context_keys: Tensor,
    context_values: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scaling: float,
) -> Tensor:
    """What every form of packed attention must give, [A, G, H, D]: all blocks against all keys under one mask."""
    shared = queries.shape[2] // keys.shape[2]
    all_keys, all_values = (
        torch.cat([context, own.flatten(0, 1)]).repeat_interleave(shared, dim=1).transpose(0, 1)
        for context, own in ((context_keys, keys), (context_values, values))
    )
    mixed = F.scaled_dot_product_attention(
        queries.flatten(0, 1).transpose(0, 1),
        all_keys,
        all_values,
        attn_mask=packed_visibility(batch, window),
        scale=scaling,
    )
    return mixed.transpose(0, 1).view_as(queries)
