"""Confidence that means what it says: sequential temperature scaling (STS) and the measures of calibration.

Legend: N rounds, K slots of a block, k = 0..K-1 a slot. A round is judged at slot k when its fate there was decided:
num_judged is the number proposed, or up to a stop token inside of the block the number committed
(see AcceptanceCounts.add_round). "Prefix k accepted" means that slots 0..k all stood: num_accepted > k.

Source: DSpark §3.2.1; ALGORITHMS "calibration". ECE = sum over bins of |sum(predicted) - sum(accepted)| / N, bins of
equal width over 0..1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from dspark.provenance import read_json, require_same, write_json

MODES = ("greedy", "sampled")
NUM_BINS = 20
MIN_ROUNDS = 200
"""A slot judged in fewer rounds has no temperature of its own: its ECE would be sampling noise."""
GRID = np.logspace(-1, 1, 41)
CALIBRATE_REMEDY = "run jobs/calibrate.py for this drafter"

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Calibration:
    """Temperatures by mode of decoding ("greedy", "sampled"), one per slot; a mode without any is left as it is.

    drafter_sha256: digest of the drafter whose confidences were fitted. fitted_on: where the rounds came from.
    """

    temperatures: dict[str, tuple[float, ...]] = field(default_factory=dict)
    drafter_sha256: str | None = None
    fitted_on: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for mode, temperatures in self.temperatures.items():
            if mode not in MODES:
                raise ValueError(f"calibration for the mode {mode!r}; modes are {', '.join(MODES)}")
            if not temperatures or not all(math.isfinite(t) and t > 0 for t in temperatures):
                raise ValueError(f"{mode} temperatures are {list(temperatures)}; each slot needs one above 0")

    def for_mode(self, temperature: float) -> tuple[float, ...] | None:
        """Temperatures of the slots for requests sampled at `temperature`; None leaves confidences as they are."""
        return self.temperatures.get("greedy" if temperature == 0 else "sampled")

    def require_drafter(self, drafter_sha256: str) -> None:
        """Raises: Mismatch naming both digests when the temperatures are another drafter's."""
        if self.temperatures:
            found = {"drafter_sha256": self.drafter_sha256}
            require_same("calibration", {"drafter_sha256": drafter_sha256}, found, remedy=CALIBRATE_REMEDY)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields."""
        temperatures = {mode: list(values) for mode, values in self.temperatures.items()}
        return {"temperatures": temperatures, "drafter_sha256": self.drafter_sha256, "fitted_on": self.fitted_on}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "Calibration":
        """Raises: ValueError for a field that is missing or does not fit."""
        try:
            temperatures = {mode: tuple(map(float, values)) for mode, values in content["temperatures"].items()}
            return cls(temperatures, content["drafter_sha256"], dict(content["fitted_on"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a calibration: {type(error).__name__} {error}; {CALIBRATE_REMEDY}") from None

    def save(self, path: str | Path) -> None:
        """Write the file, by custom `calibration.json` in the drafter's folder."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path, *, drafter_sha256: str | None = None) -> "Calibration":
        """What the file holds; a drafter without one was not calibrated, and its confidences are left as they are.

        Raises: Mismatch when it was fitted for another drafter than drafter_sha256; ValueError for a broken file.
        """
        if not Path(path).is_file():
            return cls()
        try:
            calibration = cls.from_dict(read_json(path))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if drafter_sha256 is not None:
            calibration.require_drafter(drafter_sha256)
        return calibration


def calibrated_survival(logits: Tensor | ArrayLike, temperatures: Sequence[float] | None) -> Tensor:
    """Probability that slots 0..k all stand: prod of sigmoid(logit_i / T_i) over i <= k, [..., l] float64.

    logits: [..., l], l at most the number of temperatures; None leaves them as they are.
    """
    values = torch.as_tensor(logits).double()
    if temperatures is not None:
        num_slots = values.shape[-1]
        if num_slots > len(temperatures):
            raise ValueError(f"{num_slots} slots but {len(temperatures)} temperatures; {CALIBRATE_REMEDY}")
        values = values / values.new_tensor(temperatures[:num_slots])
    return values.sigmoid().cumprod(-1)


