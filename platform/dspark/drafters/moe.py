"""Mixture of experts: a shared expert that every token takes, and E routed ones of which it takes k.

Legend: T tokens, d hidden, E routed experts, k experts per token, w expert width.
Source: DeepSeekMoE; bias-based balancing: DeepSeek-V3 §2.1.2. Tensor names: DeepSeek-V3, experts stacked.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.drafters.config import DrafterConfig, MoEConfig
from dspark.drafters.layers import SwiGLU
from dspark.drafters.mhc import Float32Module

INITIAL_STD = 0.02


class Router(Float32Module):
    """Scores every expert for every token and chooses k; in float32, whatever the model's type.

    `e_score_correction_bias` moves the choice and never the weights, so balancing does not bend what is computed.
    """

    e_score_correction_bias: Tensor | None
    load: Tensor
    usual_load: Tensor

    def __init__(self, hidden_size: int, moe: MoEConfig) -> None:
        super().__init__()
        self._moe = moe
        experts = moe.n_routed_experts
        self.weight = nn.Parameter(torch.empty(experts, hidden_size))
        nn.init.normal_(self.weight, std=INITIAL_STD)
        bias = torch.zeros(experts) if moe.topk_method == "noaux_tc" else None
        self.register_buffer("e_score_correction_bias", bias)
        self.register_buffer("load", torch.zeros(experts), persistent=False)
        self.register_buffer("usual_load", torch.ones(experts), persistent=False)
        self.score_sums: list[Tensor] = []

    def forward(self, tokens: Tensor, counted: Tensor | None) -> tuple[Tensor, Tensor]:
        """Experts [T, k] and their weights [T, k] float32. tokens: [T, d]; counted: [T] bool, None for all.

        In training the counted tokens are added to `load` (and to the balancing loss's scores).
        """
        moe = self._moe
        with torch.autocast(tokens.device.type, enabled=False):
            logits = F.linear(tokens.float(), self.weight)
        scores = logits.sigmoid() if moe.scoring_func == "sigmoid" else logits.softmax(dim=-1)
        bias = self.e_score_correction_bias
        ranked = scores.detach() if bias is None else scores.detach() + bias
        chosen = ranked.topk(moe.num_experts_per_tok, dim=-1, sorted=False).indices
        weights = scores.gather(1, chosen)
        if moe.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(1e-20)
        if self.training:
            self._count(scores, chosen, counted)
        return chosen, weights * moe.routed_scaling_factor

    def _count(self, scores: Tensor, chosen: Tensor, counted: Tensor | None) -> None:
        kept = chosen if counted is None else chosen[counted]
        self.load += kept.flatten().bincount(minlength=self._moe.n_routed_experts)
        if self._moe.aux_loss_alpha and torch.is_grad_enabled():
            shares = scores / scores.sum(dim=-1, keepdim=True).clamp_min(1e-20)
            self.score_sums.append((shares if counted is None else shares[counted]).sum(dim=0))

    def balancing_loss(self, num_tokens: float) -> Tensor:
        """alpha * sum_e f_e P_e over what was routed since the last call; num_tokens: of the whole step.

        f is the last step's load over its mean and P the share of the scores. f is taken a step late so that the sum
        over micro-batches and ranks is that of one big batch, however the step is cut.
        """
        sums, self.score_sums = self.score_sums, []
        if not sums:
            return self.load.new_zeros(())
        return self._moe.aux_loss_alpha * (self.usual_load * torch.stack(sums).sum(dim=0)).sum() / num_tokens

    @torch.no_grad()
    def balance(self, load: Tensor) -> None:
        """Once per optimiser step: move the bias towards an even load. load: [E] tokens, of all ranks."""
        self.load.zero_()
        if not load.sum():
            return
        mean = load.mean()
        self.usual_load.copy_(load / mean)
        if self.e_score_correction_bias is not None:
            self.e_score_correction_bias += self._moe.bias_update_speed * torch.sign(mean - load)


class Experts(nn.Module):
    """E SwiGLU experts in two stacked tensors: gate_up_proj [E, 2w, d] and down_proj [E, d, w]."""

    def __init__(self, gate_up_proj: Tensor, down_proj: Tensor) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(gate_up_proj)
        self.down_proj = nn.Parameter(down_proj)

    @staticmethod
    def new(hidden_size: int, moe: MoEConfig) -> "Experts":
        """Random experts."""
        experts, width = moe.n_routed_experts, moe.moe_intermediate_size
        return Experts(
            INITIAL_STD * torch.randn(experts, 2 * width, hidden_size),
            INITIAL_STD * torch.randn(experts, hidden_size, width),
        )

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """[n, d]: tokens that are sorted by expert through their experts. tokens: [n, d]; counts: [E] of each."""
        is_bfloat16 = tokens.dtype == torch.bfloat16 or torch.is_autocast_enabled(tokens.device.type)
        if tokens.is_cuda and is_bfloat16 and tokens.shape[1] % 8 == self.down_proj.shape[2] % 8 == 0:
            return self.all_at_once(tokens, counts)
        pieces = []
        # Unbound at once: the gradient of each x[i] by itself would be as large as x. Experts without a token are
        # computed as well: every weight then has a gradient, which ZeRO's buckets count on.
        weights = zip(self.gate_up_proj.unbind(), self.down_proj.unbind(), strict=True)
        for piece, (gate_up, down) in zip(tokens.split(counts.tolist()), weights, strict=True):
            gate, up = F.linear(piece, gate_up).chunk(2, dim=-1)
            pieces.append(F.linear(F.silu(gate) * up, down))
        return torch.cat(pieces)

    def all_at_once(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """The same in two products, without waiting for the counts; bfloat16."""
        ends = counts.cumsum(0).to(torch.int32)
        wide, down = (w.to(torch.bfloat16).transpose(1, 2) for w in (self.gate_up_proj, self.down_proj))
        gate, up = F.grouped_mm(tokens.bfloat16(), wide, offs=ends).chunk(2, dim=-1)
        return F.grouped_mm((F.silu(gate) * up).contiguous(), down, offs=ends)


class MoE(nn.Module):
    """shared(x) + sum of the chosen experts of x, weighted."""

    def __init__(self, config: DrafterConfig, moe: MoEConfig) -> None:
        super().__init__()
        self.num_experts, self.num_chosen = moe.n_routed_experts, moe.num_experts_per_tok
        self.gate = Router(config.hidden_size, moe)
        self.experts: Experts = Experts.new(config.hidden_size, moe)
        width = moe.n_shared_experts * moe.moe_intermediate_size
        self.shared_experts = SwiGLU(config, width) if width else None

    def forward(self, x: Tensor, counted: Tensor | None = None) -> Tensor:
        """[..., d], as x. counted: [...] bool, the tokens whose routing is counted; None for all."""
        tokens = x.flatten(0, -2)
        chosen, weights = self.gate(tokens, None if counted is None else counted.flatten())
        routed = self.routed(tokens, chosen, weights).view_as(x)
        return routed if self.shared_experts is None else routed + self.shared_experts(x)

    def routed(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of what each token's experts make of it: [T, d]. tokens: [T, d]; chosen, weights: [T, k].

        Tokens are put together by expert, so that each expert is one product.
        """
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.num_experts)
        made = self.experts(tokens[order // chosen.shape[1]], counts)
        by_token = torch.empty_like(made).index_copy(0, order, made).unflatten(0, chosen.shape)
        return (by_token * weights.unsqueeze(-1).to(made.dtype)).sum(dim=1)


def feed_forward(config: DrafterConfig, layer: int) -> MoE | SwiGLU:
    """The feed-forward part of a layer."""
    if config.is_sparse(layer):
        assert config.moe is not None
        return MoE(config, config.moe)
    return SwiGLU(config)


def routers(drafter: nn.Module) -> list[Router]:
    """The routers of a drafter, in the order of its layers."""
    return [module for module in drafter.modules() if isinstance(module, Router)]


def num_idle_parameters(drafter: nn.Module) -> int:
    """Parameters of the experts that a token does not choose."""
    mixtures = [module for module in drafter.modules() if isinstance(module, MoE)]
    return sum(
        sum(p.numel() for p in mixture.experts.parameters())
        * (mixture.num_experts - mixture.num_chosen)
        // mixture.num_experts
        for mixture in mixtures
    )
