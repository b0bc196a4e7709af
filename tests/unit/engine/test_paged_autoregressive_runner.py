"""The paged runner drafts for many what each drafter drafts from its whole context; its twin keeps nothing."""

from typing import Any

import pytest
import torch

from dspark.attention.page_pool import PageTable
from dspark.engine import pending_features
from dspark.engine.draft_runner import DraftRequest, SequentialDraftRunner
from dspark.engine.paged_autoregressive_runner import PagedAutoregressiveRunner
from random_autoregressive import AUTOREGRESSIVE_VARIANTS, random_autoregressive_drafter

PAGE_SIZE = 4
PAGES = ([0, 1, 2, 3, 4, 5, 6, 7], [11, 8, 9, 10, 20, 21, 22, 30], [12, 13, 14, 15, 16, 17, 18, 19])
PROMPTS = (1, 9, 4)

every_variant = pytest.mark.parametrize("shape", AUTOREGRESSIVE_VARIANTS.values(), ids=AUTOREGRESSIVE_VARIANTS)


class Pair:
    """Both runners over the same drafter, told the same ids and features."""

    def __init__(self, *, page_size: int = PAGE_SIZE, **shape: Any) -> None:
        self.drafter = random_autoregressive_drafter(**shape).eval().requires_grad_(False)
        self.paged = PagedAutoregressiveRunner(self.drafter, num_pages=32, page_size=page_size)
        self.twin = SequentialDraftRunner(self.drafter)
        self.tables = [PageTable(list(pages), page_size) for pages in PAGES]
        self.memories = [self.paged.new_memory(table) for table in self.tables]
        self.states = [self.twin.new_memory(table) for table in self.tables]
        self.anchors = [0] * len(PAGES)
        self._generator = torch.Generator().manual_seed(0)
        for index, num_tokens in enumerate(PROMPTS):
            self.commit(index, num_tokens, is_prompt=True)

    def commit(self, index: int, num_tokens: int, *, is_prompt: bool = False) -> None:
        """As many features, and as many ids: a prompt brings the first output token besides."""
        hidden = torch.randn(num_tokens, self.drafter.config.feature_size, generator=self._generator)
        ids = torch.randint(0, 50, (num_tokens + is_prompt,), generator=self._generator).tolist()
        self.anchors[index] = ids[-1]
        self.paged.extend(self.memories[index], ids, hidden)
        self.twin.extend(self.states[index], ids, hidden)

    def requests(self, memories: list[Any], *, max_tokens: Any = 4, temperature: float = 0.0) -> list[DraftRequest]:
        return [
            DraftRequest(
                memory=memory,
                anchor_id=self.anchors[i],
                max_tokens=max_tokens if isinstance(max_tokens, int) else max_tokens[i],
                temperature=temperature,
                generator=torch.Generator().manual_seed(i),
            )
            for i, memory in enumerate(memories)
        ]

    def check(self, **options: Any) -> None:
        """Greedy tokens are equal, and so are the distributions of sampled ones."""
        found = self.paged.propose(self.requests(self.memories, **options))
        expected = self.twin.propose(self.requests(self.states, **options))
        for one, twin in zip(found, expected, strict=True):
            assert torch.equal(one.token_ids, twin.token_ids)


@every_variant
def test_drafts_of_many_are_those_of_each_alone_as_contexts_grow(shape: dict[str, Any]):
    pair = Pair(**shape)
    for growth in ((1, 2, 3), (5, 1, 1), (2, 5, 4), (0, 0, 0), (1, 1, 1)):
        pair.check()
        for index, num_tokens in enumerate(growth):
            if num_tokens:
                pair.commit(index, num_tokens)
    pair.check()


@every_variant
def test_drafting_fewer_than_the_block_leaves_nothing_wrong_behind(shape: dict[str, Any]):
    pair = Pair(**shape)
    for lengths in ((1, 3, 2), (2, 1, 1), (1, 1, 1), (4, 2, 3)):
        pair.check(max_tokens=lengths)
        for index in range(3):
            pair.commit(index, 1 + index)
    pair.check()


def test_on_attention_of_a_gpu_s_kind_drafts_are_the_same():
    pair = Pair(page_size=16, head_dim=16)
    pair.paged.use_attention("flex")
    for growth in ((1, 2, 3), (12, 1, 1)):
        pair.check()
        for index, num_tokens in enumerate(growth):
            pair.commit(index, num_tokens)
    pair.check()


@every_variant
def test_sampled_tokens_come_with_the_distribution_that_the_twin_has_on_their_prefix(shape: dict[str, Any]):
    pair = Pair(**shape)
    for i, proposal in enumerate(pair.paged.propose(pair.requests(pair.memories, temperature=0.8))):
        state = pair.states[i]
        ids, drafted = list(state.token_ids), proposal.token_ids.tolist()
        for slot in range(4):
            expected = slot_distribution(pair, state, ids, drafted[:slot])
            torch.testing.assert_close(proposal.probs[slot], expected, atol=1e-5, rtol=1e-4)
        columns = proposal.token_ids if proposal.columns is None else proposal.columns
        assert torch.equal(proposal.drawn_probs(), proposal.probs.gather(1, columns[:, None]).squeeze(1))
        if proposal.support is not None:
            assert torch.equal(proposal.support[proposal.columns], proposal.token_ids)


