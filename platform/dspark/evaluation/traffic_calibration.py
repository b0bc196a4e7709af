"""A drafter's scales from rounds that were served: fitted on half of the answers, judged on the other half.

Legend: N rounds, G slots of a block. Served rounds are cut where the scheduler stopped verifying. It decides by what
confidences predict, never by what comes of it, so that of equally predicted rounds those it verified are no others.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark.provenance import fingerprint
from dspark.speculation.calibration import MODES, Calibration, SlotScales
from dspark.speculation.calibration_fit import MIN_ROUNDS, fit_sts, position_report
from dspark.storage import Location
from dspark.traffic.rounds import MODES as SERVED_MODES
from dspark.traffic.rounds import Origin, RecordedRounds, decode
from dspark.traffic.shards import ROUNDS, shard_names

ANOTHER_DRAFTER, ANOTHER_TARGET = "of another drafter", "of another target"


@dataclass(frozen=True)
class Traffic:
    """refused: rounds by why they do not count; files that cannot be read count as one each. newest: of the files."""

    rounds: RecordedRounds
    files: list[str]
    refused: dict[str, int]
    calibrations: list[str]

    @property
    def num_answers(self) -> int:
        return len(np.unique(self.rounds.request))


def read_traffic(
    folder: Location, *, drafter_sha256: str, target: Mapping[str, Any], block_size: int, max_rounds: int
) -> Traffic:
    """The newest rounds of this very drafter on this target, by whole files until there are max_rounds."""
    parts: list[RecordedRounds] = []
    files, refused, calibrations = [], Counter[str](), set()
    num_rounds = 0
    for name in shard_names(folder, ROUNDS):
        if num_rounds >= max_rounds:
            break
        try:
            origin, rounds = decode((folder / name).read_bytes())
        except FileNotFoundError:  # it made room for a new one
            continue
        except ValueError as broken:
            refused[f"file {name}: {broken}"] += 1
            continue
        reason = _refusal(origin, drafter_sha256, target, block_size)
        if reason is not None:
            refused[reason] += len(rounds)
            continue
        if rounds.num_unusable:
            refused["with a confidence that is not finite"] += rounds.num_unusable
        parts.append(rounds)
        files.append(name)
        calibrations.add(origin.calibration or "none")
        num_rounds += len(rounds)
    return Traffic(RecordedRounds.joined(parts, block_size), files, dict(refused), sorted(calibrations))


def _refusal(origin: Origin, drafter_sha256: str, target: Mapping[str, Any], block_size: int) -> str | None:
    if origin.drafter_sha256 != drafter_sha256:
        return f"{ANOTHER_DRAFTER} ({origin.drafter}, {origin.drafter_sha256})"
    if origin.target != dict(target):
        return f"{ANOTHER_TARGET} ({origin.target.get('name')})"
    if origin.block_size != block_size:
        return f"of blocks of {origin.block_size} slots"
    return None


def traffic_report(
    rounds: RecordedRounds, present: Calibration, *, num_bins: int, with_shift: bool, seed: int
) -> dict[str, Any]:
    """By way of decoding, in the form of `calibration_report`, JSON-ready; "before" is the present calibration's.

    is_taken: whether the scales are new ones: there were MIN_ROUNDS rounds to fit on and as many to judge by, and the
    error of the answers that were not fitted on is no larger than before. Seeded decoding is left out where nobody
    asked for it. raw: mean error without any scales.
    """
    is_fit = _fit_side(rounds.request, seed)
    return {
        mode: _fitted(rounds, is_fit, mode, present.for_mode(mode), num_bins, with_shift, seed)
        for mode in MODES
        if mode != "seeded" or len(rounds.of_mode(mode))
    }


def acceptance_levels(rounds: RecordedRounds, *, min_rounds: int = 50) -> dict[str, list[float]]:
    """Conditional acceptance by slot of each way of decoding that there are MIN_ROUNDS rounds of: what drift is
    measured against. It ends before the first slot that fewer than min_rounds rounds reached."""
    found = {}
    for mode in SERVED_MODES:
        part = rounds.of_mode(mode)
        if len(part) < MIN_ROUNDS:
            continue
        levels = []
        for k in range(part.logits.shape[1]):
            is_reached = (part.num_judged > k) & (part.num_accepted >= k)
            if is_reached.sum() < min_rounds:
                break
            levels.append(float((part.num_accepted[is_reached] > k).mean()))
        if levels:
            found[mode] = levels
    return found


def new_calibration(
    report: Mapping[str, Any], present: Calibration, *, drafter_sha256: str, fitted_on: dict[str, Any]
) -> Calibration:
    """With the scales that were taken; the other modes, and slots that traffic hardly saw, keep what they have."""
    taken = {
        mode: SlotScales(tuple(report[mode]["temperatures"]), tuple(report[mode]["shifts"]))
        for mode in report
        if report[mode]["is_taken"]
    }
    return Calibration(present.scales | taken, drafter_sha256, fitted_on)


def _fitted(
    rounds: RecordedRounds,
    is_fit: NDArray[np.bool_],
    mode: str,
    present: SlotScales | None,
    num_bins: int,
    with_shift: bool,
    seed: int,
) -> dict[str, Any]:
    is_mode = rounds.mode == SERVED_MODES.index(mode)
    fit, test = rounds.where(is_mode & is_fit), rounds.where(is_mode & ~is_fit)
    scales = fit_sts(fit.logits, fit.num_accepted, fit.num_judged, num_bins, with_shift=with_shift)
    scales = _with_kept_slots(scales, present, fit.num_judged)
    judged = _judged(test, present, scales, num_bins, seed)
    before, after = judged["mean_ece"]["before"], judged["mean_ece"]["after"]
    is_taken = len(fit) >= MIN_ROUNDS and before is not None and after is not None and after <= before
    for entry in judged["positions"]:
        entry["is_fitted"] = int(np.count_nonzero(fit.num_judged >= entry["position"])) >= MIN_ROUNDS
    return judged | {"rounds": {"fit": len(fit), "test": len(test)}, "is_taken": is_taken}


def _with_kept_slots(scales: SlotScales, present: SlotScales | None, num_judged: NDArray[np.int64]) -> SlotScales:
    """With the present scales of the slots that fewer than MIN_ROUNDS of the rounds fitted on judged.

    These are the last ones, since a round that judges a slot judged those before it. A refit must not replace what was
    fitted on whole blocks by the slot before's, which stands there only where there was nothing.
    """
    if present is None:
        return scales
    num_fitted = sum(int(np.count_nonzero(num_judged > k)) >= MIN_ROUNDS for k in range(len(scales)))
    kept = slice(num_fitted, len(scales))
    return SlotScales(
        scales.temperatures[:num_fitted] + present.temperatures[kept],
        scales.shifts[:num_fitted] + present.shifts[kept],
    )


def _judged(
    test: RecordedRounds, present: SlotScales | None, scales: SlotScales, num_bins: int, seed: int
) -> dict[str, Any]:
    """Figures of rounds that were not fitted on, before and after.

    Means are over the slots that MIN_ROUNDS of them or more judged, as the live metric's is: a few rounds show a large
    error under any scales.
    """
    columns = (test.logits, test.num_accepted, test.num_judged)
    size = test.logits.shape[1]
    unscaled = SlotScales((1.0,) * size, (0.0,) * size)
    positions = position_report(*columns, scales, num_bins=num_bins, seed=seed)
    served = position_report(*columns, present or unscaled, num_bins=num_bins, seed=seed)
    raw = [entry["ece_before"] for entry in positions if entry["n"] >= MIN_ROUNDS]
    for entry, earlier in zip(positions, served, strict=True):
        entry |= {f"{name}_before": earlier[f"{name}_after"] for name in ("ece", "auroc", "brier")}
    told = [entry for entry in positions if entry["n"] >= MIN_ROUNDS]
    means = {name: fmean(e[f"ece_{name}"] for e in told) if told else None for name in ("before", "after", "floor")}
    return {
        "temperatures": list(scales.temperatures),
        "shifts": list(scales.shifts),
        "positions": positions,
        "mean_ece": means,
        "raw": fmean(raw) if raw else None,
        "domains": {},
    }


def _fit_side(request: NDArray[np.uint64], seed: int) -> NDArray[np.bool_]:
    """Whether each round belongs to an answer that is fitted on: all rounds of an answer are on one side."""
    answers, place = np.unique(request, return_inverse=True)
    sides = np.array([int(fingerprint([seed, int(answer)]), 16) % 2 == 0 for answer in answers], bool)
    return sides[place] if len(answers) else np.zeros(0, bool)
