"""Sequential temperature scaling (STS), with a shift beside each temperature, and what it is worth by position.

Legend: N rounds, K slots of a block, k = 0..K-1 a slot. A round is judged at slot k when its fate there was decided:
num_judged is the number proposed, or up to a stop token inside of the block the number committed
(see AcceptanceCounts.add_round). "Prefix k accepted" means that slots 0..k all stood: num_accepted > k.

Source: DSpark §3.2.1; ALGORITHMS "calibration". The shift is ours, see `calibration.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark.speculation.calibration import SlotScales, calibrated_survival
from dspark.speculation.calibration_error import (
    NUM_BINS,
    Floats,
    auroc,
    binned_error,
    bins_of,
    brier,
    ece_floor,
    expected_calibration_error,
)

MIN_ROUNDS = 200
"""A slot judged in fewer rounds has no temperature of its own: its ECE would be sampling noise."""
MIN_STOOD = 20
"""A slot up to which fewer rounds stood has a shift of its own at most: so few do not tell temperatures apart."""
MAX_SHIFT = 10.0
NOISE = 2.0  # an ECE up to this many times a perfect predictor's is chance: rounds of one answer resemble each other
GRID = np.logspace(-1, 1, 41)


def fit_sts(
    logits: ArrayLike,
    num_accepted: ArrayLike,
    num_judged: ArrayLike,
    num_bins: int = NUM_BINS,
    *,
    with_shift: bool,
    min_rounds: int = MIN_ROUNDS,
) -> SlotScales:
    """Scales of the slots, left to right, each lowering the ECE of the survival at k with the earlier ones fixed.

    logits: [N, K], read where judged; num_accepted, num_judged: [N]. Rounds of whole, uncalibrated blocks.
    T_k is looked for between 0.1 and 10; of equally good ones the nearest to 1 is taken. Without shifts: the paper's.
    With them each T comes with the shift b that makes the mean survival at k the share that stood, an ECE of no more
    than chance is as good as none, and log loss decides between such T. Where fewer than MIN_STOOD stood, T is the
    slot's before. A slot judged in fewer than min_rounds rounds keeps both scales of the slot before, or 1 and 0.
    """
    logits_, accepted, judged = _rounds(logits, num_accepted, num_judged)
    fitted = [(1.0, 0.0)]
    standing = np.ones(len(logits_))  # predicted survival of the slots before k
    for k in range(logits_.shape[1]):
        here = judged > k
        temperature, shift = fitted[-1]
        if np.count_nonzero(here) >= min_rounds:
            slot = _Slot(logits_[here, k], standing[here], accepted[here] > k)
            temperature, shift = _with_shift(slot, temperature, num_bins) if with_shift else _plain(slot, num_bins)
        fitted.append((temperature, shift))
        standing = standing * _sigmoid(logits_[:, k] / temperature + shift)
    return SlotScales(tuple(t for t, _ in fitted[1:]), tuple(b for _, b in fitted[1:]))


def position_report(
    logits: ArrayLike,
    num_accepted: ArrayLike,
    num_judged: ArrayLike,
    scales: SlotScales,
    *,
    num_bins: int = NUM_BINS,
    min_rounds: int = MIN_ROUNDS,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Calibration of the survival at each position before and after scaling; JSON-ready.

    position counts from 1, as in the paper; n: rounds judged there; is_fitted: enough of them for scales of its own;
    survival: share accepted; ece_floor: ECE of a perfectly calibrated predictor at this n, which no fit can beat.
    A figure without data is None. Arguments as in `fit_sts`.
    """
    logits_, accepted, judged = _rounds(logits, num_accepted, num_judged)
    before = calibrated_survival(logits_, None).numpy()
    after = calibrated_survival(logits_, scales).numpy()
    report = []
    for k in range(logits_.shape[1]):
        here = judged > k
        n = int(np.count_nonzero(here))
        stood = accepted[here] > k
        entry: dict[str, Any] = {"position": k + 1, "n": n, "is_fitted": n >= min_rounds}
        entry |= {"temperature": scales.temperatures[k], "shift": scales.shifts[k]}
        entry["survival"] = float(stood.mean()) if n else None
        for name, predicted in (("before", before[here, k]), ("after", after[here, k])):
            entry[f"ece_{name}"] = expected_calibration_error(predicted, stood, num_bins) if n else None
            entry[f"auroc_{name}"] = auroc(predicted, stood)
            entry[f"brier_{name}"] = brier(predicted, stood) if n else None
        entry["ece_floor"] = ece_floor(after[here, k], num_bins, seed=seed) if n else None
        report.append(entry)
    return report


@dataclass(frozen=True)
class _Slot:
    """The rounds that judged a slot. standing: predicted survival of the slots before it; stood: it and they did."""

    logits: Floats
    standing: Floats
    stood: NDArray[np.bool_]

    def survival(self, temperature: float, shift: float) -> Floats:
        return self.standing * _sigmoid(self.logits / temperature + shift)


def _plain(slot: _Slot, num_bins: int) -> tuple[float, float]:
    def error(temperature: float) -> tuple[float]:
        return (expected_calibration_error(slot.survival(temperature, 0.0), slot.stood, num_bins),)

    return _best_temperature(error), 0.0


def _with_shift(slot: _Slot, temperature_before: float, num_bins: int) -> tuple[float, float]:
    def error(temperature: float) -> tuple[float, float]:
        return _misfit(slot.survival(temperature, _matching_shift(slot, temperature)), slot.stood, num_bins)

    is_told = np.count_nonzero(slot.stood) >= MIN_STOOD
    temperature = _best_temperature(error) if is_told else temperature_before
    return temperature, _matching_shift(slot, temperature)


def _matching_shift(slot: _Slot, temperature: float) -> float:
    """The shift, by bisection, with which as many rounds are expected to stand as did.

    About half a round of those standing before is left on either side at least, so that no slot is certain.
    """
    expected = slot.standing.sum()
    margin = 0.5 * expected / (expected + 1)
    wanted = np.clip(np.count_nonzero(slot.stood), margin, expected - margin)
    low, high = -MAX_SHIFT, MAX_SHIFT
    for _ in range(32):
        middle = (low + high) / 2
        low, high = (middle, high) if slot.survival(temperature, middle).sum() < wanted else (low, middle)
    return (low + high) / 2


def _misfit(predicted: Floats, stood: NDArray[np.bool_], num_bins: int) -> tuple[float, float]:
    """ECE beyond what chance explains, then log loss, which decides where there is none.

    ECE alone would flatten: once the mean is right, predicting it for every round has no ECE at all.
    """
    bins = bins_of(predicted, num_bins)
    chance = np.sqrt(np.bincount(bins, predicted * (1 - predicted)) * 2 / math.pi).sum() / len(bins)
    excess = binned_error(bins, predicted - stood) - NOISE * chance
    within = predicted.clip(1e-12, 1 - 1e-12)
    return max(excess, 0.0), float(-np.log(np.where(stood, within, 1 - within)).mean())


def _best_temperature(error: Callable[[float], tuple[float, ...]]) -> float:
    coarse = min(sorted(GRID, key=_distance_from_one), key=error)
    ratio = GRID[1] / GRID[0]
    fine = np.geomspace(max(coarse / ratio, GRID[0]), min(coarse * ratio, GRID[-1]), len(GRID))
    return float(min([coarse, *sorted(fine, key=_distance_from_one)], key=error))


def _distance_from_one(temperature: float) -> float:
    return abs(math.log(temperature))


def _sigmoid(logits: Floats) -> Floats:
    return 0.5 * (1.0 + np.tanh(0.5 * logits))  # does not overflow


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
