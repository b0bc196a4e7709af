"""Mixtures of experts: grouped tokens compute what masks do, the choice is balanced, the weights are not bent."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.drafters.config import MoEConfig
from dspark.drafters.moe import Experts, MoE, Router
from random_drafter import MOE, small_config

TOKENS = torch.randn(40, 16, generator=torch.Generator().manual_seed(0))


def mixture(**changes: Any) -> tuple[MoE, MoEConfig]:
    """A mixture of 5 experts of width 8 with random weights."""
    torch.manual_seed(1)
    shape = MoEConfig(**MOE | changes)
    module = MoE(small_config(moe=shape), shape)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)
    return module, shape


def experts_one_by_one(experts: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """What `Experts` must give, by the definition: every expert on every token, masked by who chose it."""
    mixed = torch.zeros_like(tokens)
    for expert in range(experts.gate_up_proj.shape[0]):
        gate, up = F.linear(tokens, experts.gate_up_proj[expert]).chunk(2, dim=-1)
        output = F.linear(F.silu(gate) * up, experts.down_proj[expert])
        mixed = mixed + output * torch.where(chosen == expert, weights, 0.0).sum(dim=1, keepdim=True)
    return mixed


@pytest.mark.parametrize("num_tokens", [40, 3, 1, 0])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_grouped_experts_equal_masked_ones_in_values_and_gradients(num_tokens: int, k: int):
    module, _ = mixture(num_experts_per_tok=k)
    chosen, weights = module.gate(TOKENS[:num_tokens], None)
    weights = weights.detach()
    results = []
    for run in (module.routed, lambda *inputs: experts_one_by_one(module.experts, *inputs)):
        module.zero_grad()
        tokens, scales = TOKENS[:num_tokens].clone().requires_grad_(), weights.clone().requires_grad_()
        output = run(tokens, chosen, scales)
        (output * torch.linspace(-1, 1, 16)).sum().backward()
        gradients = [p.grad.clone() for p in module.experts.parameters()]
        results.append([output, tokens.grad, scales.grad, *gradients])
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, atol=1e-5, rtol=1e-5)


def test_the_kernel_for_all_experts_at_once_agrees_with_one_after_another():
    module, _ = mixture()
    experts = module.experts.to(torch.bfloat16)
    counts = torch.tensor([7, 0, 13, 12, 8])
    tokens = TOKENS.bfloat16()
    torch.testing.assert_close(
        experts.all_at_once(tokens, counts).float(),
        experts(tokens, counts).float(),
        atol=0.1,
        rtol=0.1,
    )  # bfloat16 rounding


def test_every_weight_has_a_gradient_even_of_experts_that_nobody_chose():
    module, _ = mixture(num_experts_per_tok=1)
    module(TOKENS[:1]).sum().backward()
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize("scoring_func", ["sigmoid", "softmax"])
@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_weights_are_the_chosen_scores(scoring_func: str, norm_topk_prob: bool):
    module, shape = mixture(scoring_func=scoring_func, norm_topk_prob=norm_topk_prob, topk_method="greedy")
    chosen, weights = module.gate(TOKENS, None)
    for token, ids, found in zip(TOKENS, chosen, weights, strict=True):
        logits = module.gate.weight @ token
        scores = logits.sigmoid() if scoring_func == "sigmoid" else logits.softmax(dim=0)
        assert set(ids.tolist()) == set(scores.argsort(descending=True)[:2].tolist())
        expected = scores[ids] / (scores[ids].sum() if norm_topk_prob else 1.0) * shape.routed_scaling_factor
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_the_bias_moves_the_choice_and_not_the_weights():
    module, _ = mixture()
    before, _ = module.gate(TOKENS, None)
    assert not bool((before == 4).any(dim=1).all())
    module.gate.e_score_correction_bias[4] = 10.0
    chosen, weights = module.gate(TOKENS, None)
    assert bool((chosen == 4).any(dim=1).all())
    scores = F.linear(TOKENS, module.gate.weight).sigmoid().gather(1, chosen)
    torch.testing.assert_close(weights, 1.5 * scores / scores.sum(dim=1, keepdim=True), atol=1e-6, rtol=1e-5)


def test_a_mixture_is_its_shared_expert_and_its_chosen_ones():
    module, _ = mixture()
    chosen, weights = module.gate(TOKENS, None)
    expected = module.shared_experts(TOKENS) + experts_one_by_one(module.experts, TOKENS, chosen, weights)
    torch.testing.assert_close(module(TOKENS.view(4, 10, 16)).view(40, 16), expected, atol=1e-5, rtol=1e-5)


def test_a_mixture_without_shared_experts_is_its_chosen_ones():
    module, _ = mixture(n_shared_experts=0)
    chosen, weights = module.gate(TOKENS, None)
    torch.testing.assert_close(
        module(TOKENS), experts_one_by_one(module.experts, TOKENS, chosen, weights), atol=1e-5, rtol=1e-5
    )


def test_loads_count_the_tokens_asked_for_in_training_only():
    module, _ = mixture()
    counted = torch.arange(40) % 4 != 0
    chosen, _ = module.gate(TOKENS, None)
    module.gate.load.zero_()
    module(TOKENS, counted)
    module.eval()(TOKENS)
    expected = chosen[counted].flatten().bincount(minlength=5)
    assert module.gate.load.tolist() == expected.tolist()


def test_the_bias_evens_out_a_lopsided_load():
    module, _ = mixture(num_experts_per_tok=1, bias_update_speed=0.02)
    router, tokens = module.gate, TOKENS + 1.0
    with torch.no_grad():
        router.weight.mul_(0.1)
        router.weight[0] = 0.1  # everybody's darling
    router(tokens, None)
    first = router.load.clone()
    for _ in range(60):
        router.balance(router.load.clone())
        router(tokens, None)
    assert float(first.max()) > 20
    assert float(router.load.max()) <= 14  # of 40 tokens over 5 experts


def test_the_balancing_loss_is_that_of_one_big_batch_however_it_is_cut():
    gradients, losses = [], []
    for cuts in ([40], [8, 32], [13, 13, 14]):
        module, _ = mixture(topk_method="greedy", aux_loss_alpha=0.1)
        router = module.gate
        router.balance(torch.tensor([40.0, 10.0, 10.0, 10.0, 10.0]))
        total = torch.zeros(())
        for piece in TOKENS.split(cuts):
            router(piece, None)
            loss = router.balancing_loss(40.0)
            loss.backward()
            total += loss.detach()
        losses.append(total)
        gradients.append(router.weight.grad.clone())
    for loss, gradient in zip(losses[1:], gradients[1:], strict=True):
        torch.testing.assert_close(loss, losses[0], atol=1e-6, rtol=0)
        torch.testing.assert_close(gradient, gradients[0], atol=1e-7, rtol=1e-4)
    scores = F.linear(TOKENS, router.weight).sigmoid()
    shares = (scores / scores.sum(dim=1, keepdim=True)).mean(dim=0)
    expected = 0.1 * (torch.tensor([2.5, 0.625, 0.625, 0.625, 0.625]) * shares).sum()
    torch.testing.assert_close(losses[0], expected, atol=1e-6, rtol=1e-5)


def test_the_balancing_loss_pushes_scores_off_a_busy_expert():
    module, _ = mixture(topk_method="greedy", aux_loss_alpha=1.0)
    router = module.gate
    optimizer = torch.optim.SGD(router.parameters(), lr=1.0)
    before = F.linear(TOKENS, router.weight).sigmoid()[:, 0].mean().item()
    for _ in range(20):
        router.balance(torch.tensor([60.0, 5.0, 5.0, 5.0, 5.0]))
        router(TOKENS, None)
        optimizer.zero_grad()
        router.balancing_loss(40.0).backward()
        optimizer.step()
    assert F.linear(TOKENS, router.weight).sigmoid()[:, 0].mean().item() < before - 0.05


def test_the_router_works_in_float32_inside_a_bf16_model():
    module, _ = mixture()
    router = module.gate
    router.e_score_correction_bias.fill_(1.0009765625)  # no bfloat16
    expected = router(TOKENS.bfloat16().float(), None)
    module.to(torch.bfloat16)
    assert isinstance(router, Router)
    assert float(router.e_score_correction_bias[0]) == 1.0009765625
    with torch.autocast("cpu", torch.bfloat16):
        found = router(TOKENS.bfloat16(), None)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
