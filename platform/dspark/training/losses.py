"""The training objective: cross-entropy, total variation and confidence, with what is logged beside them.

Legend: N supervised slots (rows), V' draft vocabulary, d hidden size.
Source: DSpark §3.4; L = a_ce CE + a_tv TV + a_c BCE(c, c*), each sum(w l) / sum(w).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.config import Config

OUTSIDE = -1  # draft id of a label that is not in the reduced draft vocabulary


class LossWeights(Config):
    """Factors of the three terms. TV is the whole L1 distance, not half of it.

    soft_labels: cross-entropy against the target's whole distribution, not against the token that came.
    """

    ce: float
    tv: float
    confidence: float
    soft_labels: bool = False


@dataclass(frozen=True)
class SlotLosses:
    """Per supervised slot, [N] float32 each: the terms, and acceptance 1 - TV/2 (the confidence label)."""

    ce: Tensor
    tv: Tensor
    confidence: Tensor | None
    acceptance: Tensor


def slot_losses(
    draft_logits: Tensor,
    target_logits: Tensor,
    log_z: Tensor,
    labels: Tensor,
    confidence_logits: Tensor | None,
    *,
    soft_labels: bool = False,
) -> SlotLosses:
    """The terms of every slot, the plain way: the slow twin of `fused.head_loss`.

    draft_logits, target_logits: [N, V']; log_z: [N]; labels: [N] draft ids or OUTSIDE.
    p_t(v) = exp(target_logit_v - log Z) on V' alone; the target's mass outside V' counts fully against the
    drafter: TV = sum_{V'} |p_d - p_t| + (1 - sum_{V'} p_t). A label OUTSIDE drops its CE term only. With soft_labels
    CE = -sum_{V'} p_t log p_d.
    Computed in float32, or float64 for float64 logits. Source: ALGORITHMS §2 "reduced draft vocabulary", §3.
    """
    wide = torch.float64 if draft_logits.dtype == torch.float64 else torch.float32
    log_draft = torch.log_softmax(draft_logits.to(wide), dim=-1)
    ce = F.nll_loss(log_draft, labels, ignore_index=OUTSIDE, reduction="none")
    with torch.no_grad():
        target = torch.exp(target_logits.to(wide) - log_z.to(wide).unsqueeze(-1))
        outside_mass = (1.0 - target.sum(dim=-1)).clamp_min(0.0)
    if soft_labels:
        ce = -(target * log_draft).sum(dim=-1) * (labels != OUTSIDE)
    tv = (log_draft.exp() - target).abs().sum(dim=-1) + outside_mass
    acceptance = acceptance_of(tv)
    confidence = None if confidence_logits is None else confidence_loss(confidence_logits.to(wide), acceptance)
    return SlotLosses(ce, tv, confidence, acceptance)


def acceptance_of(tv: Tensor) -> Tensor:
    """c* = 1 - TV/2, the probability that a slot is accepted, without gradient. tv: [N]."""
    return (1.0 - 0.5 * tv.detach()).clamp(0.0, 1.0)


def confidence_loss(confidence_logits: Tensor, acceptance: Tensor) -> Tensor:
    """BCE(c, c*) of every slot: [N]."""
    return F.binary_cross_entropy_with_logits(confidence_logits, acceptance, reduction="none")
