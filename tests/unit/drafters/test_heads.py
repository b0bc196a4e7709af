"""The sequential head and the confidence head against their formulas."""

import torch

from dspark.drafters.heads import ConfidenceHead, VanillaMarkovHead


def test_the_markov_bias_is_w2_times_the_row_of_the_previous_target_id():
    head = VanillaMarkovHead(vocab_size=9, draft_vocab_size=4, rank=3)
    previous = torch.tensor([[8, 0]])
    bias = head.bias(head.embed(previous))
    assert bias.shape == (1, 2, 4)
    expected = head.markov_w1.weight[8] @ head.markov_w2.weight.T
    torch.testing.assert_close(bias[0, 0], expected)


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
