"""Tables of measured seconds by size: checked, made from samples, and read between and beyond their points."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray


def interpolated(
    at: NDArray[Any] | np.float64, points: tuple[int, ...], values: tuple[float, ...]
) -> NDArray[np.float64]:
    """Straight between the points, the first value below them, the last slope beyond."""
    beyond = np.maximum(at - points[-1], 0.0)
    return np.asarray(np.interp(at, points, values) + _last_slope(points, values) * beyond)


def _last_slope(points: tuple[int, ...], values: tuple[float, ...]) -> float:
    """Rise per unit at the table's end. Points pooled with the last one are passed over: their slope of 0 is noise."""
    lower = bisect_left(values, values[-1])
    return (values[-1] - values[lower - 1]) / (points[-1] - points[lower - 1]) if lower else 0.0


def medians(name: str, samples: Mapping[int, Sequence[float]]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Sizes ascending, and the median seconds at each."""
    for size, seconds in samples.items():
        if not seconds or not all(math.isfinite(second) and second > 0 for second in seconds):
            raise ValueError(f"{name} samples at {size} are {list(seconds)}; every size needs positive seconds")
    sizes = sorted(samples)
    return tuple(sizes), tuple(float(median(samples[size])) for size in sizes)


def check_table(sizes_name: str, sizes: Sequence[int], seconds_name: str, seconds: Sequence[float]) -> None:
    """Raises: ValueError naming what is no table of positive, non-decreasing seconds by ascending sizes."""
    check_sizes(sizes_name, sizes)
    if len(sizes) != len(seconds):
        raise ValueError(f"{sizes_name} has {len(sizes)} entries and {seconds_name} {len(seconds)}; give one for each")
    if not all(math.isfinite(second) and second > 0 for second in seconds):
        raise ValueError(f"{seconds_name} is {list(seconds)}; every entry must be a positive number of seconds")
    if list(seconds) != sorted(seconds):
        raise ValueError(f"{seconds_name} is {list(seconds)}, which falls; CostCurve.measured makes it non-decreasing")


def check_sizes(name: str, sizes: Sequence[int]) -> None:
    """Raises: ValueError where they do not ascend from 1 or more."""
    ascending = all(left < right for left, right in pairwise(sizes))
    if not ascending or (sizes and sizes[0] < 1):
        raise ValueError(f"{name} is {list(sizes)}; it must ascend from 1 or more, each size once")
