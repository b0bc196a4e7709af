"""Rejection sampling gives the target's own distribution, whatever the drafter proposes."""

import pytest
import torch

from dspark.engine.sampling import SamplingParams, filtered_probs
from dspark.speculation.proposal import Proposal
from dspark.speculation.rejection import verify, verify_greedy

NUM_DRAWS = 20_000
TARGET_LOGITS = torch.tensor([2.0, 1.2, 0.4, 0.0, -0.5, -1.0, -2.0, -3.0])
FAR_DRAFT = torch.tensor([0.02, 0.03, 0.05, 0.05, 0.1, 0.15, 0.3, 0.3])  # likes what the target does not
NEAR_DRAFT = torch.softmax(TARGET_LOGITS + torch.tensor([-0.3, 0.2, 0.1, -0.2, 0.3, 0.0, 0.4, -0.1]), -1)


def draw_many(target: torch.Tensor, draft: torch.Tensor, *, seed: int = 0) -> tuple[torch.Tensor, float]:
    """How often each token came first, [V], and the share of accepted proposals. target, draft: [V]."""
    generator = torch.Generator().manual_seed(seed)
    seen = torch.zeros_like(target)
    rows = target.expand(2, -1)
    num_accepted = 0
    for _ in range(NUM_DRAWS):
        token = torch.multinomial(draft, 1, generator=generator)
        verdict = verify(rows, Proposal(token, draft[None], None), generator)
        seen[int(token) if verdict.num_accepted else verdict.next_id] += 1
        num_accepted += verdict.num_accepted
    return seen, num_accepted / NUM_DRAWS


