"""Fitted scales are the true ones where these are known, and lower the error where they can."""

import numpy as np
import pytest

from dspark.speculation.calibration import SlotScales, calibrated_survival
from dspark.speculation.calibration_error import expected_calibration_error
from dspark.speculation.calibration_fit import fit_sts, position_report

Rounds = tuple[np.ndarray, np.ndarray, np.ndarray]
TRUE_TEMPERATURES = (2.5, 0.5, 1.6, 1.0)
TRUE_SHIFTS = (-0.7, 0.5, 0.0, -1.0)
UNSCALED = SlotScales((1.0,) * 3, (0.0,) * 3)


def synthetic_rounds(
    num_rounds: int,
    temperatures: tuple[float, ...],
    shifts: tuple[float, ...] | float = 0.0,
    *,
    mean: float = 2.0,
    spread: float = 1.5,
    seed: int = 0,
) -> Rounds:
    """logits [N, K], num_accepted [N], num_judged [N]: slot k stands with chance sigmoid(logit_k / T_k + b_k).

    mean, spread: of the true logits.
    """
    rng = np.random.default_rng(seed)
    true_logits = rng.normal(mean, spread, size=(num_rounds, len(temperatures)))
    stands = rng.random(true_logits.shape) < 1 / (1 + np.exp(-true_logits))
    num_accepted = stands.cumprod(axis=1).sum(axis=1)
    logits = (true_logits - np.array(shifts)) * np.array(temperatures)
    return logits, num_accepted, np.full(num_rounds, len(temperatures))


@pytest.fixture(scope="module")
def rounds() -> Rounds:
    return synthetic_rounds(20_000, TRUE_TEMPERATURES)


@pytest.fixture(scope="module")
def plain(rounds: Rounds) -> SlotScales:
    return fit_sts(*rounds, with_shift=False)


@pytest.fixture(scope="module")
def shifted_rounds() -> Rounds:
    return synthetic_rounds(20_000, TRUE_TEMPERATURES, TRUE_SHIFTS)


@pytest.fixture(scope="module")
def shifted(shifted_rounds: Rounds) -> SlotScales:
    return fit_sts(*shifted_rounds, with_shift=True)


# Temperatures alone


def test_known_temperatures_are_recovered_without_shifts(plain: SlotScales) -> None:
    assert plain.temperatures == pytest.approx(TRUE_TEMPERATURES, rel=0.2)
    assert plain.shifts == (0.0,) * 4


def test_scaling_lowers_the_error_of_every_position_it_had_to_change_to_near_the_floor(
    rounds: Rounds, plain: SlotScales
) -> None:
    report = position_report(*rounds, plain)
    assert [entry["position"] for entry in report] == [1, 2, 3, 4]
    for entry in report:
        assert entry["is_fitted"]
        assert entry["ece_after"] <= entry["ece_before"]
        assert entry["ece_after"] < 2 * entry["ece_floor"]
        assert entry["brier_after"] <= entry["brier_before"]
    assert report[0]["ece_before"] > 5 * report[0]["ece_after"]
    assert report[0]["auroc_after"] == pytest.approx(report[0]["auroc_before"])  # one temperature keeps the order


def test_temperatures_hold_on_rounds_they_were_not_fitted_on(plain: SlotScales) -> None:
    for entry in position_report(*synthetic_rounds(20_000, TRUE_TEMPERATURES, seed=9), plain):
        assert entry["ece_after"] <= entry["ece_before"]


@pytest.mark.parametrize("with_shift", [False, True])
def test_calibrated_confidences_are_left_nearly_alone(with_shift: bool) -> None:
    scales = fit_sts(*synthetic_rounds(20_000, (1.0, 1.0)), with_shift=with_shift)
    assert scales.temperatures == pytest.approx((1.0, 1.0), rel=0.15)
    assert scales.shifts == pytest.approx((0.0, 0.0), abs=0.15)


def test_the_first_temperature_is_the_best_of_the_whole_grid(rounds: Rounds, plain: SlotScales) -> None:
    logits, num_accepted, _ = rounds

    def error(temperature: float) -> float:
        predicted = calibrated_survival(logits[:, :1], SlotScales((temperature,), (0.0,)))[:, 0].tolist()
        return expected_calibration_error(predicted, num_accepted > 0, 20)

    assert error(plain.temperatures[0]) <= min(error(temperature) for temperature in np.logspace(-1, 1, 21)) + 1e-12


def test_a_slot_is_fitted_on_the_rounds_that_judged_it_alone(shifted_rounds: Rounds, shifted: SlotScales) -> None:
    """Undecided slots hold no logits at all here; a fit that read them would see other numbers."""
    logits, num_accepted, num_judged = (array.copy() for array in shifted_rounds)
    logits, num_accepted = np.vstack([logits, logits[:3000]]), np.append(num_accepted, num_accepted[:3000])
    num_judged = np.append(num_judged, np.zeros(3000, dtype=int))
    logits[len(shifted_rounds[0]) :] = np.nan
    assert fit_sts(logits, num_accepted, num_judged, with_shift=True) == shifted


# With shifts


