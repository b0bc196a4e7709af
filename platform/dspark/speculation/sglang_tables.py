"""Calibration and cost curve in SGLang's JSON, written and read: the STS file and the SPS (steps per second) file.

Legend: R requests in a step, B tokens in its batch, anchors included.
Source: SGLang 0.5.23, `--speculative-dspark-confidence-sts-path` and `--speculative-dspark-sps-table-path`.
"""

from collections.abc import Mapping
from typing import Any

from dspark.speculation.calibration import Calibration, SlotScales
from dspark.speculation.cost_curve import CostCurve, isotonic

STS_KEYS = ("temperatures", "dataset", "num_samples", "ece_before", "ece_after")
ADDITIVE_KEYS = ("bias_seconds", "bs_probes", "alpha_seconds", "m_probes", "theta_seconds")
TABLE_KEYS = ("sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens")


def sts_content(calibration: Calibration, mode: str) -> dict[str, Any]:
    """The STS file for one mode of decoding; `lost_shifts` says what it cannot hold.

    Raises: KeyError when the calibration has no such mode.
    """
    fitted_on = calibration.fitted_on
    domains = fitted_on.get("domains") or []
    return {
        "temperatures": list(calibration.scales[mode].temperatures),
        "dataset": ", ".join(map(str, domains)),
        "num_samples": int((fitted_on.get("rounds") or {}).get(mode) or 0),
        "ece_before": [],
        "ece_after": [],
    }


def lost_shifts(calibration: Calibration) -> str | None:
    """What becomes of the shifts, which SGLang has no place for; None when there is nothing to lose."""
    shifted = [mode for mode, scales in calibration.scales.items() if any(scales.shifts)]
    if not shifted:
        return None
    return (
        f"STS files hold temperatures only: the shifts of {' and '.join(shifted)} decoding are left out, and "
        "temperatures fitted beside shifts are not the best ones alone; fit again with jobs/calibrate.py shift=false"
    )


def calibration_from_sts(content: Mapping[str, Any], *, mode: str, drafter_sha256: str | None = None) -> Calibration:
    """A calibration of one mode from an STS file. Raises: ValueError for a field that is missing or does not fit."""
    try:
        temperatures = tuple(map(float, content["temperatures"]))
        fitted_on = {name: content[name] for name in STS_KEYS[1:] if name in content}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not an STS file: {type(error).__name__} {error}; it needs {STS_KEYS[0]}") from None
    scales = SlotScales(temperatures, (0.0,) * len(temperatures))
    return Calibration({mode: scales}, drafter_sha256, fitted_on)


def sps_content(curve: CostCurve) -> dict[str, Any]:
    """The cost curve as SGLang's additive table: seconds = bias + alpha(R) + theta(B), interpolated between probes.

    alpha(R) = T_d(R) + (R - 1) * request_s, theta(B) = T_v(B) - T_v(smallest B): equal to the curve at every R and B
    within the table. Beyond it SGLang stays at the last value, while the curve goes on rising.
    """
    bs_probes = sorted({1, *curve.draft_requests, curve.batch_tokens[-1]})
    bias = curve.verify_s[0]
    return {
        "bias_seconds": bias,
        "bs_probes": bs_probes,
        "alpha_seconds": [curve.draft_seconds(number) + (number - 1) * curve.request_s for number in bs_probes],
        "m_probes": list(curve.batch_tokens),
        "theta_seconds": [seconds - bias for seconds in curve.verify_s],
    }


def curve_from_sps(content: Mapping[str, Any], *, fingerprint: Mapping[str, Any]) -> CostCurve:
    """The cost curve of an SPS file of either form, the additive or the plain one (steps/s by batch tokens).

    What requests cost beside their tokens counts as drafting, since the file does not tell them apart; where the first
    request costs nothing more, nothing is known of drafting and each further one costs the same, request_s.
    fingerprint: the hardware it was measured on, see `hardware_fingerprint`.
    Raises: ValueError for a field that is missing or does not fit.
    """
    try:
        if "bias_seconds" in content:
            bias = float(content["bias_seconds"])
            requests = tuple(map(int, content["bs_probes"]))
            alpha = isotonic([float(seconds) for seconds in content["alpha_seconds"]])
            drafts = alpha[0] > 0
            return CostCurve(
                batch_tokens=tuple(map(int, content["m_probes"])),
                verify_s=isotonic([bias + float(seconds) for seconds in content["theta_seconds"]]),
                draft_requests=requests if drafts else (),
                draft_s=alpha if drafts else (),
                fingerprint=dict(fingerprint),
                request_s=0.0 if drafts else (alpha[-1] - alpha[0]) / max(1, requests[-1] - requests[0]),
            )
        return CostCurve(
            batch_tokens=tuple(map(int, content["sample_batch_tokens"])),
            verify_s=isotonic([1.0 / float(rate) for rate in content["sample_steps_per_sec"]]),
            fingerprint=dict(fingerprint),
        )
    except (KeyError, TypeError, IndexError, ZeroDivisionError) as error:
        expected = f"{', '.join(ADDITIVE_KEYS)} or {', '.join(TABLE_KEYS)}"
        raise ValueError(f"not an SPS file: {type(error).__name__} {error}; it needs {expected}") from None
