"""One HTML file that tells a run's story: what was trained, what it is worth, what it cost. It loads nothing else."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dspark.evaluation.plots import acceptance_plot, cost_curve_plot, load_plot, reliability_plot, training_plot
from dspark.provenance import write_bytes
from dspark.speculation.statistics import DEFINITION

DASH = "–"

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #f6f7f9; margin: 0; }
main { max-width: 1040px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 26px; margin: 0; } h2 { font-size: 18px; margin: 36px 0 10px; }
p.note { color: #666; margin: 4px 0 12px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin-top: 20px; }
.card, .panel { background: #fff; border: 1px solid #e3e6ea; border-radius: 8px; padding: 12px 14px; }
.panel { overflow-x: auto; }
.card b { display: block; font-size: 20px; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.card span { color: #666; font-size: 13px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 10px; border-bottom: 1px solid #e3e6ea; text-align: left; white-space: nowrap; }
th.number, td.number { text-align: right; }
th { font-size: 13px; color: #555; } tr:last-child td { border-bottom: 0; } tr.total td { font-weight: 600; }
img { width: 100%; height: auto; display: block; }
"""


def write_report(
    path: str | Path,
    *,
    summary: dict[str, Any],
    history: list[dict[str, Any]],
    evaluations: dict[str, dict[str, Any]],
    calibration: dict[str, Any] | None = None,
    profile: dict[str, Any] | None = None,
    load: dict[str, Any] | None = None,
    answers: Sequence[dict[str, Any]] = (),
) -> None:
    """Write the report of a run.

    summary: {"target", "drafter_parameters", "answers", "tokens", "anchors", "accepted_length": {mode: {domain: tau}},
    "stages": {name: {"seconds", "tokens_per_s"}}}; what is absent is left out. history: rows of the training run.
    evaluations: by the drafter's name, the content of each `metrics.json` of jobs/evaluate.py. calibration, profile,
    load: the content of the files of jobs/calibrate.py, profile_engine.py and benchmark.py. answers: of jobs/ask.py.
    """
    sections = [
        _header(summary),
        _accepted_lengths(summary, evaluations),
        _picture("Training", training_plot(history), "Faint: every step. Firm: running mean."),
        _picture("Acceptance by position", acceptance_plot(evaluations), "Given that all positions before it stood."),
        _positions(evaluations),
        _picture("Confidence", reliability_plot(calibration or {}), "Prompts that were not fitted on. Area: rounds."),
        _calibration(calibration or {}),
        _picture("Cost of a step", cost_curve_plot(profile or {}), "Measured here."),
        _picture("Throughput", load_plot(load or {}), "Closed loop, full-length answers."),
        _load(summary.get("load", {})),
        _answers(answers),
        _speed(evaluations),
        _stages(summary),
        _losslessness(evaluations),
        f"<h2>Definitions</h2><div class='panel'>{escape(DEFINITION)} Intervals: 95 %, bootstrap over prompts.</div>",
    ]
    body = "\n".join(section for section in sections if section)
    page = (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(_title(summary))}</title><style>{STYLE}</style></head>\n<body><main>\n{body}\n</main></body></html>\n"
    )
    write_bytes(path, page.encode("utf-8"))


def _title(summary: Mapping[str, Any]) -> str:
    return f"Speculative drafter for {summary.get('target', 'a target')}"


def _header(summary: Mapping[str, Any]) -> str:
    labels = {
        "drafter_parameters": "drafter parameters",
        "answers": "answers of the target",
        "tokens": "tokens in the target cache",
        "anchors": "anchors trained on",
    }
    cards = [(_count(summary[key]), label) for key, label in labels.items() if summary.get(key) is not None]
    for mode, by_domain in summary.get("accepted_length", {}).items():
        if by_domain.get("overall") is not None:
            cards.append((_decimal(by_domain["overall"]), f"accepted length, {mode}"))
    shown = "".join(
        f"<div class='card'><b>{escape(value)}</b><span>{escape(label)}</span></div>" for value, label in cards
    )
    return f"<h1>{escape(_title(summary))}</h1><div class='cards'>{shown}</div>"


def _accepted_lengths(summary: Mapping[str, Any], evaluations: Mapping[str, Mapping[str, Any]]) -> str:
    columns = ["drafter", "mode", "domain", "prompts", "turns", "rounds", "tau", "95 % interval"]
    rows = [
        [
            *(drafter, mode, domain, _count(f["prompts"]), _count(f["turns"]), _count(f["rounds"])),
            *(_decimal(f["accepted_length"]), _interval(f["accepted_length_interval"])),
        ]
        for drafter, mode, domain, f in _groups(evaluations)
    ]
    if not rows:  # no metrics at hand: what the summary says is better than nothing
        columns = ["mode", "domain", "tau"]
        lengths = summary.get("accepted_length", {})
        rows = [[mode, domain, _decimal(tau)] for mode, taus in lengths.items() for domain, tau in taus.items()]
    note = "Tokens per verification of the target, its own bonus token included; 1 is plain decoding."
    return _table("Accepted length", columns, rows, num_text=columns.index("domain") + 1, note=note)


def _positions(evaluations: Mapping[str, Mapping[str, Any]]) -> str:
    kinds = {
        "conditional_acceptance": "conditional acceptance",
        "mean_confidence": "mean confidence",
        "survival": "survival",
        "predicted_survival": "predicted survival",
    }
    rows = [
        [drafter, mode, label, *(_decimal(value) for value in figures[kind])]
        for drafter, mode, domain, figures in _groups(evaluations)
        if domain == "overall"
        for kind, label in kinds.items()
        if figures.get(kind)
    ]
    width = max((len(row) for row in rows), default=3)
    columns = ["drafter", "mode", "rate", *(str(k) for k in range(1, width - 2))]
    return _table("By position, all domains", columns, [row + [""] * (width - len(row)) for row in rows], num_text=3)


