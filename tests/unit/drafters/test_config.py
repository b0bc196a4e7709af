"""A drafter's shape refuses what cannot be."""

from typing import Any

import pytest

from dspark.drafters.config import DrafterConfig
from random_drafter import small_config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 3}, "num_attention_heads 3 is not a multiple of num_key_value_heads 2"),
        ({"draft_vocab_size": 62}, "draft_vocab_size 62 <= valid_vocab_size 61 <= vocab_size 61 does not hold"),
        ({"valid_vocab_size": 62}, "does not hold"),
        ({"mask_token_id": 61}, "mask_token_id 61 is outside the vocabulary of 61"),
        ({"markov_rank": 0}, "confidence_head_with_markov needs"),
        ({"enable_confidence_head": False}, "confidence_head_with_markov needs"),
        ({"architecture": "dflash", "confidence_head_with_markov": False}, "a dflash drafter has no Markov head"),
        ({"markov_head_type": "rnn"}, "vanilla"),
        ({"no_such_key": 1}, "no_such_key"),
    ],
)
def test_a_shape_that_cannot_be_is_an_error(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        small_config(**changes)


def test_the_vocabulary_is_reduced_only_below_the_tokens_in_use():
    assert not small_config().has_reduced_vocabulary
    assert not small_config(valid_vocab_size=50).has_reduced_vocabulary
    assert small_config(valid_vocab_size=50, draft_vocab_size=49).has_reduced_vocabulary


def test_a_token_has_one_feature_of_all_captured_layers():
    assert small_config(target_layer_ids=(-1, 0, 2)).feature_size == 3 * 16


def test_a_shape_survives_json():
    config = small_config(sliding_window=6)
    assert DrafterConfig.model_validate_json(config.model_dump_json()) == config
