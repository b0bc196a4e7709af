"""Experts spread over ranks: each rank holds some of them, and tokens travel to the ranks of the experts they chose.

Legend: S ranks that share one set of experts (expert parallel size), E experts, e = E/S of them on a rank, d hidden.

    rank     0 … S-1    S … 2S-1    …       experts r*e … (r+1)*e-1 lie on the r-th rank of every group;
    group    0          1           …       groups hold copies, which see other tokens and are kept equal

The experts are taken out of the module that DeepSpeed is given: what remains is equal on all ranks, as ZeRO needs it.
Their AdamW runs here, with DeepSpeed's rate and clipped by the same norm, so results do not depend on S.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dspark.drafters.config import MoEConfig
from dspark.drafters.moe import Experts, MoE
from dspark.errors import MissingInput
from dspark.training.config import TrainConfig


class ExpertParallel:
    """The experts of a drafter, spread over ranks of the default process group. Changes the drafter.

    Raises: ValueError when ranks or experts cannot be divided so.
    """

    def __init__(self, drafter: nn.Module, moe: MoEConfig, size: int, *, dtype: torch.dtype) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        for name, count in (("num_workers", world), ("n_routed_experts", moe.n_routed_experts)):
            if count % size:
                raise ValueError(
                    f"expert_parallel_size {size} does not divide {name} {count}; choose one that divides both workers "
                    "and experts"
                )
        self._place, self._world, self._size = rank % size, world, size
        groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
        copies = [dist.new_group(list(range(place, world, size))) for place in range(size)]
        self._group, self._copies = groups[rank // size], copies[self._place]
        self._mixtures = [module for module in drafter.modules() if isinstance(module, MoE)]
        self._local = [_share_of(mixture.experts, self._place, size) for mixture in self._mixtures]
        self._exchanges = [Exchange(experts, self._group, size, dtype) for experts in self._local]
        self._attach(self._exchanges)
        self._norm_squared = 0.0

    def start_optimizer(self, engine: Any, config: TrainConfig) -> None:
        """Train the experts beside what the DeepSpeed engine (ZeRO 1 or 2) trains."""
        self._engine, self._max_grad_norm = engine, config.max_grad_norm
        self._parameters = [parameter for experts in self._local for parameter in experts.parameters()]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=0.0, weight_decay=config.weight_decay)
        engine.optimizer.scaled_global_norm = self._with_experts(engine.optimizer.scaled_global_norm)

    def step(self) -> None:
        """`engine.step()`, and a step of the experts where it takes one. A collective call."""
        engine = self._engine
        if not engine.is_gradient_accumulation_boundary():
            engine.step()
            return
        for group in self._optimizer.param_groups:
            group["lr"] = engine.get_lr()[0]
        self._reduce()
        engine.step()
        norm = float(engine.get_global_grad_norm())
        if math.isfinite(norm):
            clip = max(1.0, (norm + 1e-6) / self._max_grad_norm)
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad /= clip
            self._optimizer.step()
        self._optimizer.zero_grad()

    def agree(self, is_well: bool) -> bool:
        """Whether it is so on every rank. A collective call: what some ranks skip would leave the others waiting."""
        vote = torch.tensor(float(is_well), device=self._local[0].down_proj.device)
        dist.all_reduce(vote, op=dist.ReduceOp.MIN)
        return bool(vote)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """The drafter with all its experts in place, as without this class. A collective call."""
        self._attach([self._gather(experts) for experts in self._local])
        try:
            yield
        finally:
            self._attach(self._exchanges)

    def save(self, folder: str | Path) -> None:
        """Write this rank's experts and their optimiser into `folder`."""
        state = {
            "experts": [experts.state_dict() for experts in self._local],
            "optimizer": self._optimizer.state_dict(),
        }
        torch.save(state, self._file(folder))

    def load(self, folder: str | Path) -> None:
        """Restore what `save` wrote on this rank. Raises: MissingInput when it was written by another set of ranks."""
        if not self._file(folder).is_file():
            raise MissingInput(
                f"checkpoint {folder} holds no {self._file(folder).name}; resume with the num_workers and "
                "expert_parallel_size it was written with, or start over with --fresh"
            )
        state = torch.load(self._file(folder), weights_only=True)
        for experts, stored in zip(self._local, state["experts"], strict=True):
            experts.load_state_dict(stored)
        self._optimizer.load_state_dict(state["optimizer"])

    def _file(self, folder: str | Path) -> Path:
        return Path(folder) / f"experts-{dist.get_rank():04d}-of-{self._world:04d}-by-{self._size}.pt"

    def _attach(self, experts: list[Any]) -> None:
        for mixture, own in zip(self._mixtures, experts, strict=True):
            if hasattr(mixture, "experts"):
                del mixture.experts
            mixture.experts = own

    def _reduce(self) -> None:
        """Gradients as the mean over all ranks; their squared norm over all experts."""
        squared = torch.zeros((), device=self._local[0].down_proj.device)
        for parameter in self._parameters:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=self._copies)
                parameter.grad /= self._world
                squared += parameter.grad.float().square().sum()
        dist.all_reduce(squared, group=self._group)
        self._norm_squared = float(squared)

    def _with_experts(self, dense_norm: Callable[..., Any]) -> Callable[..., Any]:
        """DeepSpeed's gradient norm with the experts' part in it: what it clips by and reports."""

        def norm(*args: Any, **options: Any) -> Any:
            return (dense_norm(*args, **options) ** 2 + self._norm_squared) ** 0.5

        return norm

    def _gather(self, experts: Experts) -> Experts:
        whole = {}
        for name, parameter in experts.named_parameters():
            parts = [torch.empty_like(parameter) for _ in range(dist.get_world_size(self._group))]
            dist.all_gather(parts, parameter.detach().contiguous(), group=self._group)
            whole[name] = torch.cat(parts)
        return Experts(**whole)


