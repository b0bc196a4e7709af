"""A drafter that has learned one answer by heart is accepted at every position when it drafts that answer.

Training sees true tokens before each slot, drafting its own: a slip between the two shows as a rate that is fine at
the first position and collapses after it.
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from dspark.drafters.base import BlockBatch
from dspark.drafters.checkpoint import load_drafter
from dspark.engine.hidden_states import HiddenStateCapture
from dspark.engine.sampling import SamplingParams
from dspark.evaluation.accepted_length import decode_plain, speculate
from dspark.targets import TargetConfig, load_target
from tiny_drafter import make_tiny_drafter

PROMPT = [1, 40, 77, 130, 2, 25, 61]
OPTIONS = {"sampling": SamplingParams(temperature=0.0), "max_new_tokens": 60, "stop_ids": (), "vocabulary_size": 320}


@pytest.mark.parametrize(
    "shape",
    [
        {"architecture": "dspark"},
        {"architecture": "dspark", "anchor_fusion": True, "sliding_window": 16, "learned_mask_embedding": True},
        {"architecture": "dflash"},
    ],
    ids=["dspark", "dspark with extensions", "dflash"],
)
def test_an_answer_learned_by_heart_is_accepted_at_every_position(tmp_path: Path, tiny_target: Path, shape: dict):
    target = load_target(TargetConfig(name=str(tiny_target), dtype="float32", device="cpu"))
    answer = decode_plain(target, PROMPT, **OPTIONS).output_ids
    drafter = load_drafter(make_tiny_drafter(tmp_path, tiny_target, **shape), trainable=True)
    learn_by_heart(drafter, target, PROMPT + answer)
    rollout = speculate(target, drafter.eval(), PROMPT, **OPTIONS)
    assert rollout.output_ids == answer
    rates = rollout.counts().conditional_acceptance
    assert len(rates) == drafter.block_size
    assert min(rates) >= 0.9, f"conditional acceptance by position: {rates}"


def learn_by_heart(drafter, target, tokens: list[int], *, steps: int = 120) -> None:
    ids = torch.tensor([tokens])
    with torch.no_grad(), HiddenStateCapture(target, drafter.target_layer_ids) as capture:
        target(ids)
        hidden = capture.hidden()
    anchors = torch.arange(len(PROMPT), len(tokens) - drafter.block_size)[None]
    batch = BlockBatch(ids, hidden, anchors, torch.ones_like(anchors, dtype=torch.bool))
    labels = ids[0][anchors[..., None] + 1 + torch.arange(drafter.block_size)]
    slots = torch.ones_like(labels, dtype=torch.bool)
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(steps):
        loss = F.cross_entropy(drafter(batch, slots).logits, labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
