"""Plots of the report as inline pictures. matplotlib's object interface only: no windows, no global state."""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#2563a8", "#c2571a", "#2f855a", "#8250a8", "#7a7a7a")
LINE_STYLES = ("-", "--", ":", "-.")
LOSSES = ("loss", "ce", "tv", "confidence")
INK, GRID = "#333333", "#e3e6ea"


def training_plot(history: Sequence[Mapping[str, Any]]) -> str | None:
    """Losses and expected accepted length over steps, as a data URI; None when there is nothing to show.

    Rows are {"step", "loss", …} of training steps and {"step", "heldout": {…}} of validations.
    """
    steps = [row for row in history if "loss" in row]
    if len(steps) < 2:
        return None
    heldout = [row | row["heldout"] for row in history if "heldout" in row]
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for colour, name in zip(COLOURS, LOSSES, strict=False):
        _curve(left, steps, name, colour=colour, label={"ce": "CE", "tv": "TV"}.get(name, name))
    _finish(left, "training loss", "step", "")
    _curve(right, steps, "expected_accepted_length", colour=COLOURS[0], label="training")
    if heldout:
        points = [(row["step"], row["expected_accepted_length"]) for row in heldout]
        right.plot(*zip(*points, strict=True), "o-", color=COLOURS[1], markersize=4, linewidth=1, label="held-out")
    _finish(right, "expected accepted length (tau, teacher forced)", "step", "tokens per round")
    return _data_uri(figure)