def fit_sts(
    logits: ArrayLike,
    num_accepted: ArrayLike,
    num_judged: ArrayLike,
    num_bins: int = NUM_BINS,
    *,
    min_rounds: int = MIN_ROUNDS,
) -> tuple[float, ...]:
    """Temperatures T_k, left to right, each minimising the ECE of the survival at k with the earlier ones fixed.

    logits: [N, K], read where judged; num_accepted, num_judged: [N]. Rounds of whole, uncalibrated blocks.
    T_k is looked for between 0.1 and 10; of equally good ones the nearest to 1 is taken.
    A slot judged in fewer than min_rounds rounds keeps the temperature before it, or 1; `position_report` says so.
    """
    logits_, accepted, judged = _rounds(logits, num_accepted, num_judged)
    temperatures: list[float] = []
    standing = np.ones(len(logits_))  # predicted survival of the slots before k
    for k in range(logits_.shape[1]):
        here = judged > k
        temperature = temperatures[-1] if temperatures else 1.0
        if np.count_nonzero(here) >= min_rounds:
            temperature = _best_temperature(logits_[here, k], standing[here], accepted[here] > k, num_bins)
        temperatures.append(temperature)
        standing = standing * _sigmoid(logits_[:, k] / temperature)
    return tuple(temperatures)


