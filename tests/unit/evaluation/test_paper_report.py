"""The page, the summary and the pictures of a set of experiments."""

import json
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dspark.evaluation import published
from dspark.evaluation.claims import CRITERIA
from dspark.evaluation.figure_parts import PaperFigure
from dspark.evaluation.findings import Findings
from dspark.evaluation.panels import Line, Panel, draw
from dspark.evaluation.paper_report import FIGURE_MAKERS, make_figures, write_report
from synthetic_findings import make_findings

ABOUT = {"date": "2026-01-01", "set": "quick, 1 seed", "target": "a|target", "hardware": "none"}


@pytest.fixture(scope="module")
def whole() -> Findings:
    return make_findings()


@pytest.fixture(scope="module")
def figures(whole: Findings) -> list[PaperFigure]:
    found, lacking = make_figures(whole, "qwen3_8b")
    assert lacking == {}
    assert len(found) == len(FIGURE_MAKERS)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, whole: Findings) -> Path:
    found = tmp_path_factory.mktemp("report")
    write_report(found, whole, "qwen3_8b", ABOUT)
    return found


@pytest.fixture(scope="module")
def summary(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "summary.json").read_text(), parse_constant=pytest.fail)  # no NaN
    return content


def size_of(picture: bytes) -> tuple[int, int]:
    """Width and height that the PNG's header tells."""
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", picture[16:24])
    return width, height


def test_every_figure_is_drawn_and_stands_on_the_page(folder, summary, figures):
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert summary["not_measured"] == {}
    for figure in figures:
        assert f"<h2>{figure.title}</h2>" in page
        width, height = size_of((folder / "figures" / f"{figure.name}.png").read_bytes())
        assert 600 < width < 2200
        assert 300 < height < 1400
    assert not re.search(r"(src|href)='(?!data:)", page)


def test_each_figure_has_the_papers_numbers_beside_those_measured(figures):
    for figure in figures:
        titles = [panel.title for row in figure.rows for panel in row]
        assert any(title.startswith("paper") for title in titles), figure.name
        assert any(title.startswith("here") for title in titles), figure.name
        assert figure.samples
        assert figure.differs
        widths = {len(row) for row in figure.table}
        assert widths == {len(figure.columns)}, figure.name
    assert figures[0].rows[1][0].title == "paper, Qwen3-8B"


def test_axes_are_labelled_and_lines_named(figures):
    for figure in figures:
        for panel in (panel for row in figure.rows for panel in row):
            assert panel.y_label
            assert panel.x_label or panel.kind == "bars"
            assert all(line.label and len(line.x) == len(line.y) for line in panel.lines)


def test_the_summary_holds_every_claim_with_its_comparisons(summary):
    assert [claim["name"] for claim in summary["claims"]] == [criterion.name for criterion in CRITERIA]
    assert summary["verdicts"] == {"holds": len(CRITERIA), "does not": 0, "not shown": 0}
    for claim in summary["claims"]:
        assert claim["parts"]
        assert all(part["low"] <= part["value"] <= part["high"] for part in claim["parts"])
    assert "bonus" in summary["definition"]


def test_the_markdown_table_has_a_line_a_claim_and_says_what_was_measured(folder):
    lines = (folder / "claims.md").read_text().splitlines()
    assert lines[0].startswith("date: 2026-01-01, set: quick, 1 seed")
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| claim")]
    assert len(rows) == len(CRITERIA)
    assert {len(re.split(r"(?<!\\)\|", row)) for row in rows} == {6}


def test_what_was_not_measured_is_named_and_the_rest_is_there(tmp_path, whole):
    few = {name: rows[:6] for name, rows in whole.rows[0].items()}
    partial = replace(whole, rows={0: few}, contest=(), calibration=(), round_times=None)
    summary = write_report(tmp_path, partial, "qwen3_4b", ABOUT)
    assert set(summary["not_measured"]) == {"figure_4_latency", "figure_6", "figure_7", "figure_8"}
    claims = {claim["name"]: claim for claim in summary["claims"]}
    assert all(not claims[name]["parts"] for name in ("sequential loop", "drafting time", "STS", "frontier"))
    assert claims["order"]["parts"]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "no runs at two loads" in page
    assert "not measured: no times of dspark with 7 draft tokens" in page


def test_a_report_of_nothing_still_is_one(tmp_path):
    summary = write_report(tmp_path, Findings(kinds={}), "qwen3_4b", ABOUT)
    assert summary["verdicts"]["not shown"] == len(CRITERIA)
    assert len(summary["not_measured"]) == len(FIGURE_MAKERS)


def test_the_papers_tables_are_whole():
    for target, table in published.TABLE_1.items():
        assert set(table) == {"dspark", "dflash", "eagle3"}
        assert {len(row) for row in table.values()} == {9}
        lengths = published.table_1(target)["dspark"]
        assert lengths["math"] == pytest.approx(sum(table["dspark"][:3]) / 3)
    means = {name: sum(row) / 9 for name, row in published.TABLE_1["qwen3_4b"].items()}
    assert (round(means["dspark"], 2), round(means["dflash"], 2), round(means["eagle3"], 2)) == (4.73, 4.06, 3.61)
    over_eagle3, over_dflash = (means["dspark"] / means[name] - 1 for name in ("eagle3", "dflash"))
    assert (round(100 * over_eagle3, 1), round(100 * over_dflash, 1)) == (30.9, 16.3)  # as the paper's text has it


def test_panels_of_bars_and_lines_are_drawn_in_one_picture():
    line = Line("a", [1, 2, 4], [1.0, 2.0, 1.5], low=[0.9, 1.8, 1.4], high=[1.1, 2.2, 1.6], notes=["x", "y", "z"])
    bars = Panel("bars", "", "tokens", [line, replace(line, label="b", style=1)], kind="bars", ticks=["p", "q", "r"])
    wide = Panel("lines", "load", "tokens", [line], log="x", diagonal=True)
    one, two = size_of(draw([[wide]])), size_of(draw([[wide, wide], [bars]]))
    assert two[0] > 1.5 * one[0]
    assert two[1] > 1.8 * one[1]