def chi_square_p(seen: torch.Tensor, probs: torch.Tensor) -> float:
    """Tail probability of Pearson's statistic; a token of probability zero must not occur."""
    possible = probs > 0
    assert float(seen[~possible].sum()) == 0, "a token outside of the target's filters was output"
    expected = probs[possible] * seen.sum()
    statistic = ((seen[possible] - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc((possible.sum() - 1) / 2, statistic / 2))


@pytest.mark.parametrize("draft", [FAR_DRAFT, NEAR_DRAFT], ids=["far", "near"])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_output_follows_the_filtered_target_and_acceptance_is_the_sum_of_minima(draft, top_p):
    target = filtered_probs(TARGET_LOGITS, SamplingParams(temperature=1.0, top_p=top_p))
    seen, rate = draw_many(target, draft)
    assert chi_square_p(seen, target) > 0.001
    assert rate == pytest.approx(float(torch.minimum(target, draft).sum()), rel=0.02)


def test_a_bfloat16_drafters_proposals_are_judged_by_the_very_numbers_they_were_drawn_from():
    draft = torch.softmax((TARGET_LOGITS * 0.7).to(torch.bfloat16).float(), -1)
    target = torch.softmax(TARGET_LOGITS, -1)
    seen, rate = draw_many(target, draft, seed=1)
    assert chi_square_p(seen, target) > 0.001
    assert rate == pytest.approx(float(torch.minimum(target, draft).sum()), rel=0.02)


def test_the_check_itself_notices_a_verifier_that_takes_only_what_the_target_drew_too():
    """Accepting a draft only if one target sample agrees, and else drawing again, prefers what both like."""
    generator = torch.Generator().manual_seed(2)
    target = torch.softmax(TARGET_LOGITS, -1)
    drafts = torch.multinomial(NEAR_DRAFT, NUM_DRAWS, replacement=True, generator=generator)
    samples = torch.multinomial(target, NUM_DRAWS, replacement=True, generator=generator)
    again = torch.multinomial(target, NUM_DRAWS, replacement=True, generator=generator)
    seen = torch.bincount(torch.where(drafts == samples, drafts, again), minlength=8).float()
    assert chi_square_p(seen, target) < 0.001


def test_second_tokens_follow_the_target_given_the_first():
    generator = torch.Generator().manual_seed(3)
    transitions = torch.softmax(torch.tensor([[1.0, 0.0, -1.0], [0.0, 1.0, 0.5], [-1.0, 0.0, 1.0]]), -1)
    start = torch.tensor([0.5, 0.3, 0.2])
    draft = torch.tensor([0.2, 0.2, 0.6])
    seen = torch.zeros(3, 3)
    for _ in range(NUM_DRAWS // 2):
        ids = torch.multinomial(draft, 2, replacement=True, generator=generator)
        rows = torch.stack([start, transitions[ids[0]], transitions[ids[1]]])
        verdict = verify(rows, Proposal(ids, draft.expand(2, -1), None), generator)
        output = [*ids[: verdict.num_accepted].tolist(), verdict.next_id]
        if len(output) == 1:
            output.append(int(torch.multinomial(transitions[output[0]], 1, generator=generator)))
        seen[output[0], output[1]] += 1
    assert chi_square_p(seen.flatten(), (start[:, None] * transitions).flatten()) > 0.001


def test_a_greedy_proposal_is_accepted_with_the_targets_own_probability():
    generator = torch.Generator().manual_seed(4)
    target = torch.tensor([0.5, 0.3, 0.2])
    seen, num_accepted = torch.zeros(3), 0
    for _ in range(NUM_DRAWS // 2):
        verdict = verify(target.expand(2, -1), Proposal(torch.tensor([1]), None, None), generator)
        seen[1 if verdict.num_accepted else verdict.next_id] += 1
        num_accepted += verdict.num_accepted
    assert chi_square_p(seen, target) > 0.001
    assert num_accepted / (NUM_DRAWS // 2) == pytest.approx(0.3, rel=0.05)


def test_every_token_of_a_three_token_vocabulary_comes_up_and_with_top_p_one_half_only_the_first():
    logits = torch.tensor([1.0, 0.5, 0.0])
    generator = torch.Generator().manual_seed(5)
    for top_p, expected in ((1.0, {0, 1, 2}), (0.5, {0})):
        target = filtered_probs(logits, SamplingParams(temperature=1.0, top_p=top_p))
        empty = Proposal(torch.empty(0, dtype=torch.long), None, None)
        assert {verify(target[None], empty, generator).next_id for _ in range(300)} == expected


def test_a_drafter_equal_to_the_target_is_always_accepted():
    target = torch.softmax(TARGET_LOGITS, -1)
    seen, rate = draw_many(target, target)
    assert rate == 1.0
    assert chi_square_p(seen, target) > 0.001


@pytest.mark.parametrize("num_right", range(5))
def test_greedy_verification_accepts_up_to_the_first_difference_and_then_says_the_argmax(num_right):
    choices = [3, 1, 4, 1, 5]
    logits = torch.nn.functional.one_hot(torch.tensor(choices), 8).float()
    proposal = [token if k < num_right else 7 for k, token in enumerate(choices[:4])]
    verdict = verify_greedy(logits, Proposal(torch.tensor(proposal), None, None))
    assert (verdict.num_accepted, verdict.next_id) == (num_right, choices[num_right])


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_a_proposal_on_a_part_of_the_vocabulary_is_judged_as_the_dense_one_is(temperature):
    """Columns of `probs` that stand for some target ids, beside the same distribution written out over all of them."""
    generator = torch.Generator().manual_seed(0)
    support = torch.tensor([6, 1, 3])
    for seed in range(300):
        probs = torch.softmax(torch.randn(3, 3, generator=generator) / temperature, -1)
        target = torch.softmax(torch.randn(4, 8, generator=generator) / temperature, -1)
        columns = torch.multinomial(probs, 1, generator=generator).squeeze(1)
        dense = torch.zeros(3, 8)
        dense[:, support] = probs
        sparse = Proposal(support[columns], probs, None, support=support, columns=columns)
        written_out = Proposal(support[columns], dense, None)
        verdicts = [verify(target, one, torch.Generator().manual_seed(seed)) for one in (sparse, written_out)]
        assert verdicts[0] == verdicts[1]


def test_the_first_tokens_of_a_proposal_are_a_proposal():
    probs = torch.softmax(torch.randn(3, 2), -1)
    whole = Proposal(torch.tensor([4, 7, 4]), probs, torch.zeros(3), torch.tensor([4, 7]), torch.tensor([0, 1, 0]))
    cut = whole.first(2)
    assert (cut.num_tokens, cut.columns.tolist(), cut.confidence_logits.numel()) == (2, [0, 1], 2)
    assert torch.equal(cut.drawn_probs(), torch.stack([probs[0, 0], probs[1, 1]]))
    assert whole.first(3) is whole
