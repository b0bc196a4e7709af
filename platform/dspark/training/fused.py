"""The head and the losses over it in one pass per chunk of slots, with closed-form gradients.

Legend: N supervised slots, P positions of the target they are taught by, V' draft vocabulary, d hidden size, r Markov
rank; z draft logits, q = softmax(z), p the target's probabilities on V', y label; of a chunk or a tile of one: n slots,
u positions.
    dCE/dz = q - 1_y  (soft labels: q sum p - p)        dTV/dz_v = q_v (s_v - sum_u q_u s_u),  s = sign(q - p)
A head that scales or soft-caps its products changes both z and p, and the slope in h alone: the Markov bias is added
to z after it. The slow twin is `losses.slot_losses` under autograd. Nothing of size [N, V'] or [P, V'] outlives a
chunk. The confidence term needs only the TV of each slot, N numbers, and is left to autograd.
Source: ALGORITHMS §3.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.target_head import TargetHead
from dspark.training.losses import OUTSIDE

CHUNK_ROWS = 256  # fewer slow the products down; more cost memory, [rows, V'] twice over, and gain nothing
TILE_BYTES = 2**20  # on a CPU: the passes over a tile of a chunk find it in the processor's cache


@dataclass(frozen=True)
class HeadTargets:
    """What N slots are taught, and how much each counts.

    last_hidden: [P, d] bf16 or as the head; log_z: [P]; rows: [N], each slot's row of these two, best in nearly
    ascending order (a chunk works out all rows between its lowest and its highest); labels: [N] draft ids or OUTSIDE;
    ce_scale, tv_scale: [N] float32, the factor of the slot's term in the loss (term factor * weight / sum of weights).
    soft_labels: CE against p instead of y.
    """

    last_hidden: Tensor
    log_z: Tensor
    rows: Tensor
    labels: Tensor
    ce_scale: Tensor
    tv_scale: Tensor
    soft_labels: bool = False


def head_loss(
    h: Tensor,
    embedded: Tensor | None,
    head_weight: Tensor,
    bias_weight: Tensor | None,
    targets: HeadTargets,
    *,
    head: TargetHead | None = None,
    head_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, ce, tv): sum over slots of ce_scale CE + tv_scale TV, and the terms themselves, [N] float32 each.

    h: [N, d]; embedded: [N, r] or None; head_weight: [V', d], frozen; bias_weight: [V', r] or None; head: what the
    target makes of its products, None where they are its logits; head_bias: [V'] or None, frozen.
    Only `loss` carries gradients, to h, embedded and bias_weight. Logits and losses have the head's precision whatever
    h has; when h is bf16, so is its gradient, and the product that gives it runs in bf16.
    """
    if bias_weight is not None and not torch.is_grad_enabled():
        bias_weight = bias_weight.detach()  # else its gradient would be worked out, and thrown away, in validation
    form = None if head is None or head.is_linear else head
    frozen = _FrozenHead(head_weight, head_weight.to(h.dtype), head_bias, form)
    return _HeadLoss.apply(h, embedded, bias_weight, frozen, targets)