def test_known_temperatures_and_shifts_are_recovered(shifted: SlotScales) -> None:
    assert shifted.temperatures == pytest.approx(TRUE_TEMPERATURES, rel=0.15)
    assert shifted.shifts == pytest.approx(TRUE_SHIFTS, abs=0.15)


def test_narrow_confidences_are_not_flattened_to_their_mean() -> None:
    """By ECE alone T ends at 10 here: when the mean is right, confidences that are all the same have no error."""
    rounds = synthetic_rounds(20_000, TRUE_TEMPERATURES, TRUE_SHIFTS, mean=-0.5, spread=0.8)
    assert fit_sts(*rounds, with_shift=True).temperatures == pytest.approx(TRUE_TEMPERATURES, rel=0.3)


def test_an_offset_that_no_temperature_repairs_is_gone_with_shifts() -> None:
    rounds = synthetic_rounds(20_000, (1.0,) * 3, -1.0, mean=0.0)
    others = synthetic_rounds(20_000, (1.0,) * 3, -1.0, mean=0.0, seed=1)
    plain, shifted = (fit_sts(*rounds, with_shift=with_shift) for with_shift in (False, True))
    for without, entry in zip(position_report(*others, plain), position_report(*others, shifted), strict=True):
        assert entry["ece_after"] <= min(entry["ece_before"], without["ece_after"])
        assert entry["ece_after"] < 2 * entry["ece_floor"]
    assert position_report(*others, plain)[0]["ece_after"] > 0.05


def test_the_mean_survival_of_every_position_is_the_share_that_stood(
    shifted_rounds: Rounds, shifted: SlotScales
) -> None:
    logits, num_accepted, _ = shifted_rounds
    shares = [np.mean(num_accepted > k) for k in range(4)]
    assert calibrated_survival(logits, shifted).mean(0).tolist() == pytest.approx(shares, abs=1e-6)


def test_a_slot_where_hardly_anything_stood_keeps_the_temperature_before_it_and_gets_its_shift() -> None:
    logits, num_accepted, num_judged = synthetic_rounds(2000, (2.0, 0.5, 0.5))
    num_accepted = np.minimum(num_accepted, np.where(np.arange(2000) < 19, 2, 1))
    scales = fit_sts(logits, num_accepted, num_judged, with_shift=True)
    assert scales.temperatures[0] == scales.temperatures[1] == scales.temperatures[2]
    survival = calibrated_survival(logits, scales).mean(0)
    assert survival[1].item() == pytest.approx(np.mean(num_accepted > 1), abs=1e-6)
    assert -10 < scales.shifts[1] < scales.shifts[0]


@pytest.mark.parametrize("accepted", [0, 3])
def test_shifts_stay_finite_where_nothing_or_everything_stood(accepted: int) -> None:
    logits, _, num_judged = synthetic_rounds(1000, (1.0,) * 3)
    scales = fit_sts(logits, np.full(1000, accepted), num_judged, with_shift=True)
    survival = calibrated_survival(logits, scales)
    assert all(abs(shift) <= 10 for shift in scales.shifts)
    assert abs(survival[:, 0].mean() - accepted / 3) < 1e-3


# Rounds


def test_a_stop_inside_the_block_judges_what_it_committed() -> None:
    logits = np.zeros((4, 3))
    report = position_report(logits, [3, 1, 0, 3], [2, 3, 3, 3], UNSCALED, min_rounds=4)
    assert [entry["n"] for entry in report] == [4, 4, 3]
    assert [entry["survival"] for entry in report] == [0.75, 0.5, pytest.approx(1 / 3)]
    assert [entry["is_fitted"] for entry in report] == [True, True, False]


@pytest.mark.parametrize("with_shift", [False, True])
def test_a_slot_seen_too_rarely_keeps_the_scales_before_it_and_is_reported(rounds: Rounds, with_shift: bool) -> None:
    logits, num_accepted, num_judged = rounds
    num_judged = np.where(np.arange(len(logits)) < 199, num_judged, 2)
    scales = fit_sts(logits, num_accepted, num_judged, with_shift=with_shift)
    for values in (scales.temperatures, scales.shifts):
        assert values[2] == values[3] == values[1]
    report = position_report(logits, num_accepted, num_judged, scales)
    assert [entry["is_fitted"] for entry in report] == [True, True, False, False]
    few = fit_sts(logits[:50], num_accepted[:50], num_judged[:50], with_shift=with_shift)
    assert few == SlotScales((1.0,) * 4, (0.0,) * 4)


def test_a_position_nobody_judged_is_reported_without_figures() -> None:
    first, second = position_report(np.zeros((2, 2)), [1, 0], [1, 1], UNSCALED)
    assert first["ece_before"] == 0.0
    assert second["n"] == 0
    assert all(second[f"{name}_after"] is None for name in ("ece", "auroc", "brier"))


@pytest.mark.parametrize(
    ("rounds", "message"),
    [
        ((np.zeros((2, 3)), [1], [3, 3]), "do not belong together"),
        ((np.zeros((2, 3)), [1, 4], [3, 3]), r"0\.\.3"),
        ((np.full((2, 3), np.nan), [1, 1], [3, 3]), "not finite"),
    ],
)
def test_rounds_that_do_not_fit_together_are_refused(rounds: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_sts(*rounds, with_shift=True)