def acceptance_plot(evaluations: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Conditional acceptance by position: a panel per mode and domain, a line per drafter; None without figures.

    Single benchmarks ("math/gsm8k") have no panel of their own.
    """
    modes = _ordered(mode for metrics in evaluations.values() for mode in metrics["modes"])
    domains = _ordered(
        domain
        for metrics in evaluations.values()
        for mode in metrics["modes"].values()
        for domain in mode["domains"]
        if "/" not in domain
    )
    if not modes or not domains:
        return None
    figure = Figure(figsize=(3.4 * len(domains) + 0.6, 2.7 * len(modes) + 0.3), layout="constrained")
    panels = figure.subplots(len(modes), len(domains), sharex=True, sharey=True, squeeze=False)
    for row, mode in zip(panels, modes, strict=True):
        for panel, domain in zip(row, domains, strict=True):
            for number, (drafter, metrics) in enumerate(evaluations.items()):
                figures = metrics["modes"].get(mode, {}).get("domains", {}).get(domain)
                if figures is not None:
                    _acceptance_line(panel, figures["conditional_acceptance"], drafter, number)
            _finish(panel, f"{domain}, {mode}", "position", "")
            panel.set_ylim(0, 1.02)
        row[0].set_ylabel("conditional acceptance")
    return _data_uri(figure)


def reliability_plot(calibration: Mapping[str, Any]) -> str | None:
    """Share accepted over predicted survival, before and after calibration: a row per mode, up to four positions.

    calibration: the content of `calibration_report.json` of jobs/calibrate.py; None when it holds no rounds.
    """
    modes = {mode: content["reliability"] for mode, content in calibration.get("modes", {}).items()}
    num_positions = max((len(positions) for positions in modes.values()), default=0)
    if not num_positions:
        return None
    chosen = sorted({round(place) for place in np.linspace(0, num_positions - 1, min(4, num_positions))})
    figure = Figure(figsize=(2.6 * len(chosen) + 0.6, 2.6 * len(modes) + 0.3), layout="constrained")
    panels = figure.subplots(len(modes), len(chosen), sharex=True, sharey=True, squeeze=False)
    for row, (mode, positions) in zip(panels, modes.items(), strict=True):
        for panel, k in zip(row, chosen, strict=True):
            panel.plot([0, 1], [0, 1], color=GRID, linewidth=1.2)
            for colour, name in zip((COLOURS[1], COLOURS[0]), ("before", "after"), strict=True):
                _reliability_line(panel, positions[k][name], colour=colour, label=name)
            _finish(panel, f"{mode}, position {k + 1}", "predicted survival", "")
        row[0].set_ylabel("share accepted", fontsize=9)
    return _data_uri(figure)


def _reliability_line(panel: Axes, bins: Sequence[Mapping[str, Any]], *, colour: str, label: str) -> None:
    """A point per bin, its area in proportion to the rounds in it."""
    if not bins:
        return
    predicted, observed, counts = (np.asarray([b[key] for b in bins]) for key in ("predicted", "observed", "count"))
    panel.plot(predicted, observed, color=colour, linewidth=1.0, label=label)
    panel.scatter(predicted, observed, s=4 + 60 * counts / counts.sum(), color=colour, alpha=0.7)


def cost_curve_plot(profile: Mapping[str, Any]) -> str | None:
    """Times of a step and of drafting, and the verify length they lead to at each number of requests.

    profile: the content of `profile.json` of jobs/profile_engine.py; None when it has no steps.
    """
    if not profile.get("steps"):
        return None
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    single = [row for row in profile["steps"] if row["requests"] == 1]
    shared = [row for row in profile["steps"] if row["requests"] > 1]
    _times(left, single, "batch_tokens", colour=COLOURS[0], label="one request")
    if shared:
        points = [(row["batch_tokens"], row["ms"]) for row in shared]
        left.plot(*zip(*points, strict=True), "x", color=COLOURS[1], markersize=5, label="several requests")
    _finish(left, "target step", "tokens in the batch", "ms")
    if profile["drafting"]:
        _times(middle, profile["drafting"], "requests", colour=COLOURS[2], label="a block for each")
    _finish(middle, "drafting", "requests", "ms")
    if profile["budgets"]:
        points = [(row["requests"], row["verify_length"]) for row in profile["budgets"]]
        right.plot(*zip(*points, strict=True), "o-", color=COLOURS[3], markersize=3, linewidth=1.2)
    _finish(right, "verify length that pays", "concurrent requests", "draft tokens per request")
    for panel in (left, middle, right):
        panel.set_ylim(bottom=0)
    return _data_uri(figure)


def load_plot(benchmark: Mapping[str, Any]) -> str | None:
    """Tokens per second, plain and speculative, by concurrency: a panel per mode, the ratio above each pair of bars.

    benchmark: the content of `benchmark.json` of jobs/benchmark.py; None when it has no figures.
    """
    modes = benchmark.get("summary") or {}
    if not modes:
        return None
    figure = Figure(figsize=(4.8 * len(modes) + 0.6, 3.2), layout="constrained")
    panels = figure.subplots(1, len(modes), squeeze=False)[0]
    for panel, (mode, by_concurrency) in zip(panels, modes.items(), strict=True):
        names = sorted(by_concurrency, key=int)
        places = np.arange(len(names))
        for number, side in enumerate(("plain", "speculative")):
            speeds = [by_concurrency[name][side]["tokens_per_s"] for name in names]
            panel.bar(places + 0.4 * number - 0.2, speeds, width=0.38, color=COLOURS[1 - number], label=side)
        for place, name in zip(places, names, strict=True):
            figures = by_concurrency[name]
            top = max(figures[side]["tokens_per_s"] for side in ("plain", "speculative"))
            panel.annotate(f"{figures['ratio']['median']:.2f} ×", (place, top), ha="center", va="bottom", fontsize=8)
        panel.set_xticks(places, names)
        panel.margins(y=0.3)
        panel.set_axisbelow(True)
        _finish(panel, f"throughput, {mode}", "concurrent requests", "tokens per second")
    return _data_uri(figure)


def learning_plot(histories: Mapping[str, Sequence[Mapping[str, Any]]]) -> str | None:
    """Held-out expected accepted length over steps, a line per drafter; None when no run was validated twice."""
    curves = {
        name: [(row["step"], row["heldout"]["expected_accepted_length"]) for row in rows if "heldout" in row]
        for name, rows in histories.items()
    }
    curves = {name: points for name, points in curves.items() if len(points) > 1}
    if not curves:
        return None
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    panel = figure.subplots()
    for number, (name, points) in enumerate(curves.items()):
        panel.plot(*zip(*points, strict=True), label=name, **_line(number))
    _finish(panel, "expected accepted length (tau, teacher forced)", "step", "tokens per round")
    return _data_uri(figure)


def contest_plot(contest: Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]) -> str | None:
    """Ratio of throughputs to the first entrant's by concurrency: a panel per mode, a line per entrant.

    contest: as `contest.summarize_contest` gives it; None when it is empty.
    """
    if not contest:
        return None
    figure = Figure(figsize=(7 * len(contest), 4.2), layout="constrained")
    panels = figure.subplots(1, len(contest), squeeze=False)[0]
    for panel, (mode, by_concurrency) in zip(panels, contest.items(), strict=True):
        counts = sorted(by_concurrency, key=int)
        names = _ordered(name for by_entrant in by_concurrency.values() for name in by_entrant)
        for number, name in enumerate(names):
            ratios = [by_concurrency[count].get(name, {}).get("ratio", {}) for count in counts]
            known = [(place, r) for place, r in enumerate(ratios) if r.get("median") is not None]
            places = [place + 0.04 * (number - len(names) / 2) for place, _ in known]  # ranges beside each other
            middle = np.asarray([r["median"] for _, r in known])
            around = [middle - [r["low"] for _, r in known], [r["high"] for _, r in known] - middle]
            panel.errorbar(places, middle, yerr=around, elinewidth=0.8, label=name, **_line(number))
        panel.set_xticks(range(len(counts)), counts)
        panel.set_ylim(bottom=0)
        _finish(panel, f"throughput, {mode}", "concurrent requests", "ratio")
        panel.legend(fontsize=8, frameon=False, bbox_to_anchor=(1.0, 1.0), loc="upper left")
    return _data_uri(figure)


def fleet_plot(sweep: Mapping[str, Sequence[Mapping[str, Any]]]) -> str | None:
    """Tokens per second over those of a user, and verify lengths over load, a line per policy; None when it is empty.

    sweep: by policy, the figures of a simulated fleet at each `concurrency`, as `FleetResult.figures` gives them.
    """
    if not any(sweep.values()):
        return None
    figure = Figure(figsize=(11, 4.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, (policy, rows) in enumerate(sweep.items()):
        loads = [row["concurrency"] for row in rows]
        speeds = [row["user_tokens_per_s"] for row in rows]
        left.plot(speeds, [row["tokens_per_s"] for row in rows], label=policy, **_line(number))
        right.plot(loads, [row["verify_length"] for row in rows], label=policy, **_line(number))
    left.set_yscale("log")
    right.set_xscale("log", base=2)
    _finish(left, "throughput at a user's speed", "tokens per second of a user", "tokens per second in all")
    _finish(right, "verify budget", "concurrent requests of a replica", "draft tokens per request")
    return _data_uri(figure)


def _times(axes: Axes, rows: Sequence[Mapping[str, Any]], key: str, *, colour: str, label: str) -> None:
    """Measured medians with their quartiles, and the curve through them."""
    sizes = [row[key] for row in rows]
    middle = np.asarray([row["ms"] for row in rows])
    around = [middle - [row["low_ms"] for row in rows], [row["high_ms"] for row in rows] - middle]
    axes.errorbar(sizes, middle, yerr=around, fmt="o", color=colour, markersize=3, linewidth=0.8, label=label)
    axes.plot(sizes, [row["curve_ms"] for row in rows], color=colour, linewidth=1.4)


def _acceptance_line(panel: Axes, rates: Sequence[float | None], drafter: str, number: int) -> None:
    values = [np.nan if rate is None else rate for rate in rates]
    panel.plot(range(1, len(values) + 1), values, label=drafter, **_line(number))
    panel.set_xticks(range(1, len(values) + 1))


def _line(number: int) -> dict[str, Any]:
    """The look of the n-th of several lines."""
    style = LINE_STYLES[number % len(LINE_STYLES)]
    return {"linestyle": style, "marker": "o", "markersize": 4, "color": COLOURS[number % len(COLOURS)]}


def _curve(axes: Axes, rows: Sequence[Mapping[str, Any]], name: str, *, colour: str, label: str) -> None:
    """A faint line of the values and a firm one of their running mean over a twentieth of the run."""
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None and np.isfinite(row[name])]
    if len(points) < 2:
        return
    steps, values = np.asarray(points, dtype=float).T
    window = max(1, len(values) // 20)
    weights = np.convolve(np.ones(len(values)), np.ones(window), mode="same")  # shorter windows at both ends
    smooth = np.convolve(values, np.ones(window), mode="same") / weights
    axes.plot(steps, values, color=colour, alpha=0.2, linewidth=0.8)
    axes.plot(steps, smooth, color=colour, linewidth=1.6, label=label)


def _finish(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, fontsize=10, loc="left", color=INK)
    axes.set_xlabel(x_label, fontsize=9)
    axes.set_ylabel(y_label, fontsize=9)
    axes.tick_params(labelsize=8, color=GRID)
    axes.grid(color=GRID, linewidth=0.8)
    for spine in axes.spines.values():
        spine.set_color(GRID)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False)


def _ordered(names: Any) -> list[str]:
    """Names in order of first appearance."""
    return list(dict.fromkeys(names))


def _data_uri(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=144)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
