"""The loss of a step: normalised once over everything, the same for every grouping, and it can be learnt."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch

from dspark.data.target_cache import CachedSample
from dspark.drafters.dflash import DFlashDrafter
from dspark.drafters.dspark import DSparkDrafter
from dspark.training.batches import MicroBatch, make_micro_batch
from dspark.training.losses import LossWeights, SlotLosses
from dspark.training.objective import StepTotals, micro_batch_loss, step_totals, weight_sums
from dspark.training.precision import Autocast
from random_drafter import VARIANTS, random_drafter, random_sample, target_to_draft

FACTORS = LossWeights(ce=0.1, tv=0.9, confidence=1.0)
Drafter = DSparkDrafter | DFlashDrafter


def micro_of(drafter: Drafter, samples: Sequence[CachedSample], *, num_anchors: int = 5) -> MicroBatch:
    micro = make_micro_batch(
        [(sample, 0) for sample in samples],
        num_anchors=num_anchors,
        block_size=drafter.block_size,
        position_decay=4.0,
        target_to_draft=target_to_draft(drafter),
        seed=7,
        device=torch.device("cpu"),
    )
    assert micro is not None
    return micro


def step(
    drafter: Drafter, groups: Sequence[Sequence[CachedSample]], *, bf16: bool = False, factors: LossWeights = FACTORS
) -> tuple[float, dict[str, float]]:
    """Loss and figures of a step over micro-batches; gradients are left in the drafter."""
    drafter.zero_grad()
    micro_batches = [micro_of(drafter, group) for group in groups]
    weights = torch.stack([weight_sums(micro) for micro in micro_batches]).sum(0)
    totals, loss_sum = StepTotals.zeros(drafter.block_size), 0.0
    for micro in micro_batches:
        loss, losses = micro_batch_loss(Autocast(drafter, enabled=bf16), drafter, micro, weights, factors)
        loss.backward()
        loss_sum += float(loss.detach())
        totals = totals + step_totals(losses, micro, drafter.block_size)
    return loss_sum, totals.metrics(factors)


def gradients(drafter: Drafter) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("shape", VARIANTS.values(), ids=VARIANTS)
def test_the_grouping_of_samples_changes_neither_gradient_nor_figures(shape: dict[str, Any]):
    drafter = random_drafter(**shape)
    samples = [random_sample(drafter.config, f"s{k}", 12 + 2 * k) for k in range(8)]
    results = []
    for size in (8, 4, 1):
        loss, figures = step(drafter, [samples[start : start + size] for start in range(0, 8, size)])
        results.append((loss, figures, gradients(drafter)))
    expected_loss, expected_figures, expected_gradients = results[0]
    assert expected_gradients
    for loss, figures, found in results[1:]:
        assert loss == pytest.approx(expected_loss, abs=1e-5)
        assert figures == pytest.approx(expected_figures, abs=1e-5)
        for name, gradient in expected_gradients.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=0)


def test_the_reported_loss_is_the_loss_that_was_minimised():
    drafter = random_drafter(draft_vocab_size=30)
    loss, figures = step(drafter, [[random_sample(drafter.config, f"s{k}", 15 + k) for k in range(3)]])
    assert loss == pytest.approx(figures["loss"], abs=1e-5)
    assert figures["labels_outside_draft_vocabulary"] > 0


def hand_made() -> tuple[SlotLosses, MicroBatch]:
    """Two blocks of three slots; the second block has one slot, with a label outside."""
    drafter = random_drafter(block_size=3)
    micro = micro_of(drafter, [random_sample(drafter.config, "a", 9, prompt=5)], num_anchors=2)
    slots = torch.tensor([[True, True, False], [True, False, False]])
    changes = {
        "slots": slots,
        "weights": torch.tensor([1.0, 0.5, 1.0]),
        "ce_weights": torch.tensor([1.0, 0.5, 0.0]),
        "labels": torch.tensor([4, 5, -1]),
        "num_tokens": 9,
    }
    micro = MicroBatch(**{**vars(micro), **changes})
    losses = SlotLosses(
        ce=torch.tensor([2.0, 4.0, 0.0]),
        tv=torch.tensor([0.5, 1.0, 1.5]),
        confidence=torch.tensor([0.2, 0.4, 0.8]),
        acceptance=torch.tensor([0.75, 0.5, 0.25]),
    )
    return losses, micro


def test_figures_by_hand():
    losses, micro = hand_made()
    figures = step_totals(losses, micro, 3).metrics(LossWeights(ce=0.1, tv=0.9, confidence=1.0))
    ce, tv, confidence = 4.0 / 1.5, 2.5 / 2.5, 1.2 / 2.5
    assert figures == pytest.approx(
        {
            "loss": 0.1 * ce + 0.9 * tv + confidence,
            "ce": ce,
            "tv": tv,
            "confidence": confidence,
            # 1 + mean over blocks of 0.75 + 0.75 * 0.5 and 0.25
            "expected_accepted_length": 1 + (0.75 + 0.375 + 0.25) / 2,
            "blocks": 2.0,
            "supervised_slots": 3.0,
            "labels_outside_draft_vocabulary": 1.0,
            "tokens": 9.0,
            "acceptance_1": 0.5,
            "acceptance_2": 0.5,
        }
    )


def test_totals_add_up_before_the_ratio_is_taken():
    losses, micro = hand_made()
    one = step_totals(losses, micro, 3)
    assert (one + one).metrics(FACTORS)["loss"] == pytest.approx(one.metrics(FACTORS)["loss"])
    assert (one + StepTotals.zeros(3)).metrics(FACTORS) == one.metrics(FACTORS)


def test_no_supervised_slot_gives_no_division_by_zero():
    figures = StepTotals.zeros(4).metrics(FACTORS)
    assert figures["loss"] == 0.0
    assert all(math.isfinite(value) for value in figures.values())
    assert torch.equal(weight_sums(None), torch.zeros(2, dtype=torch.float64))


def test_a_factor_of_zero_switches_its_term_off():
    drafter = random_drafter()
    samples = [random_sample(drafter.config, "a", 20)]
    step(drafter, [samples], factors=LossWeights(ce=0.0, tv=0.0, confidence=1.0))
    assert not drafter.markov_head.markov_w2.weight.grad.any()
    assert drafter.confidence_head.proj.weight.grad.any()
    step(drafter, [samples], factors=LossWeights(ce=1.0, tv=0.0, confidence=0.0))
    assert drafter.markov_head.markov_w2.weight.grad.any()
    assert not drafter.confidence_head.proj.weight.grad.any()


def test_frozen_parts_get_no_gradient_and_the_rest_does():
    drafter = random_drafter(anchor_fusion=True, learned_mask_embedding=True)
    step(drafter, [[random_sample(drafter.config, "a", 30)]])
    without = {name for name, parameter in drafter.named_parameters() if parameter.grad is None}
    assert without == {"backbone.embed_tokens.weight", "backbone.lm_head.weight"}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_training_stays_finite(num_layers: int, precision: Literal["float32", "bfloat16"]):
    drafter = random_drafter(num_hidden_layers=num_layers, anchor_fusion=True, draft_vocab_size=30).train()
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=1e-2)
    samples = [random_sample(drafter.config, f"s{k}", 20 + k) for k in range(3)]
    losses = []
    for _ in range(5):
        losses.append(step(drafter, [samples], bf16=precision == "bfloat16")[0])
        optimizer.step()
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0]
    assert all(p.dtype == torch.float32 and bool(p.isfinite().all()) for p in drafter.parameters())


def learnable_sample(drafter: Drafter, length: int) -> CachedSample:
    """A sample whose target is sure of every next token."""
    sample = random_sample(drafter.config, "a", length)
    head = drafter.backbone.lm_head.weight
    following = sample.input_ids.roll(-1)[sample.loss_mask.bool()]
    # The least state that puts the label 8 above what any other row can reach by chance.
    sure = torch.linalg.lstsq(head, 8.0 * torch.eye(len(head))[:, following]).solution.T.contiguous()
    last_hidden = (6.0 * sure).bfloat16()
    log_z = (last_hidden.float() @ head.T).logsumexp(-1)
    return CachedSample(sample.id, sample.input_ids, sample.loss_mask, sample.hidden, last_hidden, log_z)


def test_a_tiny_drafter_can_learn_one_sample_by_heart():
    torch.manual_seed(0)
    drafter = random_drafter(hidden_size=32, num_hidden_layers=1, vocab_size=24, mask_token_id=23).train()
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=1e-2)
    sample = learnable_sample(drafter, 30)
    figures: dict[str, float] = {}
    for _ in range(250):
        _, figures = step(drafter, [[sample]], factors=LossWeights(ce=1.0, tv=0.9, confidence=1.0))
        optimizer.step()
    for k in range(1, drafter.block_size + 1):
        assert figures[f"acceptance_{k}"] >= 0.9, figures
