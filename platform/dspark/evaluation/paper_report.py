"""One page with the paper's figures and claims as they came out here, and the same as JSON and as a Markdown table."""

import base64
import logging
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dspark.evaluation import acceptance_figures, confidence_figures, published, speed_figures
from dspark.evaluation.claims import Claim, judge_all
from dspark.evaluation.figure_parts import PaperFigure
from dspark.evaluation.findings import Findings, NotMeasured
from dspark.evaluation.html import table, write_page
from dspark.evaluation.panels import draw
from dspark.evaluation.published import PublishedTarget
from dspark.provenance import write_bytes, write_json
from dspark.speculation.statistics import DEFINITION

REPORT, SUMMARY, TABLE, FIGURES = "report.html", "summary.json", "claims.md", "figures"
MARKS = {"holds": "holds", "does not": "does NOT hold", "not shown": "not shown"}
HOW = (
    "Intervals are 95 %: prompts are drawn again with replacement, for all drafters the same ones, and so are seeds of "
    "training where there are several; then it also spans Student's t interval of the seeds' own values. With one seed "
    "the chance of training is not in the interval. Repeats under load: Student's t on ratios within a repeat. A claim "
    "holds, or does not, only where the whole interval lies on one side; everything else is not shown."
)

FIGURE_MAKERS: tuple[Callable[[Findings, PublishedTarget], PaperFigure], ...] = (
    acceptance_figures.table_1,
    acceptance_figures.figure_2,
    acceptance_figures.figure_3,
    acceptance_figures.figure_4,
    speed_figures.figure_4_latency,
    confidence_figures.figure_5,
    confidence_figures.figure_6,
    speed_figures.figure_7,
    speed_figures.figure_8,
)

log = logging.getLogger("dspark.paper")


def write_report(folder: Path, findings: Findings, target: PublishedTarget, about: Mapping[str, str]) -> dict[str, Any]:
    """Write report.html, summary.json, claims.md and figures/*.png; returns the summary.

    about: what a reader has to know of the run, by name: date, hardware, set, target, data.
    """
    claims = judge_all(findings)
    figures, lacking = make_figures(findings, target)
    pictures = {figure.name: draw(figure.rows, width=figure.panel_width) for figure in figures}
    for name, picture in pictures.items():
        write_bytes(folder / FIGURES / f"{name}.png", picture)
    summary = {
        "about": dict(about),
        "published": published.NAMES[target],
        "verdicts": {verdict: sum(claim.verdict == verdict for claim in claims) for verdict in MARKS},
        "claims": [claim.to_dict() for claim in claims],
        "figures": {figure.name: {"samples": figure.samples, "numbers": figure.numbers} for figure in figures},
        "not_measured": lacking,
        "definition": DEFINITION,
    }
    write_json(folder / SUMMARY, without_nan(summary))
    write_bytes(folder / TABLE, markdown(claims, about).encode())
    title = f"The DSpark paper, measured on {about.get('target', 'a target')}"
    sections = [
        f"<h1>{escape(title)}</h1>",
        table("This run", ["", ""], [[name, text] for name, text in about.items()], num_text=2),
        _claims_table(claims),
        f"<p class='note'>{escape(HOW)}</p>",
        *(_section(figure, pictures[figure.name]) for figure in figures),
        _lacking(lacking),
        _comparisons_table(claims),
        f"<h2>Definitions</h2><div class='panel'>{escape(DEFINITION)}</div>",
    ]
    write_page(folder / REPORT, title, sections)
    return summary


def make_figures(findings: Findings, target: PublishedTarget) -> tuple[list[PaperFigure], dict[str, str]]:
    """The figures there are measurements for, and what the others lack."""
    figures, lacking = [], {}
    for make in FIGURE_MAKERS:
        try:
            figures.append(make(findings, target))
        except NotMeasured as reason:
            lacking[make.__name__] = str(reason)
            log.info("%s is not drawn: %s", make.__name__, reason)
    return figures, lacking


