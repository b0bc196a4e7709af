"""A model that serves an engine is compared with its own `generate` and serves on."""

from pathlib import Path

import pytest

from dspark.attention import paged
from dspark.engine.target_runner import TargetRunner
from dspark.evaluation.comparison import compare_with_generate, generate_greedy
from dspark.targets import TargetConfig, load_target

PROMPT = [1, 40, 77, 130, 2, 25, 61]
OPTIONS = {"max_new_tokens": 12, "stop_ids": [2, 0], "vocabulary_size": 320}


@pytest.fixture(scope="module")
def model(tiny_target: Path):
    return load_target(TargetConfig(name=str(tiny_target), dtype="float32", device="cpu"))


def test_what_generate_itself_says_is_identical(model):
    output_ids = generate_greedy(model, PROMPT, **OPTIONS)
    found = compare_with_generate(model, PROMPT, output_ids, **OPTIONS)
    assert found == {"identical": True, "dtype": "float32", "position": None, "top2_gap": None}


def test_an_output_that_ends_too_early_parts_at_its_end(model):
    output_ids = generate_greedy(model, PROMPT, **OPTIONS)
    found = compare_with_generate(model, PROMPT, output_ids[:4], **OPTIONS)
    assert (found["identical"], found["position"]) == (False, 4)
    assert found["top2_gap"] > 0


def test_a_model_on_paged_attention_is_compared_on_its_own_and_switched_back(tiny_target):
    model = load_target(TargetConfig(name=str(tiny_target), dtype="float32", device="cpu"))
    expected = generate_greedy(model, PROMPT, **OPTIONS)
    TargetRunner(model, vocabulary_size=320, num_pages=8, page_size=8)
    assert compare_with_generate(model, PROMPT, expected, **OPTIONS)["identical"]
    assert model.config._attn_implementation == paged.NAME
