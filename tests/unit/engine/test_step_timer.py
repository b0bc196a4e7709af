"""Timed steps are real ones, on contexts like those that requests have, and leave no trace."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.attention.flat_batch import Piece
from dspark.attention.page_pool import PageTable
from dspark.drafters.checkpoint import load_drafter
from dspark.engine.paged_draft_runner import PagedDraftRunner
from dspark.engine.step_samples import take_samples
from dspark.engine.step_timer import NEW_TOKENS, BatchShape, StepTimer, batch_shapes, page_tables
from dspark.engine.target_runner import TargetRunner
from dspark.targets import TargetConfig, load_target
from tiny_drafter import make_tiny_drafter

CONTEXT, PAGE_SIZE, NUM_REQUESTS = 20, 8, 3

Parts = tuple[StepTimer, TargetRunner, PagedDraftRunner, list[PageTable]]


@pytest.fixture
def make_timer(tiny_target: Path, tmp_path: Path) -> Callable[[], Parts]:
    def make() -> Parts:
        model: Any = load_target(TargetConfig(name=str(tiny_target), dtype="float32", device="cpu"))
        drafter: Any = load_drafter(make_tiny_drafter(tmp_path / "drafter", tiny_target), dtype=torch.float32)
        tables = page_tables([CONTEXT + 24] * NUM_REQUESTS, PAGE_SIZE)
        memory = {"num_pages": sum(len(table.pages) for table in tables), "page_size": PAGE_SIZE}
        target = TargetRunner(model, vocabulary_size=320, layer_ids=drafter.target_layer_ids, **memory)
        drafts = PagedDraftRunner(drafter, **memory)
        return StepTimer(target, drafts, tables, context_tokens=CONTEXT, seed=3), target, drafts, tables

    return make


@torch.inference_mode()
def test_every_request_has_the_context_as_if_it_had_read_it_itself(make_timer, tiny_target):
    timer, target, _, tables = make_timer()
    new_ids = [7, 8, 9]
    pieces = [Piece(table, new_ids, num_logits=3) for table in tables]
    paged = target.run(target.flatten(pieces)).logits
    model: Any = load_target(TargetConfig(name=str(tiny_target), dtype="float32", device="cpu"))
    expected = model(torch.tensor([timer._ids[:CONTEXT] + new_ids])).logits[0, -3:]
    for request in range(NUM_REQUESTS):
        # sums in another order: float32 to 1e-4 of logits of size 1 to 10
        torch.testing.assert_close(paged[3 * request : 3 * request + 3], expected, rtol=1e-4, atol=1e-4)


def test_steps_take_time_and_leave_the_tables_where_they_were(make_timer):
    timer, _, _, tables = make_timer()
    for shape in (BatchShape((1,)), BatchShape((5, 4)), BatchShape((1, 1, 1))):
        assert timer.verify_s(shape) > 0
    assert timer.draft_s(2) > 0
    assert [table.num_tokens for table in tables] == [CONTEXT] * NUM_REQUESTS


@torch.inference_mode()
def test_a_long_context_is_that_of_whoever_has_room_and_only_while_it_is_timed(tiny_target):
    model: Any = load_target(TargetConfig(name=str(tiny_target), dtype="float32", device="cpu"))
    tables = page_tables([60 + 4, 60 + 4, CONTEXT + 8], PAGE_SIZE)
    target = TargetRunner(model, vocabulary_size=320, num_pages=sum(len(t.pages) for t in tables), page_size=PAGE_SIZE)
    timer = StepTimer(target, None, tables, context_tokens=CONTEXT, seed=3, long_context_tokens=60)
    alone: Any = load_target(TargetConfig(name=str(tiny_target), dtype="float32", device="cpu"))
    read = alone(torch.tensor([timer._ids[:64]])).logits[0, -4:]
    assert timer.num_long == 2
    for table in tables[:2]:
        table.num_tokens = 60
        paged = target.run(target.flatten([Piece(table, timer._ids[60:64], num_logits=4)])).logits
        torch.testing.assert_close(paged, read, rtol=1e-4, atol=1e-4)  # sums in another order, as above
        table.num_tokens = CONTEXT
    starts, run = [], target.run
    target.run = lambda batch: (starts.append([piece.start for piece in batch.pieces]), run(batch))[1]
    for is_long in (True, False):
        assert timer.verify_s(BatchShape((4, 4)), is_long=is_long) > 0
    assert starts == [[60, 60], [CONTEXT, CONTEXT]]
    assert [table.num_tokens for table in tables] == [CONTEXT] * 3


@pytest.mark.parametrize("long_context_tokens", [0, 2 * CONTEXT - 1])
def test_there_is_no_long_context_that_is_hardly_longer(tiny_target, long_context_tokens):
    """Between two that are nearly alike there is noise alone, which a slope makes large."""
    model: Any = load_target(TargetConfig(name=str(tiny_target), dtype="float32", device="cpu"))
    tables = page_tables([200], PAGE_SIZE)
    target = TargetRunner(model, vocabulary_size=320, num_pages=len(tables[0].pages), page_size=PAGE_SIZE)
    timer = StepTimer(target, None, tables, context_tokens=CONTEXT, seed=3, long_context_tokens=long_context_tokens)
    assert timer.num_long == 0
    assert take_samples(timer, [BatchShape((1,))], [], repeats=1).long is None


def test_each_drafting_stores_the_features_of_one_round_in_those_that_are_drafted_for(make_timer):
    timer, _, _, _ = make_timer()
    for number in (3, 1, 2):
        timer.draft_s(number)
    stored = [memory.num_tokens for memory in timer._memories]
    assert stored == [CONTEXT + NEW_TOKENS * times for times in (3, 2, 1)]


def test_the_features_are_the_targets_own(make_timer):
    timer, target, _, tables = make_timer()
    table = PageTable(tables[0].pages, PAGE_SIZE)
    with torch.inference_mode():
        hidden = target.run(target.flatten([Piece(table, timer._ids[:CONTEXT], num_logits=1)])).hidden
    torch.testing.assert_close(timer._features, hidden)
    assert timer._features.shape[0] == CONTEXT


def test_without_a_drafter_the_target_alone_is_timed(tiny_target):
    model: Any = load_target(TargetConfig(name=str(tiny_target), dtype="float32", device="cpu"))
    tables = page_tables([CONTEXT + 4], PAGE_SIZE)
    target = TargetRunner(model, vocabulary_size=320, num_pages=len(tables[0].pages), page_size=PAGE_SIZE)
    timer = StepTimer(target, None, tables, context_tokens=CONTEXT, seed=0)
    assert timer.verify_s(BatchShape((4,))) > 0
    with pytest.raises(AssertionError, match="no drafter"):
        timer.draft_s(1)


def test_each_size_comes_as_one_request_as_few_tokens_each_and_as_one_token_each():
    shapes = batch_shapes([8, 1], tokens_per_request=4, max_requests=8)
    assert [shape.lengths for shape in shapes] == [(1,), (8,), (4, 4), (1,) * 8]


def test_tokens_are_spread_evenly_over_no_more_than_the_requests_allowed():
    for size in (1, 3, 7, 50, 256):
        shapes = batch_shapes([size], tokens_per_request=3, max_requests=10)
        assert [shape.num_tokens for shape in shapes] == [size] * len(shapes)
        assert len({shape.num_requests for shape in shapes}) == len(shapes)
        assert all(1 <= shape.num_requests <= 10 for shape in shapes)
        assert all(max(shape.lengths) - min(shape.lengths) <= 1 for shape in shapes)
        assert min(shape.lengths[-1] for shape in shapes) >= 1


def test_page_tables_share_no_page_and_waste_none():
    tables = page_tables([17, 16, 1], 16)
    assert [len(table.pages) for table in tables] == [2, 1, 1]
    assert sorted(page for table in tables for page in table.pages) == [0, 1, 2, 3]
