"""Accepted length and per-position acceptance against hand calculations."""

import math

import pytest

from dspark.speculation.statistics import DEFINITION, AcceptanceCounts, bootstrap_interval


def counts_of(*rounds: tuple[int, int, int]) -> AcceptanceCounts:
    counts = AcceptanceCounts()
    for proposed, accepted, committed in rounds:
        counts.add_round(proposed, accepted, committed)
    return counts


def test_hand_made_rounds_give_the_hand_calculated_length_and_rates():
    # accepted bits 1,1,0,0 / 0,0,0,0 / 1,1,1,1, each with its own token of the target after it
    counts = counts_of((4, 2, 3), (4, 0, 1), (4, 4, 5))
    assert counts.accepted_length == (3 + 1 + 5) / 3
    assert counts.survival == [2 / 3, 2 / 3, 1 / 3, 1 / 3]
    assert counts.conditional_acceptance == [2 / 3, 1.0, 1 / 2, 1.0]


def test_the_first_slot_is_counted():
    counts = counts_of((3, 1, 2), (3, 0, 1))
    assert counts.accepted[0] == 1
    assert counts.survival[0] == counts.conditional_acceptance[0] == 0.5


def test_nothing_accepted_still_commits_the_correction_token():
    counts = counts_of((3, 0, 1), (3, 0, 1))
    assert counts.accepted_length == 1.0
    assert counts.survival == [0.0, 0.0, 0.0]
    assert counts.conditional_acceptance[0] == 0.0
    assert math.isnan(counts.conditional_acceptance[1])


def test_everything_accepted_gives_block_size_plus_one():
    assert counts_of((7, 7, 8), (7, 7, 8)).accepted_length == 8.0


def test_accepted_plus_one_per_round_equals_committed_tokens_over_rounds():
    rounds = [(5, n, n + 1) for n in (0, 3, 5, 2, 1)]
    counts = counts_of(*rounds)
    assert counts.accepted_length == sum(accepted + 1 for _, accepted, _ in rounds) / len(rounds)
    assert counts.committed_tokens == counts.accepted_tokens + counts.rounds


def test_a_stop_inside_the_block_commits_only_up_to_it():
    counts = counts_of((5, 5, 2))
    assert counts.accepted_length == 2.0
    assert counts.accepted == [1, 1, 0, 0, 0]
    assert counts.proposed == [1, 1, 0, 0, 0]


def test_every_draft_token_is_accepted_rejected_or_behind_a_stop():
    draft_tokens = counts_of((5, 5, 2), (5, 3, 4), (5, 5, 6), (2, 0, 1)).to_dict()["draft_tokens"]
    assert draft_tokens == {"proposed": 17, "accepted": 10, "rejected": 4, "after_stop": 3}


def test_a_round_without_a_proposal_is_counted_apart():
    counts = counts_of((0, 0, 1), (2, 1, 2))
    assert (counts.rounds, counts.plain_rounds, counts.plain_committed_tokens) == (1, 1, 1)
    assert counts.accepted_length == 2.0


def test_no_round_has_no_accepted_length():
    counts = AcceptanceCounts()
    assert math.isnan(counts.accepted_length)
    assert counts.to_dict()["accepted_length"] is None


def test_a_shorter_proposal_does_not_lower_the_rate_of_slots_it_lacks():
    counts = counts_of((3, 3, 4), (1, 1, 2))
    assert counts.survival == [1.0, 1.0, 1.0]


def test_merging_equals_counting_together():
    first, second = [(4, 2, 3), (2, 2, 1)], [(0, 0, 1), (6, 6, 7)]
    merged = counts_of(*first).merge(counts_of(*second))
    assert merged.to_dict() == counts_of(*first, *second).to_dict()


def test_merging_leaves_both_operands_alone():
    left, right = counts_of((1, 1, 2)), counts_of((3, 3, 4))
    left.merge(right)
    assert (left.to_dict(), right.to_dict()) == (counts_of((1, 1, 2)).to_dict(), counts_of((3, 3, 4)).to_dict())


@pytest.mark.parametrize("impossible", [(2, 3, 4), (2, 1, 3), (2, 1, 0), (2, -1, 1)])
def test_an_impossible_round_is_refused(impossible):
    with pytest.raises(ValueError, match="cannot be"):
        counts_of(impossible)


def test_confidence_is_compared_with_the_rounds_that_judged_the_slot():
    counts = AcceptanceCounts()
    counts.add_round(2, 2, 3, confidence_logits=[0.0, 0.0])
    counts.add_round(2, 0, 1, confidence_logits=[0.0, 50.0])  # slot 1 was never judged here
    assert counts.mean_confidence == [0.5, 0.5]
    assert counts.predicted_survival == [0.5, pytest.approx((0.25 + 0.5) / 2)]


def test_without_a_confidence_head_no_confidence_is_reported():
    assert counts_of((2, 1, 2)).to_dict()["mean_confidence"] is None


def test_the_definition_says_that_the_bonus_token_counts():
    assert "bonus" in DEFINITION
    assert "prefill is not counted" in DEFINITION


def test_the_interval_holds_the_ratio_and_is_the_same_for_the_same_seed():
    committed, rounds = [30, 12, 25, 18, 40], [10, 10, 10, 10, 10]
    low, high = bootstrap_interval(committed, rounds, seed=3)
    assert low < sum(committed) / sum(rounds) < high
    assert bootstrap_interval(committed, rounds, seed=3) == (low, high)


def test_equal_prompts_have_an_interval_of_width_zero():
    assert bootstrap_interval([20, 20, 20], [10, 10, 10]) == (2.0, 2.0)


def test_one_prompt_has_no_interval():
    assert bootstrap_interval([20, 0], [10, 0]) is None
