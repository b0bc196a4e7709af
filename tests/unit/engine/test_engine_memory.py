"""Shared pages and preemption change neither what is output nor what is drafted, whatever drafts."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.drafters.checkpoint import load_drafter
from dspark.drafters.ngram import NGramDrafter
from dspark.engine.draft_runner import DraftRunner, NGramDraftRunner, SequentialDraftRunner
from dspark.engine.engine import Engine
from dspark.engine.loading import paged_runner
from dspark.engine.lookup import LookupConfig
from dspark.engine.sampling import SamplingParams
from dspark.speculation.proposal import Proposal
from dspark.targets import TargetConfig, load_tokenizer
from tiny_drafter import make_tiny_drafter
from tiny_engine import greedy_continuations, ids_of, load, make_engine, request, run
from tiny_target import make_tiny_target

NUM_NEW = 12
PAGE_SIZE = 4
BASE = [(37 * k) % 300 + 5 for k in range(32)]  # eight pages that the texts begin with
TEXTS = [
    [*BASE, 7, 8, 9, 10],
    [*BASE, 7, 8, 90, 100, 110],
    [*BASE, 200],
    [*BASE[:13], *BASE[20:]],
    [11, 12, 13],
    [*BASE, 7, 8, 9, 10],
]
TIGHT = 88  # tokens of KV memory: one of the longer texts, and a part of another
SAMPLED = SamplingParams(temperature=0.8)
KINDS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": None,
    "dspark": {},
    "sliding_window": {"sliding_window": 8, "num_layers": 2},
    "mixed_windows": {
        "sliding_window": 8,
        "num_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"],
        "anchor_fusion": True,
    },
    "eagle3": {"architecture": "eagle3"},
    "mtp_modules": {"architecture": "mtp", "layer_ids": (5,), "num_modules": 4},
}
# Tokens that the first text's pages give to the second, which has the first 34 in common with it.
HITS = {
    "none": 32,
    "ngram": 32,
    "dspark": 32,
    "sliding_window": 28,  # its window's 7 context tokens of 37 are read again
    "mixed_windows": 28,
    "eagle3": 32,  # the row of token 31 read token 32 as well: the same in both
    "mtp_modules": 28,  # that of token 31 read tokens up to 35: not the same
}


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> Any:
    return load(tiny_target)


@pytest.fixture(scope="module")
def expected(tiny_target: Path) -> list[list[int]]:
    return greedy_continuations(load(tiny_target), TEXTS, NUM_NEW)


class Kind:
    """A way of drafting; `drafts()` is a new runner of it that notes down what it proposes."""

    def __init__(self, name: str, folder: Path, target: Path) -> None:
        self.name = name
        self.proposed: list[tuple[int, ...]] = []
        shape = KINDS[name]
        self._drafter = None if shape is None else load_drafter(make_tiny_drafter(folder, target, **shape))

    def drafts(self) -> DraftRunner | None:
        if self.name == "none":
            return None
        if self._drafter is None:
            runner: Any = NGramDraftRunner(NGramDrafter())
        else:
            runner = paged_runner(self._drafter, num_pages=512, page_size=PAGE_SIZE)
        propose = runner.propose

        def noted(requests: Any) -> Any:
            proposals = propose(requests)
            for one, proposal in zip(requests, proposals, strict=True):
                self.proposed.append((one.anchor_id, *proposal.token_ids.tolist()))
            return proposals

        runner.propose = noted
        return runner

    def engine(self, model: Any, **settings: Any) -> Engine:
        self.proposed.clear()
        return make_engine(model, self.drafts(), **{"page_size": PAGE_SIZE} | settings)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Kind:
    return Kind(request.param, tmp_path_factory.mktemp(request.param), tiny_target)


def knowing(sequences: list[list[int]], *, num_right: int) -> DraftRunner:
    """Proposes how the text goes on, `num_right` tokens of it right and the next one wrong."""
    runner: Any = NGramDraftRunner(NGramDrafter())

    def propose(requests: Any) -> list[Proposal]:
        proposals = []
        for one in requests:
            ids = one.memory.ids
            (sequence,) = (known for known in sequences if known[: len(ids)] == ids)
            right = sequence[len(ids) : len(ids) + one.max_tokens]
            drafted = [token_id if k < num_right else token_id ^ 1 for k, token_id in enumerate(right)]
            proposals.append(Proposal(torch.tensor(drafted, dtype=torch.long), None, None))
        return proposals

    runner.propose = propose
    return runner


def asked(prefix: str = "", **options: Any) -> list[Any]:
    return [request(text, f"{prefix}{i}", **{"max_tokens": NUM_NEW} | options) for i, text in enumerate(TEXTS)]


def outputs_of(engine: Engine, requests: list[Any]) -> list[list[int]]:
    outputs = run(engine, requests)
    return [ids_of(outputs[one.request_id]) for one in requests]


@pytest.mark.parametrize(("concurrency", "kv_tokens"), [(1, 1024), (8, 1024), (8, TIGHT)])
def test_greedy_output_is_the_librarys_own_on_shared_pages_and_under_pressure(
    model, expected, kind, concurrency, kv_tokens
):
    engine = kind.engine(model, max_running_requests=concurrency, kv_tokens=kv_tokens, max_batch_tokens=24)
    assert outputs_of(engine, asked("first ")) == expected
    assert outputs_of(engine, asked("second ")) == expected
    stats = engine.stats
    assert stats.prefix_cache_hits > 100
    if kv_tokens == 1024:
        assert stats.prompt_tokens + stats.prefix_cache_hits == stats.prefix_cache_queries == 2 * sum(map(len, TEXTS))
    assert (stats.preemptions > 0) == (kv_tokens == TIGHT)
    assert stats.output_tokens == 2 * NUM_NEW * len(TEXTS)


def test_what_is_drafted_behind_shared_pages_is_what_is_drafted_without(model, kind):
    """One text's pages give the other its beginning; the row before the place where they part is the delicate one."""
    for text in (TEXTS[1], TEXTS[2], TEXTS[0]):
        cold = kind.engine(model, prefix_cache=False)
        outputs = run(cold, [request(text, max_tokens=NUM_NEW)])
        proposed = list(kind.proposed)
        assert cold.stats.prefix_cache_hits == 0
        warm = kind.engine(model)
        run(warm, [request(TEXTS[0], max_tokens=NUM_NEW)])
        kind.proposed.clear()
        again = run(warm, [request(text, max_tokens=NUM_NEW)])
        assert ids_of(again["0"]) == ids_of(outputs["0"])
        assert kind.proposed == proposed
        assert warm.stats.prefix_cache_hits > 0
        if text is TEXTS[1]:
            assert warm.stats.prefix_cache_hits == HITS[kind.name]


