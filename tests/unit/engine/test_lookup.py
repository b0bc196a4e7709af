"""Two levels of drafting: repetitions are copied, the drafter does the rest, and output stays the target's."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.engine.draft_runner import SequentialDraftRunner
from dspark.engine.lookup import Lookup, LookupConfig
from dspark.engine.sampling import SamplingParams
from dspark.speculation.cost_curve import CostCurve
from scripted_drafters import FixedDistributionDrafter, ScriptedDrafter
from tiny_engine import PROMPTS, VOCABULARY, greedy_continuations, ids_of, load, make_engine, request, run
from tiny_target import small_vocabulary_target

EAGER = LookupConfig(block_size=9, min_match=1, max_match=3)
FLAT = CostCurve((1, 256), (1.0, 1.0001), (1, 32), (0.5, 0.5))
STEEP = CostCurve((1, 256), (1.0, 256.0))


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> Any:
    return load(tiny_target)


@pytest.fixture(scope="module")
def continuations(tiny_target: Path) -> list[list[int]]:
    return greedy_continuations(load(tiny_target), PROMPTS, 48)


def useless_drafter() -> SequentialDraftRunner:
    uniform = torch.full((VOCABULARY,), 1 / VOCABULARY)
    return SequentialDraftRunner(FixedDistributionDrafter(uniform, block_size=7))


def test_a_copy_is_what_followed_the_same_words_and_goes_on_as_a_repetition() -> None:
    lookup = Lookup(LookupConfig(block_size=6, min_match=2, max_match=3))
    memory = lookup.new_memory()
    lookup.extend(memory, [1, 2, 3, 4, 9, 2, 3])
    lookup.look_up(memory, 4)
    assert memory.copied == [4, 9, 2, 3]
    lookup.look_up(memory, 99)
    assert memory.copied == [4, 9, 2, 3, 4, 9]
    lookup.look_up(memory, 0)
    assert memory.copied == []
    lookup.extend(memory, [7])
    lookup.look_up(memory, 4)
    assert memory.copied == []


def test_every_committed_token_judges_the_copy_used_or_not() -> None:
    lookup = Lookup(EAGER)
    memory, other = lookup.new_memory(), lookup.new_memory()
    lookup.extend(memory, [1, 2, 3, 4, 1, 2])
    before = lookup.new_memory().estimate.survival(3)
    for _ in range(6):
        lookup.look_up(memory, 3)
        right = list(memory.copied)
        lookup.extend(memory, right[:2])
    assert memory.estimate.survival(3)[1] > before[1] + 0.2
    assert other.estimate.survival(3)[0] > before[0]  # what one request teaches starts the others
    for _ in range(6):
        lookup.look_up(memory, 3)
        lookup.extend(memory, [memory.copied[0] ^ 1] if memory.copied else [5])
        lookup.extend(memory, [1, 2])
    assert memory.estimate.survival(1)[0] < before[0]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_learnt_is_what_verification_would_have_said(seed: int) -> None:
    """The estimate after extend(committed) equals that after the verdict on the same copy."""
    generator = random.Random(seed)
    lookup, twin = Lookup(EAGER), Lookup(EAGER)
    memory, twin_memory = lookup.new_memory(), twin.new_memory()
    text = [generator.randrange(3) for _ in range(60)]
    position = 0
    while position < len(text):
        lookup.look_up(memory, 9)
        step = text[position : position + generator.randint(1, 5)]
        num_judged = min(len(memory.copied), len(step))
        num_right = 0
        while num_right < num_judged and memory.copied[num_right] == step[num_right]:
            num_right += 1
        if num_judged:
            twin_memory.estimate.update(num_judged, num_right)
        lookup.extend(memory, step)
        position += len(step)
    assert memory.estimate.survival(9) == twin_memory.estimate.survival(9)


@pytest.mark.parametrize("curve", [FLAT, STEEP, None])
@pytest.mark.parametrize("num_running", [1, 8])
def test_greedy_output_with_lookup_is_the_librarys_own(
    model: Any, continuations: list[list[int]], curve: CostCurve | None, num_running: int
) -> None:
    engine = make_engine(model, useless_drafter(), curve=curve, max_running_requests=num_running, lookup=EAGER)
    found = run(engine, [request(prompt, str(i), max_tokens=48) for i, prompt in enumerate(PROMPTS)])
    assert [ids_of(found[str(i)]) for i in range(len(PROMPTS))] == continuations
    if curve is FLAT:
        assert 0 < engine.stats.copies.rounds < engine.stats.rounds.rounds
    if curve is STEEP:
        assert engine.stats.rounds.rounds == 0


def test_a_loop_is_copied_far_beyond_the_drafters_block_and_costs_no_drafting() -> None:
    looping = small_vocabulary_target(8, initializer_range=0.7)
    for layer in looping.model.layers:  # what it says next depends on one token alone: it comes round
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    truth = greedy_continuations(looping, [[7, 1]], 200)[0]
    drafts = SequentialDraftRunner(FixedDistributionDrafter(torch.full((8,), 1 / 8), block_size=7))
    engine = make_engine(looping, drafts, curve=FLAT, lookup=LookupConfig())
    outputs = run(engine, [request([7, 1], max_tokens=200)])["0"]
    assert ids_of(outputs) == truth
    assert max(len(output.token_ids) for output in outputs) == LookupConfig().block_size + 1
    assert engine.stats.copies.accepted_length > 10
    assert engine.stats.copies.committed_tokens > 150


@pytest.mark.parametrize("curve", [None, FLAT])
def test_without_a_drafter_the_text_is_still_copied(model: Any, continuations: list[list[int]], curve: Any) -> None:
    """Without a curve too, as it is where nothing was trained."""
    engine = make_engine(model, None, curve=curve, lookup=EAGER)
    found = run(engine, [request(prompt, str(i), max_tokens=48) for i, prompt in enumerate(PROMPTS)])
    assert [ids_of(found[str(i)]) for i in range(len(PROMPTS))] == continuations
    assert engine.stats.copies.rounds == engine.stats.rounds.rounds > 0


def test_a_better_drafter_goes_before_a_worse_copy(model: Any, continuations: list[list[int]]) -> None:
    prompt, truth = PROMPTS[0], continuations[0]
    drafts = SequentialDraftRunner(ScriptedDrafter(prompt + truth, block_size=9, num_right=99))
    engine = make_engine(model, drafts, curve=FLAT, lookup=EAGER)
    assert ids_of(run(engine, [request(prompt, max_tokens=48)])["0"]) == truth
    assert engine.stats.rounds.accepted_length > 5


def test_a_length_that_the_request_asks_for_is_one_of_drafting(model: Any) -> None:
    engine = make_engine(model, useless_drafter(), curve=FLAT, lookup=EAGER)
    run(engine, [request([7, 8], max_tokens=60, verify_length=5)])
    assert engine.stats.copies.rounds == 0
    assert engine.stats.rounds.rounds > 0


def test_pages_are_there_for_the_longest_copy(model: Any) -> None:
    """run() checks the pages after every step; the memory here holds one request at a time."""
    engine = make_engine(model, useless_drafter(), curve=FLAT, lookup=EAGER, kv_tokens=80)
    found = run(engine, [request([7, 8], str(i), max_tokens=50) for i in range(3)])
    assert all(len(ids_of(outputs)) == 50 for outputs in found.values())


def test_a_sampled_request_with_lookup_is_reproducible(model: Any) -> None:
    sampling = SamplingParams(temperature=1.0, seeded="rejection")
    asked = [request(PROMPTS[2], sampling=sampling, seed=11, max_tokens=40)]
    first, second = (
        ids_of(run(make_engine(model, useless_drafter(), curve=FLAT, lookup=EAGER), asked)["0"]) for _ in range(2)
    )
    assert first == second
