"""Scaled confidences are what the formula says, and survive their file."""

import math

import pytest
import torch

from dspark.errors import Mismatch
from dspark.provenance import read_json, write_json
from dspark.speculation.calibration import MODES, Calibration, SlotScales, calibrated_survival, survival_of

# Survival


def test_survival_is_the_running_product_of_scaled_and_shifted_confidences() -> None:
    logits, temperatures, shifts = [[1.0, -2.0, 0.5], [0.0, 4.0, 4.0]], (2.0, 0.5, 1.0), (-0.7, 0.0, 1.5)
    survival = calibrated_survival(torch.tensor(logits), SlotScales(temperatures, shifts))
    for row, got in zip(logits, survival.tolist(), strict=True):
        confidences = [1 / (1 + math.exp(-(x / t + b))) for x, t, b in zip(row, temperatures, shifts, strict=True)]
        assert got == pytest.approx([math.prod(confidences[: k + 1]) for k in range(3)])


def test_without_scales_confidences_are_left_as_they_are() -> None:
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        calibrated_survival(logits, None), calibrated_survival(logits, SlotScales((1.0,) * 3, (0.0,) * 3))
    )


def test_a_shorter_proposal_uses_the_first_scales_and_a_longer_one_is_refused() -> None:
    scales = SlotScales((2.0, 3.0, 4.0), (0.5, -0.5, 1.0))
    whole = calibrated_survival([1.0, 2.0, 3.0], scales)
    assert torch.equal(calibrated_survival([1.0, 2.0], scales), whole[:2])
    assert calibrated_survival(torch.empty(0), scales).tolist() == []
    with pytest.raises(ValueError, match="3 slots but 2 temperatures"):
        calibrated_survival([1.0, 2.0, 3.0], SlotScales((2.0, 3.0), (0.0, 0.0)))


def test_survival_never_rises_even_for_huge_logits() -> None:
    survival = calibrated_survival(torch.tensor([800.0, 900.0, -800.0, 5.0]), None)
    assert survival.tolist() == pytest.approx([1.0, 1.0, 0.0, 0.0])


# The file

GREEDY, SAMPLED = SlotScales((1.5, 0.8), (-0.5, 0.25)), SlotScales((1.1, 1.2), (0.0, -2.0))
CALIBRATION = Calibration({"greedy": GREEDY, "sampled": SAMPLED}, "abc", {"domain": "math", "rounds": 900})


def test_a_calibration_survives_its_file(tmp_path) -> None:
    path = tmp_path / "calibration.json"
    CALIBRATION.save(path)
    assert Calibration.load(path) == Calibration.load(path, drafter_sha256="abc") == CALIBRATION
    assert read_json(path)["temperatures"]["greedy"] == [1.5, 0.8]
    assert read_json(path)["shifts"] == {"greedy": [-0.5, 0.25], "sampled": [0.0, -2.0]}


def test_a_file_from_before_there_were_shifts_is_read_as_having_none(tmp_path) -> None:
    path = tmp_path / "calibration.json"
    write_json(path, {"temperatures": {"greedy": [1.5, 0.8]}, "drafter_sha256": "abc", "fitted_on": {}})
    assert Calibration.load(path).scales == {"greedy": SlotScales((1.5, 0.8), (0.0, 0.0))}


def test_each_mode_of_decoding_has_its_own_scales() -> None:
    assert CALIBRATION.for_mode("greedy") == GREEDY
    assert CALIBRATION.for_mode("sampled") == SAMPLED
    assert Calibration({"greedy": GREEDY}).for_mode("sampled") is None


def test_seeded_decoding_goes_by_the_scales_of_sampled_decoding_where_it_has_none() -> None:
    seeded = SlotScales((1.0, 1.0), (-0.9, -1.1))
    assert Calibration(CALIBRATION.scales | {"seeded": seeded}).for_mode("seeded") == seeded
    assert CALIBRATION.for_mode("seeded") == SAMPLED
    assert Calibration({"greedy": GREEDY}).for_mode("seeded") is None


def test_a_drafter_without_a_file_is_left_as_it_is(tmp_path) -> None:
    calibration = Calibration.load(tmp_path / "calibration.json", drafter_sha256="abc")
    assert [calibration.for_mode(mode) for mode in MODES] == [None, None, None]


@pytest.mark.parametrize("fitted_for", ["abc", None])
def test_another_drafters_scales_are_refused_by_name(tmp_path, fitted_for: str | None) -> None:
    path = tmp_path / "calibration.json"
    Calibration({"greedy": GREEDY}, fitted_for).save(path)
    with pytest.raises(Mismatch, match=rf"drafter_sha256 is {fitted_for!r} but 'xyz' is asked for; run jobs/calibrate"):
        Calibration.load(path, drafter_sha256="xyz")


@pytest.mark.parametrize(
    ("temperatures", "shifts"),
    [
        ((), ()),
        ((0.0,), (0.0,)),
        ((-1.0,), (0.0,)),
        ((math.inf,), (0.0,)),
        ((1.0,), (math.nan,)),
        ((1.0, 1.0), (0.0,)),
    ],
)
def test_scales_that_cannot_be_are_refused(temperatures: tuple[float, ...], shifts: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"temperatures are \[.*each slot needs"):
        SlotScales(temperatures, shifts)


def test_scales_of_a_mode_that_is_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="the mode 'greddy'; modes are greedy, sampled, seeded"):
        Calibration({"greddy": GREEDY})


@pytest.mark.parametrize(
    "content", [[], {"temperatures": {}}, {"temperatures": [1.0]}, {"temperatures": {"greedy": [1.0]}, "shifts": {}}]
)
def test_a_broken_file_is_named(tmp_path, content: object) -> None:
    path = tmp_path / "calibration.json"
    write_json(path, content)
    with pytest.raises(ValueError, match=r"calibration\.json: not a calibration"):
        Calibration.load(path)


@pytest.mark.parametrize("scales", [None, SlotScales((0.5, 1.0, 2.0), (-1.0, 0.0, 1.0))])
@pytest.mark.parametrize("num_slots", [0, 1, 3])
def test_one_by_one_survival_equals_that_of_tensors(scales: SlotScales | None, num_slots: int) -> None:
    for seed in range(20):
        logits = 5 * torch.randn(num_slots, generator=torch.Generator().manual_seed(seed))
        expected = calibrated_survival(logits, scales).tolist()
        assert survival_of(logits.tolist(), scales) == pytest.approx(expected, rel=1e-12)
    assert survival_of([-math.inf, 3.0], None)[0] == pytest.approx(0.0, abs=1e-300)
    with pytest.raises(ValueError, match="4 slots but 3 temperatures"):
        survival_of([0.0] * 4, SlotScales((1.0,) * 3, (0.0,) * 3))
