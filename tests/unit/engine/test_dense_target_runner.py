"""Targets that pages refuse are served all the same, each request with a cache of its own, and a user is told."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.attention.flat_batch import Piece
from dspark.attention.page_pool import PageTable
from dspark.engine.config import EngineConfig
from dspark.engine.dense_target_runner import DenseTargetRunner, dense_bytes_per_token
from dspark.engine.loading import load_engine, plain_twin
from dspark.engine.step_timer import BatchShape, StepTimer, page_tables
from dspark.targets import TargetConfig
from random_targets import DENSE, random_target
from tiny_engine import PROMPTS, VOCABULARY, greedy_continuations, ids_of, load, request, run
from tiny_families import make_family_target


def runner_of(name: str = "bloom", **options: Any) -> DenseTargetRunner:
    memory = {"vocabulary_size": VOCABULARY, "num_pages": 16, "page_size": 4}
    return DenseTargetRunner(random_target(DENSE[name]), **memory | options)


def read(runner: DenseTargetRunner, table: PageTable, ids: list[int]) -> torch.Tensor:
    return runner.run(runner.flatten([Piece(table, ids, num_logits=len(ids))])).logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family_target(tmp_path_factory.mktemp("bloom"), "bloom")


def test_it_is_chosen_where_pages_do_not_fit_and_one_line_says_so(folder: Path, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, logger="dspark.engine"):
        loaded = load_engine(
            TargetConfig(name=str(folder), dtype="float32", device="cpu"),
            "ngram",
            config=EngineConfig(page_size=4, kv_memory_bytes=2_000_000, verify_length=3),
        )
    assert isinstance(loaded.target, DenseTargetRunner)
    lines = [line for line in caplog.messages if "BloomForCausalLM" in line]
    assert lines == loaded.notes
    assert len(lines) == 1
    assert "does not use the library's attention interface" in lines[0]
    assert "each request has a cache and a forward pass of its own instead" in lines[0]
    per_token = 4 * 2 * 64 * 4  # layers, keys and values, hidden size, bytes
    assert loaded.engine.num_pages == 2_000_000 // (4 * per_token)
    alone = load(folder)
    alone.get_output_embeddings().weight.data[VOCABULARY:] = 0.0  # padding, which the engine never outputs
    expected = greedy_continuations(alone, PROMPTS[:3], 12)
    for engine in (loaded.engine, plain_twin(loaded)):
        outputs = run(engine, [request(prompt, str(i), max_tokens=12) for i, prompt in enumerate(PROMPTS[:3])])
        assert [ids_of(outputs[str(i)]) for i in range(3)] == expected
        assert engine.stats.prefix_cache_queries == 0


def test_what_was_rejected_is_taken_back() -> None:
    runner = runner_of()
    table, fresh = PageTable([0, 1, 2], 4), PageTable([3, 4, 5], 4)
    read(runner, table, [5, 6, 7])
    table.num_tokens = 3
    read(runner, table, [8, 9, 10, 11])
    table.num_tokens = 4
    found = read(runner, table, [12, 13])
    torch.testing.assert_close(found, read(runner, fresh, [5, 6, 7, 8, 12, 13])[-2:], atol=1e-5, rtol=1e-5)


def test_a_cache_goes_with_its_table() -> None:
    runner = runner_of()
    table = PageTable([0, 1], 4)
    read(runner, table, [5, 6])
    assert runner.num_caches == 1
    del table
    assert runner.num_caches == 0


def test_padding_ids_have_no_probability_and_rows_are_as_many_as_asked_for() -> None:
    runner = runner_of(vocabulary_size=300)
    pieces = [Piece(PageTable([i], 4), [1, 2, 3], num_logits=i) for i in range(3)]
    output = runner.run(runner.flatten(pieces))
    assert output.scores.shape == (3, VOCABULARY)
    assert torch.isinf(output.scores[:, 300:]).all()
    assert output.hidden is None


def test_bytes_of_a_token_are_those_that_its_cache_takes() -> None:
    runner = runner_of()
    table = PageTable([0, 1], 4)
    read(runner, table, [1, 2, 3, 4])
    layers = runner._stored[table].cache.layers
    assert 4 * dense_bytes_per_token(runner.model) == sum(
        part.numel() * part.element_size() for layer in layers for part in (layer.keys, layer.values)
    )


def test_its_steps_are_timed_on_contexts_that_were_read() -> None:
    runner = runner_of()
    tables = page_tables([20] * 2, 4)
    timer = StepTimer(runner, None, tables, context_tokens=9, seed=0)
    assert [runner._stored[table].num_tokens for table in tables] == [9, 9]
    assert timer.verify_s(BatchShape((3, 2))) > 0
    assert [table.num_tokens for table in tables] == [9, 9]
