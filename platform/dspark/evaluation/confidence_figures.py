"""The paper's figures about confidences: thresholds and calibration.

Each function gives a figure, or raises NotMeasured saying what lacks.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dspark.evaluation import published
from dspark.evaluation.acceptance_claims import THRESHOLDS, confident_rows, fitted_sts
from dspark.evaluation.confidence import calibration_report, fit_scales
from dspark.evaluation.evidence import Floats, bootstrap, ratio
from dspark.evaluation.figure_parts import PaperFigure, estimated_line, shown
from dspark.evaluation.findings import Findings, NotMeasured, calibration_error, reliability_sums, threshold_sums
from dspark.evaluation.html import decimal
from dspark.evaluation.panels import Line, Panel
from dspark.evaluation.published import PublishedTarget
from dspark.evaluation.summary import domains_of
from dspark.speculation.calibration_error import NUM_BINS

SIDES = ("before", "after")
POSITIONS = (1, 3, 5, 7)


def figure_5(findings: Findings, target: PublishedTarget) -> PaperFigure:
    every = confident_rows(findings)
    here, told, table, numbers = [], [], [], {}
    for domain in findings.domains:
        rows = [row for row in every if domain in domains_of(row)]
        sums = threshold_sums(rows, THRESHOLDS)
        lines, values = [], {}
        for look, (name, over) in enumerate((("verified", 2), ("accepted", 2))):
            values[name] = [
                bootstrap(sums, lambda s, side=look, over=over, h=h: ratio(s[:, side, h], s[:, over, h]))  # type: ignore[misc]
                for h in range(len(THRESHOLDS))
            ]
            lines.append(estimated_line(name, THRESHOLDS, values[name], look))
        rates = [
            bootstrap(sums, lambda s, h=h: ratio(s[:, 1, h], s[:, 0, h]))  # type: ignore[misc]
            for h in range(len(THRESHOLDS))
        ]
        here.append(Panel(f"here, {domain}", "threshold on confidence", "tokens per round", lines, from_zero=True))
        table += [
            [domain, "here", "verified", *(decimal(value.value) for value in values["verified"])],
            [domain, "here", "accepted", *(decimal(value.value) for value in values["accepted"])],
            [domain, "here", "share, %", *(decimal(100 * rate.value, 1) for rate in rates)],
        ]
        numbers[domain] = {name: [v.to_dict() for v in row] for name, row in (values | {"share": rates}).items()}
    for domain, paper in published.FIGURE_5.items():
        lines = [Line(name, THRESHOLDS, paper[name], look) for look, name in enumerate(("verified", "accepted"))]
        told.append(Panel(f"paper, {domain}", "threshold on confidence", "tokens per round", lines, from_zero=True))
        rates_told = [100 * a / v for a, v in zip(paper["accepted"], paper["verified"], strict=True)]
        table += [[domain, "paper", name, *(decimal(value) for value in paper[name])] for name in paper]
        table.append([domain, "paper", "share, %", *(decimal(rate, 1) for rate in rates_told)])
    return PaperFigure(
        "figure_5",
        "Figure 5: a static threshold on the confidence of a slot",
        [here, told],
        f"{len(every)} prompts, one seed; bands: 95 % over prompts",
        "rounds of whole blocks are cut where a slot is unsure; what would have been decoded after a cut is not",
        ["domain", "", "tokens", *(f"{threshold:g}" for threshold in THRESHOLDS)],
        sorted(table, key=lambda row: [*findings.domains, *published.FIGURE_5].index(row[0])),
        num_text=3,
        numbers=numbers,
    )


def figure_6(findings: Findings, target: PublishedTarget) -> PaperFigure:
    """The paper's temperatures, without shifts: fitted on half of the prompts, judged on the others."""
    scales, test = fitted_sts(findings)
    ids: dict[str, Any] = {"fit_ids": findings.fit_ids, "test_ids": findings.test_ids}
    options: dict[str, Any] = {"num_bins": NUM_BINS, "fit_domains": None}
    report = calibration_report(findings.calibration, scales, seed=0, **options, **ids)
    shifted = fit_scales(findings.calibration, findings.fit_ids, block_size=len(scales), with_shift=True, **options)
    served = calibration_report(findings.calibration, shifted, seed=0, **options, **ids)["positions"]
    sums = reliability_sums(test, scales)
    chosen = [k for k in POSITIONS if k <= len(scales) and report["positions"][k - 1]["n"]]
    if not chosen:
        raise NotMeasured("no rounds to judge on")
    here, table, numbers = [], [], {}
    for position in chosen:
        bins, entry = report["reliability"][position - 1], report["positions"][position - 1]
        lines = [_reliability(side, bins[side], look) for look, side in ((1, "before"), (0, "after"))]
        title = f"here, position {position}"
        here.append(Panel(title, "predicted survival", "share accepted", lines, limits=(0, 1), diagonal=True))
        errors = [bootstrap(sums, _error_at(position - 1, side)) for side in (0, 1)]
        cells = [shown(error, 3) for error in errors]
        told = published.FIGURE_6.get(position, {})
        table.append(
            [
                *(str(position), "here", f"{entry['n']:,}", decimal(entry["temperature"]), *cells),
                *(decimal(served[position - 1]["ece_after"], 3), decimal(entry["ece_floor"], 3)),
                decimal(entry["auroc_before"], 3),
            ]
        )
        paper = (decimal(told.get(side), 3) for side in SIDES)
        table.append([str(position), "paper", "", "", *paper, "", "", decimal(told.get("auroc"), 3)])
        numbers[str(position)] = {s: e.to_dict() for s, e in zip(SIDES, errors, strict=True)}
        numbers[str(position)] |= {"auroc": entry["auroc_before"], "rounds": entry["n"]}
    return PaperFigure(
        "figure_6",
        "Figure 6: whether confidences can be believed, before and after STS",
        [here, _published_reliability()],
        f"{len(findings.fit_ids)} prompts fitted on, {len(test)} tested on, {report['rounds']['test']:,} rounds",
        "all domains of held-out prompts here, Alpaca in the paper; few rounds leave an error (floor) that no scaling "
        "can take away. Serving shifts each slot too, which the paper does not: a temperature cannot lower confidences "
        "on both sides of one half",
        ["position", "", "rounds", "T", "ECE before", "ECE after", "with shifts", "floor", "AUROC"],
        table,
        numbers=numbers,
    )


def _published_reliability() -> list[Panel]:
    return [
        Panel(
            f"paper, position {position}",
            "predicted survival",
            "share accepted",
            [Line.through(side, by[side], look) for look, side in ((1, "before"), (0, "after"))],
            limits=(0, 1),
            diagonal=True,
        )
        for position, by in published.FIGURE_6_BINS.items()
    ]


def _reliability(side: str, bins: Sequence[Mapping[str, Any]], look: int) -> Line:
    """Bins that hold next to nothing are left out: they are noise on a line."""
    least = max(1, sum(one["count"] for one in bins) // 200)
    kept = [one for one in bins if one["count"] >= least]
    return Line(side, [one["predicted"] for one in kept], [one["observed"] for one in kept], look)


def _error_at(slot: int, side: int) -> Any:
    def error(sums: Floats) -> Floats:
        return np.asarray(calibration_error(sums[:, slot, side]))

    return error
