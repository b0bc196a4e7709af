"""Pictures of the cost curve and of throughput: drawn from what the jobs write, left out where there is nothing."""

import base64

import pytest

from dspark.evaluation.plots import cost_curve_plot, load_plot


def row(ms: float, **sizes: int) -> dict:
    return {"ms": ms, "low_ms": 0.9 * ms, "high_ms": 1.2 * ms, "curve_ms": ms} | sizes


PROFILE = {
    "steps": [
        row(10.0, batch_tokens=1, requests=1),
        row(12.0, batch_tokens=8, requests=1),
        row(15.0, batch_tokens=8, requests=8),
    ],
    "drafting": [row(3.0, requests=1), row(5.0, requests=8)],
    "budgets": [{"requests": 1, "verify_length": 5.0}, {"requests": 8, "verify_length": 2.5}],
}
FIGURES = {"plain": {"tokens_per_s": 50.0}, "speculative": {"tokens_per_s": 80.0}, "ratio": {"median": 1.6}}
BENCHMARK = {"summary": {"greedy": {"1": FIGURES, "16": FIGURES}, "sampled": {"4": FIGURES}}}


def is_png(uri: str | None) -> bool:
    assert uri is not None
    head, _, content = uri.partition(",")
    return head == "data:image/png;base64" and base64.b64decode(content).startswith(b"\x89PNG")


@pytest.mark.parametrize("without", [(), ("drafting", "budgets"), ("budgets",)])
def test_a_profile_is_drawn_with_or_without_a_drafter(without):
    assert is_png(cost_curve_plot(PROFILE | {name: [] for name in without}))


def test_a_benchmark_is_drawn_mode_by_mode():
    assert is_png(load_plot(BENCHMARK))


def test_what_was_not_measured_is_not_drawn():
    assert cost_curve_plot({}) is None
    assert load_plot({}) is None
    assert load_plot({"summary": {}}) is None
