"""The live window against the calibrate job's own figures over the same rounds."""

import numpy as np
import pytest

from dspark.speculation.calibration import SlotScales
from dspark.speculation.calibration_error import ece_floor, expected_calibration_error
from dspark.speculation.calibration_fit import position_report
from dspark.traffic.live_error import ConfidenceWindow, expected_floor

BLOCK = 4


def rounds(number: int, *, scale: float = 1.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits `scale` times as far from 0 as acceptance has them, of proposals cut at random."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(1.0, 1.5, (number, BLOCK))
    stands = rng.random((number, BLOCK)) < 1 / (1 + np.exp(-logits))
    judged = rng.integers(1, BLOCK + 1, number)
    accepted = np.minimum(np.cumprod(stands, axis=1).sum(axis=1), judged)
    return (logits * scale).astype(np.float32), accepted, judged


def filled(window_rounds: int, columns: tuple[np.ndarray, np.ndarray, np.ndarray]) -> ConfidenceWindow:
    window = ConfidenceWindow(BLOCK, window_rounds)
    for row, accepted, judged in zip(*columns, strict=True):
        window.add(row[:judged].tolist(), int(accepted), int(judged))
    return window


@pytest.mark.parametrize("scales", [None, SlotScales((2.0, 1.5, 1.0, 0.5), (0.1, 0.0, -0.2, 0.0))])
def test_errors_are_those_of_the_newest_rounds(scales: SlotScales | None) -> None:
    columns = rounds(900)
    newest = tuple(column[-500:] for column in columns)
    found = filled(500, columns).errors(scales)
    report = position_report(*newest, scales or SlotScales((1.0,) * BLOCK, (0.0,) * BLOCK))
    assert len(found) == BLOCK
    for slot, entry in zip(found, report, strict=True):
        assert slot.num_rounds == entry["n"]
        assert slot.ece == pytest.approx(entry["ece_after"], abs=1e-9)
        assert slot.stood == pytest.approx(entry["survival"])
        assert slot.floor == pytest.approx(entry["ece_floor"], rel=0.15)  # which is the mean of fifty draws


def test_stretched_confidences_show_and_their_temperature_cures_them() -> None:
    window = filled(4000, rounds(4000, scale=3.0))
    stretched = window.errors(None)
    cured = window.errors(SlotScales((3.0,) * BLOCK, (0.0,) * BLOCK))
    assert all(slot.ece > 0.08 > 3 * slot.floor for slot in stretched[:2])
    assert all(slot.ece < 2 * slot.floor for slot in cured)


def test_the_floor_by_formula_is_the_one_by_drawing() -> None:
    rng = np.random.default_rng(3)
    for number in (300, 3000):
        predicted = rng.beta(2, 1, number)
        assert expected_floor(predicted) == pytest.approx(ece_floor(predicted, num_draws=300), rel=0.06)


def test_what_is_not_finite_says_nothing_and_an_empty_window_has_no_slots() -> None:
    window = ConfidenceWindow(BLOCK, 300)
    window.add([float("nan"), 1.0], 1, 2)
    assert (window.num_seen, window.errors(None)) == (0, [])
    window.add([2.0], 1, 1)
    (slot,) = window.errors(None)
    assert slot.ece == pytest.approx(expected_calibration_error([1 / (1 + np.exp(-2.0))], [1]))
