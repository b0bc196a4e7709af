"""SGLang's STS and SPS files: what is written is what its loader takes, and means the same when it is read again."""

import bisect
import json
from typing import Any

import pytest

from dspark.speculation.calibration import Calibration, SlotScales
from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.sglang_tables import (
    calibration_from_sts,
    curve_from_sps,
    lost_shifts,
    sps_content,
    sts_content,
)

FINGERPRINT = {"processor": "here"}
DRAFTING = CostCurve((1, 4, 16, 64), (0.01, 0.011, 0.02, 0.05), (1, 8), (0.002, 0.004), (), FINGERPRINT, 0.0005)
PLAIN = CostCurve((1, 8), (0.01, 0.02), fingerprint=FINGERPRINT, request_s=0.001)
FREE = CostCurve((1, 8), (0.01, 0.02), fingerprint=FINGERPRINT)


def sglang_step_time(content: dict[str, Any], num_reqs: int, budget: int) -> float:
    """Seconds of a step over num_reqs + budget tokens as SGLang's scheduler reads the additive table."""

    def interpolate(probes: list[int], values: list[float], at: float) -> float:
        if at <= probes[0] or at >= probes[-1]:
            return values[0] if at <= probes[0] else values[-1]
        high = bisect.bisect_right(probes, at)
        share = (at - probes[high - 1]) / (probes[high] - probes[high - 1])
        return values[high - 1] + share * (values[high] - values[high - 1])

    alpha = interpolate(content["bs_probes"], content["alpha_seconds"], num_reqs)
    return (
        content["bias_seconds"] + alpha + interpolate(content["m_probes"], content["theta_seconds"], num_reqs + budget)
    )


def seconds(curve: CostCurve, num_reqs: int, budget: int) -> float:
    step = curve.verify_seconds(num_reqs + budget) + (num_reqs - 1) * curve.request_s
    return step + curve.draft_seconds(num_reqs)


@pytest.mark.parametrize("curve", [DRAFTING, PLAIN, FREE], ids=["drafting", "plain", "free"])
def test_sglang_reads_the_same_seconds_at_every_batch_within_the_table(curve):
    content = json.loads(json.dumps(sps_content(curve)))
    back = curve_from_sps(content, fingerprint=FINGERPRINT)
    largest = curve.batch_tokens[-1]
    for num_reqs in range(1, largest + 1):
        for budget in range(largest - num_reqs + 1):
            expected = seconds(curve, num_reqs, budget)
            assert sglang_step_time(content, num_reqs, budget) == pytest.approx(expected, rel=1e-12)
            assert seconds(back, num_reqs, budget) == pytest.approx(expected, rel=1e-12)


def test_an_sps_file_has_the_keys_and_invariants_of_sglangs_loader():
    content = sps_content(DRAFTING)
    assert set(content) == {"bias_seconds", "bs_probes", "alpha_seconds", "m_probes", "theta_seconds"}
    assert content["bias_seconds"] > 0
    for probes, values in (("bs_probes", "alpha_seconds"), ("m_probes", "theta_seconds")):
        assert content[probes] == sorted(set(content[probes]))
        assert len(content[probes]) == len(content[values])


def test_a_curve_without_requests_of_its_own_comes_back_as_it_was():
    assert curve_from_sps(sps_content(PLAIN), fingerprint=FINGERPRINT) == PLAIN


def test_the_plain_table_is_read_too():
    content = {"sample_batch_tokens": [1, 8, 32], "sample_steps_per_sec": [100.0, 50.0, 80.0], "max_batch_tokens": 64}
    curve = curve_from_sps(content, fingerprint=FINGERPRINT)
    assert curve.batch_tokens == (1, 8, 32)
    assert curve.verify_s == pytest.approx((0.01, 0.01625, 0.01625))  # made non-decreasing
    assert curve.fingerprint == FINGERPRINT


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"bias_seconds": 0.1, "bs_probes": [1]},
        {"bias_seconds": 0.1, "bs_probes": [], "alpha_seconds": [], "m_probes": [1], "theta_seconds": [0.0]},
        {"sample_batch_tokens": [1], "sample_steps_per_sec": [0.0], "max_batch_tokens": 1},
    ],
)
def test_what_is_no_sps_file_is_refused(content):
    with pytest.raises(ValueError, match=r"not an SPS file: .* it needs bias_seconds"):
        curve_from_sps(content, fingerprint={})


def test_temperatures_come_back_for_the_mode_they_were_written_for():
    scales = {"greedy": SlotScales((1.5, 0.7), (0.0, 0.0)), "sampled": SlotScales((1.1, 1.2), (0.0, 0.0))}
    fitted_on = {"domains": ["chat", "math"], "rounds": {"greedy": 12, "sampled": 9}}
    calibration = Calibration(scales, "abc", fitted_on)
    for mode in scales:
        content = json.loads(json.dumps(sts_content(calibration, mode)))
        assert set(content) == {"temperatures", "dataset", "num_samples", "ece_before", "ece_after"}
        assert (content["dataset"], content["num_samples"]) == ("chat, math", fitted_on["rounds"][mode])
        back = calibration_from_sts(content, mode=mode, drafter_sha256="abc")
        assert back.scales == {mode: scales[mode]}
        assert back.drafter_sha256 == "abc"
    assert lost_shifts(calibration) is None


def test_lost_shifts_are_named_with_the_remedy():
    scales = {"greedy": SlotScales((1.0,), (0.3,)), "sampled": SlotScales((1.0,), (0.0,))}
    message = lost_shifts(Calibration(scales, "abc"))
    assert message is not None
    assert "shifts of greedy decoding are left out" in message
    assert "jobs/calibrate.py shift=false" in message


@pytest.mark.parametrize("content", [{}, {"temperatures": ["warm"]}, {"temperatures": None}])
def test_what_is_no_sts_file_is_refused(content):
    with pytest.raises(ValueError, match="not an STS file"):
        calibration_from_sts(content, mode="greedy")


def test_a_temperature_of_nothing_is_refused():
    with pytest.raises(ValueError, match="temperature above 0"):
        calibration_from_sts({"temperatures": [1.0, 0.0]}, mode="greedy")
