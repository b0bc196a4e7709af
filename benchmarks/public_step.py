"""A training step as DeepSpec's public code takes it, restated for comparison; nothing of the package is used.

One sequence at a time, blocks padded to a fixed number of anchors; keys of context and all blocks in one dense mask;
bf16 weights, gradients and logits; the full vocabulary for draft and target; three eager losses, the acceptance worked
out beside them by softmaxes of its own. float32 copies of the weights for AdamW.

Legend: L tokens, A anchors, G block size, Q = A*G queries, m captured layers, d hidden, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class PublicShape:
    """Sizes of the drafter; the demo's."""

    vocab_size: int
    num_features: int
    hidden_size: int = 576
    intermediate_size: int = 1536
    num_layers: int = 2
    num_heads: int = 9
    num_kv_heads: int = 3
    block_size: int = 7
    num_anchors: int = 64
    markov_rank: int = 64
    rope_theta: float = 100_000.0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Layer(nn.Module):
    """Queries from the blocks; keys and values from context and blocks, side by side."""

    def __init__(self, shape: PublicShape) -> None:
        super().__init__()
        d, kv, inner = shape.hidden_size, shape.num_kv_heads * shape.head_dim, shape.intermediate_size
        self.shape = shape
        self.q_proj, self.o_proj = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.k_proj, self.v_proj = nn.Linear(d, kv, bias=False), nn.Linear(d, kv, bias=False)
        self.q_norm, self.k_norm = Norm(shape.head_dim), Norm(shape.head_dim)
        self.input_norm, self.post_norm = Norm(d), Norm(d)
        self.gate, self.up = nn.Linear(d, inner, bias=False), nn.Linear(d, inner, bias=False)
        self.down = nn.Linear(inner, d, bias=False)

    def forward(self, h: Tensor, context: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """[1, Q, d]. context: [1, L, d]; cos, sin: [L + Q, D]; mask: [1, 1, Q, L + Q]."""
        u = self.input_norm(h)

        def heads(x: Tensor) -> Tensor:
            return x.unflatten(-1, (-1, self.shape.head_dim))

        keys = torch.cat([heads(self.k_proj(context)), heads(self.k_proj(u))], dim=1)
        values = torch.cat([heads(self.v_proj(context)), heads(self.v_proj(u))], dim=1).transpose(1, 2)
        queries = rotated(self.q_norm(heads(self.q_proj(u))).transpose(1, 2), cos[-u.shape[1] :], sin[-u.shape[1] :])
        keys = rotated(self.k_norm(keys).transpose(1, 2), cos, sin)
        shared = self.shape.num_heads // self.shape.num_kv_heads
        keys, values = (x.repeat_interleave(shared, dim=1) for x in (keys, values))
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        h = h + self.o_proj(mixed.transpose(1, 2).flatten(2))
        u = self.post_norm(h)
        return h + self.down(F.silu(self.gate(u)) * self.up(u))


class PublicDrafter(nn.Module):
    """Embedding and head are frozen; states of all slots of one sequence come out."""

    def __init__(self, shape: PublicShape) -> None:
        super().__init__()
        d = shape.hidden_size
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, d).requires_grad_(False)
        self.lm_head = nn.Linear(d, shape.vocab_size, bias=False).requires_grad_(False)
        self.fc, self.hidden_norm, self.norm = nn.Linear(shape.num_features * d, d, bias=False), Norm(d), Norm(d)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.markov_w1 = nn.Embedding(shape.vocab_size, shape.markov_rank)
        self.markov_w2 = nn.Linear(shape.markov_rank, shape.vocab_size, bias=False)
        self.confidence = nn.Linear(d + shape.markov_rank, 1)

    def states(self, input_ids: Tensor, hidden: Tensor, anchors: Tensor, keep: Tensor) -> Tensor:
        """[1, Q, d]. input_ids: [L]; hidden: [L, m*d]; anchors, keep: [A]."""
        length, block = len(input_ids), self.shape.block_size
        ids = torch.full((len(anchors), block), self.shape.vocab_size - 1)
        ids[keep, 0] = input_ids[anchors[keep]]
        context = self.hidden_norm(self.fc(hidden))[None]
        slots = (anchors[:, None] + torch.arange(block)).flatten()
        owners = torch.arange(len(anchors)).repeat_interleave(block)
        sees_context = (torch.arange(length) < anchors[owners, None]) & keep[owners, None]
        mask = torch.cat([sees_context, owners[:, None] == owners], dim=1)[None, None]
        cos, sin = rotary(torch.cat([torch.arange(length), slots]), self.shape, hidden.dtype)
        h = self.embed_tokens(ids.flatten())[None]
        for layer in self.layers:
            h = layer(h, context, cos, sin, mask)
        return self.norm(h)

    def losses(self, h: Tensor, previous: Tensor, labels: Tensor, target_states: Tensor, weights: Tensor) -> Tensor:
        """0.1 CE + 0.9 L1 + BCE. h, target_states: [Q, d]; previous, labels, weights: [Q]."""
        embedded = self.markov_w1(previous)
        logits = self.lm_head(h) + self.markov_w2(embedded)
        confidence = self.confidence(torch.cat([h, embedded], dim=-1)).squeeze(-1).float()
        with torch.no_grad():
            target_logits = self.lm_head(target_states)
        total = weights.sum() + 1e-6
        ce = (F.cross_entropy(logits, labels, reduction="none") * weights).sum() / total
        distance = (logits.float().softmax(-1) - target_logits.float().softmax(-1)).abs().sum(-1)
        l1 = (distance * weights).sum() / total
        overlap = (logits.float().softmax(-1) - target_logits.float().softmax(-1)).abs().sum(-1)
        accepted = (1.0 - 0.5 * overlap).clamp(0.0, 1.0).detach()
        bce = F.binary_cross_entropy_with_logits(confidence, accepted, reduction="none")
        return 0.1 * ce + 0.9 * l1 + (bce * weights).sum() / total


class MasterAdamW:
    """AdamW on float32 copies of bf16 weights."""

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p.detach().float() for p in self.weights]
        self.adam = torch.optim.AdamW(self.masters, lr=learning_rate, weight_decay=0.0)

    @torch.no_grad()
    def step(self) -> None:
        """Clip to norm 1, step, copy back, clear."""
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        for master, weight in zip(self.masters, self.weights, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        self.adam.step()
        for master, weight in zip(self.masters, self.weights, strict=True):
            weight.copy_(master)
            weight.grad = None


def rotary(positions: Tensor, shape: PublicShape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, sin), [n, D] each."""
    frequencies = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    angles = (positions.float()[:, None] * frequencies).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[1, H, n, D] turned by position."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