def markdown(claims: Sequence[Claim], about: Mapping[str, str]) -> str:
    """The claims as a table for a README, what they were measured on above it."""
    lines = [", ".join(f"{name}: {text}" for name, text in about.items()), ""]
    lines += ["| claim of the paper | here | value (95 % interval) | in the paper |", "|---|---|---|---|"]
    for claim in claims:
        cells = (f"{claim.statement} ({claim.source})", MARKS[claim.verdict], _deciding(claim), claim.published)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def without_nan(content: Any) -> Any:
    """JSON has no NaN: what could not be computed is null."""
    if isinstance(content, dict):
        return {key: without_nan(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [without_nan(value) for value in content]
    return None if isinstance(content, float) and content != content else content


def _deciding(claim: Claim) -> str:
    """The comparison that a reader should see: the one that failed, else the tightest."""
    if not claim.parts:
        return claim.reason
    if claim.verdict == "holds":
        return "; ".join(_value(part.label, part.estimate.to_dict()) for part in claim.parts[:3])
    return claim.reason


def _value(label: str, estimate: Mapping[str, Any]) -> str:
    if estimate["low"] is None:
        return f"{label} {estimate['value']:.3g}"
    if estimate["low"] == estimate["high"]:
        return f"{label} {estimate['value']:.3g}"
    return f"{label} {estimate['value']:.3g} ({estimate['low']:.3g} to {estimate['high']:.3g})"


def _claims_table(claims: Sequence[Claim]) -> str:
    """Long lines wrap here, unlike in tables of figures."""
    colours = {"holds": "#2f855a", "does not": "#b42318", "not shown": "#666666"}
    rows = "".join(
        f"<tr><td>{escape(claim.statement)}<br><span class='note'>{escape(claim.source)}</span></td>"
        f"<td style='color: {colours[claim.verdict]}; white-space: nowrap'><b>{MARKS[claim.verdict]}</b></td>"
        f"<td>{escape(_deciding(claim))}</td><td>{escape(claim.published)}</td><td>{escape(claim.samples)}</td></tr>"
        for claim in claims
    )
    head = "".join(f"<th>{name}</th>" for name in ("claim of the paper", "here", "by", "in the paper", "samples"))
    style = "<style>.wrapped td { white-space: normal; vertical-align: top; } .wrapped .note { color: #666; }</style>"
    body = f"<table class='wrapped'><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f"{style}<h2>Claims</h2><div class='panel'>{body}</div>"


def _section(figure: PaperFigure, picture: bytes) -> str:
    uri = "data:image/png;base64," + base64.b64encode(picture).decode("ascii")
    note = f"{figure.samples}. What differs: {figure.differs}."
    image = f"<div class='panel'><img alt='{escape(figure.title, quote=True)}' src='{uri}'></div>"
    numbers = table("", figure.columns, figure.table, num_text=figure.num_text).replace("<h2></h2>", "")
    return f"<h2>{escape(figure.title)}</h2><p class='note'>{escape(note)}</p>{image}{numbers}"


def _lacking(lacking: Mapping[str, str]) -> str:
    rows = [[name.replace("_", " "), reason] for name, reason in lacking.items()]
    return table("Not measured", ["figure", "what lacks"], rows, num_text=2)


def _comparisons_table(claims: Sequence[Claim]) -> str:
    rows = []
    for claim in claims:
        for part in claim.parts:
            value = part.estimate
            interval = "–" if value.low is None or value.high is None else f"{value.low:.3g} to {value.high:.3g}"
            by_seed = ", ".join(f"{one:.3g}" for one in value.by_seed)
            direction = f"{'above' if part.is_above else 'below'} {part.bound:.3g}"
            rows.append([claim.name, part.label, f"{value.value:.3g}", interval, by_seed, direction, part.verdict])
    columns = ["claim", "comparison", "value", "95 % interval", "by seed", "claimed", "verdict"]
    return table("Every comparison", columns, rows, num_text=2)
