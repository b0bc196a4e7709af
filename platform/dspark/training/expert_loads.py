"""How evenly tokens spread over experts in training: counted, balanced once per optimiser step, logged."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dspark.drafters.moe import routers


class ExpertLoads:
    """The routers of a drafter; without any, everything here is empty.

    last: per sparse layer, the tokens that each expert was given in the last step, all ranks together.
    """

    def __init__(self, drafter: nn.Module) -> None:
        self._routers = routers(drafter)
        self.last: list[list[int]] = []

    def balancing_loss(self, num_tokens: float) -> Tensor:
        """What the micro-batch just computed adds to the loss. num_tokens: routed tokens of the whole step."""
        return sum((router.balancing_loss(max(num_tokens, 1.0)) for router in self._routers), torch.zeros(()))

    def balance(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Even out the loads of the step that ended; returns its figures per sparse layer. A collective call.

        expert_load_max, _min: the busiest and the idlest expert's tokens over the mean.
        """
        if not self._routers:
            return {}
        loads = sum_over_ranks(torch.stack([router.load for router in self._routers]).cpu())
        figures = {}
        for layer, (router, load) in enumerate(zip(self._routers, loads, strict=True)):
            router.balance(load.to(router.load.device))
            mean = max(float(load.mean()), 1e-12)
            figures[f"expert_load_max_{layer}"] = float(load.max()) / mean
            figures[f"expert_load_min_{layer}"] = float(load.min()) / mean
        self.last = [[int(tokens) for tokens in load] for load in loads.tolist()]
        return figures

    @contextmanager
    def uncounted(self, is_uncounted: bool = True) -> Iterator[None]:
        """Leaves no trace of what is routed inside."""
        loads = [router.load.clone() for router in self._routers]
        yield
        if is_uncounted:
            for router, load in zip(self._routers, loads, strict=True):
                router.load.copy_(load)
                router.score_sums = []

    def state(self) -> list[list[float]]:
        """What the next step's balancing loss rests on, for a checkpoint."""
        return [router.usual_load.tolist() for router in self._routers]

    def load_state(self, state: list[list[float]]) -> None:
        """Go on from what `state` gave."""
        for router, usual in zip(self._routers, state, strict=True):
            router.usual_load.copy_(torch.tensor(usual))