@dataclass(frozen=True)
class _FrozenHead:
    """weight: [V', d]; narrow_weight: the same in h's type; bias: [V'] or None; form: None if products are logits."""

    weight: Tensor
    narrow_weight: Tensor
    bias: Tensor | None
    form: TargetHead | None

    def logits(self, states: Tensor, memory: Tensor) -> Tensor:
        """[n, V'] in the head's precision, in `memory` or newly made. states: [n, d]; memory: [n or more, V']."""
        products = _wide_product(states, self.weight, self.narrow_weight, memory)
        if self.bias is not None:
            products.add_(self.bias)
        return products if self.form is None else self.form.logits(products)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        embedded: Tensor | None,
        bias_weight: Tensor | None,
        head: _FrozenHead,
        targets: HeadTargets,
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs_gradient = any(ctx.needs_input_grad)
        ce, tv = torch.empty_like(targets.ce_scale), torch.empty_like(targets.ce_scale)
        h_grad = torch.empty_like(h) if needs_gradient else None
        embedded_grad = None if embedded is None else torch.empty_like(embedded)
        bias_grad = None if bias_weight is None else torch.zeros_like(bias_weight)
        chunks = _chunks(targets.rows)
        # Memory of a chunk is taken once: fresh pages cost a CPU as much as the passes over them.
        most = (CHUNK_ROWS, max((used.stop - used.start for _, used in chunks), default=0))
        logits_memory, target_memory = (head.weight.new_empty(rows, head.weight.shape[0]) for rows in most)
        slope_memory = logits_memory if h.dtype == head.weight.dtype else torch.empty_like(logits_memory, dtype=h.dtype)
        for chunk, used in chunks:
            logits = head.logits(h[chunk], logits_memory)
            base = None if head.form is None else logits.clone()  # the slope in h asks for z without the bias
            if embedded is not None and bias_weight is not None:
                logits.addmm_(embedded[chunk], bias_weight.T)
            target = head.logits(targets.last_hidden[used], target_memory)
            slope = logits if slope_memory is logits_memory else slope_memory[: len(logits)]
            ce[chunk], tv[chunk] = _losses_of_chunk(logits, target, slope, targets, chunk, used)
            if h_grad is None:
                continue
            if embedded is not None and bias_weight is not None:
                torch.mm(logits, bias_weight, out=embedded_grad[chunk])  # type: ignore[index]
                bias_grad.addmm_(logits.T, embedded[chunk])  # type: ignore[union-attr]
            if head.form is not None and base is not None:
                slope = head.form.product_slope(logits, base).to(h.dtype)
            torch.mm(slope, head.narrow_weight, out=h_grad[chunk])
        ctx.gradients = (h_grad, embedded_grad, bias_grad)
        ctx.mark_non_differentiable(ce, tv)
        return (ce * targets.ce_scale).sum() + (tv * targets.tv_scale).sum(), ce, tv

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [None if gradient is None else gradient * gradients[0] for gradient in ctx.gradients]
        return (*scaled, None, None)


def target_probabilities(logits: Tensor, log_z: Tensor) -> Tensor:
    """Turns the target's logits [u, V'] into its probabilities, in place; returns its mass outside V', [u]."""
    probabilities = logits.sub_(log_z.unsqueeze(1)).exp_()
    return (1.0 - probabilities.sum(dim=1)).clamp_min_(0.0)


def slot_terms(
    logits: Tensor,
    target: Tensor,
    outside_mass: Tensor,
    rows: Tensor,
    labels: Tensor,
    ce_scale: Tensor,
    tv_scale: Tensor,
    *,
    soft_labels: bool = False,
) -> tuple[Tensor, Tensor]:
    """(ce, tv) of n slots, and the loss's slope in their logits, which it is written over: [n, V'].

    target: [u, V'] probabilities, outside_mass: [u]; rows: [n], each slot's row of these two.
    """
    inside = labels != OUTSIDE
    places = labels.clamp_min(0).unsqueeze(1)
    highest, label_logit = logits.amax(dim=1), logits.gather(1, places).squeeze(1)
    draft, chosen = torch.softmax(logits, dim=1), target.index_select(0, rows)
    # log sum exp z = z_v - log q_v for any v; for the most probable one the logarithm is never infinite
    log_sum = highest - draft.amax(dim=1).log()
    if soft_labels:
        ce = (chosen * (log_sum.unsqueeze(1) - logits)).sum(dim=1) * inside
    else:
        ce = (log_sum - label_logit) * inside
    difference = torch.sub(draft, chosen)
    signs = torch.sign(difference, out=logits)
    tv = difference.abs_().sum(dim=1).add_(outside_mass[rows])

    # slope = ce_scale (q - 1_y) + tv_scale q (s - q.s), with one factor of q taken out of both
    # Soft labels: sum p takes the place of 1 before q, and p that of 1_y.
    ce_scale, tv_scale = (ce_scale * inside).unsqueeze(1), tv_scale.unsqueeze(1)
    mean_sign = torch.mul(draft, signs, out=difference).sum(dim=1, keepdim=True)
    if soft_labels:
        ce_mass = ce_scale * chosen.sum(dim=1, keepdim=True)
        signs.mul_(tv_scale).add_(ce_mass - tv_scale * mean_sign).mul_(draft).sub_(chosen.mul_(ce_scale))
    else:
        signs.mul_(tv_scale).add_(ce_scale - tv_scale * mean_sign).mul_(draft).scatter_add_(1, places, -ce_scale)
    return ce, tv