def slot_distribution(pair: Pair, state: Any, ids: list[int], drafted: list[int]) -> torch.Tensor:
    """Of the next slot after these draft tokens, from the whole context."""
    num_tokens, steps = state.num_tokens, len(drafted) + 1
    unroll = pair.drafter._unroll(torch.cat(state.context)[None], torch.tensor([[num_tokens - 1]]))
    tokens = ids + drafted
    for step in range(steps):
        h = unroll.step(torch.tensor([tokens[1 + step : 1 + step + num_tokens]]))
    return torch.softmax(pair.drafter.backbone.base_logits(h)[0, 0] / 0.8, dim=-1)


def test_a_requests_draws_do_not_depend_on_its_company():
    def drawn(chosen: list[int]) -> dict[int, list[int]]:
        pair = Pair()
        requests = pair.requests(pair.memories, temperature=1.0)
        proposals = pair.paged.propose([requests[i] for i in chosen])
        return {i: proposal.token_ids.tolist() for i, proposal in zip(chosen, proposals, strict=True)}

    together = drawn([0, 1, 2])
    for i in range(3):
        assert drawn([i])[i] == together[i]


def test_what_was_drafted_is_written_over_and_never_read():
    pair = Pair()
    pair.check()
    for index, table in enumerate(pair.tables):
        behind = torch.tensor(table.slots(pair.memories[index].num_stored, table.capacity_tokens))
        pair.paged.kv_cache.keys[0][:, behind] = torch.nan
        pair.paged.kv_cache.values[0][:, behind] = torch.nan
        pair.commit(index, 2)
    pair.check()


def test_more_than_the_block_is_refused():
    pair = Pair()
    with pytest.raises(ValueError, match=r"use 0\.\.4"):
        pair.paged.propose(pair.requests(pair.memories[:1], max_tokens=5))


@every_variant
def test_a_long_prompt_is_stored_as_it_is_read(shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    drafter = random_autoregressive_drafter(**shape).requires_grad_(False)
    paged = PagedAutoregressiveRunner(drafter, num_pages=20, page_size=32)
    twin = SequentialDraftRunner(drafter)
    monkeypatch.setattr(pending_features, "MOST_BYTES", 256 * 4 * drafter.config.feature_size)
    memory, state = paged.new_memory(PageTable(list(range(20)), 32)), twin.new_memory(PageTable([0], 1))
    generator = torch.Generator().manual_seed(3)
    for chunk in (200, 100, 150):
        ids = torch.randint(0, 50, (chunk,), generator=generator).tolist()
        hidden = torch.randn(chunk, drafter.config.feature_size, generator=generator)
        for runner, own in ((paged, memory), (twin, state)):
            runner.extend(own, ids, hidden)
        assert memory.pending.num_rows <= 256
    paged.extend(memory, [7], None)
    twin.extend(state, [7], None)
    assert memory.num_stored > 0
    asked = [DraftRequest(own, 7, 4, 0.0, None) for own in (memory, state)]
    assert torch.equal(paged.propose(asked[:1])[0].token_ids, twin.propose(asked[1:])[0].token_ids)


@every_variant
def test_a_context_on_pages_that_another_request_stored_is_its_own(shape: dict[str, Any]):
    """Pages are shared where the tokens behind them that their rows have read are the same, and no further."""
    pair = Pair(**shape)
    runner, num_shared = pair.paged, 12
    generator = torch.Generator().manual_seed(4)
    known = num_shared + runner.num_ids_behind
    ids = torch.randint(0, 50, (known,), generator=generator).tolist()
    hidden = torch.randn(known - 1, pair.drafter.config.feature_size, generator=generator)
    first = runner.new_memory(PageTable([25, 24, 26, 23, 27], PAGE_SIZE))
    runner.extend(first, ids, hidden)
    runner.store(first)
    assert runner.num_stored(first) == num_shared

    rest = torch.randn(7, pair.drafter.config.feature_size, generator=generator)
    more_ids = torch.randint(0, 50, (num_shared + 8 - known,), generator=generator).tolist()
    second = runner.new_memory(PageTable([25, 24, 26, 29, 28, 31], PAGE_SIZE), ids[:num_shared])
    state = pair.twin.new_memory(PageTable([0], 1))
    own_ids = [*ids[num_shared:], *more_ids]
    runner.extend(second, own_ids, rest)
    pair.twin.extend(state, [*ids[:num_shared], *own_ids], torch.cat([hidden[:num_shared], rest]))
    asked = [DraftRequest(own, own_ids[-1], 4, 0.0, None) for own in (second, state)]
    assert torch.equal(runner.propose(asked[:1])[0].token_ids, pair.twin.propose(asked[1:])[0].token_ids)
