"""Rounds that are replayed: as they were recorded, also from within a block."""

from typing import Any

import numpy as np
import pytest

from dspark.evaluation.simulated_rounds import modelled_rounds, recorded_rounds

LOGIT = float(np.log(0.8 / 0.2))


def turn(*accepted: int, num_proposed: int = 3) -> dict[str, Any]:
    rounds = [
        {"num_proposed": num_proposed, "num_accepted": a, "confidence_logits": [LOGIT] * num_proposed} for a in accepted
    ]
    return {"output_ids": [1] * 9, "rounds": rounds}


def test_rounds_are_kept_answer_by_answer_and_cut_ones_left_out() -> None:
    short = turn(1, num_proposed=2)
    pool = recorded_rounds([{"turns": [turn(3, 0), short]}, {"turns": [turn(2)]}], block_size=3)
    assert pool.accepted.tolist() == [3, 0, 2]
    assert (pool.first.tolist(), pool.number.tolist(), pool.tokens.tolist()) == ([0, 2], [2, 1], [9, 9])
    assert pool.mean_survival == pytest.approx([0.8, 0.64, 0.512])


def test_nothing_to_replay_is_an_error() -> None:
    with pytest.raises(ValueError, match="confidence head"):
        recorded_rounds([{"turns": [turn(1, num_proposed=2)]}], block_size=3)


def test_what_is_left_of_a_block_is_drafted_next() -> None:
    pool = recorded_rounds([{"turns": [turn(3, 0, 2)]}], block_size=3)
    answers, zero = np.array([0]), np.array([0])
    survival, stands = pool.drafts(np.array([0]), np.array([1]))
    assert stands.tolist() == [2]
    assert survival[0] == pytest.approx([0.8, 0.64, 0.512])
    assert [part.tolist() for part in pool.advance(answers, zero, zero, np.array([2]))] == [[0], [2]]
    assert [part.tolist() for part in pool.advance(answers, zero, zero, np.array([4]))] == [[1], [0]]
    last = np.array([2])
    assert [part.tolist() for part in pool.advance(answers, last, zero, np.array([3]))] == [[0], [0]]


@pytest.mark.parametrize("length", [1, 3])
def test_a_replay_at_any_length_commits_what_was_recorded(length: int) -> None:
    """Blocks of 3, 0 and 2 accepted tokens are nine tokens with the target's own, whatever is verified of them."""
    pool = recorded_rounds([{"turns": [turn(3, 0, 2)]}], block_size=3)
    answers, rounds, offsets = (np.array([0]) for _ in range(3))
    committed = 0
    while committed < 8:
        _, stands = pool.drafts(rounds, offsets)
        tokens = np.minimum(stands, length) + 1
        committed += int(tokens[0])
        rounds, offsets = pool.advance(answers, rounds, offsets, tokens)
    assert committed == 8
    assert (rounds.tolist(), offsets.tolist()) == ([0], [0])


def test_a_modelled_pool_is_calibrated_and_its_answers_differ() -> None:
    pool = modelled_rounds(np.random.default_rng(0), num_answers=300)
    survival = np.cumprod(pool.confidence, axis=1)
    for k in (0, 3, 6):
        assert survival[:, k].mean() == pytest.approx((pool.accepted > k).mean(), abs=0.03)
    sure = pool.confidence[:, 0] > 0.85
    assert (pool.accepted[sure] > 0).mean() == pytest.approx(pool.confidence[sure, 0].mean(), abs=0.03)
    per_answer = pool.accepted.reshape(300, -1).mean(axis=1)
    assert per_answer.std() > 0.8
