"""What a source of samples gave, and where the time went."""

from dataclasses import astuple, dataclass

import torch
from torch import Tensor


@dataclass
class SampleCounts:
    """What a source gave since it was last asked.

    samples: given with their states. not_finite: asked for, but given without loss, since the target's states were
    not finite. captured: those that the target ran for, the others came from disk or memory. wait_s: seconds that the
    loop waited for them. target_s: seconds that target workers computed.
    """

    samples: int = 0
    not_finite: int = 0
    captured: int = 0
    wait_s: float = 0.0
    target_s: float = 0.0

    @property
    def values(self) -> Tensor:
        """[5] float64, to be summed over ranks."""
        return torch.tensor(astuple(self), dtype=torch.float64)

    @staticmethod
    def metrics(values: Tensor, *, num_ranks: int, step_s: float) -> dict[str, float]:
        """Figures of a step from `values` summed over ranks; step_s: seconds the step took, waiting included."""
        samples, not_finite, captured, wait_s, target_s = values.tolist()
        return {
            "samples": samples,
            "samples_not_finite": not_finite,
            "samples_captured": captured,
            "step_s": step_s,
            "data_wait_s": wait_s / num_ranks,
            "target_s": target_s,
        }
