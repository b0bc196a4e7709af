"""The CPU kernel attends as its slow twin does: to 1e-5 in float32, and as the formula does in bfloat16."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dspark import native
from dspark.attention.cpu import AttentionPlan
from dspark.attention.flat_batch import FlatBatch, Piece, flatten
from dspark.attention.kv_cache import LayerShape, PagedKVCache
from dspark.attention.page_pool import PageTable
from dspark.attention.paged import PagedStep, attend_pieces, plan_of

pytestmark = pytest.mark.skipif(native.kernels() is None, reason="the CPU kernels cannot be built here")

# heads, key/value heads, width of keys, width of values, page size, window
SHAPES = {
    "shared keys": (6, 2, 64, 64, 16, None),
    "odd sizes": (3, 3, 8, 24, 3, None),
    "one head for all": (8, 1, 80, 80, 1, None),
    "a window within a tile": (4, 2, 32, 32, 5, 7),
    "a window of tiles": (4, 4, 96, 16, 16, 90),
}
# Tokens stored before, and new, per request: decode, verify, prompt, a prompt over several tiles.
LENGTHS = ((70, 1), (0, 9), (129, 8), (0, 1), (3, 150), (64, 1))


class Problem:
    """Requests with some tokens in scattered pages, and the next of each."""

    def __init__(self, shape: tuple[Any, ...], dtype: torch.dtype) -> None:
        heads, self.kv_heads, key_dim, value_dim, page_size, self.window = shape
        generator = torch.Generator().manual_seed(0)
        needed = [-(-(start + length) // page_size) for start, length in LENGTHS]
        pages = torch.randperm(sum(needed) + 3, generator=generator).tolist()
        self.tables = [PageTable([pages.pop() for _ in range(number)], page_size) for number in needed]
        self.kv_cache = PagedKVCache(
            [LayerShape(self.kv_heads, key_dim, value_dim)],
            num_slots=(sum(needed) + 3) * page_size,
            dtype=dtype,
            device="cpu",
        )
        for part in (*self.kv_cache.keys, *self.kv_cache.values):
            part.copy_(torch.randn(part.shape, generator=generator))
        for table, (start, _) in zip(self.tables, LENGTHS, strict=True):
            table.num_tokens = start
        num_tokens = sum(length for _, length in LENGTHS)
        self.query, self.key, self.value = (
            torch.randn(num, num_tokens, dim, generator=generator).to(dtype)
            for num, dim in ((heads, key_dim), (self.kv_heads, key_dim), (self.kv_heads, value_dim))
        )

    def batch(self, chosen: list[int]) -> FlatBatch:
        return flatten([Piece(self.tables[i], [0] * LENGTHS[i][1], 1) for i in chosen], "cpu")

    def rows(self, chosen: list[int]) -> Tensor:
        starts = [sum(length for _, length in LENGTHS[:i]) for i in chosen]
        return torch.cat([start + torch.arange(LENGTHS[i][1]) for i, start in zip(chosen, starts, strict=True)])

    def by_kernel(self, chosen: list[int], **options: Any) -> Tensor:
        rows = self.rows(chosen)
        query, key, value = (part[:, rows].transpose(0, 1) for part in (self.query, self.key, self.value))
        held = self.kv_cache.keys[0], self.kv_cache.values[0]
        return plan_of(self.batch(chosen)).attend(query, (key, value), held, window=self.window, **options)

    def by_twin(self, **options: Any) -> Tensor:
        step = PagedStep(self.batch(list(range(len(LENGTHS)))), self.kv_cache)
        options = {"scaling": None, "sliding_window": self.window} | options
        return attend_pieces(step, 0, self.query, self.key, self.value, **options).contiguous()


EVERY = list(range(len(LENGTHS)))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_in_float32_the_kernel_gives_what_its_twin_gives(shape: tuple[Any, ...]) -> None:
    problem, twin = Problem(shape, torch.float32), Problem(shape, torch.float32)
    found, expected = problem.by_kernel(EVERY), twin.by_twin()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(problem.kv_cache.keys[0], twin.kv_cache.keys[0])
    assert torch.equal(problem.kv_cache.values[0], twin.kv_cache.values[0])


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_in_bfloat16_the_kernel_rounds_once(shape: tuple[Any, ...]) -> None:
    problem, exact = Problem(shape, torch.bfloat16), Problem(shape, torch.bfloat16)
    exact.query, exact.key, exact.value = (part.double() for part in (exact.query, exact.key, exact.value))
    exact.kv_cache.keys[0], exact.kv_cache.values[0] = (
        exact.kv_cache.keys[0].double(),
        exact.kv_cache.values[0].double(),
    )
    found = problem.by_kernel(EVERY)
    torch.testing.assert_close(found.double(), exact.by_twin(), rtol=2**-8, atol=1e-4)  # one rounding to 8 bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_request_gets_the_same_bits_alone_and_among_others(shape: tuple[Any, ...], dtype: torch.dtype) -> None:
    problem = Problem(shape, dtype)
    together = problem.by_kernel(EVERY)
    for i in EVERY:
        assert torch.equal(problem.by_kernel([i]), together[problem.rows([i])])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_gets_the_same_bits_alone_and_behind_others_of_its_step(dtype: torch.dtype) -> None:
    problem = Problem(SHAPES["shared keys"], dtype)
    table, rows = problem.tables[2], problem.rows([2])
    start, length = LENGTHS[2]
    at_once = problem.by_kernel([2])
    held = problem.kv_cache.keys[0], problem.kv_cache.values[0]
    for i in range(length):
        slots = torch.tensor(table.slots(start + i, start + i + 1))
        query, key, value = (p[:, rows[i : i + 1]].transpose(0, 1) for p in (problem.query, problem.key, problem.value))
        alone = AttentionPlan([table], [(start + i, start + i + 1)], slots).attend(query, (key, value), held)
        assert torch.equal(alone[0], at_once[i])


def test_a_block_sees_its_context_and_all_of_itself() -> None:
    problem = Problem(SHAPES["shared keys"], torch.float32)
    start, length = LENGTHS[2]
    table, rows = problem.tables[2], problem.rows([2])
    query, key, value = (part[:, rows] for part in (problem.query, problem.key, problem.value))
    plan = AttentionPlan([table], [(start, start + length)], problem.batch([2]).slot_mapping, is_causal=False)
    held = problem.kv_cache.keys[0], problem.kv_cache.values[0]
    found = plan.attend(query.transpose(0, 1), (key.transpose(0, 1), value.transpose(0, 1)), held, scaling=0.3)
    keys, values = (x.repeat_interleave(3, dim=0) for x in problem.kv_cache.read(0, table, 0, start + length))
    expected = (query @ keys.transpose(1, 2) * 0.3).softmax(-1) @ values
    torch.testing.assert_close(found.transpose(0, 1), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["softcap", "sinks"])
def test_scores_are_capped_and_sinks_are_seen_as_by_the_twin(dtype: torch.dtype, name: str) -> None:
    problem, twin = Problem(SHAPES["a window of tiles"], dtype), Problem(SHAPES["a window of tiles"], torch.float32)
    twin.query, twin.key, twin.value = (part.float() for part in (problem.query, problem.key, problem.value))
    twin.kv_cache.keys[0].copy_(problem.kv_cache.keys[0])
    twin.kv_cache.values[0].copy_(problem.kv_cache.values[0])
    options = {name: 0.5 if name == "softcap" else torch.tensor([3.0, -50.0, 0.0, 8.0])}
    found = problem.by_kernel(EVERY, **options).float()
    tolerance = 1e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(found, twin.by_twin(**options), atol=max(1e-4, tolerance), rtol=tolerance)
    assert not torch.allclose(found, twin.by_twin(), atol=0.05)
