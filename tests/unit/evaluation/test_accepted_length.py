"""The reference loop is lossless: greedy output is the target's own, sampled output follows its distribution."""

from pathlib import Path

import pytest
import torch
import transformers

from dspark.engine.sampling import SamplingParams, filtered_probs
from dspark.evaluation.accepted_length import Rollout, decode_plain, speculate
from scripted_drafters import FixedDistributionDrafter, ScriptedDrafter
from tiny_target import small_vocabulary_target

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [1, 40, 77, 130, 2, 25, 61]
NUM_NEW = 24
VOCABULARY = 320
BLOCK_SIZES = (3, 5, 7)


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def continuation(target: transformers.PreTrainedModel) -> list[int]:
    """The library's own greedy output with nothing to stop it, one block longer than the tests decode."""
    return generate(target, PROMPT, NUM_NEW + 8, stop_ids=())


def generate(
    model: transformers.PreTrainedModel, prompt: list[int], num_new: int, *, stop_ids: tuple[int, ...]
) -> list[int]:
    model.generation_config = transformers.GenerationConfig(eos_token_id=list(stop_ids) or None, pad_token_id=2)
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_new)
    return output[0, len(prompt) :].tolist()


def greedy(model, drafter, *, num_new: int = NUM_NEW, stop_ids: tuple[int, ...] = (), **options) -> Rollout:
    return speculate(
        model,
        drafter,
        PROMPT,
        sampling=GREEDY,
        max_new_tokens=num_new,
        stop_ids=stop_ids,
        vocabulary_size=VOCABULARY,
        **options,
    )


@pytest.mark.parametrize(
    ("block_size", "verify_length"), [(size, length) for size in BLOCK_SIZES for length in range(size + 1)]
)
@pytest.mark.parametrize("num_right", [0, 2, 99])
def test_greedy_output_is_the_librarys_own_whatever_is_proposed(
    target, continuation, block_size, verify_length, num_right
):
    drafter = ScriptedDrafter(PROMPT + continuation, block_size=block_size, num_right=num_right)
    rollout = greedy(target, drafter, verify_length=verify_length)
    assert rollout.output_ids == continuation[:NUM_NEW]
    assert rollout.finish_reason == "length"


@pytest.mark.parametrize("position", range(1, 12))
def test_a_stop_token_anywhere_in_an_accepted_block_ends_the_output_there(target, continuation, position):
    stop_id = continuation[position]
    first = continuation.index(stop_id)
    drafter = ScriptedDrafter(PROMPT + continuation, block_size=7, num_right=99)
    rollout = greedy(target, drafter, stop_ids=(stop_id,))
    assert rollout.output_ids == continuation[: first + 1] == generate(target, PROMPT, NUM_NEW, stop_ids=(stop_id,))
    assert rollout.finish_reason == "stop"


def test_a_stop_inside_a_block_commits_only_up_to_it(target, continuation):
    position = next(p for p in range(3, 7) if continuation[p] not in continuation[:p])
    drafter = ScriptedDrafter(PROMPT + continuation, block_size=7, num_right=99)
    (only_round,) = greedy(target, drafter, stop_ids=(continuation[position],)).rounds
    assert (only_round.num_proposed, only_round.num_accepted, only_round.num_committed) == (7, 7, position)


def test_a_stop_as_the_very_first_token_needs_no_round(target, continuation):
    drafter = ScriptedDrafter(PROMPT + continuation, block_size=3, num_right=99)
    rollout = greedy(target, drafter, stop_ids=(continuation[0],))
    assert (rollout.output_ids, rollout.finish_reason, rollout.rounds) == ([continuation[0]], "stop", [])


def test_one_token_is_one_token(target, continuation):
    drafter = ScriptedDrafter(PROMPT + continuation, block_size=3, num_right=99)
    rollout = greedy(target, drafter, num_new=1)
    assert (rollout.output_ids, rollout.finish_reason, rollout.rounds) == (continuation[:1], "length", [])


@pytest.mark.parametrize("num_new", range(1, 12))
def test_output_is_exactly_as_long_as_asked_for(target, continuation, num_new):
    drafter = ScriptedDrafter(PROMPT + continuation, block_size=5, num_right=99)
    assert greedy(target, drafter, num_new=num_new).output_ids == continuation[:num_new]


