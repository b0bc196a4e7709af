"""A drafter's shape refuses what cannot be."""

from typing import Any

import pytest

from dspark.drafters.config import DrafterConfig
from random_drafter import HYPER, MOE, VARIANTS, small_config


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
        ({"markov_head_type": "lstm"}, "vanilla"),
        ({"attention_k_eq_v": True}, "attention_k_eq_v is for gemma4 draft layers"),
        (VARIANTS["gemma4"] | {"moe": MOE}, "type gemma4_text cannot have moe; set drafter.moe null"),
        (VARIANTS["gemma4"] | {"hyper_connections": HYPER}, "gemma4_text cannot have hyper_connections"),
        ({"final_logit_softcapping": 0.0}, "final_logit_softcapping"),
        ({"no_such_key": 1}, "no_such_key"),
    ],
)
def test_a_shape_that_cannot_be_is_an_error(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        small_config(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ("sliding_attention",)}, "layer_types names 1 layers, the drafter has 2"),
        ({"layer_types": ("sliding_attention", "full_attention")}, "sliding layers need a window"),
        ({"sliding_window": 6, "layer_types": ("full_attention",) * 2}, "a window needs a sliding layer"),
        ({"layer_types": ("strided", "full_attention")}, "strided"),
        ({"mlp_layer_types": ("dense", "sparse")}, r"moe \(not set\) do not go together"),
        ({"moe": MOE, "mlp_layer_types": ("dense", "dense")}, r"moe \(set\) do not go together"),
        ({"moe": MOE | {"num_experts_per_tok": 6}}, "num_experts_per_tok 6 is more than n_routed_experts 5"),
        ({"moe": MOE | {"scoring_func": "tanh"}}, "scoring_func"),
        ({"moe": {"n_routed_experts": 4}}, "num_experts_per_tok"),
        ({"hyper_connections": {"hc_mult": 1}}, "hc_mult"),
        ({"hyper_connections": {"streams": 4}}, "streams"),
    ],
)
def test_layers_that_cannot_be_are_an_error(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        small_config(**changes)


def test_every_layer_has_its_own_window_and_feed_forward_part():
    config = small_config(
        sliding_window=6,
        layer_types=("sliding_attention", "full_attention"),
        moe=MOE,
        mlp_layer_types=("dense", "sparse"),
    )
    assert [config.window_of(layer) for layer in range(2)] == [6, None]
    assert [config.is_sparse(layer) for layer in range(2)] == [False, True]
    everywhere = small_config(sliding_window=6, moe=MOE)
    assert everywhere.layer_types == ("sliding_attention",) * 2
    assert everywhere.mlp_layer_types == ("sparse",) * 2


def test_the_vocabulary_is_reduced_only_below_the_tokens_in_use():
    assert not small_config().has_reduced_vocabulary
    assert not small_config(valid_vocab_size=50).has_reduced_vocabulary
    assert small_config(valid_vocab_size=50, draft_vocab_size=49).has_reduced_vocabulary


def test_a_token_has_one_feature_of_all_captured_layers():
    assert small_config(target_layer_ids=(-1, 0, 2)).feature_size == 3 * 16


def test_a_shape_survives_json():
    config = small_config(sliding_window=6, moe=MOE, hyper_connections=HYPER)
    assert DrafterConfig.model_validate_json(config.model_dump_json()) == config
