"""Verdicts on measurements whose truth is known."""

from dataclasses import replace

import numpy as np
import pytest

from dspark.evaluation.acceptance_claims import lossless
from dspark.evaluation.claims import CRITERIA, Claim, judge_all
from dspark.evaluation.findings import Findings, NotMeasured, budget_sums, threshold_sums
from synthetic_findings import KINDS, SLOTS, make_budget, make_findings, make_lossless, make_round, make_rows

NAMES = [criterion.name for criterion in CRITERIA]


@pytest.fixture(scope="module")
def whole() -> Findings:
    return make_findings()


@pytest.fixture(scope="module")
def published(whole: Findings) -> dict[str, str]:
    return {claim.name: claim.verdict for claim in judge_all(whole)}


@pytest.fixture(scope="module")
def opposite() -> dict[str, str]:
    return {claim.name: claim.verdict for claim in judge_all(make_findings(is_as_published=False))}


def judge(name: str, findings: Findings) -> Claim:
    return next(criterion for criterion in CRITERIA if criterion.name == name).judge(findings)


@pytest.mark.parametrize("name", NAMES)
def test_a_claim_holds_where_it_is_true(name, published):
    assert published[name] == "holds"


@pytest.mark.parametrize("name", NAMES)
def test_a_claim_does_not_where_the_opposite_is_true(name, opposite):
    assert opposite[name] == "does not"


def test_nothing_is_shown_of_nothing_and_the_reason_says_what_lacks():
    for claim in judge_all(Findings(kinds={})):
        assert (claim.verdict, claim.parts) == ("not shown", ())
        assert claim.reason.startswith("not measured: ")


def test_a_drafter_that_lacks_is_named(whole):
    rows = {0: {name: rows for name, rows in whole.rows[0].items() if name != "eagle3"}}
    claim = judge("order", replace(whole, rows=rows))
    assert claim.verdict == "not shown"
    assert claim.reason == "not measured: no drafter eagle3 of 1 layers, 7 draft tokens"


def test_few_prompts_leave_a_small_difference_open(whole):
    few = {name: rows[:3] for name, rows in whole.rows[0].items()}
    few["dspark-rnn"] = [row | {"turns": row["turns"]} for row in few["dspark"]]  # the very same rounds
    claim = judge("RNN head", replace(whole, rows={0: few}))
    assert claim.verdict == "not shown"
    assert "does not tell it from 1" in claim.reason


def test_with_several_seeds_each_ones_value_is_told():
    claim = judge("depth", make_findings(seeds=3))
    (part,) = claim.parts
    assert len(part.estimate.by_seed) == 3
    assert claim.samples == "36 prompts, 3 seeds of training"
    assert judge("threshold", make_findings(seeds=3)).samples == "36 prompts, 1 seed of training"  # of the first one
    assert judge("threshold pays", make_findings(seeds=3)).samples == "18 prompts, 1 seed of training"  # half judge


def test_a_seed_that_is_not_evaluated_yet_takes_nothing_from_the_others():
    several = make_findings(seeds=3)
    begun = {**several.rows[1], "eagle3": several.rows[1]["eagle3"][:4]}
    claim = judge("slot 1", replace(several, rows={**several.rows, 1: begun}))
    assert claim.samples == "36 prompts, 2 seeds of training"


def test_runs_under_load_that_stopped_anywhere_are_compared_within_repeats(whole):
    for stop in range(len(whole.contest)):
        for name in ("frontier", "static under load", "budget by load"):
            claim = judge(name, replace(whole, contest=whole.contest[:stop]))
            assert claim.verdict in ("holds", "not shown"), (stop, name, claim.reason)


def test_scales_that_are_right_are_never_said_to_leave_half_of_the_error(whole):
    """With few rounds most of what is left is noise, which absolute errors cannot tell from an error."""
    verdicts = []
    for seed in range(8):
        few = make_rows((0.8, 0.8), SLOTS, seed=seed, prompts=24, sharpness=1.3, spread=(0.3, 2.0))
        ids = [row["id"] for row in few]
        halves = {"fit_ids": frozenset(ids[::2]), "test_ids": frozenset(ids[1::2])}
        verdicts.append(judge("STS", replace(whole, calibration=few, **halves)).verdict)
    assert verdicts.count("does not") == 0


def test_drafters_are_compared_on_the_prompts_that_all_answered(whole):
    rows = {0: {**whole.rows[0], "dflash": whole.rows[0]["dflash"][5:]}}
    assert replace(whole, rows=rows).sums(["dspark", "dflash"]).shape[:3] == (1, 31, 2)
    with pytest.raises(NotMeasured, match="no prompt that dspark answered in poetry"):
        whole.sums(["dspark"], domain="poetry")


def test_drafters_are_found_by_what_they_are(whole):
    assert whole.drafter("dflash", num_layers=5) == "dflash-5-layers"
    assert whole.drafter("dspark", head="rnn") == "dspark-rnn"
    renamed = replace(whole, kinds={**KINDS, "other": KINDS["dspark-rnn"]})
    assert renamed.drafter("dspark", head="rnn") == "dspark-rnn"  # the one that was measured


def test_thresholds_cut_rounds_by_hand():
    logit = float(np.log(0.6 / 0.4))
    rounds = [make_round(3, 2, [2.0, logit, -2.0]), make_round(3, 3, [2.0, 2.0, 2.0]), make_round(0, 0, None)]
    rows = [{"turns": [{"rounds": rounds}]}]
    verified, accepted, counted = threshold_sums(rows, [0.0, 0.7])[0, 0]
    assert verified.tolist() == [8, 6]  # 4 + 4; 2 + 4
    assert accepted.tolist() == [7, 6]  # 3 + 4; 2 + 4
    assert counted.tolist() == [2, 2]


def test_a_stop_inside_a_block_counts_what_was_committed():
    stopped = make_round(3, 3, [2.0, 2.0, 2.0]) | {"num_committed": 2}
    _, accepted, _ = threshold_sums([{"turns": [{"rounds": [stopped]}]}], [0.0])[0, 0]
    assert accepted.tolist() == [2]


def test_steps_without_a_proposal_verify_their_anchor_alone():
    (row, *_) = make_budget((4, 4, 4))
    turn = {"rounds": [make_round(4, 1)], "output_ids": [0] * 6}  # the prefill's token, a round of two, three plain
    sums = budget_sums([row | {"turns": [turn]}], ["math", "chat"])
    assert sums[0, 0].tolist() == [[8, 4], [0, 0]]


def test_a_difference_at_a_near_tie_is_no_loss(whole):
    (part,) = lossless(replace(whole, lossless=make_lossless(gap=1e-5)))
    assert part.verdict == "holds"