def test_no_draft_is_made_that_could_not_be_output(target, continuation):
    drafter = ScriptedDrafter(PROMPT + continuation, block_size=5, num_right=0)
    greedy(target, drafter, num_new=8)
    assert drafter.proposed_lengths == [5, 5, 4, 3, 2, 1]  # and none for the last single token


def test_a_perfect_drafter_has_block_size_plus_one(target, continuation):
    drafter = ScriptedDrafter(PROMPT + continuation, block_size=5, num_right=99)
    rollout = greedy(target, drafter, num_new=1 + 3 * 6)
    assert rollout.counts().accepted_length == 6.0


@pytest.mark.parametrize("num_right", range(4))
def test_a_drafter_that_is_right_k_times_has_accepted_length_k_plus_one(target, continuation, num_right):
    drafter = ScriptedDrafter(PROMPT + continuation, block_size=7, num_right=num_right)
    rollout = greedy(target, drafter, num_new=1 + 4 * (num_right + 1) + 8)
    full_rounds = [r for r in rollout.rounds if r.num_proposed == 7]
    assert {r.num_committed for r in full_rounds} == {num_right + 1}
    assert {tuple(r.accepted_bits) for r in full_rounds} == {(1,) * num_right + (0,) * (7 - num_right)}


def test_committed_tokens_and_the_prefills_token_are_the_output(target, continuation):
    drafter = ScriptedDrafter(PROMPT + continuation, block_size=3, num_right=2)
    rollout = greedy(target, drafter)
    assert 1 + sum(r.num_committed for r in rollout.rounds) == len(rollout.output_ids)


def test_without_a_proposal_rounds_are_counted_as_plain(target, continuation):
    drafter = ScriptedDrafter(PROMPT + continuation, block_size=3, num_right=99)
    counts = greedy(target, drafter, verify_length=0).counts()
    assert (counts.rounds, counts.plain_rounds) == (0, NUM_NEW - 1)


def test_plain_decoding_is_the_same_output(target, continuation):
    rollout = decode_plain(
        target, PROMPT, sampling=GREEDY, max_new_tokens=NUM_NEW, stop_ids=(), vocabulary_size=VOCABULARY
    )
    assert rollout.output_ids == continuation[:NUM_NEW]
    assert rollout.seconds.draft == 0.0 or rollout.seconds.draft < rollout.seconds.verify


def test_drafter_context_is_what_one_pass_over_the_output_gives(target, continuation):
    drafter = ScriptedDrafter(PROMPT + continuation, block_size=5, num_right=2, layer_ids=(-1, 0, 2))
    rollout = greedy(target, drafter)
    (state,) = drafter.states
    tokens = PROMPT + rollout.output_ids
    with torch.no_grad():
        states = target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[i + 1][0] for i in (-1, 0, 2)], dim=-1)
    # The last token was never read by the target; what it would give is not context yet.
    assert state.num_tokens == len(tokens) - 1
    torch.testing.assert_close(state.hidden, expected[:-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("verify_length", [-1, 4])
def test_a_verify_length_outside_of_the_block_is_refused(target, verify_length):
    drafter = ScriptedDrafter(PROMPT, block_size=3, num_right=0)
    with pytest.raises(ValueError, match=r"use 0\.\.3"):
        greedy(target, drafter, verify_length=verify_length)


def test_an_empty_prompt_is_refused(target):
    with pytest.raises(ValueError, match="prompt is empty"):
        decode_plain(target, [], sampling=GREEDY, max_new_tokens=1, stop_ids=(), vocabulary_size=VOCABULARY)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.5)])
