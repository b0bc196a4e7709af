"""Scaled confidences mean what they say; every measure equals its definition."""

import math

import numpy as np
import pytest
import torch

from dspark.errors import Mismatch
from dspark.provenance import read_json, write_json
from dspark.speculation.calibration import (
    Calibration,
    auroc,
    brier,
    calibrated_survival,
    ece_floor,
    expected_calibration_error,
    fit_sts,
    position_report,
)

Rounds = tuple[np.ndarray, np.ndarray, np.ndarray]
TRUE_TEMPERATURES = (2.5, 0.5, 1.6, 1.0)


def synthetic_rounds(num_rounds: int, temperatures: tuple[float, ...], *, seed: int = 0) -> Rounds:
    """logits [N, K], num_accepted [N], num_judged [N]: slot k stands with chance sigmoid(logit_k / T_k)."""
    rng = np.random.default_rng(seed)
    true_logits = rng.normal(2.0, 1.5, size=(num_rounds, len(temperatures)))
    stands = rng.random(true_logits.shape) < 1 / (1 + np.exp(-true_logits))
    num_accepted = stands.cumprod(axis=1).sum(axis=1)
    return true_logits * np.array(temperatures), num_accepted, np.full(num_rounds, len(temperatures))


@pytest.fixture(scope="module")
def rounds() -> Rounds:
    return synthetic_rounds(20_000, TRUE_TEMPERATURES)


@pytest.fixture(scope="module")
def fitted(rounds: Rounds) -> tuple[float, ...]:
    return fit_sts(*rounds)


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


# Measures


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


# Survival


def test_survival_is_the_running_product_of_scaled_confidences() -> None:
    logits, temperatures = [[1.0, -2.0, 0.5], [0.0, 4.0, 4.0]], (2.0, 0.5, 1.0)
    survival = calibrated_survival(torch.tensor(logits), temperatures)
    for row, got in zip(logits, survival.tolist(), strict=True):
        confidences = [1 / (1 + math.exp(-x / t)) for x, t in zip(row, temperatures, strict=True)]
        assert got == pytest.approx([math.prod(confidences[: k + 1]) for k in range(3)])


def test_without_temperatures_confidences_are_left_as_they_are() -> None:
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(calibrated_survival(logits, None), calibrated_survival(logits, (1.0, 1.0, 1.0)))


def test_a_shorter_proposal_uses_the_first_temperatures_and_a_longer_one_is_refused() -> None:
    whole = calibrated_survival([1.0, 2.0, 3.0], (2.0, 3.0, 4.0))
    assert torch.equal(calibrated_survival([1.0, 2.0], (2.0, 3.0, 4.0)), whole[:2])
    assert calibrated_survival(torch.empty(0), (2.0,)).tolist() == []
    with pytest.raises(ValueError, match="3 slots but 2 temperatures"):
        calibrated_survival([1.0, 2.0, 3.0], (2.0, 3.0))


def test_survival_never_rises_even_for_huge_logits() -> None:
    survival = calibrated_survival(torch.tensor([800.0, 900.0, -800.0, 5.0]), None)
    assert survival.tolist() == pytest.approx([1.0, 1.0, 0.0, 0.0])


# STS


def test_known_temperatures_are_recovered(fitted: tuple[float, ...]) -> None:
    assert fitted == pytest.approx(TRUE_TEMPERATURES, rel=0.2)


def test_scaling_lowers_the_error_of_every_position_it_had_to_change_to_near_the_floor(
    rounds: Rounds, fitted: tuple[float, ...]
) -> None:
    report = position_report(*rounds, fitted)
    assert [entry["position"] for entry in report] == [1, 2, 3, 4]
    for entry in report:
        assert entry["is_fitted"]
        assert entry["ece_after"] <= entry["ece_before"]
        assert entry["ece_after"] < 2 * entry["ece_floor"]
        assert entry["brier_after"] <= entry["brier_before"]
    assert report[0]["ece_before"] > 5 * report[0]["ece_after"]
    assert report[0]["auroc_after"] == pytest.approx(report[0]["auroc_before"])  # one temperature keeps the order


def test_temperatures_hold_on_rounds_they_were_not_fitted_on(fitted: tuple[float, ...]) -> None:
    for entry in position_report(*synthetic_rounds(20_000, TRUE_TEMPERATURES, seed=9), fitted):
        assert entry["ece_after"] <= entry["ece_before"]


def test_calibrated_confidences_are_left_nearly_alone() -> None:
    assert fit_sts(*synthetic_rounds(20_000, (1.0, 1.0))) == pytest.approx((1.0, 1.0), rel=0.15)


