"""What a step's routing leaves behind: figures, a moved bias, nothing of what was not to be counted."""

import pytest
import torch

from dspark.drafters.moe import MoE
from dspark.training.expert_loads import ExpertLoads
from random_drafter import MOE, random_batch, random_drafter


def two_ranks(values: torch.Tensor) -> torch.Tensor:
    """A second rank that routed the same."""
    return 2 * values


def routed(**changes: object) -> tuple[ExpertLoads, list[MoE]]:
    drafter = random_drafter(moe=MOE | changes).train()
    loads = ExpertLoads(drafter)
    drafter.backbone.block_states(random_batch(drafter.config, [[3, 9, 15], [4]]))
    return loads, [module for module in drafter.modules() if isinstance(module, MoE)]


def test_figures_tell_the_busiest_and_the_idlest_expert():
    loads, mixtures = routed()
    tokens = [mixture.gate.load.clone() for mixture in mixtures]
    assert [int(load.sum()) for load in tokens] == [4 * 4 * 2] * 2  # blocks without padding, slots, experts per token
    figures = loads.balance(two_ranks)
    for layer, load in enumerate(tokens):
        assert loads.last[layer] == (2 * load).int().tolist()
        assert figures[f"expert_load_max_{layer}"] == pytest.approx(float(load.max() / load.mean()))
        assert figures[f"expert_load_min_{layer}"] == pytest.approx(float(load.min() / load.mean()))


def test_a_step_moves_the_bias_once_and_starts_counting_anew():
    loads, mixtures = routed(bias_update_speed=0.5)
    router = mixtures[0].gate
    before, load = router.e_score_correction_bias.clone(), router.load.clone()
    loads.balance(two_ranks)
    expected = 0.5 * torch.sign(load.mean() - load)
    torch.testing.assert_close(router.e_score_correction_bias - before, expected)
    assert not bool(router.load.any())


def test_what_is_uncounted_leaves_no_trace():
    loads, mixtures = routed(topk_method="greedy", aux_loss_alpha=0.1)
    before = mixtures[0].gate.load.clone()
    loads.balancing_loss(10.0)
    with loads.uncounted():
        mixtures[0](torch.randn(7, 16))
    assert torch.equal(mixtures[0].gate.load, before)
    assert float(loads.balancing_loss(10.0)) == 0.0


def test_the_state_of_a_checkpoint_restores_the_next_balancing_loss():
    loads, mixtures = routed(topk_method="greedy", aux_loss_alpha=0.1)
    loads.balance(two_ranks)
    other, others = routed(topk_method="greedy", aux_loss_alpha=0.1)
    other.load_state(loads.state())
    for one, twin in zip(mixtures, others, strict=True):
        assert torch.equal(one.gate.usual_load, twin.gate.usual_load)


def test_a_dense_drafter_has_nothing_to_balance():
    loads = ExpertLoads(random_drafter())
    assert loads.balance(two_ranks) == {}
    assert float(loads.balancing_loss(3.0)) == 0.0
    assert (loads.last, loads.state()) == ([], [])