def position_report(
    logits: ArrayLike,
    num_accepted: ArrayLike,
    num_judged: ArrayLike,
    temperatures: Sequence[float],
    *,
    num_bins: int = NUM_BINS,
    min_rounds: int = MIN_ROUNDS,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Calibration of the survival at each position before and after scaling; JSON-ready.

    position counts from 1, as in the paper; n: rounds judged there; is_fitted: enough of them for an own temperature;
    survival: share accepted; ece_floor: ECE of a perfectly calibrated predictor at this n, which no fit can beat.
    A figure without data is None. Arguments as in `fit_sts`.
    """
    logits_, accepted, judged = _rounds(logits, num_accepted, num_judged)
    before = calibrated_survival(logits_, None).numpy()
    after = calibrated_survival(logits_, temperatures).numpy()
    report = []
    for k in range(logits_.shape[1]):
        here = judged > k
        n = int(np.count_nonzero(here))
        stood = accepted[here] > k
        entry: dict[str, Any] = {"position": k + 1, "n": n, "is_fitted": n >= min_rounds}
        entry["temperature"] = temperatures[k]
        entry["survival"] = float(stood.mean()) if n else None
        for name, predicted in (("before", before[here, k]), ("after", after[here, k])):
            entry[f"ece_{name}"] = expected_calibration_error(predicted, stood, num_bins) if n else None
            entry[f"auroc_{name}"] = auroc(predicted, stood)
            entry[f"brier_{name}"] = brier(predicted, stood) if n else None
        entry["ece_floor"] = ece_floor(after[here, k], num_bins, seed=seed) if n else None
        report.append(entry)
    return report


def expected_calibration_error(predicted: ArrayLike, accepted: ArrayLike, num_bins: int = NUM_BINS) -> float:
    """ECE over bins of equal width. predicted: [N] in 0..1; accepted: [N] 0 or 1; NaN without any."""
    predicted_, accepted_ = _pairs(predicted, accepted)
    return _binned_error(_bins(predicted_, num_bins), predicted_ - accepted_)


def ece_floor(predicted: ArrayLike, num_bins: int = NUM_BINS, seed: int = 0, *, num_draws: int = 50) -> float:
    """Mean ECE that these predictions would show at this sample size if they were perfectly calibrated."""
    predicted_ = np.asarray(predicted, dtype=np.float64)
    bins = _bins(predicted_, num_bins)
    generator = np.random.default_rng(seed)
    draws = [_binned_error(bins, predicted_ - (generator.random(len(bins)) < predicted_)) for _ in range(num_draws)]
    return float(np.mean(draws))


def auroc(predicted: ArrayLike, accepted: ArrayLike) -> float | None:
    """Chance that an accepted round was predicted above a rejected one, ties counted half; None if one kind lacks."""
    predicted_, accepted_ = _pairs(predicted, accepted)
    num_accepted = accepted_.sum()
    num_rejected = len(accepted_) - num_accepted
    if not num_accepted or not num_rejected:
        return None
    _, group, sizes = np.unique(predicted_, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(sizes) - (sizes - 1) / 2  # of each group of equals, counted from 1
    wins = (mean_rank[group] * accepted_).sum() - num_accepted * (num_accepted + 1) / 2
    return float(wins / (num_accepted * num_rejected))


def brier(predicted: ArrayLike, accepted: ArrayLike) -> float:
    """Mean squared difference of prediction and outcome; NaN without any."""
    predicted_, accepted_ = _pairs(predicted, accepted)
    return float(((predicted_ - accepted_) ** 2).sum() / len(predicted_)) if len(predicted_) else math.nan


def _best_temperature(logits: Floats, standing: Floats, accepted: NDArray[np.bool_], num_bins: int) -> float:
    def error(temperature: float) -> float:
        return expected_calibration_error(standing * _sigmoid(logits / temperature), accepted, num_bins)

    coarse = min(sorted(GRID, key=_distance_from_one), key=error)
    ratio = GRID[1] / GRID[0]
    fine = np.geomspace(max(coarse / ratio, GRID[0]), min(coarse * ratio, GRID[-1]), len(GRID))
    return float(min([coarse, *sorted(fine, key=_distance_from_one)], key=error))


def _distance_from_one(temperature: float) -> float:
    return abs(math.log(temperature))


def _bins(predicted: Floats, num_bins: int) -> NDArray[np.int64]:
    return np.minimum((predicted * num_bins).astype(np.int64), num_bins - 1)  # 1.0 belongs to the last bin


def _binned_error(bins: NDArray[np.int64], excess: Floats) -> float:
    return float(np.abs(np.bincount(bins, excess)).sum() / len(bins)) if len(bins) else math.nan


def _sigmoid(logits: Floats) -> Floats:
    return 0.5 * (1.0 + np.tanh(0.5 * logits))  # does not overflow


def _pairs(predicted: ArrayLike, accepted: ArrayLike) -> tuple[Floats, Floats]:
    return np.asarray(predicted, dtype=np.float64), np.asarray(accepted, dtype=np.float64)


def _rounds(
    logits: ArrayLike, num_accepted: ArrayLike, num_judged: ArrayLike
) -> tuple[Floats, NDArray[np.int64], NDArray[np.int64]]:
    """Arrays of matching shapes. Raises: ValueError when they do not match or a judged slot has no finite logit."""
    logits_ = np.asarray(logits, dtype=np.float64)
    accepted, judged = np.asarray(num_accepted, dtype=np.int64), np.asarray(num_judged, dtype=np.int64)
    if logits_.ndim != 2 or accepted.shape != logits_.shape[:1] or judged.shape != accepted.shape:
        raise ValueError(
            f"logits of shape {logits_.shape}, num_accepted {accepted.shape} and num_judged {judged.shape} do not "
            "belong together; give [N, K], [N] and [N]"
        )
    num_slots = logits_.shape[1]
    if ((judged < 0) | (judged > num_slots) | (accepted < 0) | (accepted > num_slots)).any():
        raise ValueError(f"num_accepted and num_judged must lie in 0..{num_slots}, the slots that have logits")
    if not np.isfinite(logits_[np.arange(num_slots) < judged[:, None]]).all():
        raise ValueError("a judged slot has a confidence logit that is not finite; leave out the rounds without one")
    return logits_, accepted, judged