def _losses_of_chunk(
    logits: Tensor, target: Tensor, slope: Tensor, targets: HeadTargets, chunk: slice, used: slice
) -> tuple[Tensor, Tensor]:
    """(ce, tv) of a chunk; logits and `slope` are overwritten by the slope, target by the probabilities."""
    probabilities, terms = _compiled_on(logits.device.type)
    tile = logits.shape[0] if logits.is_cuda else max(1, TILE_BYTES // (logits.element_size() * logits.shape[1]))
    log_z = targets.log_z[used].split(tile)
    outside_mass = torch.cat([probabilities(*part) for part in zip(target.split(tile), log_z, strict=True)])
    columns = (
        targets.rows[chunk] - used.start,
        targets.labels[chunk],
        targets.ce_scale[chunk],
        targets.tv_scale[chunk],
    )
    ce: list[Tensor] = []
    tv: list[Tensor] = []
    for tile_logits, tile_slope, *tile_columns in zip(
        *(tensor.split(tile) for tensor in (logits, slope, *columns)), strict=True
    ):
        tile_ce, tile_tv = terms(tile_logits, target, outside_mass, *tile_columns, soft_labels=targets.soft_labels)
        ce.append(tile_ce)
        tv.append(tile_tv)
        if slope is not logits:
            tile_slope.copy_(tile_logits)
    return torch.cat(ce), torch.cat(tv)


def _chunks(rows: Tensor) -> list[tuple[slice, slice]]:
    """Slots of each chunk, and the target's positions between the lowest and the highest that they need."""
    pieces = rows.split(CHUNK_ROWS)
    if not rows.numel():
        return []
    # One wait for the device per micro-batch, not one per chunk.
    bounds = torch.stack([torch.stack(piece.aminmax()) for piece in pieces]).tolist()
    starts = range(0, rows.numel(), CHUNK_ROWS)
    return [
        (slice(start, start + CHUNK_ROWS), slice(low, high + 1))
        for start, (low, high) in zip(starts, bounds, strict=True)
    ]


def _wide_product(states: Tensor, head_weight: Tensor, narrow_weight: Tensor, memory: Tensor) -> Tensor:
    """Products [n, V'] in the head's precision, in the first rows of `memory` on a CPU.

    On a GPU bf16 factors are multiplied as such and summed in float32.
    """
    if states.is_cuda and states.dtype == narrow_weight.dtype == torch.bfloat16:
        return torch.mm(states, narrow_weight.T, out_dtype=torch.float32)
    return torch.mm(states.to(head_weight.dtype), head_weight.T, out=memory[: len(states)])


@functools.cache
def _compiled_on(device_type: str) -> tuple[Callable[..., Tensor], Callable[..., tuple[Tensor, Tensor]]]:
    """Compiled on a GPU, where each pass over [n, V'] counts; a CPU would need a compiler installed for it."""
    if device_type != "cuda":
        return target_probabilities, slot_terms
    return (
        torch.compile(target_probabilities, dynamic=True, fullgraph=True),
        torch.compile(slot_terms, dynamic=True, fullgraph=True),
    )
