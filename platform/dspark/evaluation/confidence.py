"""How far a drafter's confidences can be believed: fitted on some prompts' rounds, judged on the others'.

Legend: N rounds, G slots of a block, k = 0..G-1 a slot; positions in reports count from 1.
Survival at k is the product of the confidences of slots 0..k; see `speculation/calibration_fit.py`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark.data.prompts import Prompt
from dspark.evaluation.config import SAMPLE
from dspark.evaluation.summary import domains_of
from dspark.provenance import fingerprint
from dspark.speculation.calibration import SlotScales, calibrated_survival
from dspark.speculation.calibration_fit import MIN_ROUNDS, fit_sts, position_report

Row = Mapping[str, Any]

DEFINITION = (
    "ECE: expected calibration error of the predicted survival of positions 1..k, bins of equal width; floor: what a "
    "perfect predictor would show at this number of rounds. Prompts were split before fitting: no prompt's rounds are "
    "on both sides, and every figure is of the prompts that were not fitted on."
)


@dataclass(frozen=True)
class RoundTable:
    """Rounds that the drafter proposed something for. logits: [N, G] float64, NaN where nothing was proposed.

    num_accepted: [N], the verdict's; num_judged: [N], slots whose fate was decided: none behind a stop token.
    num_copied: rounds of copied tokens, which no confidence speaks of: left out.
    """

    logits: NDArray[np.float64]
    num_accepted: NDArray[np.int64]
    num_judged: NDArray[np.int64]
    num_copied: int = 0

    @property
    def num_rounds(self) -> int:
        return len(self.num_judged)

    @classmethod
    def of(cls, rows: Iterable[Row], block_size: int) -> "RoundTable":
        """The rounds of all turns of result rows, of a drafter that has confidences."""
        proposed = [r for row in rows for turn in row["turns"] for r in turn["rounds"] if r["num_proposed"]]
        rounds = [r for r in proposed if r["confidence_logits"] is not None]
        logits = np.full((len(rounds), block_size), np.nan)
        for line, r in zip(logits, rounds, strict=True):
            line[: r["num_proposed"]] = r["confidence_logits"]
        accepted = [r["num_accepted"] for r in rounds]
        judged = [_num_judged(r) for r in rounds]
        num_copied = len(proposed) - len(rounds)
        return cls(logits, np.array(accepted, np.int64), np.array(judged, np.int64), num_copied)


def split_halves(prompts: Iterable[Prompt], *, seed: int) -> tuple[set[str], set[str]]:
    """Ids of the prompts to fit on, and of those to test on: half of each domain, the same ones each time.

    The same prompt under two ids stays on one side. Raises: ValueError when there are no two different prompts.
    """
    ids: dict[str, list[str]] = {}
    domain_of: dict[str, str] = {}
    for prompt in prompts:
        content = fingerprint(prompt.messages)
        ids.setdefault(content, []).append(prompt.id)
        domain_of.setdefault(content, prompt.domain)
    if len(ids) < 2:
        raise ValueError(f"{len(ids)} different held-out prompts cannot be split into two halves; give 2 or more")
    ranked = sorted(ids, key=lambda content: (domain_of[content], fingerprint([seed, content])))
    fit, test = ({prompt_id for content in ranked[side::2] for prompt_id in ids[content]} for side in (0, 1))
    return fit, test


def fit_scales(
    rows: Sequence[Row],
    fit_ids: AbstractSet[str],
    *,
    block_size: int,
    num_bins: int,
    with_shift: bool,
    fit_domains: Sequence[str] | None,
) -> SlotScales:
    """Scales of the slots from the rounds of the fit half, of one way of decoding."""
    fit = RoundTable.of((row for row in rows if _is_fitted_on(row, fit_ids, fit_domains)), block_size)
    return fit_sts(fit.logits, fit.num_accepted, fit.num_judged, num_bins, with_shift=with_shift)


def calibration_report(
    rows: Sequence[Row],
    scales: SlotScales,
    *,
    fit_ids: AbstractSet[str],
    test_ids: AbstractSet[str],
    num_bins: int,
    fit_domains: Sequence[str] | None,
    seed: int,
) -> dict[str, Any]:
    """What the scales are worth on the test half, as a whole and by domain; JSON-ready.

    rows: of one way of decoding. is_fitted, per position: whether the fit half held enough rounds of it.
    reliability: for a diagram, per position the bins {"predicted", "observed", "count"} before and after.
    """
    block_size = len(scales)
    fit = RoundTable.of((row for row in rows if _is_fitted_on(row, fit_ids, fit_domains)), block_size)
    test_rows = [row for row in rows if row["id"] in test_ids]
    test = RoundTable.of(test_rows, block_size)
    positions = _positions(test, scales, num_bins, seed)
    for entry in positions:
        entry["is_fitted"] = int(np.count_nonzero(fit.num_judged >= entry["position"])) >= MIN_ROUNDS
    domains = {
        name: _domain_report([row for row in test_rows if name in domains_of(row)], scales, num_bins, seed)
        | {"is_fitted_on": fit_domains is None or name in fit_domains or name.split("/")[0] in fit_domains}
        for name in sorted({name for row in test_rows for name in domains_of(row)})
    }
    return {
        "temperatures": list(scales.temperatures),
        "shifts": list(scales.shifts),
        "rounds": {"fit": fit.num_rounds, "test": test.num_rounds},
        "copied_rounds": {"fit": fit.num_copied, "test": test.num_copied},
        "answers": dict(Counter(turn["finish_reason"] for row in rows for turn in row["turns"])),
        "positions": positions,
        "mean_ece": _mean_ece(positions),
        "reliability": _reliability(test, scales, num_bins),
        "domains": domains,
    }


def mode_of(row: Row) -> str:
    """The way of decoding that a row is a sample of."""
    return str(row["mode"]).partition(SAMPLE)[0]


def format_calibration(report: Mapping[str, Any]) -> str:
    """The report as text: every position of every mode, then the mean error by mode and domain."""
    shown = "{:<9} {:>8} {:>8} {:>6} {:>7} {:>9} {:>11} {:>10} {:>7} {:>13} {:>12}"
    names = ("mode", "position", "rounds", "T", "shift", "survival", "ECE before", "ECE after", "floor")
    lines = [shown.format(*names, "AUROC before", "after")]
    for mode, content in report["modes"].items():
        for p in content["positions"]:
            errors = [_percent(p[f"ece_{name}"]) for name in ("before", "after", "floor")]
            areas = [_number(p[f"auroc_{name}"]) for name in ("before", "after")]
            scales = [_number(p[name]) if p["is_fitted"] else "-" for name in ("temperature", "shift")]
            lines.append(shown.format(mode, p["position"], p["n"], *scales, _number(p["survival"]), *errors, *areas))
    shown = "{:<9} {:<20} {:>8} {:>11} {:>10} {:>7}"
    lines += ["", shown.format("mode", "domain", "rounds", "ECE before", "ECE after", "floor")]
    for mode, content in report["modes"].items():
        for name, f in [*content["domains"].items(), ("overall", content)]:
            rounds = f["rounds"]["test"] if name == "overall" else f["rounds"]
            label = name if f.get("is_fitted_on", True) else f"{name} (not fitted)"
            lines.append(shown.format(mode, label, rounds, *(_percent(value) for value in f["mean_ece"].values())))
    return "\n".join([*lines, "", DEFINITION])


def reliability_bins(predicted: NDArray[Any], accepted: NDArray[Any], num_bins: int) -> list[dict[str, Any]]:
    """Mean prediction, share accepted and number of rounds of every bin that holds any."""
    bins = np.minimum((predicted * num_bins).astype(np.int64), num_bins - 1)
    counts = np.bincount(bins, minlength=num_bins)
    sums, stood = np.bincount(bins, predicted, num_bins), np.bincount(bins, accepted, num_bins)
    return [
        {"predicted": float(sums[b] / counts[b]), "observed": float(stood[b] / counts[b]), "count": int(counts[b])}
        for b in np.flatnonzero(counts)
    ]


def _is_fitted_on(row: Row, fit_ids: AbstractSet[str], fit_domains: Sequence[str] | None) -> bool:
    return row["id"] in fit_ids and (fit_domains is None or bool(domains_of(row) & set(fit_domains)))


def _domain_report(rows: Sequence[Row], scales: SlotScales, num_bins: int, seed: int) -> dict[str, Any]:
    table = RoundTable.of(rows, len(scales))
    positions = _positions(table, scales, num_bins, seed)
    means = _mean_ece(positions)
    before, after = means["before"], means["after"]
    return {
        "rounds": table.num_rounds,
        "positions": positions,
        "mean_ece": means,
        "is_improved": None if before is None or after is None else after <= before,
    }


def _positions(table: RoundTable, scales: SlotScales, num_bins: int, seed: int) -> list[dict[str, Any]]:
    return position_report(table.logits, table.num_accepted, table.num_judged, scales, num_bins=num_bins, seed=seed)


def _mean_ece(positions: Sequence[Row]) -> dict[str, float | None]:
    """Over the positions that were judged at all, each counting the same."""
    judged = [p for p in positions if p["n"]]
    return {n: fmean(p[f"ece_{n}"] for p in judged) if judged else None for n in ("before", "after", "floor")}


def _reliability(table: RoundTable, scales: SlotScales, num_bins: int) -> list[dict[str, Any]]:
    forms = {
        "before": calibrated_survival(table.logits, None).numpy(),
        "after": calibrated_survival(table.logits, scales).numpy(),
    }
    found = []
    for k in range(len(scales)):
        here = table.num_judged > k
        stood = (table.num_accepted[here] > k).astype(np.float64)
        bins = {name: reliability_bins(form[here, k], stood, num_bins) for name, form in forms.items()}
        found.append({"position": k + 1} | bins)
    return found


def _num_judged(r: Row) -> int:
    is_stopped_inside = r["num_committed"] <= r["num_accepted"]
    return int(r["num_committed"] if is_stopped_inside else r["num_proposed"])


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
