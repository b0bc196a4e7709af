"""Manifold-constrained hyper-connections: n residual streams in the place of one.

Legend: n streams (hc_mult), d hidden.

    X            [..., n, d]   the streams
    u = pre X    [..., d]      what a sublayer reads: a gated sum of the streams
    X'           = res^T X + post (x) F(u)

pre, post and res are computed from the streams themselves. res is doubly stochastic, so products of it over many
layers neither grow nor shrink the streams. Source: mHC (Xie et al.); tensors as in DeepSeek-V4.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.drafters.config import DrafterConfig, HyperConnectionConfig

# What a sublayer computed -> the residual stream (or streams) with it.
Connect = Callable[[Tensor], Tensor]

INITIAL_SCALE = 0.01
INITIAL_DIAGONAL = 4.0


class Float32Module(nn.Module):
    """A module whose weights and buffers stay in float32 when the model around it is cast."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def moved(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return result if result.dtype == tensor.dtype else tensor.to(result.device)

        return super()._apply(moved, recurse)


class HyperConnection(Float32Module):
    """The three maps of one sublayer, in float32.

    It starts as a plain residual: pre and res mix equal parts into the mean of the streams, and post adds the
    sublayer's output to that mean once. The streams get different shares of it, else they would stay equal for ever.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self._config = streams_of(config)
        self._norm_eps = config.rms_norm_eps
        n = self._config.hc_mult
        self.fn = nn.Parameter(torch.zeros((2 + n) * n, n * config.hidden_size))
        self.scale = nn.Parameter(torch.full((3,), INITIAL_SCALE))
        shares = [2.0 * stream / (n - 1) - 1.0 for stream in range(n)]  # symmetric about 0: 2 sigmoid(.) has mean 1
        mixing = [INITIAL_DIAGONAL * (row == column) for row in range(n) for column in range(n)]
        self.base = nn.Parameter(torch.tensor([_logit(1.0 / n)] * n + shares + mixing))

    def forward(self, streams: Tensor) -> tuple[Tensor, Connect]:
        """What the sublayer reads, [..., d], and how its output is added. streams: [..., n, d]."""
        pre, post, res = self.maps(streams)
        wide = streams.float()

        def connect(output: Tensor) -> Tensor:
            with torch.autocast(streams.device.type, enabled=False):
                mixed = res.transpose(-1, -2) @ wide + post.unsqueeze(-1) * output.float().unsqueeze(-2)
            return mixed.to(streams.dtype)

        return _weighted_sum(pre, wide).to(streams.dtype), connect

    def maps(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """pre [..., n] in (0, 1), post [..., n] in (0, 2), res [..., n, n] doubly stochastic; float32."""
        n, eps = self._config.hc_mult, self._config.hc_eps
        with torch.autocast(streams.device.type, enabled=False):
            mixed = F.linear(_normed(streams, self._norm_eps), self.fn)
            pre, post, res = mixed.split([n, n, n * n], dim=-1)
            base_pre, base_post, base_res = self.base.split([n, n, n * n])
            return (
                torch.sigmoid(pre * self.scale[0] + base_pre) + eps,
                2.0 * torch.sigmoid(post * self.scale[1] + base_post),
                sinkhorn(
                    (res * self.scale[2] + base_res).unflatten(-1, (n, n)),
                    num_rounds=self._config.hc_sinkhorn_iters,
                    eps=eps,
                ),
            )


class HyperHead(Float32Module):
    """Collapses the streams before the final norm; starts as their mean."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self._eps, n = streams_of(config).hc_eps, streams_of(config).hc_mult
        self._norm_eps = config.rms_norm_eps
        self.hc_fn = nn.Parameter(torch.zeros(n, n * config.hidden_size))
        self.hc_base = nn.Parameter(torch.full((n,), _logit(1.0 / n)))
        self.hc_scale = nn.Parameter(torch.full((1,), INITIAL_SCALE))

    def forward(self, streams: Tensor) -> Tensor:
        """[..., d]. streams: [..., n, d]."""
        with torch.autocast(streams.device.type, enabled=False):
            mixed = F.linear(_normed(streams, self._norm_eps), self.hc_fn)
            weights = torch.sigmoid(mixed * self.hc_scale + self.hc_base) + self._eps
        return _weighted_sum(weights, streams.float()).to(streams.dtype)


def sinkhorn(logits: Tensor, *, num_rounds: int, eps: float) -> Tensor:
    """exp(logits) made doubly stochastic by dividing rows and columns by their sums in turn. logits: [..., n, n].

    Columns are divided last and sum to one; rows do after enough rounds.
    """
    matrix = logits.softmax(dim=-1) + eps
    matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + eps)
    for _ in range(num_rounds - 1):
        matrix = matrix / (matrix.sum(dim=-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + eps)
    return matrix


def plain_residual(h: Tensor) -> tuple[Tensor, Connect]:
    """The one-stream form of `HyperConnection.forward`: read h, add to h."""
    return h, lambda output: h + output


def streams_of(config: DrafterConfig) -> HyperConnectionConfig:
    """The shape of the hyper-connections of a drafter that has them."""
    assert config.hyper_connections is not None, "asked for hyper-connections that the config does not have"
    return config.hyper_connections


def _normed(streams: Tensor, eps: float) -> Tensor:
    """The streams side by side over their root mean square: [..., n*d] float32."""
    flat = streams.float().flatten(-2)
    return F.rms_norm(flat, flat.shape[-1:], eps=eps)


def _weighted_sum(weights: Tensor, streams: Tensor) -> Tensor:
    return (weights.unsqueeze(-1) * streams).sum(dim=-2)


def _logit(probability: float) -> float:
    return math.log(probability / (1.0 - probability))
