"""Confidence that means what it says: the scales of a drafter's confidences, their file, and what they are used for.

Legend: k = 0..K-1 a slot of a block; l slots of a proposal. Source: DSpark §3.2.1; ALGORITHMS "calibration". The shift
is ours: a temperature stretches a logit, but cannot lower confidences on both sides of 0 at once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from dspark.provenance import read_json, require_same, write_json
from dspark.storage import Location, locate

MODES = ("greedy", "sampled", "seeded")
LARGEST_EXPONENT = 700.0  # of e, in float64
CALIBRATE_REMEDY = "run jobs/calibrate.py for this drafter"


@dataclass(frozen=True)
class SlotScales:
    """What confidences are scaled by, one each per slot: sigmoid(logit / temperature + shift)."""

    temperatures: tuple[float, ...]
    shifts: tuple[float, ...]

    def __post_init__(self) -> None:
        are_finite = all(map(math.isfinite, (*self.temperatures, *self.shifts)))
        if not (0 < len(self.temperatures) == len(self.shifts) and are_finite and min(self.temperatures) > 0):
            raise ValueError(
                f"temperatures are {list(self.temperatures)} and shifts {list(self.shifts)}; each slot needs a "
                "temperature above 0 and a shift, both finite"
            )

    def __len__(self) -> int:
        return len(self.temperatures)


@dataclass(frozen=True)
class Calibration:
    """Scales by mode of decoding; greedy or sampled decoding without any is left as it is.

    Seeded decoding accepts what equals the target's own draw under shared noise, which is less than rejection sampling
    accepts. So it has scales of its own, and where a file lacks them those of sampled decoding are nearest.

    drafter_sha256: digest of the drafter whose confidences were fitted. fitted_on: where the rounds came from.
    """

    scales: dict[str, SlotScales] = field(default_factory=dict)
    drafter_sha256: str | None = None
    fitted_on: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for mode in self.scales:
            if mode not in MODES:
                raise ValueError(f"calibration for the mode {mode!r}; modes are {', '.join(MODES)}")

    def for_mode(self, mode: str) -> SlotScales | None:
        """Scales of the slots for requests decoded so; None leaves confidences as they are."""
        if mode == "seeded" and mode not in self.scales:
            return self.scales.get("sampled")
        return self.scales.get(mode)

    def require_drafter(self, drafter_sha256: str) -> None:
        """Raises: Mismatch naming both digests when the scales are another drafter's."""
        if self.scales:
            found = {"drafter_sha256": self.drafter_sha256}
            require_same("calibration", {"drafter_sha256": drafter_sha256}, found, remedy=CALIBRATE_REMEDY)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields."""
        return {
            "temperatures": {mode: list(scales.temperatures) for mode, scales in self.scales.items()},
            "shifts": {mode: list(scales.shifts) for mode, scales in self.scales.items()},
            "drafter_sha256": self.drafter_sha256,
            "fitted_on": self.fitted_on,
        }

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "Calibration":
        """Without "shifts", as files had none once, they are 0. Raises: ValueError for a field that does not fit."""
        try:
            temperatures = {mode: tuple(map(float, values)) for mode, values in content["temperatures"].items()}
            shifts = content.get("shifts", {mode: [0.0] * len(values) for mode, values in temperatures.items()})
            scales = {mode: SlotScales(t, tuple(map(float, shifts[mode]))) for mode, t in temperatures.items()}
            return cls(scales, content["drafter_sha256"], dict(content["fitted_on"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a calibration: {type(error).__name__} {error}; {CALIBRATE_REMEDY}") from None

    def save(self, path: str | Location) -> None:
        """Write the file, by custom `calibration.json` in the drafter's folder."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Location, *, drafter_sha256: str | None = None) -> "Calibration":
        """What the file holds; a drafter without one was not calibrated, and its confidences are left as they are.

        Raises: Mismatch when it was fitted for another drafter than drafter_sha256; ValueError for a broken file.
        """
        if not locate(path).is_file():
            return cls()
        try:
            calibration = cls.from_dict(read_json(path))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if drafter_sha256 is not None:
            calibration.require_drafter(drafter_sha256)
        return calibration


def survival_of(logits: Sequence[float], scales: SlotScales | None) -> list[float]:
    """`calibrated_survival` of one proposal, which is its slow twin: a few numbers are soonest done one by one."""
    if scales is not None:
        _check_slots(len(logits), scales)
        logits = [x / t + b for x, t, b in zip(logits, scales.temperatures, scales.shifts, strict=False)]
    confidences = (1.0 / (1.0 + math.exp(min(-x, LARGEST_EXPONENT))) for x in logits)
    return list(accumulate(confidences, mul))


def calibrated_survival(logits: Tensor | ArrayLike, scales: SlotScales | None) -> Tensor:
    """Probability that slots 0..k all stand: prod of sigmoid(logit_i / T_i + b_i) over i <= k, [..., l] float64.

    logits: [..., l], l at most the number of scales; None leaves them as they are.
    """
    values = torch.as_tensor(logits).double()
    if scales is not None:
        num_slots = values.shape[-1]
        _check_slots(num_slots, scales)
        temperatures, shifts = (values.new_tensor(v[:num_slots]) for v in (scales.temperatures, scales.shifts))
        values = values / temperatures + shifts
    return values.sigmoid().cumprod(-1)


def _check_slots(num_slots: int, scales: SlotScales) -> None:
    if num_slots > len(scales):
        raise ValueError(f"{num_slots} slots but {len(scales)} temperatures; {CALIBRATE_REMEDY}")
