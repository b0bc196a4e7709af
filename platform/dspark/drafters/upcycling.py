"""A mixture of experts made from a dense feed-forward layer.

Legend: I width of the dense layer, w expert width, S width of the shared experts, d hidden, n sample tokens.
Source: sparse upcycling (Komatsuzaki et al. 2023), here with experts narrower than the dense layer.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.drafters.config import MoEConfig
from dspark.drafters.moe import MoE


@torch.no_grad()
def upcycle(mixture: MoE, moe: MoEConfig, dense: Any, inputs: Tensor) -> None:
    """Fill the experts with the dense layer's most active units: the shared ones first, all routed ones alike.

    As long as they are alike the mixture computes the dense layer cut to its S + w best units, whatever the router
    says; different tokens then drive them apart. Units that the dense layer does not have stay random.
    dense: with gate_proj, up_proj and down_proj; inputs: [n, d] float32, what the layer is given.
    """
    gate, up, down = (getattr(dense, name).weight.float() for name in ("gate_proj", "up_proj", "down_proj"))
    activity = (F.silu(inputs @ gate.T) * (inputs @ up.T)).abs().mean(dim=0) * down.norm(dim=0)  # [I]
    ranked = activity.argsort(descending=True)
    shared_width = moe.n_shared_experts * moe.moe_intermediate_size
    if mixture.shared_experts is not None:
        units, shared = ranked[:shared_width], mixture.shared_experts
        shared.gate_proj.weight[: len(units)] = gate[units]
        shared.up_proj.weight[: len(units)] = up[units]
        shared.down_proj.weight[:, : len(units)] = down[:, units]
    units = ranked[shared_width : shared_width + moe.moe_intermediate_size]
    gates, ups = mixture.experts.gate_up_proj.chunk(2, dim=1)  # views [E, w, d]
    gates[:, : len(units)] = gate[units]
    ups[:, : len(units)] = up[units]
    mixture.experts.down_proj[:, :, : len(units)] = down[:, units] / moe.routed_scaling_factor