def test_pages_that_the_drafter_has_not_written_are_not_shared(model, kind):
    """Features of a request that is not drafted for are put off; when it is aborted they are gone."""
    run(kind.engine(model, prefix_cache=False), [request(TEXTS[1], max_tokens=NUM_NEW)])
    proposed = list(kind.proposed)
    engine = kind.engine(model)
    engine.add(request(TEXTS[0], "undrafted", max_tokens=NUM_NEW, verify_length=0))
    for _ in range(4):
        engine.step()
    engine.abort("undrafted")
    run(engine, [request(TEXTS[1], max_tokens=NUM_NEW)])
    assert kind.proposed == proposed
    assert engine.stats.prefix_cache_hits == (32 if kind.name in ("none", "ngram") else 0)


def test_what_is_drafted_after_a_preemption_is_what_is_drafted_without(model, kind):
    outputs_of(kind.engine(model, kv_tokens=1024, prefix_cache=False), asked())
    proposed = sorted(kind.proposed)
    pressed = kind.engine(model, kv_tokens=TIGHT)
    outputs_of(pressed, asked())
    assert pressed.stats.preemptions > 0
    assert sorted(kind.proposed) == proposed


def test_seeded_output_is_the_same_with_and_without_preemption(model, kind):
    options = {"sampling": SAMPLED, "seed": 3}
    alone = outputs_of(kind.engine(model, max_running_requests=1, prefix_cache=False), asked(**options))
    pressed = kind.engine(model, kv_tokens=TIGHT, prefix_cache=False)  # everything is read again
    assert outputs_of(pressed, asked(**options)) == alone
    assert pressed.stats.preemptions > 0


def test_a_text_of_drafts_that_are_rejected_is_found_again_without_them(model, tiny_target):
    """Rejected tokens are never published: the answer, read as part of the next prompt, goes on as it did (B04)."""
    prompt = [(53 * k) % 311 + 3 for k in range(200)]
    (truth,) = greedy_continuations(load(tiny_target), [prompt], 60)

    warm = make_engine(model, knowing([prompt + truth], num_right=0))
    assert ids_of(run(warm, [request(prompt, max_tokens=40)])["0"]) == truth[:40]
    assert warm.stats.rounds.accepted_tokens == 0 < warm.stats.rounds.proposed_tokens
    assert ids_of(run(warm, [request(prompt, max_tokens=40)])["0"]) == truth[:40]
    assert warm.stats.prefix_cache_hits == 196  # of 200 the last is read in any case, and so are those of its page
    assert ids_of(run(warm, [request(prompt + truth[:40], max_tokens=20)])["0"]) == truth[40:]
    assert warm.stats.prefix_cache_hits == 196 + 236


