"""From a micro-batch to its loss and its figures; the same for training and for held-out data.

Legend: N supervised slots, G block size, V' draft vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dspark.drafters import TrainedDrafter
from dspark.training.batches import MicroBatch
from dspark.training.fused import HeadTargets, head_loss
from dspark.training.losses import LossWeights, SlotLosses, acceptance_of, confidence_loss

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


def micro_batch_loss(
    model: nn.Module, drafter: TrainedDrafter, micro: MicroBatch, totals: Tensor, factors: LossWeights
) -> tuple[Tensor, SlotLosses]:
    """This micro-batch's share of sum_terms a * sum(w l) / sum(w), and the terms of every slot.

    model: the drafter's DeepSpeed engine or `Autocast` around it, giving SlotRows. totals: [2], weight sums of the
    whole step, over ranks and accumulation.
    """
    weight, ce_weight = totals.clamp_min(1e-12).tolist()
    rows = model(micro.blocks, micro.slots)
    targets = HeadTargets(
        last_hidden=micro.last_hidden,
        log_z=micro.log_z,
        rows=micro.target_rows,
        labels=micro.labels,
        ce_scale=micro.ce_weights * (factors.ce / ce_weight),
        tv_scale=micro.weights * (factors.tv / weight),
        soft_labels=factors.soft_labels,
    )
    backbone = drafter.backbone
    loss, ce, tv = head_loss(
        rows.h,
        rows.embedded,
        backbone.head_weight(),
        drafter.bias_weight(),
        targets,
        head=backbone.target_head,
        head_bias=backbone.head_bias(),
    )
    acceptance = acceptance_of(tv)
    confidence = None
    if rows.confidence_logits is not None:
        confidence = confidence_loss(rows.confidence_logits, acceptance)
        loss = loss + factors.confidence * (confidence * micro.weights).sum() / weight
    return loss, SlotLosses(ce, tv, confidence, acceptance)


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
    by_position = [per_slot.flatten(0, -2).sum(dim=0) for per_slot in (acceptance, micro.slots.double().cpu())]
    return StepTotals(torch.cat([torch.stack([s.double().cpu() for s in sums]), *by_position]), block_size)
