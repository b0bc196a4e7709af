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

    by_seed: the value of each seed's training alone, where there are several.
    """

    value: float
    low: float | None
    high: float | None
    by_seed: tuple[float, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {"value": self.value, "low": self.low, "high": self.high, "by_seed": list(self.by_seed)}


@dataclass(frozen=True)
class Part:
    """One comparison that a claim is made of: that a value is above a bound, or below it."""

    label: str
    estimate: Estimate
    bound: float
    is_above: bool = True

    @property
    def verdict(self) -> Verdict:
        """Decided by the whole interval, and with several seeds by every one of them."""
        low, high = self.estimate.low, self.estimate.high
        if low is None or high is None:
            return "not shown"
        seeds = self.estimate.by_seed or (self.estimate.value,)
        sides = ((low, min(seeds)), (high, max(seeds)))
        over, under = (all(end > self.bound for end in sides[0]), all(end < self.bound for end in sides[1]))
        if over:
            return "holds" if self.is_above else "does not"
        if under:
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

    sums: [M, N, F…], what each prompt adds under each seed. statistic: [S, F…] totals to [S] values.
    Two or more prompts that added anything are needed for an interval.
    """
    values = np.asarray(sums, dtype=np.float64)
    num_seeds, num_prompts = values.shape[:2]
    value = float(statistic(values.sum(axis=(0, 1))[None])[0])
    by_seed = tuple(statistic(values.sum(axis=1)).tolist()) if num_seeds > 1 else ()
    if np.count_nonzero(np.abs(values).reshape(num_seeds, num_prompts, -1).sum(axis=(0, 2))) < 2:
        return Estimate(value, None, None, by_seed)
    prompts, seeds = _weights(num_prompts, num_seeds, num_resamples, seed)
    drawn = np.tensordot(prompts, values, axes=(1, 1))  # [S, M, F…]
    totals = (drawn * seeds.reshape(*seeds.shape, *[1] * (drawn.ndim - 2))).sum(axis=1)
    return _interval(value, statistic(totals), by_seed)


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
    if len(found) < 2:
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


@lru_cache(maxsize=8)
def _weights(num_prompts: int, num_seeds: int, num_resamples: int, seed: int) -> tuple[Floats, Floats]:
    """[S, N] and [S, M], how often each prompt and each seed was drawn; a single seed is taken as it is."""
    generator = np.random.default_rng(seed)

    def draws(number: int) -> Floats:
        return generator.multinomial(number, np.full(number, 1 / number), size=num_resamples).astype(np.float64)

    prompts = draws(num_prompts)
    return prompts, draws(num_seeds) if num_seeds > 1 else np.ones((num_resamples, 1))


def _interval(value: float, resampled: Floats, by_seed: tuple[float, ...] = ()) -> Estimate:
    defined = resampled[np.isfinite(resampled)]
    if len(defined) < (1 - MOST_UNDEFINED) * len(resampled):
        return Estimate(value, None, None, by_seed)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(defined, [tail, 1 - tail]).tolist()
    return Estimate(value, low, high, by_seed)


def _exponent(estimate: Estimate) -> Estimate:
    low, high = (None if end is None else float(np.exp(end)) for end in (estimate.low, estimate.high))
    return Estimate(float(np.exp(estimate.value)), low, high)
