"""Verdicts on measurements whose truth is known."""

from dataclasses import replace

import numpy as np
import pytest

from dspark.evaluation.acceptance_claims import lossless
from dspark.evaluation.claims import CRITERIA, Claim, judge_all
from dspark.evaluation.findings import Findings, NotMeasured, budget_sums, threshold_sums
from synthetic_findings import KINDS, make_budget, make_findings, make_lossless, make_round

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
    assert "3 seeds" in claim.samples


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
