"""How far predicted probabilities are from what happened: ECE and its floor, AUROC, Brier score.

Legend: N rounds; predicted: [N] in 0..1; accepted: [N] 0 or 1.
ECE = sum over bins of |sum(predicted) - sum(accepted)| / N, bins of equal width over 0..1. Source: DSpark §3.2.1.
"""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

NUM_BINS = 20

Floats = NDArray[np.float64]


def expected_calibration_error(predicted: ArrayLike, accepted: ArrayLike, num_bins: int = NUM_BINS) -> float:
    """ECE over bins of equal width. predicted: [N] in 0..1; accepted: [N] 0 or 1; NaN without any."""
    predicted_, accepted_ = _pairs(predicted, accepted)
    return binned_error(bins_of(predicted_, num_bins), predicted_ - accepted_)


def ece_floor(predicted: ArrayLike, num_bins: int = NUM_BINS, seed: int = 0, *, num_draws: int = 50) -> float:
    """Mean ECE that these predictions would show at this sample size if they were perfectly calibrated."""
    predicted_ = np.asarray(predicted, dtype=np.float64)
    bins = bins_of(predicted_, num_bins)
    generator = np.random.default_rng(seed)
    draws = [binned_error(bins, predicted_ - (generator.random(len(bins)) < predicted_)) for _ in range(num_draws)]
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


def bins_of(predicted: Floats, num_bins: int) -> NDArray[np.int64]:
    """Number of the bin of each prediction."""
    return np.minimum((predicted * num_bins).astype(np.int64), num_bins - 1)  # 1.0 belongs to the last bin


def binned_error(bins: NDArray[np.int64], excess: Floats) -> float:
    """ECE from predicted - accepted; NaN without any."""
    return float(np.abs(np.bincount(bins, excess)).sum() / len(bins)) if len(bins) else math.nan


def _pairs(predicted: ArrayLike, accepted: ArrayLike) -> tuple[Floats, Floats]:
    return np.asarray(predicted, dtype=np.float64), np.asarray(accepted, dtype=np.float64)
