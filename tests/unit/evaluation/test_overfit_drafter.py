"""A drafter that has learned one answer by heart is accepted at every position when it drafts that answer.

Training sees true tokens before each slot, drafting its own: a slip between the two shows as a rate that is fine at
the first position and collapses after it.
"""

from pathlib import Path

import pytest

from dspark.drafters.checkpoint import load_drafter
from dspark.engine.sampling import SamplingParams
from dspark.evaluation.accepted_length import decode_plain, speculate
from dspark.targets import TargetConfig, load_target
from tiny_drafter import learn_by_heart, make_tiny_drafter

PROMPT = [1, 40, 77, 130, 2, 25, 61]
OPTIONS = {"sampling": SamplingParams(temperature=0.0), "max_new_tokens": 60, "stop_ids": (), "vocabulary_size": 320}


@pytest.mark.parametrize(
    "shape",
    [
        {"architecture": "dspark"},
        {"architecture": "dspark", "anchor_fusion": True, "sliding_window": 16, "learned_mask_embedding": True},
        {"architecture": "dspark", "markov_head_type": "gated"},
        {"architecture": "dspark", "markov_head_type": "rnn"},
        {"architecture": "dflash"},
        {"architecture": "eagle3"},
    ],
    ids=["dspark", "dspark with extensions", "gated", "rnn", "dflash", "eagle3"],
)
def test_an_answer_learned_by_heart_is_accepted_at_every_position(tmp_path: Path, tiny_target: Path, shape: dict):
    target = load_target(TargetConfig(name=str(tiny_target), dtype="float32", device="cpu"))
    answer = decode_plain(target, PROMPT, **OPTIONS).output_ids
    drafter = load_drafter(make_tiny_drafter(tmp_path, tiny_target, **shape), trainable=True)
    learn_by_heart(drafter, target, PROMPT, answer)
    rollout = speculate(target, drafter.eval(), PROMPT, **OPTIONS)
    assert rollout.output_ids == answer
    rates = rollout.counts().conditional_acceptance
    assert len(rates) == drafter.block_size
    assert min(rates) >= 0.9, f"conditional acceptance by position: {rates}"