def test_the_first_temperature_is_the_best_of_the_whole_grid(rounds: Rounds, fitted: tuple[float, ...]) -> None:
    logits, num_accepted, _ = rounds

    def error(temperature: float) -> float:
        predicted = calibrated_survival(logits[:, :1], [temperature])[:, 0].tolist()
        return ece_slowly(predicted, (num_accepted > 0).astype(int).tolist(), 20)

    assert error(fitted[0]) <= min(error(temperature) for temperature in np.logspace(-1, 1, 21)) + 1e-12


def test_a_slot_is_fitted_on_the_rounds_that_judged_it_alone(rounds: Rounds, fitted: tuple[float, ...]) -> None:
    """Undecided slots hold no logits at all here; a fit that read them would see other numbers."""
    logits, num_accepted, num_judged = (array.copy() for array in rounds)
    logits, num_accepted = np.vstack([logits, logits[:3000]]), np.append(num_accepted, num_accepted[:3000])
    num_judged = np.append(num_judged, np.zeros(3000, dtype=int))
    logits[len(rounds[0]) :] = np.nan
    assert fit_sts(logits, num_accepted, num_judged) == fitted


def test_a_stop_inside_the_block_judges_what_it_committed() -> None:
    logits = np.zeros((4, 3))
    report = position_report(logits, [3, 1, 0, 3], [2, 3, 3, 3], (1.0, 1.0, 1.0), min_rounds=4)
    assert [entry["n"] for entry in report] == [4, 4, 3]
    assert [entry["survival"] for entry in report] == [0.75, 0.5, pytest.approx(1 / 3)]
    assert [entry["is_fitted"] for entry in report] == [True, True, False]


def test_a_slot_seen_too_rarely_keeps_the_temperature_before_it_and_is_reported(rounds: Rounds) -> None:
    logits, num_accepted, num_judged = rounds
    num_judged = np.where(np.arange(len(logits)) < 199, num_judged, 2)
    temperatures = fit_sts(logits, num_accepted, num_judged)
    assert temperatures[2] == temperatures[3] == temperatures[1]
    report = position_report(logits, num_accepted, num_judged, temperatures)
    assert [entry["is_fitted"] for entry in report] == [True, True, False, False]
    assert fit_sts(logits[:50], num_accepted[:50], num_judged[:50]) == (1.0, 1.0, 1.0, 1.0)


def test_a_position_nobody_judged_is_reported_without_figures() -> None:
    first, second = position_report(np.zeros((2, 2)), [1, 0], [1, 1], (1.0, 1.0))
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
        fit_sts(*rounds)


# The file

CALIBRATION = Calibration({"greedy": (1.5, 0.8), "sampled": (1.1, 1.2)}, "abc", {"domain": "math", "rounds": 900})


def test_a_calibration_survives_its_file(tmp_path) -> None:
    path = tmp_path / "calibration.json"
    CALIBRATION.save(path)
    assert Calibration.load(path) == Calibration.load(path, drafter_sha256="abc") == CALIBRATION
    assert read_json(path)["temperatures"]["greedy"] == [1.5, 0.8]


def test_each_mode_of_decoding_has_its_own_temperatures() -> None:
    assert CALIBRATION.for_mode(0.0) == (1.5, 0.8)
    assert CALIBRATION.for_mode(0.7) == (1.1, 1.2)
    assert Calibration({"greedy": (2.0,)}).for_mode(1.0) is None


def test_a_drafter_without_a_file_is_left_as_it_is(tmp_path) -> None:
    calibration = Calibration.load(tmp_path / "calibration.json", drafter_sha256="abc")
    assert calibration.for_mode(0.0) is None
    assert calibration.for_mode(1.0) is None


@pytest.mark.parametrize("fitted_for", ["abc", None])
def test_another_drafters_temperatures_are_refused_by_name(tmp_path, fitted_for: str | None) -> None:
    path = tmp_path / "calibration.json"
    Calibration({"greedy": (2.0,)}, fitted_for).save(path)
    with pytest.raises(Mismatch, match=rf"drafter_sha256 is {fitted_for!r} but 'xyz' is asked for; run jobs/calibrate"):
        Calibration.load(path, drafter_sha256="xyz")


@pytest.mark.parametrize("temperatures", [{"greddy": (1.0,)}, {"greedy": ()}, {"greedy": (0.0,)}, {"sampled": (-1.0,)}])
def test_temperatures_that_cannot_be_are_refused(temperatures: dict) -> None:
    with pytest.raises(ValueError, match=r"temperatures|mode"):
        Calibration(temperatures)


@pytest.mark.parametrize("content", [[], {"temperatures": {}}, {"temperatures": [1.0]}])
def test_a_broken_file_is_named(tmp_path, content: object) -> None:
    path = tmp_path / "calibration.json"
    write_json(path, content)
    with pytest.raises(ValueError, match=r"calibration\.json: not a calibration"):
        Calibration.load(path)
