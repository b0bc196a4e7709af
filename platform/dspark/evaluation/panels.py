"""Plots described as data, and the one function that draws them: rows of panels, one legend a row.

A row usually shows what was measured, and the row below it what the paper shows, on axes of the same kind.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dspark.evaluation.plots import COLOURS, GRID, INK, LINE_STYLES

PANEL_WIDTH, ROW_HEIGHT = 3.6, 2.9
HEADROOM = 1.06  # of an axis from zero, above its highest point


@dataclass(frozen=True)
class Line:
    """Points in order; low and high, where given, are the ends of their intervals. style: number of its look."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: int = 0
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    notes: Sequence[str] = ()
    """Words beside the points."""

    @classmethod
    def through(cls, label: str, points: Sequence[tuple[float, float]], style: int) -> "Line":
        """A line through (x, y) points."""
        return cls(label, [x for x, _ in points], [y for _, y in points], style)


@dataclass(frozen=True)
class Panel:
    """kind: "lines", or "bars" side by side, whose x are places that `ticks` name."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    kind: Literal["lines", "bars"] = "lines"
    ticks: Sequence[str] = ()
    limits: tuple[float, float] | None = None
    from_zero: bool = False
    log: Literal["", "x", "y"] = ""
    diagonal: bool = False


def draw(rows: Sequence[Sequence[Panel]], *, width: float = PANEL_WIDTH) -> bytes:
    """A PNG picture. Rows may be of different lengths; each has a legend of its own to its right."""
    rows = [row for row in rows if any(panel.lines for panel in row)]
    columns = max(len(row) for row in rows)
    figure = Figure(figsize=(width * columns + 1.5, ROW_HEIGHT * len(rows) + 0.2), layout="constrained")
    strips = figure.subfigures(len(rows), 1, squeeze=False)[:, 0]
    for strip, row in zip(strips, rows, strict=True):
        axes = strip.subplots(1, columns, squeeze=False)[0]
        for number, (place, panel) in enumerate(zip(axes, row, strict=False)):
            _panel(place, panel)
            if number and panel.y_label == row[number - 1].y_label:
                place.set_ylabel("")  # its neighbour says it
        for place in axes[len(row) :]:
            place.set_axis_off()
        named: dict[str, Any] = {}
        for place in axes:
            named |= dict(zip(*reversed(place.get_legend_handles_labels()), strict=True))
        if len(named) > 0:
            strip.legend(named.values(), named.keys(), loc="outside right center", fontsize=8, frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


def _panel(axes: Axes, panel: Panel) -> None:
    if panel.diagonal:
        axes.plot([0, 1], [0, 1], color=GRID, linewidth=1.5)
    if panel.kind == "bars":
        _bars(axes, panel)
    else:
        for line in panel.lines:
            _line(axes, line)
        if panel.ticks:
            axes.set_xticks([float(tick) for tick in panel.ticks], panel.ticks)
    if "x" in panel.log:
        axes.set_xscale("log", base=2)
        numbers = sorted({x for line in panel.lines for x in line.x})
        axes.set_xticks(numbers, [f"{number:g}" for number in numbers])
        axes.minorticks_off()
    if "y" in panel.log:
        axes.set_yscale("log")
    if panel.kind == "lines" and not panel.ticks and "x" not in panel.log and _are_whole(panel.lines):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # there is no position two and a half
    if panel.from_zero:
        axes.set_ylim(0, max(axes.get_ylim()[1], HEADROOM * axes.dataLim.y1))
    if panel.limits is not None:
        axes.set_ylim(*panel.limits)
    axes.set_title(panel.title, fontsize=10, loc="left", color=INK)
    axes.set_xlabel(panel.x_label, fontsize=9)
    axes.set_ylabel(panel.y_label, fontsize=9)
    axes.tick_params(labelsize=8, color=GRID)
    axes.set_axisbelow(True)
    axes.grid(color=GRID, linewidth=0.8)
    for spine in axes.spines.values():
        spine.set_color(GRID)


def _are_whole(lines: Sequence[Line]) -> bool:
    return all(float(x).is_integer() for line in lines for x in line.x)


def _line(axes: Axes, line: Line) -> None:
    colour = COLOURS[line.style % len(COLOURS)]
    style = LINE_STYLES[(line.style // len(COLOURS) + line.style) % len(LINE_STYLES)]
    axes.plot(
        line.x, line.y, marker="o", markersize=3.5, linewidth=1.4, color=colour, linestyle=style, label=line.label
    )
    if line.low is not None and line.high is not None:
        axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.13, linewidth=0)
    for x, y, note in zip(line.x, line.y, line.notes, strict=False):
        axes.annotate(note, (x, y), textcoords="offset points", xytext=(4, 4), fontsize=7, color=colour)


def _bars(axes: Axes, panel: Panel) -> None:
    number = len(panel.lines)
    for place, line in enumerate(panel.lines):
        x = np.asarray(line.x, dtype=float) + (place - (number - 1) / 2) * 0.8 / number
        y = np.asarray(line.y, dtype=float)
        around = None
        if line.low is not None and line.high is not None:
            around = np.maximum(np.array([y - line.low, np.asarray(line.high) - y]), 0)
        colour = COLOURS[line.style % len(COLOURS)]
        look = {"elinewidth": 0.8, "ecolor": INK}
        axes.bar(x, y, width=0.76 / number, color=colour, label=line.label, yerr=around, error_kw=look)
    if panel.ticks:
        turned: dict[str, Any] = {"rotation": 35, "ha": "right"} if len(panel.ticks) > 4 else {}
        axes.set_xticks(range(len(panel.ticks)), panel.ticks, **turned)