def _calibration(calibration: Mapping[str, Any]) -> str:
    columns = ["mode", "domain", "rounds", "ECE before", "ECE after", "floor"]
    rows = []
    for mode, content in calibration.get("modes", {}).items():
        for domain, figures in [*content["domains"].items(), ("overall", content)]:
            rounds = figures["rounds"]["test"] if domain == "overall" else figures["rounds"]
            label = domain if figures.get("is_fitted_on", True) else f"{domain} (not fitted)"
            errors = [_percent(figures["mean_ece"][name]) for name in ("before", "after", "floor")]
            rows.append([mode, label, _count(rounds), *errors])
    note = "Mean over positions, on prompts that were not fitted on. Floor: what a perfect predictor would show."
    return _table("Calibration error of predicted survival", columns, rows, num_text=2, note=note)


def _load(load: Mapping[str, Mapping[str, Mapping[str, float | None]]]) -> str:
    keys = ("plain", "speculative", "ratio", "accepted_length", "verify_length")
    rows = [
        [mode, concurrency, *(_decimal(figures.get(key)) for key in keys)]
        for mode, by_concurrency in load.items()
        for concurrency, figures in by_concurrency.items()
    ]
    columns = ["mode", "at once", "plain tokens/s", "speculative tokens/s", "ratio", "tau", "mean verify length"]
    return _table("Tokens per second", columns, rows, num_text=1)


def _answers(answers: Sequence[Mapping[str, Any]]) -> str:
    """Questions that were put to the served model, and what it said."""
    if not answers:
        return ""
    shown = "".join(
        f"<p><b>{escape(answer['question'])}</b><br>{escape(answer['text'].strip())}</p>"
        f"<p class='note'>{answer['completion_tokens']} tokens in {answer['chunks']} pieces, "
        f"{_decimal(answer['tokens_per_s'], 1)} tokens/s</p>"
        for answer in answers
    )
    return f"<h2>Answers of the served model</h2><div class='panel' style='white-space: pre-wrap'>{shown}</div>"


def _speed(evaluations: Mapping[str, Mapping[str, Any]]) -> str:
    columns = ["drafter", "mode", "domain", "drafting ms/round", "verifying ms/round", "plain ms/token", "speed-up"]
    keys = ("draft_ms_per_round", "verify_ms_per_round", "plain_ms_per_token", "speedup")
    rows = [
        [drafter, mode, domain, *(_decimal(figures.get(key)) for key in keys)]
        for drafter, mode, domain, figures in _groups(evaluations)
        if figures.get("draft_ms_per_round") is not None
    ]
    note = "Reference loop, one request at a time on the machine of the run; prefill left out on both sides."
    return _table("Time per round", columns, rows, num_text=3, note=note)


def _stages(summary: Mapping[str, Any]) -> str:
    rows = [
        [name, _decimal(stage.get("seconds"), 1), _decimal(stage.get("tokens_per_s"), 1)]
        for name, stage in summary.get("stages", {}).items()
    ]
    return _table("Stages", ["stage", "seconds", "tokens/s"], rows, num_text=1)


def _losslessness(evaluations: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for drafter, metrics in evaluations.items():
        found = metrics.get("generate_comparison") or {}
        if found.get("checked"):
            gaps = [_decimal(d["top2_gap"], 4) for d in found["first_differences"]]
            counts = [_count(found["checked"]), _count(found["identical"])]
            rows.append([drafter, str(found.get("dtype", DASH)), *counts, ", ".join(gaps) or DASH])
    columns = ["drafter", "target dtype", "prompts compared", "identical", "top-2 logit gap where they part"]
    note = "Greedy output beside the library's own generate, token for token."
    return _table("Losslessness", columns, rows, num_text=2, note=note)


def _groups(evaluations: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:
    """(drafter, mode, domain, figures), domains in order, then "overall"."""
    for drafter, metrics in evaluations.items():
        for mode, content in metrics["modes"].items():
            for domain, figures in content["domains"].items():
                yield drafter, mode, domain, figures
            yield drafter, mode, "overall", content["overall"]


def _picture(title: str, uri: str | None, note: str) -> str:
    if uri is None:
        return ""
    heading = f"<h2>{escape(title)}</h2><p class='note'>{escape(note)}</p>"
    return f"{heading}<div class='panel'><img alt='{escape(title, quote=True)}' src='{uri}'></div>"


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, num_text: int, note: str = "") -> str:
    """A titled table whose columns after the first `num_text` hold numbers; nothing when there are no rows."""
    if not rows:
        return ""
    classes = ["" if n < num_text else " class='number'" for n in range(len(columns))]
    head = "".join(f"<th{c}>{escape(column)}</th>" for c, column in zip(classes, columns, strict=True))
    lines = []
    for row in rows:
        cells = "".join(f"<td{c}>{escape(cell)}</td>" for c, cell in zip(classes, row, strict=True))
        lines.append(f"<tr class='total'>{cells}</tr>" if "overall" in row[:num_text] else f"<tr>{cells}</tr>")
    shown_note = f"<p class='note'>{escape(note)}</p>" if note else ""
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f"<h2>{escape(title)}</h2>{shown_note}<div class='panel'>{table}</div>"


def _decimal(value: float | None, digits: int = 2) -> str:
    return DASH if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return DASH if value is None else f"{100 * value:.2f} %"


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _interval(bounds: Sequence[float] | None) -> str:
    return DASH if bounds is None else f"{bounds[0]:.2f} … {bounds[1]:.2f}"
