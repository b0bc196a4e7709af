"""Trained drafters of every head and layer type in the engine: lossless, accepted, and as their sequential twin."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.drafters.checkpoint import load_drafter
from dspark.engine.draft_runner import DraftRunner, SequentialDraftRunner
from dspark.engine.engine import Engine
from dspark.engine.paged_draft_runner import PagedDraftRunner
from tiny_drafter import learn_by_heart, make_tiny_drafter
from tiny_engine import PROMPTS, greedy_continuations, ids_of, load, make_engine, request, run
from tiny_families import make_family_target

NUM_NEW = 24
# What is drafted with, by the target it drafts for.
SHAPES: dict[str, dict[str, Any]] = {
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "gemma4": {"warm_start": False},
}


@dataclass
class Case:
    """A target's folder, what it says after every prompt, and a drafter that knows the first answer by heart."""

    folder: Path
    continuations: list[list[int]]
    drafter: Any

    def engine(self, drafts: DraftRunner) -> Engine:
        return make_engine(load(self.folder), drafts)


@pytest.fixture(scope="module", params=SHAPES)
def case(request: pytest.FixtureRequest, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    target = make_family_target(folder / "target", "gemma4_text") if request.param == "gemma4" else tiny_target
    continuations = greedy_continuations(load(target), PROMPTS, NUM_NEW)
    torch.manual_seed(0)
    made = make_tiny_drafter(folder / "drafter", target, **SHAPES[request.param])
    drafter = load_drafter(made, trainable=True)
    learn_by_heart(drafter, load(target), PROMPTS[0], continuations[0])
    return Case(target, continuations, drafter.eval().requires_grad_(False))


def outputs_of(case: Case, drafts: DraftRunner) -> tuple[list[list[int]], list[float], int]:
    """Output ids of every prompt, conditional acceptance by position, rounds."""
    engine = case.engine(drafts)
    outputs = run(engine, [request(prompt, str(i), max_tokens=NUM_NEW) for i, prompt in enumerate(PROMPTS)])
    rounds = engine.stats.rounds
    return [ids_of(outputs[str(i)]) for i in range(len(PROMPTS))], rounds.conditional_acceptance, rounds.rounds


def test_greedy_output_is_the_targets_own_and_the_paged_runner_is_its_twin(case: Case):
    paged = outputs_of(case, PagedDraftRunner(case.drafter, num_pages=512, page_size=4))
    twin = outputs_of(case, SequentialDraftRunner(case.drafter, has_confidence=True))
    assert paged[0] == case.continuations
    assert paged == twin


def test_what_was_learned_is_accepted_in_whole_blocks(case: Case):
    engine = case.engine(PagedDraftRunner(case.drafter, num_pages=512, page_size=4))
    found = run(engine, [request(PROMPTS[0], max_tokens=NUM_NEW)])["0"]
    assert ids_of(found) == case.continuations[0]
    assert engine.stats.rounds.accepted_length > 3.0, engine.stats.rounds.conditional_acceptance