class Exchange:
    """Called like `Experts`: sends each token to its expert's rank and brings back what the expert made of it.

    No module, so that its experts are no part of the drafter's parameters.
    """

    def __init__(self, experts: Experts, group: Any, size: int, dtype: torch.dtype) -> None:
        self._experts, self._group, self._size, self._dtype = experts, group, size, dtype

    def __call__(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """[n, d]. tokens: [n, d], sorted by expert; counts: [E], how many each expert is given. A collective call."""
        outgoing = counts.view(self._size, -1)  # [S, e]: mine for every rank's experts
        incoming = torch.empty_like(outgoing)  # [S, e]: every rank's for my experts
        dist.all_to_all_single(incoming, outgoing.contiguous(), group=self._group)
        sent, received = outgoing.sum(dim=1).tolist(), incoming.sum(dim=1).tolist()
        arrived = _Send.apply(tokens.to(self._dtype), received, sent, self._group)
        expert_of = torch.arange(outgoing.shape[1], device=tokens.device).repeat(self._size)
        order = expert_of.repeat_interleave(incoming.flatten()).argsort(stable=True)  # by rank -> by expert
        made = self._experts(arrived[order], incoming.sum(dim=0)).to(self._dtype)
        return _Send.apply(torch.empty_like(made).index_copy(0, order, made), sent, received, self._group)


class _Send(torch.autograd.Function):
    """Rows to the ranks of a group and rows from them; the gradients travel the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        back = gradient.new_empty(sum(ctx.sent), gradient.shape[1])
        dist.all_to_all_single(back, gradient.contiguous(), ctx.sent, ctx.received, group=ctx.group)
        return back, None, None, None


def spread_experts(drafter: Any, config: TrainConfig) -> ExpertParallel | None:
    """The experts of a drafter over ranks as the config asks; None when every rank keeps them all.

    Raises: ValueError when there are none, or they cannot be divided so.
    """
    if config.expert_parallel_size == 1:
        return None
    moe = drafter.config.moe
    if moe is None:
        raise ValueError(
            f"expert_parallel_size is {config.expert_parallel_size} but the drafter has no experts; set drafter.moe"
        )
    dtype = torch.bfloat16 if config.precision == "bfloat16" else torch.float32
    return ExpertParallel(drafter, moe, config.expert_parallel_size, dtype=dtype)


def _share_of(experts: Experts, place: int, size: int) -> Experts:
    """The `place`-th of `size` equal parts of the experts, in memory of their own."""
    parts = {name: p.detach().chunk(size)[place].clone() for name, p in experts.named_parameters()}
    return Experts(**parts)
