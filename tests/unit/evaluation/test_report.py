"""The report is one file that says what was found, and shows what is missing as missing."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dspark.evaluation.config import EvaluationMode
from dspark.evaluation.report import write_report
from dspark.evaluation.summary import summarize

SUMMARY = {
    "target": "bundled:<tiny>",
    "drafter_parameters": 1_234_567,
    "answers": 60,
    "tokens": 9_000,
    "anchors": 4_000,
    "accepted_length": {"greedy": {"math": 2.5, "overall": 2.25}},
    "stages": {"generate": {"seconds": 12.0, "tokens_per_s": 750.0}, "train": {"seconds": 99.5, "tokens_per_s": None}},
}
HISTORY = [
    {"step": n, "loss": 3 / n, "ce": 2 / n, "tv": 1 / n, "confidence": 0.5, "expected_accepted_length": 1 + n / 30}
    for n in range(1, 30)
] + [{"step": 29, "heldout": {"expected_accepted_length": 1.8}}]


def metrics(accepted: int) -> dict:
    rounds = [
        {"num_proposed": 3, "num_accepted": accepted, "num_committed": accepted + 1, "confidence_logits": None}
        for _ in range(4)
    ]
    turn = {
        "output_ids": [1] * 5,
        "rounds": rounds,
        "seconds": {"prefill": 0.1, "draft": 0.1, "verify": 0.2},
        "plain": {"rounds": 4, "seconds": 0.4},
        "comparison": {"identical": True, "dtype": "float32", "position": None, "top2_gap": None},
    }
    rows = [
        {"id": f"{domain}{n}", "domain": domain, "mode": "greedy", "error": None, "turns": [turn]}
        for domain in ("chat", "math")
        for n in range(2)
    ]
    return summarize(rows, [EvaluationMode(name="greedy")], seed=0)


class Page(HTMLParser):
    """Tags that were opened and not closed, links to elsewhere, and all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "img"):
            self.open.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"{tag} is closed out of order"

    def handle_data(self, data):
        self.text += data + "\n"


@pytest.fixture
def page(tmp_path: Path) -> Page:
    path = tmp_path / "report.html"
    write_report(path, summary=SUMMARY, history=HISTORY, evaluations={"DSpark": metrics(2), "DFlash": metrics(1)})
    return Page(path.read_text(encoding="utf-8"))


def test_the_file_is_well_formed_and_loads_nothing_from_elsewhere(page):
    assert page.open == []
    assert len(page.links) == 2
    assert all(link.startswith("data:image/png;base64,") for link in page.links)


def test_the_figures_of_both_drafters_and_of_every_stage_are_there(page):
    for shown in ("1,234,567", "DSpark", "DFlash", "3.00", "2.00", "generate", "750.0", "99.5"):
        assert re.search(rf"^{re.escape(shown)}$", page.text, re.MULTILINE), shown


def test_the_definition_is_there(page):
    assert "bonus" in page.text
    assert "prefill is not counted" in page.text


def test_names_are_shown_as_they_are_and_never_as_markup(page):
    assert "bundled:<tiny>" in page.text
    assert "tiny" not in page.open


def test_calibration_is_shown_with_its_diagram_and_its_errors(tmp_path):
    bins = [{"predicted": 0.3, "observed": 0.5, "count": 40}, {"predicted": 0.8, "observed": 0.7, "count": 10}]
    errors = {"mean_ece": {"before": 0.123, "after": 0.045, "floor": None}}
    mode = errors | {
        "rounds": {"fit": 60, "test": 50},
        "reliability": [{"position": k, "before": bins, "after": [] if k == 3 else bins} for k in (1, 2, 3)],
        "domains": {"math": errors | {"rounds": 50, "is_fitted_on": False}},
    }
    path = tmp_path / "r.html"
    write_report(path, summary={}, history=[], evaluations={}, calibration={"modes": {"greedy": mode}})
    page = Page(path.read_text(encoding="utf-8"))
    assert len(page.links) == 1
    for shown in ("12.30 %", "4.50 %", "math (not fitted)"):
        assert re.search(rf"^{re.escape(shown)}$", page.text, re.MULTILINE), shown


def test_without_training_history_or_evaluations_the_rest_is_still_shown(tmp_path):
    write_report(tmp_path / "r.html", summary=SUMMARY, history=[], evaluations={})
    page = Page((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert page.open == []
    assert page.links == []
    assert "2.50" in page.text


def test_an_empty_summary_is_no_error(tmp_path):
    write_report(tmp_path / "r.html", summary={}, history=[{"step": 1, "loss": 1.0}], evaluations={})
    assert "Definitions" in (tmp_path / "r.html").read_text(encoding="utf-8")
