"""How sure a figure is, and what that says about a claim: nothing here knows what the figures mean.

Legend: M seeds of training, N prompts, S resamples, F summed quantities. Prompts are the same ones for every seed and
every drafter, so that differences are taken prompt by prompt.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Statistic = Callable[[Floats], Floats]
Verdict = Literal["holds", "does not", "not shown"]

NUM_RESAMPLES = 2000
CONFIDENCE = 0.95
MOST_UNDEFINED = 0.05  # share of resamples without a value (no round at a position) that is tolerated
# Two-sided 95 % quantiles of Student's t by degrees of freedom.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval; low and high are None where there is too little to tell.

    by_seed: the value of each seed's training alone, where there are several. rests_on: numbers of prompts, those that
    added anything, and of seeds; None of what is no sum over prompts.
    """

    value: float
    low: float | None
    high: float | None
    by_seed: tuple[float, ...] = ()
    rests_on: tuple[int, int] | None = None

    def to_dict(self) -> dict[str, Any]:
        content = {"value": self.value, "low": self.low, "high": self.high, "by_seed": list(self.by_seed)}
        prompts, seeds = self.rests_on or (None, None)
        return content | {"prompts": prompts, "seeds": seeds}


@dataclass(frozen=True)
class Part:
    """One comparison that a claim is made of: that a value is above a bound, or below it."""

    label: str
    estimate: Estimate
    bound: float
    is_above: bool = True

    @property
    def verdict(self) -> Verdict:
        """Decided by the whole interval."""
        low, high = self.estimate.low, self.estimate.high
        if low is None or high is None:
            return "not shown"
        if low > self.bound:
            return "holds" if self.is_above else "does not"
        if high < self.bound:
            return "does not" if self.is_above else "holds"
        return "not shown"

    def to_dict(self) -> dict[str, Any]:
        direction = "above" if self.is_above else "below"
        claimed = {"label": self.label, "claimed": direction, "bound": self.bound, "verdict": self.verdict}
        return claimed | self.estimate.to_dict()


def combined(parts: Sequence[Part]) -> Verdict:
    """A claim holds when all its parts do, does not when one does not; nothing is shown of nothing."""
    verdicts = {part.verdict for part in parts}
    if "does not" in verdicts:
        return "does not"
    return "holds" if verdicts == {"holds"} else "not shown"


def bootstrap(sums: ArrayLike, statistic: Statistic, *, seed: int = 0, num_resamples: int = NUM_RESAMPLES) -> Estimate:
    """Percentile interval of a function of sums over prompts, when prompts, and seeds, are drawn with replacement.

    With several seeds it also spans Student's t interval of what each seed gives alone: three drawn from three are all
    the same one too often for a percentile to reach further than the seeds themselves do.
    sums: [M, N, F…], what each prompt adds under each seed. statistic: [S, F…] totals to [S] values.
    Two or more prompts that added anything are needed for an interval.
    """
    values = np.asarray(sums, dtype=np.float64)
    value = float(statistic(values.sum(axis=(0, 1))[None])[0])
    by_seed = tuple(statistic(values.sum(axis=1)).tolist()) if len(values) > 1 else ()
    rests_on = _num_shown(values), len(values)
    if rests_on[0] < 2:
        return Estimate(value, None, None, by_seed, rests_on)
    found = _interval(value, statistic(_drawn_totals(values, num_resamples, seed)))
    if by_seed and found.low is not None and found.high is not None:
        alone = mean_estimate(by_seed)
        if alone.low is None or alone.high is None:
            return Estimate(value, None, None, by_seed, rests_on)
        return Estimate(value, min(found.low, alone.low), max(found.high, alone.high), by_seed, rests_on)
    return Estimate(value, found.low, found.high, by_seed, rests_on)


def noise_free_share(sums: ArrayLike, squares: Statistic, *, bound: float, seed: int = 0) -> Estimate:
    """How much of a squared error is left, without what a finite sample adds to squares.

    Noise adds to both what is left and what there was, and drawing the prompts again adds as much once more. So what
    the resamples lie above the sample is taken off it (basic bootstrap interval; Davison and Hinkley 1997, 5.2). The
    interval is of the first less `bound` times the second, the sign of which is what is judged, over what there was.
    sums: [1, N, F…]. squares: [S, F…] totals to [S, 2], what is left and what there was. The value is NaN, without an
    interval, where nothing but noise was there.
    """
    values = np.asarray(sums, dtype=np.float64)
    rests_on = _num_shown(values), len(values)
    own, drawn = squares(values.sum(axis=(0, 1))[None])[0], squares(_drawn_totals(values, NUM_RESAMPLES, seed))
    left, there_was = 2 * own - drawn.mean(axis=0)
    if not there_was > 0 or rests_on[0] < 2:
        return Estimate(float("nan"), None, None, rests_on=rests_on)
    weights = np.array([1.0, -bound])
    contrast = _interval(0.0, 2 * float(own @ weights) - drawn @ weights)
    low, high = (None if end is None else max(0.0, bound + end / there_was) for end in (contrast.low, contrast.high))
    return Estimate(left / there_was, low, high, rests_on=rests_on)


