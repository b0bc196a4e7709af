"""Figures from result rows, against hand calculations."""

import json

import pytest

from dspark.evaluation.config import EvaluationMode
from dspark.evaluation.summary import format_table, summarize

GREEDY = EvaluationMode(name="greedy")


def a_round(proposed: int, accepted: int, committed: int, confidence_logits: list[float] | None = None) -> dict:
    return {
        "num_proposed": proposed,
        "num_accepted": accepted,
        "num_committed": committed,
        "confidence_logits": confidence_logits,
    }


def a_turn(*rounds: dict, draft: float = 0.1, verify: float = 0.3, **extras) -> dict:
    return {
        "output_ids": [5] * (1 + sum(r["num_committed"] for r in rounds)),
        "finish_reason": "length",
        "rounds": list(rounds),
        "seconds": {"prefill": 9.0, "draft": draft, "verify": verify},
        "num_prompt_tokens": 4,
        "plain": None,
        "comparison": None,
    } | extras


def a_row(row_id: str, *turns: dict, domain: str = "math", mode: str = "greedy", error: str | None = None) -> dict:
    return {
        "id": row_id,
        "domain": domain,
        "mode": mode,
        "prompt": "-",
        "request": "-",
        "error": error,
        "turns": list(turns),
    }


def test_accepted_length_is_over_all_rounds_and_not_a_mean_of_prompts():
    rows = [
        a_row("a", a_turn(a_round(3, 3, 4), a_round(3, 3, 4), a_round(3, 1, 2))),
        a_row("b", a_turn(a_round(3, 0, 1))),
    ]
    overall = summarize(rows, [GREEDY], seed=0)["modes"]["greedy"]["overall"]
    assert overall["accepted_length"] == 11 / 4
    assert overall["rounds"] == 4
    low, high = overall["accepted_length_interval"]
    assert low <= 11 / 4 <= high


def test_figures_are_kept_apart_by_domain_and_mode():
    rows = [
        a_row("a", a_turn(a_round(3, 3, 4))),
        a_row("b", a_turn(a_round(3, 1, 2)), domain="chat"),
        a_row("a", a_turn(a_round(3, 0, 1)), mode="sampled"),
    ]
    modes = summarize(rows, [GREEDY, EvaluationMode(name="sampled", temperature=1.0)], seed=0)["modes"]
    lengths = {(m, d): f["accepted_length"] for m, content in modes.items() for d, f in content["domains"].items()}
    assert lengths == {("greedy", "math"): 4.0, ("greedy", "chat"): 2.0, ("sampled", "math"): 1.0}


def test_a_benchmark_counts_under_its_own_name_and_in_its_domain():
    rows = [
        a_row("a", a_turn(a_round(3, 3, 4)), domain="math/gsm8k"),
        a_row("b", a_turn(a_round(3, 1, 2)), domain="math/aime25"),
    ]
    domains = summarize(rows, [GREEDY], seed=0)["modes"]["greedy"]["domains"]
    assert {name: figures["accepted_length"] for name, figures in domains.items()} == {
        "math": 3.0,
        "math/aime25": 2.0,
        "math/gsm8k": 4.0,
    }


def test_turns_and_prompts_of_several_turns_are_counted():
    rows = [a_row("a", a_turn(a_round(3, 0, 1)), a_turn(a_round(3, 0, 1))), a_row("b", a_turn(a_round(3, 0, 1)))]
    overall = summarize(rows, [GREEDY], seed=0)["modes"]["greedy"]["overall"]
    assert (overall["prompts"], overall["turns"], overall["multi_turn_prompts"]) == (2, 3, 1)


def test_a_failed_prompt_is_counted_by_reason_and_not_in_the_figures():
    rows = [a_row("a", a_turn(a_round(3, 0, 1))), a_row("b", a_turn(a_round(3, 3, 4)), error="too long")]
    content = summarize(rows, [GREEDY], seed=0)["modes"]["greedy"]
    assert content["failed"] == {"too long": 1}
    assert content["overall"]["prompts"] + sum(content["failed"].values()) == len(rows)
    assert content["overall"]["accepted_length"] == 1.0


def test_speed_up_is_seconds_a_token_without_over_with_the_drafter_on_the_timed_turns_alone():
    timed = a_turn(a_round(3, 3, 4), draft=0.2, verify=0.6, plain={"rounds": 4, "seconds": 1.6})
    untimed = a_turn(a_round(3, 0, 1), draft=5.0, verify=5.0)
    overall = summarize([a_row("a", timed), a_row("b", untimed)], [GREEDY], seed=0)["modes"]["greedy"]["overall"]
    assert overall["speedup"] == pytest.approx((1.6 / 4) / (0.8 / 4))
    assert overall["timed_turns"] == 1
    assert overall["draft_ms_per_round"] == pytest.approx(2600.0)


def test_rows_of_the_engine_have_no_times_of_their_own():
    rows = [a_row("a", a_turn(a_round(3, 1, 2), seconds=None))]
    metrics = summarize(rows, [GREEDY], seed=0)
    overall = metrics["modes"]["greedy"]["overall"]
    assert overall["accepted_length"] == 2.0
    assert [overall[key] for key in ("draft_ms_per_round", "verify_ms_per_round", "speedup")] == [None] * 3
    assert "2.00" in format_table(metrics)


def test_the_comparison_counts_prompts_and_keeps_where_they_part():
    same = {"identical": True, "dtype": "bfloat16", "position": None, "top2_gap": None}
    other = {"identical": False, "dtype": "bfloat16", "position": 7, "top2_gap": 0.01}
    rows = [
        a_row("a", a_turn(a_round(1, 0, 1), comparison=same), a_turn(a_round(1, 0, 1), comparison=other)),
        a_row("b", a_turn(a_round(1, 0, 1), comparison=same)),
        a_row("c", a_turn(a_round(1, 0, 1))),
    ]
    found = summarize(rows, [GREEDY], seed=0)["generate_comparison"]
    assert (found["checked"], found["identical"], found["dtype"]) == (2, 1, "bfloat16")
    assert found["first_differences"] == [{"id": "a", "mode": "greedy", "turn": 1} | other]


def test_the_table_shows_every_position_and_the_definition():
    rows = [a_row("a", a_turn(a_round(3, 1, 2, [0.0, 0.0, 0.0]), a_round(3, 3, 4, [0.0, 0.0, 0.0])))]
    text = format_table(summarize(rows, [GREEDY], seed=0))
    lines = {" ".join(line.split()) for line in text.splitlines()}
    assert "greedy overall conditional acceptance 1.00 0.50 1.00" in lines
    assert "greedy overall survival 1.00 0.50 0.50" in lines
    assert "greedy overall mean confidence 0.50 0.50 0.50" in lines
    assert "bonus" in text


def test_figures_are_json_without_nan():
    rows = [a_row("a", a_turn()), a_row("b", a_turn(a_round(3, 0, 1)))]
    figures = summarize(rows, [GREEDY], seed=0)
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
