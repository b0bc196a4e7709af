"""FlexAttention over pages: its mask against visibility written out, its output against the reference."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from dspark.attention.block_tables import NOTHING
from dspark.attention.flex import LONG_TILE, SHORT_TILE, FlexEntry, _kernel_options, unserved
from dspark.attention.kv_cache import LayerShape, PagedKVCache
from dspark.attention.page_pool import PageTable
from dspark.evaluation.attention_check import DECODING, SHAPES, PagedProblem, relative_error

PAGE_SIZE = 16


def memory(num_pages: int = 8, *, width: int = 16, page_size: int = PAGE_SIZE) -> PagedKVCache:
    shape = LayerShape(1, width, width)
    return PagedKVCache([shape], num_slots=num_pages * page_size, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("is_causal", [True, False])
def test_a_row_sees_its_own_request_s_tokens_and_no_others(window, is_causal):
    """Two requests that share a first page; every slot of memory is asked for by every row."""
    tables = [PageTable([6, 2], PAGE_SIZE), PageTable([6, 4, 1], PAGE_SIZE)]
    spans = [(18, 20), (30, 48)]
    entry = FlexEntry(memory(), PAGE_SIZE)
    slots = [s for table, span in zip(tables, spans, strict=True) for s in table.slots(*span)]
    plan = entry.plan_of([*tables], spans, torch.tensor(slots), is_causal=is_causal)
    number = 1 + 1  # 18 rows are one long tile
    tile, row, slot = torch.meshgrid(*(torch.arange(n) for n in (number, LONG_TILE, 8 * PAGE_SIZE)), indexing="ij")
    seen = plan.mask(window)(tile, torch.zeros_like(tile), row, slot)
    expected = torch.zeros_like(seen)
    for i, (table, (start, stop)) in enumerate(zip(tables, spans, strict=True)):
        for place, own in enumerate(range(start, stop)):
            last = own if is_causal else stop - 1
            first = 0 if window is None else max(0, last - window + 1)
            expected[i, place, table.slots(first, last + 1)] = True
    assert torch.equal(seen, expected)


def test_the_kernel_s_mask_needs_no_list_of_pages_where_it_visits_the_listed_ones_alone():
    """On the pages that a tile lists, the short mask and the whole one say the same."""
    problem = PagedProblem(SHAPES["window"], page_size=PAGE_SIZE, dtype=torch.float32, device="cpu")
    entry = FlexEntry(problem.memory(), PAGE_SIZE)
    plan = entry.plan(problem.batch())
    whole = plan.mask(37)
    entry.is_compiled, plan._owned = True, None
    short, listed = plan.mask(37), plan.listed_pages()
    tiles, pages = listed.nonzero(as_tuple=True)
    slots = (pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()
    tiles = tiles.repeat_interleave(PAGE_SIZE)
    rows = torch.arange(LONG_TILE)[:, None].expand(-1, len(slots))
    heads = torch.zeros(())
    assert torch.equal(short(tiles, heads, rows, slots), whole(tiles, heads, rows, slots))


def test_block_masks_list_the_pages_for_every_block_of_rows_and_follow_a_refill():
    problem = PagedProblem(SHAPES["one head for all"], page_size=PAGE_SIZE, dtype=torch.float32, device="cpu")
    entry = FlexEntry(problem.memory(), PAGE_SIZE)
    plan = entry.fixed_plan(num_tokens=16, num_requests=4, max_pages=3)
    table = PageTable([3, 1], PAGE_SIZE)
    plan.fill([table], [(17, 18)], torch.zeros(16, dtype=torch.long))
    mask = plan.block_mask(12, None, entry.logical.shape[0] * PAGE_SIZE)
    assert mask.kv_num_blocks.shape == (4, 1, -(-12 * SHORT_TILE // 128))
    assert mask.kv_num_blocks[:, 0, 1].tolist() == [2, 0, 0, 0]
    assert mask.kv_indices[0, 0, 1, :2].tolist() == [3, 1]
    plan.fill([PageTable([5], PAGE_SIZE)] * 2, [(1, 2), (3, 4)], torch.zeros(16, dtype=torch.long))
    assert plan.block_mask(12, None, entry.logical.shape[0] * PAGE_SIZE) is mask
    assert mask.kv_num_blocks[:, 0, 1].tolist() == [1, 1, 0, 0]
    assert mask.kv_indices[1, 0, 1, 0] == 5
    assert plan._positions[:3, 0].tolist() == [1, 3, NOTHING]


@pytest.mark.parametrize("name", SHAPES)
def test_it_gives_what_the_reference_gives(name):
    problem = PagedProblem(SHAPES[name], page_size=PAGE_SIZE, dtype=torch.float32, device="cpu")
    kv_cache = problem.memory()
    found = problem.by_entry(FlexEntry(kv_cache, PAGE_SIZE), kv_cache)
    assert relative_error(found, problem.by_reference()) < 1e-5


@pytest.mark.parametrize("name", ["shared keys", "wide"])
def test_the_library_s_own_function_gives_the_same_where_it_is_not_compiled(name):
    few = ((20, 1), (17, 3))
    problem = PagedProblem(SHAPES[name], page_size=PAGE_SIZE, dtype=torch.float32, device="cpu", lengths=few)
    kv_cache = problem.memory()
    found = problem.by_entry(FlexEntry(kv_cache, PAGE_SIZE, flex_attention), kv_cache)
    assert relative_error(found, problem.by_reference()) < 1e-5


@pytest.mark.parametrize("name", ["shared keys", "window"])
def test_a_plan_of_fixed_size_gives_the_same_whatever_it_held_before(name):
    problem = PagedProblem(SHAPES[name], page_size=PAGE_SIZE, dtype=torch.float32, device="cpu", lengths=DECODING)
    kv_cache = problem.memory()
    found = problem.by_fixed_plan(FlexEntry(kv_cache, PAGE_SIZE), kv_cache)
    assert relative_error(found, problem.by_reference()) < 1e-5


def test_a_step_that_does_not_fit_a_fixed_plan_is_known_before():
    plan = FlexEntry(memory(), PAGE_SIZE).fixed_plan(num_tokens=20, num_requests=2, max_pages=2)
    assert plan.holds([(0, 16), (30, 32)])
    assert not plan.holds([(0, 17), (30, 31)])  # three tiles
    assert not plan.holds([(0, 15), (0, 6)])  # 21 rows
    assert not plan.holds([(32, 33)])  # three pages


def test_what_it_does_not_serve_has_a_reason():
    assert unserved(memory(), PAGE_SIZE) is None
    assert unserved(memory(page_size=24), 24) == "page_size 24 is no power of two from 16"
    assert unserved(memory(page_size=8), 8) == "page_size 8 is no power of two from 16"
    assert unserved(memory(width=8), PAGE_SIZE) == "heads are narrower than 16"


@pytest.mark.parametrize(("width", "page_size"), [(64, 16), (64, 256), (256, 64)])
def test_kernel_blocks_divide_a_page_and_a_block_of_queries(width, page_size):
    options = _kernel_options(torch.empty(1, 1, width), page_size)
    assert page_size % options["BLOCK_N"] == 0
    assert 128 % options["BLOCK_M"] == 0