def test_aborting_anywhere_leaves_nothing_behind_and_spoils_nobody(model, expected, kind):
    for seed in range(2):
        generator = random.Random(seed)
        engine = kind.engine(model, kv_tokens=TIGHT, max_batch_tokens=16)
        pending, aborted, found = asked(), set(), dict[str, list[int]]()
        while pending or engine.has_work:
            if pending and generator.random() < 0.4:
                engine.add(pending.pop(0))
            if generator.random() < 0.15:
                name = str(generator.randrange(len(TEXTS)))
                aborted.add(name)
                pending = [one for one in pending if one.request_id != name]
                engine.abort(name)
                engine.check()
            for output in engine.step():
                assert output.request_id not in aborted
                found.setdefault(output.request_id, []).extend(output.token_ids)
            engine.check()
        assert engine.num_free_pages == engine.num_pages
        kept = [i for i in range(len(TEXTS)) if str(i) not in aborted]
        assert [found[str(i)] for i in kept] == [expected[i] for i in kept]


def test_text_and_usage_go_on_where_they_stopped(model, tiny_target):
    tokenizer = load_tokenizer(TargetConfig(name=str(tiny_target), dtype="float32", device="cpu"))
    streams = []
    for kv_tokens in (1024, TIGHT):
        engine = make_engine(model, tokenizer=tokenizer, kv_tokens=kv_tokens)
        outputs = run(engine, asked(stop_strings=("\N{REPLACEMENT CHARACTER}" * 9,)))
        streams.append([("".join(o.text for o in one), one[-1].num_output_tokens) for one in outputs.values()])
        counts = [[o.num_output_tokens for o in one] for one in outputs.values()]
        assert counts == [list(range(1, NUM_NEW + 1))] * len(TEXTS)
    assert engine.stats.preemptions > 0
    assert streams[0] == streams[1]


def test_copies_go_on_after_a_preemption(model, expected):
    lookup = LookupConfig(min_match=1, max_match=3)
    engine = make_engine(model, NGramDraftRunner(NGramDrafter()), kv_tokens=128, lookup=lookup, verify_length=4)
    assert outputs_of(engine, asked("first ")) == expected
    assert outputs_of(engine, asked("second ")) == expected
    assert engine.stats.preemptions > 0
    assert engine.stats.copies.rounds > 0


def test_a_drafter_that_keeps_nothing_in_pages_reads_everything(model, expected, tiny_target, tmp_path):
    drafter = load_drafter(make_tiny_drafter(tmp_path, tiny_target))
    engine = make_engine(model, SequentialDraftRunner(drafter), kv_tokens=TIGHT)
    assert outputs_of(engine, asked()) == expected
    assert engine.stats.preemptions > 0
    assert (engine.stats.prefix_cache_queries, engine.pool.num_cached) == (0, 0)


@pytest.mark.parametrize("kind", [name for name in KINDS if name not in ("none", "ngram")], indirect=True)
@pytest.mark.parametrize("limit", [40, 20])
def test_a_request_that_outgrows_the_drafters_context_is_served_without_it(model, expected, kind, limit):
    drafts = kind.drafts()
    drafts.max_context_tokens = limit
    engine = make_engine(model, drafts, page_size=PAGE_SIZE)
    for _ in range(2):
        kind.proposed.clear()
        outputs = run(engine, [request(TEXTS[0], max_tokens=NUM_NEW, verify_length=4)])["0"]
        assert ids_of(outputs) == expected[0]
        assert len(kind.proposed) == sum(one.round.num_proposed > 0 for one in outputs if one.round is not None)
        assert (len(kind.proposed) > 0) == (limit == 40)  # 36 tokens and a block of 4: one round
    assert engine.stats.requests_beyond_drafter == 2


def test_a_long_prompt_is_read_in_chunks_beside_decodes_of_every_length(tmp_path):
    """B19: a step may hold a chunk and verifications of different lengths."""
    folder = make_tiny_target(tmp_path, max_length=2048)
    prompt = [(29 * k) % 307 + 4 for k in range(1500)]
    texts = [BASE[:9], BASE[5:12], BASE[3:20], prompt]
    truth = greedy_continuations(load(folder), texts, 24)
    drafts = knowing([text + answer for text, answer in zip(texts, truth, strict=True)], num_right=3)
    engine = make_engine(load(folder), drafts, max_batch_tokens=128)
    lengths = (0, 2, 7, 5)
    outputs = run(engine, [request(text, str(i), verify_length=lengths[i]) for i, text in enumerate(texts)])
    assert [ids_of(outputs[str(i)]) for i in range(4)] == truth
