"""Fitting on one half of the prompts and judging on the other, against rounds whose truth is known."""

import json
import math

import numpy as np
import pytest

from dspark.data.prompts import Prompt
from dspark.evaluation.confidence import (
    RoundTable,
    calibration_report,
    fit_scales,
    format_calibration,
    mode_of,
    reliability_bins,
    split_halves,
)
from dspark.speculation.calibration import SlotScales

NUM_PROMPTS, ROUNDS_PER_PROMPT, BLOCK = 40, 250, 3
FIT, TEST = ({f"p{n}" for n in range(side, NUM_PROMPTS, 2)} for side in (0, 1))


def prompt(name: str, domain: str = "math", text: str | None = None) -> Prompt:
    return Prompt(name, domain, "heldout", [{"role": "user", "content": text or name}])


def a_round(logits, accepted: int, committed: int) -> dict:
    return {
        "num_proposed": len(logits),
        "num_accepted": accepted,
        "num_committed": committed,
        "confidence_logits": list(logits),
    }


def overconfident_rows(*, factor: float = 2.0, offset: float = 0.0, domain: str = "math", seed: int = 0) -> list[dict]:
    """Rounds that stand as often as sigmoid(z) says while the drafter reports factor * z + offset."""
    generator = np.random.default_rng(seed)
    rows = []
    for n in range(NUM_PROMPTS):
        rounds = []
        for _ in range(ROUNDS_PER_PROMPT):
            z = generator.normal(0.5, 1.0, BLOCK)
            stands = generator.random(BLOCK) < 1 / (1 + np.exp(-z))
            accepted = int(stands.cumprod().sum())
            rounds.append(a_round((factor * z + offset).tolist(), accepted, accepted + 1))
        turn = {"rounds": rounds, "finish_reason": "stop"}
        rows.append({"id": f"p{n}", "domain": domain, "mode": "sampled", "turns": [turn]})
    return rows


def fitted(rows: list[dict], fit_domains: list[str] | None = None) -> tuple[SlotScales, dict]:
    options = {"num_bins": 20, "fit_domains": fit_domains}
    scales = fit_scales(rows, FIT, block_size=BLOCK, with_shift=True, **options)
    return scales, calibration_report(rows, scales, fit_ids=FIT, test_ids=TEST, seed=0, **options)


def test_each_prompt_is_in_one_half_and_each_domain_in_both():
    prompts = [prompt(f"{domain}{n}", domain) for domain in ("math", "chat") for n in range(11)]
    fit, test = split_halves(prompts, seed=0)
    assert fit | test == {p.id for p in prompts}
    assert not fit & test
    assert (len(fit), len(test)) == (11, 11)
    assert {len([i for i in half if i.startswith("math")]) for half in (fit, test)} == {5, 6}


def test_the_split_depends_on_the_seed_and_not_on_the_order_of_the_prompts():
    prompts = [prompt(f"p{n}") for n in range(20)]
    assert split_halves(prompts, seed=0) == split_halves(prompts[::-1], seed=0) != split_halves(prompts, seed=1)


def test_the_same_prompt_under_two_ids_is_on_one_side():
    prompts = [prompt(f"p{n}{suffix}", text=f"question {n}") for n in range(10) for suffix in ("", "~2")]
    for half in split_halves(prompts, seed=0):
        assert {i.removesuffix("~2") for i in half if i.endswith("~2")} == {i for i in half if not i.endswith("~2")}


def test_one_prompt_cannot_be_split():
    with pytest.raises(ValueError, match="1 different held-out prompts"):
        split_halves([prompt("a", text="same"), prompt("b", text="same")], seed=0)


def test_rounds_are_judged_as_far_as_their_fate_was_decided():
    rounds = [
        a_round([1.0, 2.0, 3.0], 3, 4),
        a_round([1.0, 2.0, 3.0], 2, 2),  # the second draft token was a stop token
        a_round([1.0], 0, 1),  # there was no room for more
        a_round([], 0, 1),
    ]
    table = RoundTable.of([{"turns": [{"rounds": rounds}]}], 3)
    assert table.num_judged.tolist() == [3, 2, 1]
    assert table.num_accepted.tolist() == [3, 2, 0]
    assert np.isnan(table.logits[2, 1:]).all()


def test_copied_rounds_have_no_confidence_and_are_counted_apart():
    copied = a_round([0.0, 0.0, 0.0], 3, 4) | {"confidence_logits": None}
    table = RoundTable.of([{"turns": [{"rounds": [a_round([1.0], 1, 2), copied, copied]}]}], 3)
    assert (table.num_rounds, table.num_copied) == (1, 2)


def test_no_rows_are_no_rounds():
    assert RoundTable.of([], 3).logits.shape == (0, 3)


