"""Greedy float32 output is what `generate` of the library gives, for every family and every switch of the engine.

Each family meets: one request at a time and all at once, every verify length, drafts right, wrong and partly right,
shared prefixes found in pages, and preemption. What drafters are fed is the library's own hidden states.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.engine.config import EngineConfig
from dspark.engine.loading import target_runner
from dspark.engine.target_runner import NotPageable, TargetRunner
from dspark.speculation.proposal import Proposal
from random_targets import DENSE, PAGED, REFUSED, Family, random_target
from tiny_engine import VOCABULARY, greedy_continuations, ids_of, make_engine, request, run

NUM_NEW = 14
BLOCK = 4
PAGE_SIZE = 4
BASE = [(37 * k) % 300 + 5 for k in range(12)]  # three pages that texts begin with
TEXTS = [
    [*BASE, 7, 8],
    [5],
    [*BASE, 7, 90, 100, 110, 120],
    [9, 9, 9, 12, 200, 14, 300],
    [*BASE, 200, 31, 32, 33, 34, 35, 36, 37],
]
TIGHT = 44  # tokens of KV memory: one of the longer texts, and a part of another
FAMILIES = PAGED | DENSE


@dataclass
class Memory:
    """ids: all committed; hidden: [n, m*d] of the tokens from `start` on, as they came."""

    ids: list[int]
    start: int
    hidden: list[Tensor] = field(default_factory=list)


class KnowingRunner:
    """Proposes how its texts go on: the first one's drafts are right, the second's wrong, the third's right for two
    tokens, and so on. It keeps nothing in pages."""

    kind, has_confidence, block_size = "knowing", False, BLOCK
    max_context_tokens, num_reread, num_ids_behind = None, 0, 0

    def __init__(self, sequences: list[list[int]], layer_ids: tuple[int, ...] = ()) -> None:
        self.target_layer_ids = layer_ids
        self.memories: list[Memory] = []
        self._sequences = sequences

    def new_memory(self, table: Any, stored_ids: Sequence[int] = ()) -> Memory:
        self.memories.append(Memory(list(stored_ids), len(stored_ids)))
        return self.memories[-1]

    def num_stored(self, memory: Memory) -> int:
        return len(memory.ids)

    def store(self, memory: Memory) -> None:
        pass

    def extend(self, memory: Memory, committed_ids: Sequence[int], hidden: Tensor | None) -> None:
        memory.ids += committed_ids
        if hidden is not None:
            memory.hidden.append(hidden)

    def propose(self, requests: Any) -> list[Proposal]:
        proposals = []
        for one in requests:
            ids = one.memory.ids
            assert ids[-1] == one.anchor_id
            number = next(i for i, sequence in enumerate(self._sequences) if sequence[: len(ids)] == ids)
            right = self._sequences[number][len(ids) : len(ids) + one.max_tokens]
            num_right = (BLOCK, 0, 2)[number % 3]
            drafted = [token_id if k < num_right else token_id ^ 1 for k, token_id in enumerate(right)]
            proposals.append(Proposal(torch.tensor(drafted, dtype=torch.long), None, None))
        return proposals


@dataclass
class Case:
    """A family's target, `continuations` being what `generate` makes of TEXTS, and the states of each text so far."""

    family: Family
    model: Any
    continuations: list[list[int]]
    states: list[tuple[Tensor, ...]]

    def drafts(self, layer_ids: tuple[int, ...] = ()) -> Any:
        sequences = [text + continuation for text, continuation in zip(TEXTS, self.continuations, strict=True)]
        return KnowingRunner(sequences, layer_ids)

    def check(self, engine: Any, verify_lengths: Sequence[int | None] = (None,) * len(TEXTS)) -> None:
        """Run all texts, and compare."""
        numbered = enumerate(zip(TEXTS, verify_lengths, strict=True))
        asked = [request(text, str(i), max_tokens=NUM_NEW, verify_length=length) for i, (text, length) in numbered]
        outputs = run(engine, asked)
        assert [ids_of(outputs[str(i)]) for i in range(len(TEXTS))] == self.continuations


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest) -> Case:
    model = random_target(FAMILIES[request.param])
    continuations = greedy_continuations(model, TEXTS, NUM_NEW)
    assert sum(len(set(continuation)) for continuation in continuations) > 20, "texts that repeat themselves"
    states = []
    for text, continuation in zip(TEXTS, continuations, strict=True):
        with torch.no_grad():
            ids = torch.tensor([text + continuation])
            states.append(model(ids, use_cache=False, output_hidden_states=True).hidden_states)
    return Case(FAMILIES[request.param], model, continuations, states)


@pytest.mark.parametrize("concurrency", [1, len(TEXTS)])
def test_plain_decoding_is_the_librarys(case: Case, concurrency: int) -> None:
    engine = make_engine(case.model, page_size=PAGE_SIZE, max_running_requests=concurrency, max_batch_tokens=16)
    case.check(engine)
    assert engine._target.has_pages == case.family.has_pages


def test_speculation_is_lossless_one_request_at_a_time(case: Case) -> None:
    engine = make_engine(case.model, case.drafts(), page_size=PAGE_SIZE, max_running_requests=1)
    case.check(engine)
    counts = engine.stats.rounds
    assert 0 < counts.accepted_tokens < engine.stats.scheduled_tokens


@pytest.mark.parametrize("shift", [0, 3])
def test_every_verify_length_is_lossless_beside_all_others(case: Case, shift: int) -> None:
    drafts = case.drafts((-1, 1, len(case.states[0])))
    engine = make_engine(case.model, drafts, page_size=PAGE_SIZE, prefix_cache=False)
    case.check(engine, [(i + shift) % (BLOCK + 1) for i in range(len(TEXTS))])
    for memory, states in zip(drafts.memories, case.states, strict=True):
        found = torch.cat(memory.hidden)
        expected = torch.cat([states[0][0], states[2][0], states[-1][0]], dim=-1)
        torch.testing.assert_close(found, expected[: found.shape[0]], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_shared_prefixes_and_preemption_change_nothing(case: Case, prefix_cache: bool) -> None:
    options = {"kv_tokens": TIGHT, "prefix_cache": prefix_cache}
    engine = make_engine(case.model, case.drafts(), page_size=PAGE_SIZE, **options)
    case.check(engine)
    assert engine.stats.preemptions > 0
    case.check(engine)
    assert (engine.stats.prefix_cache_hits > 0) == (prefix_cache and case.family.has_pages)
    if not case.family.has_pages:
        assert engine._target.num_caches == 0


@pytest.mark.parametrize("family", REFUSED.values(), ids=REFUSED)
def test_a_recurrent_state_is_refused_by_name(family: Family) -> None:
    model = random_target(family)
    with pytest.raises(ValueError, match=f"target class {type(model).__name__} keeps a state that gives up no token"):
        target_runner(model, config=EngineConfig(page_size=PAGE_SIZE, kv_tokens=64), vocabulary_size=VOCABULARY)


@pytest.mark.parametrize("family", DENSE.values(), ids=DENSE)
def test_a_target_that_pages_refuse_is_left_as_it_was(family: Family) -> None:
    model, twin = random_target(family), random_target(family)
    with pytest.raises(NotPageable, match=f"target class {type(model).__name__} "):
        TargetRunner(model, vocabulary_size=VOCABULARY, num_pages=16, page_size=PAGE_SIZE)
    ids = torch.tensor([TEXTS[4]])
    torch.testing.assert_close(model(ids).logits, twin(ids).logits, atol=1e-4, rtol=1e-4)
