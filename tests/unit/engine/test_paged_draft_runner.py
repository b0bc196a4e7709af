"""The paged runner drafts for many what the drafter drafts for each: its twin goes one request after another."""

from typing import Any

import pytest
import torch

from dspark.attention.page_pool import PageTable
from dspark.drafters.dspark import DSparkDrafter
from dspark.engine import pending_features
from dspark.engine.draft_memory import DraftMemory
from dspark.engine.draft_runner import DraftRequest, SequentialDraftRunner
from dspark.engine.paged_draft_runner import PagedDraftRunner
from random_drafter import VARIANTS, random_drafter

PAGE_SIZE = 4
PAGES = ([0, 1, 2, 3, 4, 5], [11, 7, 9, 8, 20, 21], [12, 13, 14, 15, 16, 17])
CONTEXTS = (1, 9, 4)


class Pair:
    """Both runners over the same drafter, fed the same features."""

    def __init__(self, *, page_size: int = PAGE_SIZE, **shape: Any) -> None:
        self.drafter = random_drafter(**shape).eval().requires_grad_(False)
        self.paged = PagedDraftRunner(self.drafter, num_pages=32, page_size=page_size)
        self.twin = SequentialDraftRunner(self.drafter)
        self.tables = [PageTable(list(pages), page_size) for pages in PAGES]
        self.memories = [self.paged.new_memory(table) for table in self.tables]
        self.states = [self.twin.new_memory(table) for table in self.tables]
        self._generator = torch.Generator().manual_seed(0)

    def extend(self, index: int, num_tokens: int) -> None:
        hidden = torch.randn(num_tokens, self.drafter.config.feature_size, generator=self._generator)
        self.paged.extend(self.memories[index], [0] * num_tokens, hidden)
        self.twin.extend(self.states[index], [0] * num_tokens, hidden)

    def requests(self, memories: list[Any], *, max_tokens: Any = 4, temperature: float = 0.0) -> list[DraftRequest]:
        return [
            DraftRequest(
                memory=memory,
                anchor_id=5 + i,
                max_tokens=max_tokens if isinstance(max_tokens, int) else max_tokens[i],
                temperature=temperature,
                generator=torch.Generator().manual_seed(i),
            )
            for i, memory in enumerate(memories)
        ]


@pytest.mark.parametrize("shape", VARIANTS.values(), ids=VARIANTS)
def test_greedy_blocks_of_many_are_those_of_each_alone_as_contexts_grow(shape):
    pair = Pair(**shape)
    for index, num_tokens in enumerate(CONTEXTS):
        pair.extend(index, num_tokens)
    for growth in ((1, 2, 3), (4, 1, 1), (2, 4, 4), (0, 0, 0)):
        found = pair.paged.propose(pair.requests(pair.memories))
        expected = pair.twin.propose(pair.requests(pair.states))
        for one, twin in zip(found, expected, strict=True):
            assert torch.equal(one.token_ids, twin.token_ids)
            assert (one.confidence_logits is None) == (twin.confidence_logits is None)
            if twin.confidence_logits is not None:
                torch.testing.assert_close(one.confidence_logits, twin.confidence_logits, atol=1e-4, rtol=1e-4)
        for index, num_tokens in enumerate(growth):
            if num_tokens:
                pair.extend(index, num_tokens)


@pytest.mark.parametrize("shape", [{}, {"sliding_window": 6, "layer_types": ("sliding_attention", "full_attention")}])
def test_on_attention_of_a_gpu_s_kind_blocks_are_the_same(shape):
    pair = Pair(page_size=16, head_dim=16, **shape)
    pair.paged.use_attention("flex")
    for index, num_tokens in enumerate(CONTEXTS):
        pair.extend(index, num_tokens)
    for growth in ((1, 2, 3), (14, 1, 1), (0, 0, 0)):
        found = pair.paged.propose(pair.requests(pair.memories))
        expected = pair.twin.propose(pair.requests(pair.states))
        for one, twin in zip(found, expected, strict=True):
            assert torch.equal(one.token_ids, twin.token_ids)
            torch.testing.assert_close(one.confidence_logits, twin.confidence_logits, atol=1e-4, rtol=1e-4)
        for index, num_tokens in enumerate(growth):
            if num_tokens:
                pair.extend(index, num_tokens)


@pytest.mark.parametrize("shape", VARIANTS.values(), ids=VARIANTS)
def test_sampled_tokens_come_with_the_distribution_that_teacher_forcing_gives(shape):
    pair = Pair(**shape)
    for index, num_tokens in enumerate(CONTEXTS):
        pair.extend(index, num_tokens)
    for i, proposal in enumerate(pair.paged.propose(pair.requests(pair.memories, temperature=0.8))):
        h = pair.drafter.backbone.draft_states(pair.states[i], 5 + i)
        logits = pair.drafter.backbone.base_logits(h)
        previous = torch.tensor([5 + i, *proposal.token_ids[:-1].tolist()])
        if isinstance(pair.drafter, DSparkDrafter) and pair.drafter.markov_head is not None:
            head = pair.drafter.markov_head
            bias = head.bias(head.unroll(h, head.embed(previous)))
            logits = logits + bias[:, : pair.drafter.config.draft_vocab_size]
        expected = torch.softmax(logits / 0.8, dim=-1)
        torch.testing.assert_close(proposal.probs, expected, atol=1e-5, rtol=1e-4)
        drawn = expected.gather(1, (proposal.token_ids if proposal.columns is None else proposal.columns)[:, None])
        torch.testing.assert_close(proposal.drawn_probs(), drawn.squeeze(1), atol=1e-5, rtol=1e-4)
        if proposal.support is not None:
            assert torch.equal(proposal.support[proposal.columns], proposal.token_ids)