def test_overconfidence_is_found_and_gone_on_the_other_prompts():
    scales, report = fitted(overconfident_rows())
    assert scales.temperatures[0] == pytest.approx(2.0, rel=0.25)
    errors = report["mean_ece"]
    assert errors["after"] < errors["before"] / 2
    assert errors["after"] < errors["floor"] + 0.02
    assert report["rounds"] == {"fit": 5000, "test": 5000}
    assert report["answers"] == {"stop": NUM_PROMPTS}
    json.dumps(report, allow_nan=False)


def test_figures_are_of_the_prompts_that_were_not_fitted_on():
    rows = overconfident_rows()
    _, report = fitted(rows)
    _, without_fit_half = fitted([row for row in rows if row["id"] in TEST])
    assert report["positions"][0]["ece_before"] == without_fit_half["positions"][0]["ece_before"]
    assert [p["is_fitted"] for p in report["positions"]] == [True] * BLOCK
    assert [p["is_fitted"] for p in without_fit_half["positions"]] == [False] * BLOCK


def test_only_the_named_domain_is_fitted_on_and_the_report_says_which():
    rows = overconfident_rows() + overconfident_rows(factor=0.5, domain="chat", seed=1)
    scales, report = fitted(rows, ["math"])
    assert scales.temperatures[0] == pytest.approx(2.0, rel=0.25)
    math_, chat = report["domains"]["math"], report["domains"]["chat"]
    assert (math_["is_fitted_on"], math_["is_improved"]) == (True, True)
    assert (chat["is_fitted_on"], chat["is_improved"]) == (False, False)
    assert math_["rounds"] == chat["rounds"] == 5000


def test_a_benchmark_counts_under_its_own_name_and_in_its_domain():
    _, report = fitted(overconfident_rows(domain="math/gsm8k"), ["math"])
    assert report["domains"].keys() == {"math", "math/gsm8k"}
    assert all(figures["is_fitted_on"] for figures in report["domains"].values())


def test_reliability_bins_are_those_of_a_plain_loop():
    generator = np.random.default_rng(0)
    predicted = np.concatenate([generator.random(300) ** 2, [0.0, 1.0]])
    accepted = (generator.random(302) < 0.4).astype(float)
    expected = []
    for b in range(5):
        inside = [(p, a) for p, a in zip(predicted, accepted, strict=True) if min(math.floor(p * 5), 4) == b]
        if inside:
            ps, as_ = zip(*inside, strict=True)
            expected.append((sum(ps) / len(ps), sum(as_) / len(as_), len(ps)))
    found = [tuple(b.values()) for b in reliability_bins(predicted, accepted, 5)]
    assert [b[2] for b in found] == [b[2] for b in expected]
    assert np.array(found) == pytest.approx(np.array(expected))


def test_the_diagram_and_the_error_are_of_the_same_rounds():
    _, report = fitted(overconfident_rows())
    for entry, position in zip(report["reliability"], report["positions"], strict=True):
        for name in ("before", "after"):
            bins = entry[name]
            gaps = sum(b["count"] * abs(b["predicted"] - b["observed"]) for b in bins)
            assert sum(b["count"] for b in bins) == position["n"]
            assert gaps / position["n"] == pytest.approx(position[f"ece_{name}"])


def test_every_sample_of_a_prompt_is_of_its_mode():
    assert [mode_of({"mode": name}) for name in ("greedy", "sampled", "sampled~3")] == ["greedy", "sampled", "sampled"]


def test_the_table_shows_every_position_domain_and_the_floor():
    _, report = fitted(overconfident_rows(), ["math"])
    text = format_calibration({"modes": {"sampled": report}})
    lines = [line.split() for line in text.splitlines()]
    assert [line[1] for line in lines if line[:1] == ["sampled"]] == ["1", "2", "3", "math", "overall"]
    assert "floor" in text


def test_an_offset_is_found_and_temperature_and_shift_are_in_report_and_table():
    scales, report = fitted(overconfident_rows(offset=3.0))
    assert scales.shifts[0] == pytest.approx(-1.5, abs=0.25)
    assert (report["temperatures"], report["shifts"]) == (list(scales.temperatures), list(scales.shifts))
    for n, position in enumerate(report["positions"]):
        assert (position["temperature"], position["shift"]) == (scales.temperatures[n], scales.shifts[n])
    assert report["mean_ece"]["after"] < report["mean_ece"]["floor"] + 0.02
    header, first = (line.split() for line in format_calibration({"modes": {"sampled": report}}).splitlines()[:2])
    at = header.index("T")
    assert header[at : at + 2] == ["T", "shift"]
    assert first[at : at + 2] == [f"{scales.temperatures[0]:.3f}", f"{scales.shifts[0]:.3f}"]