def bootstrap_medians(samples: ArrayLike, statistic: Statistic, *, seed: int = 0) -> Estimate:
    """Percentile interval of a function of medians over sweeps, when whole sweeps are drawn with replacement.

    samples: [N, F], N sweeps in which everything was measured once. statistic: [S, F] medians to [S] values.
    """
    values = np.asarray(samples, dtype=np.float64)
    value = float(statistic(np.median(values, axis=0)[None])[0])
    if len(values) < 5:
        return Estimate(value, None, None)
    drawn = np.random.default_rng(seed).integers(len(values), size=(NUM_RESAMPLES, len(values)))
    return _interval(value, statistic(np.median(values[drawn], axis=1)))


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Ratio of two ways' figures over repeats in which both were measured: Student's t on the mean of log ratios.

    So few repeats as there are do not carry a bootstrap; one alone has no interval.
    """
    logs = np.log(np.asarray(numerators, dtype=np.float64) / np.asarray(denominators, dtype=np.float64))
    return _exponent(mean_estimate(logs))


def mean_estimate(values: ArrayLike) -> Estimate:
    """Mean of repeats with Student's t interval."""
    found = np.asarray(values, dtype=np.float64)
    mean = float(found.mean())
    if len(found) < 2 or not np.isfinite(mean):
        return Estimate(mean, None, None)
    reach = t_quantile(len(found) - 1) * float(found.std(ddof=1)) / len(found) ** 0.5
    return Estimate(mean, mean - reach, mean + reach)


def t_quantile(degrees: int) -> float:
    """Two-sided 95 % quantile; beyond the table by Cornish and Fisher's expansion, good to 0.001 there."""
    if degrees <= len(T_QUANTILES):
        return T_QUANTILES[degrees - 1]
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3


def ratio(numerator: Floats, denominator: Floats) -> Floats:
    """Elementwise, NaN where there is nothing to divide by."""
    safe = np.where(denominator == 0, np.nan, denominator)
    return np.asarray(numerator / safe, dtype=np.float64)


def _num_shown(values: Floats) -> int:
    """Prompts that added anything under any seed. values: [M, N, F…]."""
    return int(np.count_nonzero(np.abs(values).reshape(*values.shape[:2], -1).sum(axis=(0, 2))))


def _drawn_totals(values: Floats, num_resamples: int, seed: int) -> Floats:
    """[S, F…] sums of resamples. values: [M, N, F…]."""
    num_seeds, num_prompts = values.shape[:2]
    prompts, seeds = _weights(num_prompts, num_seeds, num_resamples, seed)
    drawn = np.tensordot(prompts, values, axes=(1, 1))  # [S, M, F…]
    return np.asarray((drawn * seeds.reshape(*seeds.shape, *[1] * (drawn.ndim - 2))).sum(axis=1))


@lru_cache(maxsize=8)
def _weights(num_prompts: int, num_seeds: int, num_resamples: int, seed: int) -> tuple[Floats, Floats]:
    """[S, N] and [S, M], how often each prompt and each seed was drawn; a single seed is taken as it is."""
    generator = np.random.default_rng(seed)

    def draws(number: int) -> Floats:
        return generator.multinomial(number, np.full(number, 1 / number), size=num_resamples).astype(np.float64)

    prompts = draws(num_prompts)
    return prompts, draws(num_seeds) if num_seeds > 1 else np.ones((num_resamples, 1))


def _interval(value: float, resampled: Floats) -> Estimate:
    defined = resampled[np.isfinite(resampled)]
    if len(defined) < (1 - MOST_UNDEFINED) * len(resampled):
        return Estimate(value, None, None)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(defined, [tail, 1 - tail]).tolist()
    return Estimate(value, low, high)


def _exponent(estimate: Estimate) -> Estimate:
    low, high = (None if end is None else float(np.exp(end)) for end in (estimate.low, estimate.high))
    return Estimate(float(np.exp(estimate.value)), low, high)
