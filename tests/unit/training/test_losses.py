"""The objective's terms by hand, and on a reduced vocabulary against the whole one in float64."""

import math
from typing import Any

import torch

from dspark.training.losses import OUTSIDE, SlotLosses, slot_losses


def by_hand(labels: list[int], confidence: list[float] | None = None) -> SlotLosses:
    """Draft (1/2, 1/4, 1/4) against target (1/4, 1/2, 1/4) in every slot."""
    rows = len(labels)
    draft = torch.tensor([0.5, 0.25, 0.25]).log().expand(rows, 3)
    target = torch.tensor([0.25, 0.5, 0.25]).log().expand(rows, 3)
    logits = None if confidence is None else torch.tensor(confidence)
    return slot_losses(draft + 3.0, target + 7.0, torch.full((rows,), 7.0), torch.tensor(labels), logits)


def test_the_terms_of_a_slot_by_hand():
    losses = by_hand([0, 1], [0.0, math.log(3.0)])  # confidences 1/2 and 3/4
    torch.testing.assert_close(losses.ce, torch.tensor([math.log(2), math.log(4)]))
    torch.testing.assert_close(losses.tv, torch.tensor([0.5, 0.5]))  # the whole L1 distance, not its half
    torch.testing.assert_close(losses.acceptance, torch.tensor([0.75, 0.75]))
    entropy = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    torch.testing.assert_close(losses.confidence, torch.tensor([math.log(2), entropy]))


def test_acceptance_is_the_shared_mass():
    generator = torch.Generator().manual_seed(0)
    draft, target = torch.randn(5, 9, generator=generator), torch.randn(5, 9, generator=generator)
    losses = slot_losses(draft, target, target.logsumexp(-1), torch.zeros(5, dtype=torch.long), None)
    shared = torch.minimum(draft.softmax(-1), target.softmax(-1)).sum(-1)
    torch.testing.assert_close(losses.acceptance, shared)


def test_a_label_outside_the_draft_vocabulary_drops_its_ce_term_only():
    inside, outside = by_hand([2], [0.3]), by_hand([OUTSIDE], [0.3])
    assert float(outside.ce) == 0.0 < float(inside.ce)
    assert torch.equal(outside.tv, inside.tv)
    assert torch.equal(outside.acceptance, inside.acceptance)
    assert torch.equal(outside.confidence, inside.confidence)  # type: ignore[arg-type]


def test_no_confidence_head_no_confidence_loss():
    assert by_hand([0]).confidence is None


def test_the_confidence_label_pulls_nothing_but_the_confidence():
    draft = torch.randn(4, 6, requires_grad=True)
    target, labels = torch.randn(4, 6), torch.zeros(4, dtype=torch.long)
    confidence = torch.randn(4, requires_grad=True)
    losses = slot_losses(draft, target, target.logsumexp(-1), labels, confidence)
    assert losses.confidence is not None
    losses.confidence.sum().backward()
    assert draft.grad is None
    assert confidence.grad is not None


def test_losses_are_float32_for_bf16_logits():
    target = torch.randn(2, 5).bfloat16()
    losses = slot_losses(torch.randn(2, 5).bfloat16(), target, target.float().logsumexp(-1), torch.tensor([0, 1]), None)
    assert losses.ce.dtype == losses.tv.dtype == losses.acceptance.dtype == torch.float32


def whole_vocabulary_twin(draft: torch.Tensor, target: torch.Tensor, kept: torch.Tensor, labels: torch.Tensor) -> Any:
    """(ce, tv, acceptance) in float64 over all V ids, p_d zero outside the kept ones. labels: [N] target ids."""
    p_t = target.double().softmax(-1)
    p_d = torch.zeros_like(p_t)
    p_d[:, kept] = draft.double().softmax(-1)
    tv = (p_d - p_t).abs().sum(-1)
    ce = -p_d.gather(1, labels[:, None]).squeeze(1).log()
    return torch.where(ce.isinf(), 0.0, ce), tv, torch.minimum(p_d, p_t).sum(-1)


def test_the_reduced_vocabulary_gives_what_the_whole_one_gives():
    generator = torch.Generator().manual_seed(0)
    kept = torch.tensor([1, 4, 5, 9, 11])
    to_draft = torch.full((13,), OUTSIDE)
    to_draft[kept] = torch.arange(5)
    labels = torch.randint(0, 13, (40,), generator=generator)
    assert (to_draft[labels] == OUTSIDE).any()
    draft, target = (3.0 * torch.randn(40, size, generator=generator) for size in (5, 13))
    losses = slot_losses(draft, target[:, kept], target.logsumexp(-1), to_draft[labels], None)
    expected = whole_vocabulary_twin(draft, target, kept, labels)
    for found, wanted in zip((losses.ce, losses.tv, losses.acceptance), expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=0)


def test_a_log_z_rounded_down_does_not_make_acceptance_leave_its_range():
    target = torch.tensor([[2.0, 1.0]])
    losses = slot_losses(target, target, target.logsumexp(-1) - 0.5, torch.tensor([0]), torch.zeros(1))
    assert 0.0 <= float(losses.acceptance) <= 1.0
