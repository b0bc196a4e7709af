"""Simulated expectations are the engine's own, request by request."""

import itertools

import numpy as np
import pytest

from dspark.engine.estimates import AcceptanceEstimate, ConfidenceDrift, PriorEstimate
from dspark.evaluation.simulated_estimates import Estimates

ROW = np.array([0])


def block(rng: np.random.Generator) -> list[float]:
    return list(itertools.accumulate(rng.uniform(0.2, 1.0, 4).tolist(), lambda a, c: a * c))


@pytest.mark.parametrize("seed", range(5))
def test_expected_survival_equals_the_engines_after_any_rounds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ours, prior = Estimates(1, 2, 4), PriorEstimate()
    theirs = [AcceptanceEstimate(prior) for _ in range(2)]
    for _ in range(12):
        rows = [block(rng) for _ in range(2)]
        widths = rng.integers(0, 5, 2)
        is_drafted = np.arange(4) < widths[:, None]
        ours.observe(ROW, np.where(is_drafted, rows, 0.0)[None], is_drafted[None])
        for estimate, row, width in zip(theirs, rows, widths, strict=True):
            estimate.observe(row[:width])
        if rng.random() < 0.2:
            theirs[1] = AcceptanceEstimate(prior)
            ours.reset((ROW, np.array([1])))
        assert ours.survival(ROW)[0] == pytest.approx(np.array([estimate.survival(4) for estimate in theirs]))


@pytest.mark.parametrize("seed", range(5))
def test_the_correction_of_confidences_equals_the_engines(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ours, theirs = Estimates(1, 1, 4), ConfidenceDrift()
    for _ in range(30):
        row, length = block(rng), int(rng.integers(0, 5))
        accepted = int(rng.integers(0, length + 1))
        assert ours.corrected(ROW, np.array([[row]]))[0, 0] == pytest.approx(theirs.corrected(row))
        ours.learn(ROW, np.array([[row]]), np.array([[length]]), np.array([[accepted]]))
        theirs.update(row[:length], accepted)
