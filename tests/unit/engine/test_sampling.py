"""Tests of sampling parameters, of the filtered distribution and of drawing from it."""

import re
from typing import Any

import pytest
import torch

from dspark.config import build_config
from dspark.engine.sampling import SamplingParams, filtered_probs, sampling_problem


def test_temperature_zero_puts_all_mass_on_the_argmax() -> None:
    probs = filtered_probs(torch.tensor([0.1, 2.0, 2.0, -1.0]), SamplingParams(temperature=0))
    assert probs.tolist() == [0.0, 1.0, 0.0, 0.0]


def test_top_p_keeps_the_token_that_crosses_the_mass() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    probs = filtered_probs(logits, SamplingParams(top_p=0.6))
    torch.testing.assert_close(probs, torch.tensor([4 / 7, 3 / 7, 0.0, 0.0]))


def test_top_k_renormalises_before_top_p() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    probs = filtered_probs(logits, SamplingParams(top_k=2, top_p=0.5))
    torch.testing.assert_close(probs, torch.tensor([1.0, 0.0, 0.0, 0.0]))


def test_equal_logits_rank_by_token_id() -> None:
    probs = filtered_probs(torch.zeros(4), SamplingParams(top_k=2))
    assert probs.tolist() == [0.5, 0.5, 0.0, 0.0]


def test_min_p_keeps_what_is_at_least_that_share_of_the_likeliest():
    logits = torch.tensor([0.5, 0.26, 0.14, 0.1]).log()
    probs = filtered_probs(logits, SamplingParams(min_p=0.25))
    torch.testing.assert_close(probs, torch.tensor([0.5, 0.26, 0.14, 0.0]) / 0.9)


def test_min_p_is_measured_at_the_temperature_and_before_top_p():
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    assert (filtered_probs(logits, SamplingParams(temperature=2.0, min_p=0.5)) > 0).tolist() == [
        True,
        True,
        True,
        False,
    ]
    found = filtered_probs(logits, SamplingParams(min_p=0.25, top_p=0.8))  # 5/9, 5/18 and 1/6 are left; two make 5/6
    torch.testing.assert_close(found, torch.tensor([2 / 3, 1 / 3, 0.0, 0.0]))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", 0),
        ("top_p", 0),
        ("min_p", 1.5),
        ("min_p", -0.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", float("nan")),
        ("logit_bias", {3: 101}),
        ("logit_bias", {3: float("nan")}),
        ("logit_bias", {-1: 1}),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("banned_token_ids", [-1]),
        ("min_tokens", -1),
        ("logprobs", 21),
        ("logprobs", -1),
        ("seeded", "sometimes"),
    ],
)
def test_a_parameter_out_of_range_is_refused_in_one_line_with_its_name_and_value(name: str, value: Any):
    with pytest.raises(ValueError, match=f"{name}.* = .*: ") as caught:
        build_config(SamplingParams, {name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("params", "name", "line"),
    [
        (SamplingParams(logit_bias={8: 1.0}), "logit_bias", "token id 8.*use 0..7"),
        (SamplingParams(allowed_token_ids=(1, 9)), "allowed_token_ids", "token id 9"),
        (SamplingParams(banned_token_ids=(8,)), "banned_token_ids", "token id 8"),
        (SamplingParams(min_tokens=6), "min_tokens", "is 6, over the limit of 5 tokens"),
        (SamplingParams(allowed_token_ids=(1, 2), banned_token_ids=(1, 2, 3)), "banned_token_ids", "leave one"),
        (SamplingParams(banned_token_ids=tuple(range(8))), "banned_token_ids", "leave one"),
        (SamplingParams(allowed_token_ids=(1, 7), banned_token_ids=(1,), min_tokens=1), "min_tokens", "or use 0"),
    ],
)
def test_what_no_output_can_meet_is_told(params: SamplingParams, name: str, line: str):
    problem = sampling_problem(params, stop_ids={7}, max_tokens=5, vocabulary_size=8)
    assert problem is not None
    assert problem[0] == name
    assert re.search(line, problem[1])


def test_what_can_be_met_is_no_problem():
    params = SamplingParams(allowed_token_ids=(1, 7), banned_token_ids=(2,), min_tokens=5, logit_bias={7: 1.0})
    assert sampling_problem(params, stop_ids={7}, max_tokens=5, vocabulary_size=8) is None
    assert sampling_problem(SamplingParams(), stop_ids=(), max_tokens=1, vocabulary_size=1) is None


def test_what_only_the_engine_applies_is_refused_elsewhere_by_name():
    SamplingParams(temperature=0.5, top_p=0.9, min_p=0.1).require_plain("a loop")
    with pytest.raises(ValueError, match=r"a loop does not apply logprobs, min_tokens; leave it out"):
        SamplingParams(temperature=0.5, min_tokens=2, logprobs=0).require_plain("a loop")
