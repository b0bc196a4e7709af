"""Axes show all there is, and no places that there are not."""

import pytest
from matplotlib.figure import Figure

from dspark.evaluation.panels import Line, Panel, _panel, draw


def axes_of(panel: Panel):
    axes = Figure().subplots()
    _panel(axes, panel)
    return axes


def test_an_axis_from_zero_ends_above_its_highest_point() -> None:
    for y in ([1.05, 1.0], [0.2, 40.0]):
        low, high = axes_of(Panel("t", "x", "y", [Line("a", [1, 2], y)], from_zero=True)).get_ylim()
        assert low == 0
        assert high >= 1.05 * max(y)


@pytest.mark.parametrize(("x", "are_whole"), [([1, 2, 3], True), ([0.5, 1.0], False)])
def test_whole_numbers_are_marked_by_whole_numbers(x: list[float], are_whole: bool) -> None:
    axes = axes_of(Panel("t", "x", "y", [Line("a", x, x)]))
    assert all(float(tick).is_integer() for tick in axes.get_xticks()) == are_whole


def test_a_picture_is_drawn_of_rows_of_different_lengths() -> None:
    line = Line("a", [1, 2], [0.5, 1.0])
    assert draw([[Panel("t", "x", "y", [line])] * 2, [Panel("u", "x", "y", [line])]]).startswith(b"\x89PNG")
