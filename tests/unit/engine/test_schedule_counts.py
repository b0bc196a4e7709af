"""What was expected beside what came, by slot, by budget and in seconds."""

from pathlib import Path

import pytest

from dspark.drafters.ngram import NGramDrafter
from dspark.engine.draft_runner import NGramDraftRunner
from dspark.engine.schedule_counts import PredictedSeconds, ScheduleCounts
from dspark.speculation.cost_curve import CostCurve
from tiny_engine import PROMPTS, load, make_engine, request, run


def test_budgets_are_counted_by_length() -> None:
    counts = ScheduleCounts()
    counts.add_budgets([])
    counts.add_budgets([0, 3, 3])
    counts.add_budgets([1])
    assert counts.budgets == [1, 1, 0, 2]


def test_expected_survival_stands_beside_what_stood() -> None:
    counts = ScheduleCounts()
    counts.add_round([0.9, 0.5], 1)
    counts.add_round([0.5], 1)
    counts.add_round([], 0)
    assert (counts.judged, counts.stood) == ([2, 1], [2, 0])
    assert counts.expected == pytest.approx([1.4, 0.5])


def test_only_steps_that_a_curve_speaks_of_have_a_prediction() -> None:
    counts = ScheduleCounts()
    counts.add_step(None, 9.0, 1.0)
    counts.add_step(PredictedSeconds(verify_s=0.25, context_s=0.125, draft_s=0.125), 0.75, 0.25)
    assert (counts.predicted_s, counts.measured_s) == (0.5, 0.75)
    assert (counts.predicted_draft_s, counts.draft_s) == (0.125, 0.25)
    assert counts.predicted_context_s == 0.125


def test_an_engines_counts_agree_with_its_rounds_and_its_curve(tiny_target: Path) -> None:
    curve = CostCurve((1, 512), (0.25, 0.25), request_s=0.5)
    engine = make_engine(load(tiny_target), NGramDraftRunner(NGramDrafter()), curve=curve, min_gain=0.0, probe_every=1)
    run(engine, [request(prompt, str(i), max_tokens=250) for i, prompt in enumerate(PROMPTS[:2])])
    stats, counts = engine.stats, engine.stats.schedule
    assert sum(counts.budgets) == stats.decodes
    assert sum(length * number for length, number in enumerate(counts.budgets)) == stats.scheduled_tokens > 0
    assert sum(counts.judged) == stats.scheduled_tokens
    assert sum(counts.stood) >= stats.rounds.accepted_tokens > 0
    assert counts.measured_s == pytest.approx(stats.step_s)
    assert stats.steps * 0.25 < counts.predicted_s <= stats.steps * 0.75  # one or two requests a step


def test_the_prediction_grows_with_what_requests_have_in_memory(tiny_target: Path) -> None:
    curve = CostCurve((1, 512), (0.25, 0.25), context_s=1.0, context_tokens=4)
    engine = make_engine(load(tiny_target), NGramDraftRunner(NGramDrafter()), curve=curve, verify_length=0)
    prompt = list(range(20, 30))
    run(engine, [request(prompt, "a", max_tokens=5)])
    steps = [0, *range(10, 14)]  # the prompt is read, then four tokens are decoded behind 10, 11, … tokens
    assert engine.stats.steps == len(steps)
    expected = sum(0.25 + max(0, stored - 4) / 1000 for stored in steps)
    assert engine.stats.schedule.predicted_s == pytest.approx(expected)
