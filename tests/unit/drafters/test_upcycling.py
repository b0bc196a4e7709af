"""Experts made from a dense layer compute what its most active units do."""

import pytest
import torch
import torch.nn.functional as F

from dspark.drafters.config import MoEConfig
from dspark.drafters.layers import SwiGLU
from dspark.drafters.moe import MoE
from dspark.drafters.upcycling import upcycle
from random_drafter import MOE, small_config

INPUTS = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))


def upcycled(**changes: object) -> tuple[MoE, SwiGLU]:
    """A mixture made from a dense layer of 24 units."""
    torch.manual_seed(1)
    shape = MoEConfig(**MOE | changes)
    config = small_config(moe=shape)
    dense, mixture = SwiGLU(config), MoE(config, shape)
    torch.nn.init.normal_(mixture.gate.weight)
    upcycle(mixture, shape, dense, INPUTS)
    return mixture, dense


@pytest.mark.parametrize("scaling", [1.0, 2.5])
def test_all_units_together_are_the_dense_layer(scaling: float):
    mixture, dense = upcycled(n_shared_experts=2, moe_intermediate_size=8, routed_scaling_factor=scaling)
    torch.testing.assert_close(mixture(INPUTS), dense(INPUTS), atol=1e-5, rtol=1e-4)


def test_fewer_units_are_the_most_active_ones():
    mixture, dense = upcycled(n_shared_experts=1, moe_intermediate_size=8)
    activity = (F.silu(dense.gate_proj(INPUTS)) * dense.up_proj(INPUTS)).abs().mean(0) * dense.down_proj.weight.norm(
        dim=0
    )
    kept = activity.argsort(descending=True)[:16]
    units = F.silu(dense.gate_proj(INPUTS)) * dense.up_proj(INPUTS)
    expected = units[:, kept] @ dense.down_proj.weight[:, kept].T
    torch.testing.assert_close(mixture(INPUTS), expected, atol=1e-5, rtol=1e-4)


def test_units_that_the_dense_layer_does_not_have_stay_random():
    mixture, _ = upcycled(n_shared_experts=1, moe_intermediate_size=16)
    down = mixture.experts.down_proj
    assert torch.equal(down[0, :, :8], down[3, :, :8])
    assert not torch.equal(down[0, :, 8:], down[3, :, 8:])
