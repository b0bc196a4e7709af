"""One HTML file that tells a run's story: what was trained, what it is worth, what it cost. It loads nothing else."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dspark.evaluation.html import DASH, count, decimal, interval, percent, picture, table, write_page
from dspark.evaluation.plots import acceptance_plot, cost_curve_plot, load_plot, reliability_plot, training_plot
from dspark.speculation.statistics import DEFINITION


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
        accepted_lengths(summary, evaluations),
        picture("Training", training_plot(history), "Faint: every step. Firm: running mean."),
        picture("Acceptance by position", acceptance_plot(evaluations), "Given that all positions before it stood."),
        positions(evaluations),
        picture("Confidence", reliability_plot(calibration or {}), "Prompts that were not fitted on. Area: rounds."),
        _calibration(calibration or {}),
        picture("Cost of a step", cost_curve_plot(profile or {}), "Measured here."),
        picture("Throughput", load_plot(load or {}), "Closed loop, full-length answers."),
        _load(summary.get("load", {})),
        _answers(answers),
        _speed(evaluations),
        _stages(summary),
        _losslessness(evaluations),
        f"<h2>Definitions</h2><div class='panel'>{escape(DEFINITION)} Intervals: 95 %, bootstrap over prompts.</div>",
    ]
    write_page(path, _title(summary), sections)


def _title(summary: Mapping[str, Any]) -> str:
    return f"Speculative drafter for {summary.get('target', 'a target')}"


def _header(summary: Mapping[str, Any]) -> str:
    labels = {
        "drafter_parameters": "drafter parameters",
        "answers": "answers of the target",
        "tokens": "tokens in the target cache",
        "anchors": "anchors trained on",
    }
    cards = [(count(summary[key]), label) for key, label in labels.items() if summary.get(key) is not None]
    for mode, by_domain in summary.get("accepted_length", {}).items():
        if by_domain.get("overall") is not None:
            cards.append((decimal(by_domain["overall"]), f"accepted length, {mode}"))
    shown = "".join(
        f"<div class='card'><b>{escape(value)}</b><span>{escape(label)}</span></div>" for value, label in cards
    )
    return f"<h1>{escape(_title(summary))}</h1><div class='cards'>{shown}</div>"


def accepted_lengths(summary: Mapping[str, Any], evaluations: Mapping[str, Mapping[str, Any]]) -> str:
    """Accepted lengths by drafter, mode and domain; without metrics, what the summary says."""
    columns = ["drafter", "mode", "domain", "prompts", "turns", "rounds", "tau", "95 % interval"]
    rows = [
        [
            *(drafter, mode, domain, count(f["prompts"]), count(f["turns"]), count(f["rounds"])),
            *(decimal(f["accepted_length"]), interval(f["accepted_length_interval"])),
        ]
        for drafter, mode, domain, f in _groups(evaluations)
    ]
    if not rows:  # no metrics at hand: what the summary says is better than nothing
        columns = ["mode", "domain", "tau"]
        lengths = summary.get("accepted_length", {})
        rows = [[mode, domain, decimal(tau)] for mode, taus in lengths.items() for domain, tau in taus.items()]
    note = "Tokens per verification of the target, its own bonus token included; 1 is plain decoding."
    return table("Accepted length", columns, rows, num_text=columns.index("domain") + 1, note=note)


def positions(evaluations: Mapping[str, Mapping[str, Any]]) -> str:
    """Every rate by position, all domains together."""
    kinds = {
        "conditional_acceptance": "conditional acceptance",
        "mean_confidence": "mean confidence",
        "survival": "survival",
        "predicted_survival": "predicted survival",
    }
    rows = [
        [drafter, mode, label, *(decimal(value) for value in figures[kind])]
        for drafter, mode, domain, figures in _groups(evaluations)
        if domain == "overall"
        for kind, label in kinds.items()
        if figures.get(kind)
    ]
    width = max((len(row) for row in rows), default=3)
    columns = ["drafter", "mode", "rate", *(str(k) for k in range(1, width - 2))]
    return table("By position, all domains", columns, [row + [""] * (width - len(row)) for row in rows], num_text=3)


def _calibration(calibration: Mapping[str, Any]) -> str:
    columns = ["mode", "domain", "rounds", "ECE before", "ECE after", "floor"]
    rows = []
    for mode, content in calibration.get("modes", {}).items():
        for domain, figures in [*content["domains"].items(), ("overall", content)]:
            rounds = figures["rounds"]["test"] if domain == "overall" else figures["rounds"]
            label = domain if figures.get("is_fitted_on", True) else f"{domain} (not fitted)"
            errors = [percent(figures["mean_ece"][name]) for name in ("before", "after", "floor")]
            rows.append([mode, label, count(rounds), *errors])
    note = "Mean over positions, on prompts that were not fitted on. Floor: what a perfect predictor would show."
    return table("Calibration error of predicted survival", columns, rows, num_text=2, note=note)


def _load(load: Mapping[str, Mapping[str, Mapping[str, float | None]]]) -> str:
    keys = ("plain", "speculative", "ratio", "accepted_length", "verify_length")
    rows = [
        [mode, concurrency, *(decimal(figures.get(key)) for key in keys)]
        for mode, by_concurrency in load.items()
        for concurrency, figures in by_concurrency.items()
    ]
    columns = ["mode", "at once", "plain tokens/s", "speculative tokens/s", "ratio", "tau", "mean verify length"]
    return table("Tokens per second", columns, rows, num_text=1)


def _answers(answers: Sequence[Mapping[str, Any]]) -> str:
    """Questions that were put to the served model, and what it said."""
    if not answers:
        return ""
    shown = "".join(
        f"<p><b>{escape(answer['question'])}</b><br>{escape(answer['text'].strip())}</p>"
        f"<p class='note'>{answer['completion_tokens']} tokens in {answer['chunks']} pieces, "
        f"{decimal(answer['tokens_per_s'], 1)} tokens/s</p>"
        for answer in answers
    )
    return f"<h2>Answers of the served model</h2><div class='panel' style='white-space: pre-wrap'>{shown}</div>"


def _speed(evaluations: Mapping[str, Mapping[str, Any]]) -> str:
    columns = ["drafter", "mode", "domain", "drafting ms/round", "verifying ms/round", "plain ms/token", "speed-up"]
    keys = ("draft_ms_per_round", "verify_ms_per_round", "plain_ms_per_token", "speedup")
    rows = [
        [drafter, mode, domain, *(decimal(figures.get(key)) for key in keys)]
        for drafter, mode, domain, figures in _groups(evaluations)
        if figures.get("draft_ms_per_round") is not None
    ]
    note = "Reference loop, one request at a time on the machine of the run; prefill left out on both sides."
    return table("Time per round", columns, rows, num_text=3, note=note)


def _stages(summary: Mapping[str, Any]) -> str:
    rows = [
        [name, decimal(stage.get("seconds"), 1), decimal(stage.get("tokens_per_s"), 1)]
        for name, stage in summary.get("stages", {}).items()
    ]
    return table("Stages", ["stage", "seconds", "tokens/s"], rows, num_text=1)


def _losslessness(evaluations: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for drafter, metrics in evaluations.items():
        found = metrics.get("generate_comparison") or {}
        if found.get("checked"):
            gaps = [decimal(d["top2_gap"], 4) for d in found["first_differences"]]
            counts = [count(found["checked"]), count(found["identical"])]
            rows.append([drafter, str(found.get("dtype", DASH)), *counts, ", ".join(gaps) or DASH])
    columns = ["drafter", "target dtype", "prompts compared", "identical", "top-2 logit gap where they part"]
    note = "Greedy output beside the library's own generate, token for token."
    return table("Losslessness", columns, rows, num_text=2, note=note)


def _groups(evaluations: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:
    """(drafter, mode, domain, figures), domains in order, then "overall"."""
    for drafter, metrics in evaluations.items():
        for mode, content in metrics["modes"].items():
            for domain, figures in content["domains"].items():
                yield drafter, mode, domain, figures
            yield drafter, mode, "overall", content["overall"]
