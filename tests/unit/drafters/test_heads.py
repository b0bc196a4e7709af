"""The sequential heads and the confidence head against their formulas."""

import pytest
import torch

from dspark.drafters.heads import (
    ConfidenceHead,
    GatedMarkovHead,
    RNNMarkovHead,
    SequentialHead,
    VanillaMarkovHead,
    build_sequential_head,
)
from random_drafter import small_config

SIZES = {"vocab_size": 9, "draft_vocab_size": 4, "rank": 3}
HEADS = {
    "vanilla": VanillaMarkovHead(**SIZES),
    "gated": GatedMarkovHead(**SIZES, hidden_size=5),
    "rnn": RNNMarkovHead(**SIZES, hidden_size=5),
}
every_head = pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)


def blocks() -> tuple[torch.Tensor, torch.Tensor]:
    """Two blocks of four slots: states [2, 4, 5] and previous ids [2, 4]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 4, 5, generator=generator), torch.randint(0, 9, (2, 4), generator=generator)


def test_the_markov_bias_is_w2_times_the_row_of_the_previous_target_id():
    head, (h, previous) = HEADS["vanilla"], blocks()
    bias = head.bias(head.unroll(h, head.embed(previous)))
    assert bias.shape == (2, 4, 4)
    expected = head.markov_w1.weight[previous[1, 2]] @ head.markov_w2.weight.T
    torch.testing.assert_close(bias[1, 2], expected)


def test_the_gate_reads_the_slots_state_and_the_previous_token():
    head, (h, previous) = HEADS["gated"], blocks()
    assert isinstance(head, GatedMarkovHead)
    row = head.markov_w1.weight[previous[1, 2]]
    gate = torch.sigmoid(head.gate_proj.weight @ torch.cat([h[1, 2], row]) + head.gate_proj.bias)
    torch.testing.assert_close(head.unroll(h, head.embed(previous))[1, 2], gate * row)


def test_the_recurrent_head_carries_its_state_from_slot_to_slot():
    head, (h, previous) = HEADS["rnn"], blocks()
    assert isinstance(head, RNNMarkovHead)
    weight, offset = head.joint_proj.weight, head.joint_proj.bias
    state = torch.zeros(3)
    found = head.unroll(h, head.embed(previous))[1]
    for slot in range(4):
        inputs = torch.cat([state, head.markov_w1.weight[previous[1, slot]], h[1, slot]])
        gate, candidate, out = weight[:3], weight[3:6], weight[6:]
        kept = torch.sigmoid(gate @ inputs + offset[:3])
        state = kept * state + (1 - kept) * torch.tanh(candidate @ inputs + offset[3:6])
        torch.testing.assert_close(found[slot], torch.tanh(out @ inputs + offset[6:]))


@every_head
def test_slot_by_slot_is_what_the_whole_block_gives(head: SequentialHead):
    h, previous = blocks()
    whole = head.unroll(h, head.embed(previous))
    state = None
    for slot in range(4):
        vector, state = head.step(h[:, slot], head.embed(previous[:, slot]), state)
        torch.testing.assert_close(vector, whole[:, slot])


@every_head
def test_a_slot_does_not_hang_on_later_ones(head: SequentialHead):
    h, previous = blocks()
    whole = head.unroll(h, head.embed(previous))
    changed_h, changed = h.clone(), previous.clone()
    changed_h[:, 2:], changed[:, 2:] = 7.0, 0
    torch.testing.assert_close(head.unroll(changed_h, head.embed(changed))[:, :2], whole[:, :2])


@pytest.mark.parametrize("kind", HEADS)
def test_the_config_names_the_head(kind: str):
    head = build_sequential_head(small_config(markov_head_type=kind), draft_rows=30)
    assert type(head) is type(HEADS[kind])
    assert head.markov_w2.weight.shape == (30, 5)


def test_the_confidence_logit_reads_state_and_previous_token():
    head = ConfidenceHead(hidden_size=4, markov_rank=2)
    h, embedded = torch.randn(3, 4), torch.randn(3, 2)
    expected = torch.cat([h, embedded], dim=-1) @ head.proj.weight[0] + head.proj.bias
    torch.testing.assert_close(head(h, embedded), expected)


def test_the_confidence_logit_can_leave_the_previous_token_out():
    head = ConfidenceHead(hidden_size=4, markov_rank=0)
    h = torch.randn(3, 4)
    torch.testing.assert_close(head(h, torch.randn(3, 2)), h @ head.proj.weight[0] + head.proj.bias)
    assert head(h, None).shape == (3,)


def test_confidence_logits_are_float32_in_a_bf16_drafter():
    head = ConfidenceHead(hidden_size=4, markov_rank=2).to(torch.bfloat16)
    assert head(torch.randn(3, 4).bfloat16(), torch.randn(3, 2)).dtype == torch.float32
