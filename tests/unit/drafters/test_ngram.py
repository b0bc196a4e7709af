"""Prompt lookup against a scan of everything for every proposal."""

import random
from collections.abc import Sequence

import pytest
import torch

from dspark.drafters.ngram import NGramConfig, NGramDrafter, NGramState


def propose(drafter: NGramDrafter, ids: Sequence[int], max_tokens: int) -> list[int]:
    state = drafter.new_state()
    drafter.extend_ids(state, ids)
    proposed: list[int] = drafter.propose(state, max_tokens).token_ids.tolist()
    return proposed


def scan(ids: Sequence[int], config: NGramConfig, max_tokens: int) -> list[int]:
    """Every length, longest first, and every place, newest first; then the copy token by token."""
    for length in range(config.max_match, config.min_match - 1, -1):
        suffix = list(ids[len(ids) - length :])
        for start in range(len(ids) - 1, length - 1, -1):
            if len(ids) > length and list(ids[start - length : start]) == suffix:
                grown = list(ids)
                for k in range(max_tokens):
                    grown.append(grown[start + k])
                return grown[len(ids) :]
    return []


@pytest.mark.parametrize(("min_match", "max_match"), [(2, 5), (1, 3), (3, 3)])
@pytest.mark.parametrize("vocabulary", [2, 4, 20])
def test_the_index_finds_what_a_scan_finds(min_match: int, max_match: int, vocabulary: int):
    rng = random.Random(vocabulary)
    config = NGramConfig(block_size=7, min_match=min_match, max_match=max_match)
    drafter = NGramDrafter(config)
    num_found = 0
    for _ in range(20):
        state = drafter.new_state()
        while state.num_tokens < 80:
            drafter.extend_ids(state, [rng.randrange(vocabulary) for _ in range(rng.randint(0, 8))])
            max_tokens = rng.randint(0, 7)
            proposed = drafter.propose(state, max_tokens).token_ids.tolist()
            assert proposed == scan(state.ids, config, max_tokens)
            num_found += bool(proposed)
    assert num_found > 0


def test_what_followed_the_newest_earlier_match_is_proposed():
    assert propose(NGramDrafter(), [1, 2, 3, 4, 1, 2, 5, 6, 7, 1, 2], 3) == [5, 6, 7]


def test_a_longer_match_wins_over_a_newer_one():
    assert propose(NGramDrafter(), [9, 1, 2, 3, 8, 1, 2, 5, 9, 1, 2], 1) == [3]


def test_without_a_match_nothing_is_proposed():
    drafter = NGramDrafter()
    for ids in ([], [1], [1, 2], [1, 2, 3, 4, 5, 2], [1, 2, 3, 1]):
        proposal = drafter.propose(_state(drafter, ids), 7)
        assert proposal.num_tokens == 0
        assert proposal.token_ids.dtype == torch.long


def test_a_repetition_is_copied_beyond_its_end():
    assert propose(NGramDrafter(), [1, 2, 3, 1, 2, 3, 1], 7) == [2, 3, 1, 2, 3, 1, 2]
    assert propose(NGramDrafter(), [5, 5, 5], 4) == [5, 5, 5, 5]


def test_a_proposal_is_certain_of_its_tokens_and_has_no_confidence():
    drafter = NGramDrafter()
    proposal = drafter.propose(_state(drafter, [1, 2, 3, 1, 2]), 2)
    assert proposal.token_ids.tolist() == [3, 1]
    assert proposal.probs is None
    assert proposal.confidence_logits is None


def test_proposing_does_not_change_the_state():
    drafter = NGramDrafter()
    state = _state(drafter, [1, 2, 3, 1, 2])
    first = drafter.propose(state, 7).token_ids.tolist()
    assert drafter.propose(state, 7).token_ids.tolist() == first
    assert state.ids == [1, 2, 3, 1, 2]


def test_requests_do_not_see_each_other():
    drafter = NGramDrafter()
    _state(drafter, [1, 2, 3, 4])
    assert drafter.propose(_state(drafter, [7, 1, 2]), 7).num_tokens == 0


def test_an_index_entry_per_token_and_length_is_all_it_keeps():
    drafter = NGramDrafter()
    state = _state(drafter, list(range(1000)))
    assert len(state.followed_at) == sum(1000 - length for length in range(2, 6))


@pytest.mark.parametrize("max_tokens", [-1, 8])
def test_a_length_outside_the_block_is_an_error(max_tokens: int):
    drafter = NGramDrafter()
    with pytest.raises(ValueError, match=f"asked for {max_tokens} draft tokens; the drafter's block holds 7"):
        drafter.propose(_state(drafter, [1, 2, 1, 2]), max_tokens)


def test_match_lengths_the_wrong_way_round_are_an_error():
    with pytest.raises(ValueError, match="min_match 4 is above max_match 3"):
        NGramConfig(min_match=4, max_match=3)


def _state(drafter: NGramDrafter, ids: Sequence[int]) -> NGramState:
    state = drafter.new_state()
    drafter.extend_ids(state, ids)
    return state
