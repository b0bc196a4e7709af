"""Every measure of calibration equals its definition."""

import numpy as np
import pytest

from dspark.speculation.calibration_error import auroc, brier, ece_floor, expected_calibration_error


def ece_slowly(predicted: list[float], accepted: list[int], num_bins: int) -> float:
    total = 0.0
    for b in range(num_bins):
        inside = [
            (p, y)
            for p, y in zip(predicted, accepted, strict=True)
            if b <= p * num_bins < b + 1 or (b == num_bins - 1 and p == 1)
        ]
        if inside:
            confidence = sum(p for p, _ in inside) / len(inside)
            accuracy = sum(y for _, y in inside) / len(inside)
            total += len(inside) / len(predicted) * abs(confidence - accuracy)
    return total


def auroc_slowly(predicted: list[float], accepted: list[int]) -> float:
    """Every accepted round against every rejected one."""
    above = [p for p, y in zip(predicted, accepted, strict=True) if y]
    below = [p for p, y in zip(predicted, accepted, strict=True) if not y]
    return sum((a > b) + 0.5 * (a == b) for a in above for b in below) / (len(above) * len(below))


def test_measures_equal_hand_calculations() -> None:
    predicted, accepted = [0.9, 0.8, 0.3, 0.3], [1, 0, 0, 1]
    # bins of a half: {0.3, 0.3} -> 0.3 said, 0.5 seen; {0.9, 0.8} -> 0.85 said, 0.5 seen
    assert expected_calibration_error(predicted, accepted, 2) == pytest.approx(0.5 * 0.2 + 0.5 * 0.35)
    assert brier(predicted, accepted) == pytest.approx((0.01 + 0.64 + 0.09 + 0.49) / 4)
    assert auroc(predicted, accepted) == pytest.approx((1 + 1 + 0 + 0.5) / 4)


@pytest.mark.parametrize("seed", range(5))
def test_measures_equal_their_slow_twins_with_ties_and_at_the_ends(seed: int) -> None:
    rng = np.random.default_rng(seed)
    predicted = np.round(rng.random(300), 2)
    predicted[:4] = [0.0, 1.0, 1.0, 0.5]
    accepted = (rng.random(300) < predicted**2).astype(int)
    for num_bins in (1, 8, 15, 20):
        expected = ece_slowly(predicted.tolist(), accepted.tolist(), num_bins)
        assert expected_calibration_error(predicted, accepted, num_bins) == pytest.approx(expected)
    assert auroc(predicted, accepted) == pytest.approx(auroc_slowly(predicted.tolist(), accepted.tolist()))


@pytest.mark.parametrize("accepted", [[1, 1], [0, 0]])
def test_one_kind_of_outcome_has_no_auroc(accepted: list[int]) -> None:
    assert auroc([0.2, 0.8], accepted) is None


def test_the_floor_is_what_a_calibrated_predictor_shows_and_shrinks_with_the_sample() -> None:
    rng = np.random.default_rng(1)
    predicted = rng.random(4000)
    shown = [expected_calibration_error(predicted, rng.random(4000) < predicted) for _ in range(50)]
    assert ece_floor(predicted, 20, 0) == pytest.approx(float(np.mean(shown)), rel=0.1)
    assert ece_floor(predicted[:400]) > 2 * ece_floor(predicted)
    assert ece_floor(predicted, 20, 3) == ece_floor(predicted, 20, 3)


def test_certain_predictions_have_no_floor() -> None:
    assert ece_floor([0.0, 1.0, 1.0]) == 0.0