def test_padding_ids_are_never_output_even_where_the_target_and_the_drafter_like_them(target, sampling):
    used = 40
    with torch.no_grad():
        free = greedy(target, None, num_new=12).output_ids
    assert max(free) >= used, "the target must want an id outside for this test to mean something"
    drafter = FixedDistributionDrafter(torch.ones(VOCABULARY) / VOCABULARY, block_size=3)
    rollout = speculate(
        target,
        drafter,
        [1, 5, 9],
        sampling=sampling,
        max_new_tokens=40,
        stop_ids=(),
        vocabulary_size=used,
        generator=torch.Generator().manual_seed(1),
    )
    assert max(rollout.output_ids) < used


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=1.0), SamplingParams(temperature=1.2, top_p=0.8)])
def test_sampled_pairs_of_tokens_follow_the_filtered_target(sampling):
    """Two tokens a rollout, compared with the exact probability of each pair."""
    vocab_size, num_draws = 4, 1200
    model = small_vocabulary_target(vocab_size)
    drafter = FixedDistributionDrafter(torch.tensor([0.7, 0.1, 0.1, 0.1]), block_size=3)
    generator = torch.Generator().manual_seed(7)
    seen = torch.zeros(vocab_size, vocab_size)
    for _ in range(num_draws):
        ids = speculate(
            model,
            drafter,
            [0, 3, 1],
            sampling=sampling,
            max_new_tokens=3,
            stop_ids=(),
            vocabulary_size=vocab_size,
            generator=generator,
        ).output_ids
        seen[ids[1], ids[2]] += 1
    expected = pair_probabilities(model, [0, 3, 1], vocab_size, sampling) * num_draws
    assert chi_square_p(seen.flatten(), expected.flatten()) > 0.001


def pair_probabilities(model, prompt: list[int], vocab_size: int, sampling: SamplingParams) -> torch.Tensor:
    """P(second token, third token) of plain sampling, [V, V]: the sum over all first tokens."""
    triples = [[a, b] for a in range(vocab_size) for b in range(vocab_size)]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + pair for pair in triples])).logits[:, len(prompt) - 1 :]
    probs = filtered_probs(logits, sampling)
    total = torch.zeros(vocab_size, vocab_size)
    for (a, b), rows in zip(triples, probs, strict=True):
        total[b] += rows[0, a] * rows[1, b] * rows[2]
    return total


def chi_square_p(seen: torch.Tensor, expected: torch.Tensor) -> float:
    """Tail probability of Pearson's statistic over the cells that can occur at all; others must be empty."""
    possible = expected > 0
    assert float(seen[~possible].sum()) == 0, "a token outside of the target's filters was output"
    seen, expected = seen[possible], expected[possible]
    statistic = ((seen - expected) ** 2 / expected).sum()
    degrees = torch.tensor((possible.sum().item() - 1) / 2)
    return float(torch.special.gammaincc(degrees, statistic / 2))


def test_at_temperature_one_every_token_of_a_small_vocabulary_comes_up():
    model = small_vocabulary_target(3, initializer_range=0.3)
    drafter = FixedDistributionDrafter(torch.tensor([0.98, 0.01, 0.01]), block_size=3)
    rollout = speculate(
        model,
        drafter,
        [0],
        sampling=SamplingParams(temperature=1.0),
        max_new_tokens=300,
        stop_ids=(),
        vocabulary_size=3,
        generator=torch.Generator().manual_seed(0),
    )
    assert set(rollout.output_ids) == {0, 1, 2}


def test_the_same_seed_gives_the_same_sampled_output(target):
    drafter = FixedDistributionDrafter(torch.ones(VOCABULARY) / VOCABULARY, block_size=5)
    outputs = [sampled(target, drafter, torch.Generator().manual_seed(seed)).output_ids for seed in (11, 11, 12)]
    assert outputs[0] == outputs[1] != outputs[2]


def sampled(model, drafter, generator: torch.Generator) -> Rollout:
    return speculate(
        model,
        drafter,
        PROMPT,
        sampling=SamplingParams(temperature=1.0),
        max_new_tokens=NUM_NEW,
        stop_ids=(),
        vocabulary_size=VOCABULARY,
        generator=generator,
    )


def test_confidence_logits_travel_with_their_round(target):
    drafter = FixedDistributionDrafter(torch.ones(VOCABULARY) / VOCABULARY, block_size=3, with_confidence=True)
    rollout = sampled(target, drafter, torch.Generator().manual_seed(2))
    assert all(r.confidence_logits == [0.0] * r.num_proposed for r in rollout.rounds if r.num_proposed)
    assert rollout.counts().mean_confidence[0] == 0.5
