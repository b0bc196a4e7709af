"""The real bundled model; fetched and converted (about half a minute) unless the user's cache folder holds it."""

import pytest
import torch

from dspark.bundled_target import SMOLLM2_135M_INSTRUCT
from dspark.targets import (
    TargetConfig,
    default_sampling,
    load_target,
    load_target_config,
    load_tokenizer,
    stop_token_ids,
    target_identity,
    vocabulary_size,
)

pytestmark = pytest.mark.e2e

CONFIG = TargetConfig(name="bundled:smollm2-135m-instruct", device="cpu")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(CONFIG)


@pytest.fixture(scope="module")
def model():
    return load_target(CONFIG)


def test_greedy_answer_is_sensible(model, tokenizer):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=16)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(ids) == "The capital of France is Paris.<|im_end|>"


def test_embeddings_are_tied(model):
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_dimensions_are_those_of_the_published_model():
    config = load_target_config(CONFIG)
    assert (config.vocab_size, config.num_hidden_layers, config.hidden_size) == (49152, 30, 576)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.rope_parameters["rope_theta"], config.max_position_embeddings) == (100_000.0, 8192)


def test_special_ids_are_those_of_the_published_model(tokenizer):
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer("<|im_start|><|im_end|>").input_ids == [1, 2]
    assert stop_token_ids(CONFIG, tokenizer) == (2,)
    assert vocabulary_size(tokenizer) == 49152


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("x12345", ["x", "1", "2", "3", "4", "5"]), ("a  42", ["a", "ĠĠ", "4", "2"]), ("a  b", ["a", "Ġ", "Ġb"])],
)
def test_each_digit_is_a_token_of_its_own(tokenizer, text, tokens):
    assert tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids) == tokens


@pytest.mark.parametrize("text", ["  7 and  42", "don't  é 漢 \n\n 3", "<|im_start|>user\n1 + 1"])
def test_tokenizer_round_trips_text(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_tokenizer_pads_left_and_knows_the_context_length(tokenizer):
    assert (tokenizer.padding_side, tokenizer.model_max_length) == ("left", 8192)


def test_default_sampling_is_recorded_in_the_checkpoint():
    assert default_sampling(CONFIG) == {"temperature": 0.7, "top_p": 0.95}


def test_revision_is_the_hash_of_the_wheel():
    assert target_identity(CONFIG)["revision"] == SMOLLM2_135M_INSTRUCT.wheel_sha256


def test_weights_are_finite(model):
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
