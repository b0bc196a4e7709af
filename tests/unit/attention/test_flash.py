"""The arguments of flash-attn's function, given to its documented formula: the result is the reference's."""

import dataclasses
import sys

import pytest
import torch

import flash_by_formula
from dspark.attention import flash
from dspark.attention.flash import FlashEntry
from dspark.attention.kv_cache import LayerShape, PagedKVCache
from dspark.attention.page_pool import PageTable
from dspark.evaluation.attention_check import DECODING, SHAPES, PagedProblem, relative_error

PAGE_SIZE = 256
NAMES = [name for name, shape in SHAPES.items() if shape.key_dim == shape.value_dim]


def by_flash(problem: PagedProblem, *, is_fixed: bool) -> float:
    kv_cache = problem.memory()
    entry = FlashEntry(kv_cache, problem.page_size, flash_by_formula.flash_attn_varlen_func)
    found = problem.by_fixed_plan(entry, kv_cache) if is_fixed else problem.by_entry(entry, kv_cache)
    return relative_error(found, problem.by_reference())


@pytest.mark.parametrize("page_size", [16, PAGE_SIZE])
@pytest.mark.parametrize("name", NAMES)
def test_it_is_asked_for_what_the_reference_gives(name, page_size):
    problem = PagedProblem(SHAPES[name], page_size=page_size, dtype=torch.float32, device="cpu")
    assert by_flash(problem, is_fixed=False) < 1e-5


@pytest.mark.parametrize("name", ["shared keys", "window"])
def test_a_plan_of_fixed_size_gives_the_same_whatever_it_held_before(name):
    problem = PagedProblem(SHAPES[name], page_size=16, dtype=torch.float32, device="cpu", lengths=DECODING)
    assert by_flash(problem, is_fixed=True) < 1e-5


def test_a_block_sees_its_context_and_all_of_itself():
    problem = PagedProblem(
        dataclasses.replace(SHAPES["shared keys"]), page_size=16, dtype=torch.float32, device="cpu", lengths=((20, 4),)
    )
    kv_cache = problem.memory()
    batch = problem.batch()
    entry = FlashEntry(kv_cache, 16, flash_by_formula.flash_attn_varlen_func)
    tables, spans = [batch.pieces[0].table], [(20, 24)]
    found = problem._attend(entry.plan_of(tables, spans, batch.slot_mapping, is_causal=False), kv_cache, 0)
    keys, values = (x.repeat_interleave(3, dim=0) for x in kv_cache.read(0, tables[0], 0, 24))
    scores = problem._queries.transpose(0, 1) @ keys.transpose(1, 2) * 64**-0.5
    torch.testing.assert_close(found.transpose(0, 1), scores.softmax(-1) @ values, atol=1e-5, rtol=1e-5)


def test_a_step_that_does_not_fit_a_fixed_plan_is_known_before():
    kv_cache = PagedKVCache([LayerShape(1, 8, 8)], num_slots=64, dtype=torch.bfloat16, device="cpu")
    plan = FlashEntry(kv_cache, 16, flash_by_formula.flash_attn_varlen_func).fixed_plan(
        num_tokens=20, num_requests=2, max_pages=2
    )
    assert plan.holds([(0, 18), (30, 32)])
    assert not plan.holds([(0, 1)] * 3)
    assert not plan.holds([(0, 15), (0, 6)])
    assert not plan.holds([(32, 33)])
    with pytest.raises(AssertionError, match="does not fit"):
        plan.fill([PageTable([0, 1, 2], 16)], [(32, 33)], torch.zeros(20, dtype=torch.long))


@pytest.mark.parametrize(
    ("shape", "dtype", "page_size", "reason"),
    [
        (LayerShape(1, 64, 64), torch.bfloat16, 256, None),
        (LayerShape(1, 64, 64), torch.float32, 256, "torch.float32 is no half precision"),
        (LayerShape(1, 64, 64), torch.bfloat16, 16, "page_size 16 is no multiple of 256"),
        (LayerShape(1, 64, 32), torch.bfloat16, 256, "keys and values have different widths"),
        (LayerShape(1, 20, 20), torch.bfloat16, 256, "head widths [20] are not all multiples of 8 up to 256"),
    ],
)
def test_what_it_does_not_serve_has_a_reason(monkeypatch, shape, dtype, page_size, reason):
    kv_cache = PagedKVCache([shape], num_slots=page_size, dtype=dtype, device="cpu")
    monkeypatch.setattr(flash, "installed", lambda: flash_by_formula.flash_attn_varlen_func)
    assert flash.unserved(kv_cache, page_size) == reason


def test_where_it_is_not_installed_that_is_the_reason(monkeypatch):
    kv_cache = PagedKVCache([LayerShape(1, 64, 64)], num_slots=256, dtype=torch.bfloat16, device="cpu")
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert flash.installed() is None
    assert flash.unserved(kv_cache, 256) == "flash_attn is not installed"
    monkeypatch.setitem(sys.modules, "flash_attn", flash_by_formula)
    assert flash.unserved(kv_cache, 256) is None
