"""The head and the losses over it in one pass per chunk of slots, with closed-form gradients.

Legend: N supervised slots, V' draft vocabulary, d hidden size, r Markov rank; z draft logits, q = softmax(z),
p the target's probabilities on V', y label.
    dCE/dz = q - 1_y        dTV/dz_v = q_v (s_v - sum_u q_u s_u),  s = sign(q - p)
The slow twin is `losses.slot_losses` under autograd. Nothing of size [N, V'] outlives a chunk.
Source: ALGORITHMS §3.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.training.losses import OUTSIDE

CHUNK_ROWS = 128  # a chunk's [rows, V'] tensors stay in the processor's cache for V' of some thousands


@dataclass(frozen=True)
class HeadTargets:
    """What N slots are taught, and how much each counts.

    last_hidden: [N, d]; log_z: [N]; labels: [N] draft ids or OUTSIDE; ce_scale, tv_scale: [N] float32, the factor
    of the slot's term in the loss (term factor * weight / sum of weights).
    """

    last_hidden: Tensor
    log_z: Tensor
    labels: Tensor
    ce_scale: Tensor
    tv_scale: Tensor


def head_loss(
    h: Tensor, embedded: Tensor | None, head_weight: Tensor, bias_weight: Tensor | None, targets: HeadTargets
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, ce, tv): sum over slots of ce_scale CE + tv_scale TV, and the terms themselves, [N] float32 each.

    h: [N, d]; embedded: [N, r] or None; head_weight: [V', d], frozen; bias_weight: [V', r] or None.
    Only `loss` carries gradients, to h, embedded and bias_weight.
    """
    if bias_weight is not None and not torch.is_grad_enabled():
        bias_weight = bias_weight.detach()  # else its gradient would be worked out, and thrown away, in validation
    return _HeadLoss.apply(h, embedded, bias_weight, head_weight, targets)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        embedded: Tensor | None,
        bias_weight: Tensor | None,
        head_weight: Tensor,
        targets: HeadTargets,
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs_gradient = any(ctx.needs_input_grad)
        ce, tv = torch.empty_like(targets.log_z), torch.empty_like(targets.log_z)
        h_grad = torch.empty_like(h) if needs_gradient else None
        embedded_grad = None if embedded is None else torch.empty_like(embedded)
        bias_grad = None if bias_weight is None else torch.zeros_like(bias_weight)
        for start in range(0, h.shape[0], CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            logits = h[rows] @ head_weight.T
            if embedded is not None and bias_weight is not None:
                logits.addmm_(embedded[rows], bias_weight.T)
            slope = _chunk(logits, head_weight, targets, rows, ce, tv)
            if h_grad is None:
                continue
            torch.mm(slope, head_weight, out=h_grad[rows])
            if embedded is not None and bias_weight is not None:
                torch.mm(slope, bias_weight, out=embedded_grad[rows])  # type: ignore[index]
                bias_grad.addmm_(slope.T, embedded[rows])  # type: ignore[union-attr]
        ctx.gradients = (h_grad, embedded_grad, bias_grad)
        ctx.mark_non_differentiable(ce, tv)
        return (ce * targets.ce_scale).sum() + (tv * targets.tv_scale).sum(), ce, tv

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [None if gradient is None else gradient * gradients[0] for gradient in ctx.gradients]
        return (*scaled, None, None)


def _chunk(logits: Tensor, head_weight: Tensor, targets: HeadTargets, rows: slice, ce: Tensor, tv: Tensor) -> Tensor:
    """Writes the terms of a chunk; returns the loss's slope in the logits: [rows, V']."""
    target = targets.last_hidden[rows] @ head_weight.T
    target.sub_(targets.log_z[rows].unsqueeze(1)).exp_()
    outside_mass = (1.0 - target.sum(dim=1)).clamp_min_(0.0)
    labels = targets.labels[rows]
    inside = (labels != OUTSIDE).unsqueeze(1)
    places = labels.clamp_min(0).unsqueeze(1)

    log_draft = torch.log_softmax(logits, dim=1)
    ce[rows] = -(log_draft.gather(1, places) * inside).squeeze(1)
    draft = log_draft.exp_()
    difference = target.neg_().add_(draft)
    signs = difference.sign()
    tv[rows] = difference.abs_().sum(dim=1).add_(outside_mass)

    # slope = ce_scale (q - 1_y) + tv_scale q (s - q.s), with one factor of q taken out of both
    ce_scale = (targets.ce_scale[rows].unsqueeze(1) * inside).to(draft.dtype)
    tv_scale = targets.tv_scale[rows].unsqueeze(1)
    mean_sign = torch.linalg.vecdot(draft, signs).unsqueeze(1)
    slope = signs.sub_(mean_sign).mul_(tv_scale).add_(ce_scale).mul_(draft)
    return slope.scatter_add_(1, places, -ce_scale)
