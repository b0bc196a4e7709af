"""From a micro-batch to its loss and its figures; the same for training and for held-out data.

Legend: N supervised slots, G block size, V' draft vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.training.batches import MicroBatch
from dspark.training.losses import LossWeights, SlotLosses, slot_losses

SUMS = ("weight", "ce_weight", "ce", "tv", "confidence", "blocks", "slots", "expected", "outside", "tokens")


@dataclass(frozen=True)
class StepTotals:
    """Sums over micro-batches and ranks; a ratio is taken once, at the end.

    values: [len(SUMS) + 2 G] float64: the named sums, then acceptance and count by position.
    """

    values: Tensor
    block_size: int

    @staticmethod
    def zeros(block_size: int) -> "StepTotals":
        return StepTotals(torch.zeros(len(SUMS) + 2 * block_size, dtype=torch.float64), block_size)

    def __add__(self, other: "StepTotals") -> "StepTotals":
        return StepTotals(self.values + other.values, self.block_size)

    def metrics(self, factors: LossWeights) -> dict[str, float]:
        """Means by name: loss and its terms, expected accepted length, conditional acceptance by position."""
        sums = dict(zip(SUMS, self.values.tolist(), strict=False))
        acceptance, counts = self.values[len(SUMS) :].view(2, -1).tolist()
        terms = {
            "ce": sums["ce"] / max(sums["ce_weight"], 1e-12),
            "tv": sums["tv"] / max(sums["weight"], 1e-12),
            "confidence": sums["confidence"] / max(sums["weight"], 1e-12),
        }
        named = {
            "loss": factors.ce * terms["ce"] + factors.tv * terms["tv"] + factors.confidence * terms["confidence"],
            **terms,
            "expected_accepted_length": 1.0 + sums["expected"] / max(sums["blocks"], 1.0),
            "blocks": sums["blocks"],
            "supervised_slots": sums["slots"],
            "labels_outside_draft_vocabulary": sums["outside"],
            "tokens": sums["tokens"],
        }
        for k, (total, count) in enumerate(zip(acceptance, counts, strict=True), start=1):
            if count:
                named[f"acceptance_{k}"] = total / count
        return named


def weight_sums(micro: MicroBatch | None) -> Tensor:
    """[2] float64: sum of w, and of w where the label lies in the draft vocabulary."""
    if micro is None:
        return torch.zeros(2, dtype=torch.float64)
    return torch.stack([micro.weights.sum(), micro.ce_weights.sum()]).double()


def compute_losses(drafter: nn.Module, head_weight: Tensor, micro: MicroBatch) -> SlotLosses:
    """Per-slot terms of a micro-batch. drafter: the module or its DeepSpeed engine; head_weight: [V', d]."""
    output = drafter(micro.blocks, micro.slots)
    with torch.no_grad():
        target_logits = F.linear(micro.last_hidden.to(head_weight.dtype), head_weight)
    return slot_losses(output.logits, target_logits, micro.log_z, micro.labels, output.confidence_logits)


def normalised_loss(losses: SlotLosses, micro: MicroBatch, totals: Tensor, factors: LossWeights) -> Tensor:
    """This micro-batch's share of sum_terms a * sum(w l) / sum(w). totals: [2], weight sums of the whole step."""
    weight, ce_weight = totals.clamp_min(1e-12).tolist()
    loss = factors.ce * (losses.ce * micro.ce_weights).sum() / ce_weight
    loss = loss + factors.tv * (losses.tv * micro.weights).sum() / weight
    if losses.confidence is not None:
        loss = loss + factors.confidence * (losses.confidence * micro.weights).sum() / weight
    return loss


@torch.no_grad()
def step_totals(losses: SlotLosses, micro: MicroBatch, block_size: int) -> StepTotals:
    """The figures of a micro-batch as sums."""
    acceptance = torch.zeros(micro.slots.shape, dtype=torch.float64)
    acceptance[micro.slots.cpu()] = losses.acceptance.double().cpu()
    expected = acceptance.cumprod(dim=-1).sum()
    zero = torch.zeros(())
    confidence = zero if losses.confidence is None else (losses.confidence * micro.weights).sum()
    sums = [
        micro.weights.sum(),
        micro.ce_weights.sum(),
        (losses.ce * micro.ce_weights).sum(),
        (losses.tv * micro.weights).sum(),
        confidence,
        torch.tensor(float(micro.num_blocks)),
        torch.tensor(float(micro.weights.numel())),
        expected,
        (micro.labels < 0).sum(),
        torch.tensor(float(micro.num_tokens)),
    ]
    by_position = [acceptance.sum(dim=(0, 1)), micro.slots.sum(dim=(0, 1)).double().cpu()]
    return StepTotals(torch.cat([torch.stack([s.double().cpu() for s in sums]), *by_position]), block_size)