def test_a_requests_draws_do_not_depend_on_its_company():
    def drawn(chosen: list[int]) -> dict[int, list[int]]:
        pair = Pair()
        for index, num_tokens in enumerate(CONTEXTS):
            pair.extend(index, num_tokens)
        requests = pair.requests(pair.memories, temperature=1.0)
        return {
            i: proposal.token_ids.tolist()
            for i, proposal in zip(chosen, pair.paged.propose([requests[i] for i in chosen]), strict=True)
        }

    together = drawn([0, 1, 2])
    for i in range(3):
        assert drawn([i])[i] == together[i]


def test_shorter_blocks_are_the_beginnings_of_whole_ones():
    pair = Pair()
    for index, num_tokens in enumerate(CONTEXTS):
        pair.extend(index, num_tokens)
    whole = pair.paged.propose(pair.requests(pair.memories))
    cut = pair.paged.propose(pair.requests(pair.memories, max_tokens=(1, 3, 2)))
    for one, short, length in zip(whole, cut, (1, 3, 2), strict=True):
        assert short.token_ids.tolist() == one.token_ids[:length].tolist()
        assert short.confidence_logits.numel() == length


def test_more_than_the_block_is_refused():
    pair = Pair()
    pair.extend(0, 2)
    with pytest.raises(ValueError, match=r"use 0\.\.4"):
        pair.paged.propose(pair.requests(pair.memories[:1], max_tokens=5))


def test_layers_with_a_window_keep_no_more_than_a_ring_however_long_the_context_is():
    pair = Pair(sliding_window=6)
    for num_tokens in (1, 20, 2):  # more at once than the ring of 5 + 4 holds
        pair.extend(0, num_tokens)
        found, expected = (
            pair.paged.propose(pair.requests(pair.memories[:1])),
            pair.twin.propose(pair.requests(pair.states[:1])),
        )
        assert torch.equal(found[0].token_ids, expected[0].token_ids)
        torch.testing.assert_close(found[0].confidence_logits, expected[0].confidence_logits, atol=1e-4, rtol=1e-4)
    assert pair.paged.kv_cache.num_bytes == 0
    ring = pair.memories[0].ring
    assert ring is not None
    assert [tuple(keys.shape) for keys in ring.keys] == [(2, 9, 8)] * 2


def test_only_layers_that_see_all_context_take_room_in_pages():
    pair = Pair(sliding_window=6, layer_types=("sliding_attention", "full_attention"))
    assert len(pair.paged.kv_cache.keys) == 1
    assert len(pair.memories[0].ring.keys) == 1


def test_features_of_a_request_that_is_not_drafted_for_do_not_pile_up(monkeypatch):
    pair = Pair()
    row_bytes = 4 * pair.drafter.config.feature_size
    monkeypatch.setattr(pending_features, "MOST_BYTES", 100 * row_bytes)
    pair.memories[0] = DraftMemory(PageTable(list(range(32)), 32))
    runner = PagedDraftRunner(pair.drafter, num_pages=32, page_size=32)
    for _ in range(110):
        runner.extend(pair.memories[0], [0], torch.randn(1, pair.drafter.config.feature_size))
    assert pair.memories[0].num_tokens == 101
    assert pair.memories[0].pending.num_rows == 9


@pytest.mark.parametrize("shape", VARIANTS.values(), ids=VARIANTS)
def test_a_context_on_pages_that_another_request_stored_is_its_own(shape):
    """Twelve of nineteen tokens come with shared pages; what a window sees is given again."""
    pair = Pair(**shape)
    assert pair.paged.num_reread <= 7
    shared = torch.randn(12, pair.drafter.config.feature_size, generator=pair._generator)
    own = torch.randn(7, pair.drafter.config.feature_size, generator=pair._generator)
    pair.paged.extend(pair.memories[0], [0] * 12, shared)
    pair.paged.store(pair.memories[0])
    assert pair.paged.num_stored(pair.memories[0]) == 12
    pages = [*pair.tables[0].pages[:3], 25, 24, 23]
    memory = pair.paged.new_memory(PageTable(pages, PAGE_SIZE), [0] * 12)
    assert pair.paged.num_stored(memory) == 12
    pair.paged.extend(memory, [0] * 7, own)
    pair.twin.extend(pair.states[0], [0] * 19, torch.cat([shared, own]))
    (found,) = pair.paged.propose(pair.requests([memory]))
    (expected,) = pair.twin.propose(pair.requests(pair.states[:1]))
    assert torch.equal(found.token_ids, expected.token_ids)
