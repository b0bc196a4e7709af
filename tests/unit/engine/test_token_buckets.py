"""Steps in buckets: the same outputs as unpadded steps, padding in a page of nobody's, and who may use them."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.attention.flat_batch import Piece
from dspark.attention.page_pool import PageTable
from dspark.engine.config import EngineConfig
from dspark.engine.dense_target_runner import DenseTargetRunner
from dspark.engine.engine import Engine
from dspark.engine.graphs import most_tokens, use_graphs, wants_graphs
from dspark.engine.paged_draft_runner import PagedDraftRunner
from dspark.engine.target_runner import TargetRunner
from dspark.engine.token_buckets import SIZES, bucket_sizes, most_decode_tokens, uncaptured
from random_drafter import random_drafter
from random_targets import DENSE, random_target
from tiny_engine import PROMPTS, VOCABULARY, greedy_continuations, ids_of, load, request, run

PAGE_SIZE = 16


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> Any:
    return load(tiny_target)


@pytest.fixture(scope="module")
def expected(tiny_target: Path) -> list[list[int]]:
    return greedy_continuations(load(tiny_target), PROMPTS, 24)


def runner_of(model: Any, *, layer_ids: tuple[int, ...] = (), num_pages: int = 40) -> TargetRunner:
    return TargetRunner(
        model,
        vocabulary_size=VOCABULARY,
        layer_ids=layer_ids,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        attention="flex",
        has_scratch_page=True,
    )


def config_of(**changes: Any) -> EngineConfig:
    return EngineConfig(**{"page_size": PAGE_SIZE, "kv_tokens": 640, "max_running_requests": 8} | changes)


def batch_of(runner: TargetRunner, lengths: list[int], *, num_logits: int | None = None) -> Any:
    tables = [PageTable([2 * i, 2 * i + 1], PAGE_SIZE) for i in range(len(lengths))]
    for i, table in enumerate(tables):
        table.num_tokens = 3 * i + 1
    pieces = [
        Piece(table, [5 + n] * n, num_logits=n if num_logits is None else num_logits)
        for table, n in zip(tables, lengths, strict=True)
    ]
    return runner.flatten(pieces)


def test_sizes_grow_with_the_step_and_end_at_the_largest():
    assert bucket_sizes(20) == (1, 2, 4, 8, 12, 16, 20)
    assert bucket_sizes(1) == (1,)
    assert all(size <= 2 * smaller or size - smaller <= 1 for smaller, size in pairwise(SIZES))
    assert most_decode_tokens(8, 7, 512) == 64
    assert most_decode_tokens(64, 7, 128) == 128
    assert most_decode_tokens(200, 7, 100) == 200  # every request decodes, whatever the limit


def test_a_step_in_a_bucket_gives_the_logits_and_features_of_one_that_is_not_padded(model):
    plain, padded = (runner_of(model, layer_ids=(0, 2)) for _ in range(2))
    assert use_graphs(padded, config_of(), num_ahead=7, capture=uncaptured) is None
    generator = torch.Generator().manual_seed(0)
    for memories in zip(plain.kv_cache.held, padded.kv_cache.held, strict=True):
        noise = torch.randn(memories[0].shape, generator=generator)
        for memory in memories:
            memory.copy_(noise)
    for lengths in ([1, 4, 1], [2], [8, 8, 8, 1]):  # 6, 2 and 25 rows in buckets of 8, 2 and 32
        batches = batch_of(plain, lengths), batch_of(padded, lengths)
        alone, together = plain.run(batches[0]), padded.run(batches[1])
        torch.testing.assert_close(together.logits, alone.logits, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(together.hidden, alone.hidden, atol=1e-4, rtol=1e-4)
    assert (plain.num_bucket_runs, padded.num_bucket_runs) == (0, 3)


def test_padding_is_stored_in_the_scratch_page_alone(model):
    runner = runner_of(model)
    use_graphs(runner, config_of(), num_ahead=7, capture=uncaptured)
    before = [keys.clone() for keys in runner.kv_cache.keys]
    batch = batch_of(runner, [3, 2])
    runner.run(batch)
    scratch = runner.num_pages * PAGE_SIZE
    assert runner.scratch_slot == scratch
    for keys, old in zip(runner.kv_cache.keys, before, strict=True):
        changed = (keys != old).any(dim=2).any(dim=0).nonzero()[:, 0].tolist()
        assert changed == sorted([*batch.slot_mapping.tolist(), scratch])


def test_features_stay_what_they_were_when_the_next_step_runs(model):
    runner = runner_of(model, layer_ids=(0, 2))
    outputs = []

    def replay_of(compute: Any) -> Any:
        """As a graph does: the outputs lie where they lay the time before."""
        kept = [part.clone() for part in compute()]

        def replay() -> Any:
            for whole, part in zip(kept, compute(), strict=True):
                whole.copy_(part)
            return tuple(kept)

        return replay

    use_graphs(runner, config_of(), num_ahead=7, capture=replay_of)
    for length in (3, 4):
        hidden = runner.run(batch_of(runner, [length])).hidden
        assert hidden is not None
        outputs.append((hidden, hidden.clone()))
    assert all(torch.equal(hidden, copy) for hidden, copy in outputs)


@pytest.mark.parametrize(
    ("lengths", "num_logits", "is_held"),
    [([1, 4], None, True), ([40], 1, False), ([1] * 9, None, False), ([64], None, True), ([65], None, False)],
)
def test_prompts_and_what_does_not_fit_run_as_before(model, lengths, num_logits, is_held):
    runner = runner_of(model, num_pages=600)
    use_graphs(runner, config_of(), num_ahead=7, capture=uncaptured)
    tables = [PageTable(list(range(5 * i, 5 * i + 5)), PAGE_SIZE) for i in range(len(lengths))]
    pieces = [Piece(t, [5] * n, num_logits=num_logits or n) for t, n in zip(tables, lengths, strict=True)]
    runner.run(runner.flatten(pieces))
    assert runner.num_bucket_runs == is_held


@pytest.mark.parametrize("is_drafted", [False, True])
def test_an_engine_whose_steps_run_in_buckets_writes_what_the_library_writes(model, expected, is_drafted):
    config, drafts = config_of(verify_length=3 if is_drafted else None, prefix_cache=False), None
    if is_drafted:
        shape = {"hidden_size": 64, "vocab_size": VOCABULARY, "target_layer_ids": (0, 2), "mask_token_id": 0}
        drafts = PagedDraftRunner(
            random_drafter(**shape, num_target_layers=4), num_pages=config.num_pages, page_size=PAGE_SIZE
        )
    runner = runner_of(model, layer_ids=(0, 2) if is_drafted else ())
    engine = Engine(runner, drafts, None, config=config)
    assert use_graphs(runner, config, num_ahead=engine.most_ahead, capture=uncaptured) is None
    outputs = run(engine, [request(prompt, str(i)) for i, prompt in enumerate(PROMPTS)])
    assert [ids_of(outputs[str(i)]) for i in range(len(PROMPTS))] == expected
    assert runner.num_bucket_runs > 20


def test_graphs_are_tried_on_cuda_only_and_refused_elsewhere_where_they_are_demanded():
    assert wants_graphs(EngineConfig(), "cuda")
    assert not wants_graphs(EngineConfig(), "cpu")
    assert not wants_graphs(EngineConfig(cuda_graphs=False), "cuda")
    assert not wants_graphs(EngineConfig(deterministic=True), "cuda")
    with pytest.raises(ValueError, match="cuda_graphs is true, but the target is on cpu"):
        wants_graphs(EngineConfig(cuda_graphs=True), "cpu")
    with pytest.raises(ValueError, match="cuda_graphs pads steps, which deterministic rules out"):
        EngineConfig(cuda_graphs=True, deterministic=True)


def test_what_cannot_be_captured_is_said_or_refused(model, caplog):
    def fail(compute: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    runner = runner_of(model)
    reason = use_graphs(runner, config_of(), num_ahead=0, capture=fail)
    assert reason == "LlamaForCausalLM cannot be captured (operation not permitted when stream is capturing)"
    assert "decode steps run without CUDA graphs: LlamaForCausalLM" in caplog.text
    with pytest.raises(ValueError, match="cuda_graphs is true, but LlamaForCausalLM cannot be captured"):
        use_graphs(runner, config_of(cuda_graphs=True), num_ahead=0, capture=fail)
    reference = TargetRunner(model, vocabulary_size=VOCABULARY, num_pages=4, page_size=PAGE_SIZE, attention="torch")
    assert use_graphs(reference, config_of(), num_ahead=0) == "attention torch cannot be captured"
    assert most_tokens(config_of(), 3) == 32


def test_without_pages_there_are_none():
    runner = DenseTargetRunner(random_target(DENSE["bloom"]), vocabulary_size=VOCABULARY, num_pages=4, page_size=4)
    assert use_graphs(runner, config_of(), num_ahead=0) == "BloomForCausalLM is served without pages"


def test_a_target_that_computes_something_else_in_padded_steps_runs_as_it_comes(model):
    def capture(compute: Any) -> Any:
        return lambda: (compute()[0] + torch.arange(VOCABULARY), None)

    runner = runner_of(model)
    reason = use_graphs(runner, config_of(), num_ahead=7, capture=capture)
    assert reason is not None
    assert reason.startswith("LlamaForCausalLM computes something else in padded steps (logits differ by 319 of")
    runner.run(batch_of(runner, [3]))
    assert runner.num_bucket_runs == 0
