"""Deterministic: a token gets the same bits in every batch, and a request the same text however it is served."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from dspark import native
from dspark.attention.flat_batch import Piece
from dspark.attention.page_pool import PageTable
from dspark.drafters.checkpoint import load_drafter
from dspark.engine.deterministic import SLICE_ROWS, AngleTable, SlicedRunner, deterministic
from dspark.engine.loading import paged_runner
from dspark.engine.lookup import LookupConfig
from dspark.engine.sampling import SamplingParams
from dspark.engine.target_runner import TargetRunner
from dspark.numerics import pack_linears
from tiny_drafter import make_tiny_drafter
from tiny_engine import PROMPTS, ids_of, load, make_engine, request, run
from tiny_target import make_tiny_target

SMALL: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 128,
    "intermediate_size": 200,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.12,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 16,
    "long_factor": [2.0] * 16,
    "original_max_position_embeddings": 24,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "whole layers": ("Llama", {}),
    "a window": ("Mistral", {"sliding_window": 6}),
    "another family": ("Olmo2", {}),
    "soft caps": ("Gemma2", {"sliding_window": 9}),
    "experts": ("Qwen3Moe", EXPERTS),
    "angles of the longest": ("Llama", {"rope_parameters": LONG}),
}
LONGEST = 40
TEXT, OTHER = (torch.randint(90, (LONGEST,), generator=torch.Generator().manual_seed(n)).tolist() for n in (1, 2))
has_products = (available := native.kernels()) is not None and available.has_products


@pytest.fixture(params=["kernels", "pytorch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "pytorch":
        monkeypatch.setenv(native.SWITCH, "0")
        native.kernels.cache_clear()
    yield request.param
    monkeypatch.undo()
    native.kernels.cache_clear()


def model_of(name: str, *, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**SMALL | changes))
    model = model.to(dtype).eval().requires_grad_(False)
    pack_linears(model)
    return model


def runner_of(model: Any) -> TargetRunner:
    return TargetRunner(model, vocabulary_size=90, layer_ids=(0,), num_pages=32, page_size=4)


def table_of(start: int) -> PageTable:
    """Ten pages that are no neighbours."""
    return PageTable([start + (3 * k) % 10 for k in range(10)], 4)


def read(runner: Any, cuts: Sequence[int], *, num_beside: int = 0) -> Tensor:
    """Logits of all tokens of the text, read in pieces that begin at the cuts: [40, V]."""
    table, other, parts = table_of(0), table_of(12), []
    for first, last in zip(cuts, [*cuts[1:], LONGEST], strict=True):
        pieces = [Piece(table, TEXT[first:last], last - first)]
        if num_beside:
            other.num_tokens = 0
            pieces.insert(first % 2, Piece(other, OTHER[:num_beside], 1))
        scores = runner.run(runner.flatten(pieces)).scores
        parts.append(scores[1:] if num_beside and first % 2 == 0 else scores[: last - first])
        table.num_tokens = last
    return torch.cat(parts)


def differing_rows(runner: Any, counts: Sequence[int]) -> list[int]:
    """Rows of the text that get other bits than alone where the last so many are read at once, beside 0 to 9 others."""
    alone = read(runner, range(LONGEST))
    others = [read(runner, sorted({0, LONGEST - n}), num_beside=n % 10) for n in counts]
    return sorted({int(row) for found in others for row in (found != alone).any(1).nonzero()[:, 0]})


@pytest.mark.parametrize(("name", "changes"), FAMILIES.values(), ids=FAMILIES)
def test_a_token_gets_the_same_bits_alone_and_in_every_batch(kernels: str, name: str, changes: dict[str, Any]) -> None:
    runner = deterministic(runner_of(model_of(name, **changes)))
    is_whole = name in ("Llama", "Mistral") and "rope_parameters" not in changes
    assert isinstance(runner, TargetRunner) == (is_whole and kernels == "kernels" and has_products)
    if isinstance(runner, SlicedRunner):
        assert runner.num_rows == (1 if changes in (EXPERTS, {"rope_parameters": LONG}) else SLICE_ROWS)
    counts = range(1, LONGEST + 1) if is_whole or name == "Olmo2" else (1, 3, 8, 17, 40)
    assert differing_rows(runner, counts) == []


@pytest.mark.parametrize("kernels", ["pytorch"], indirect=True)
@pytest.mark.parametrize(("name", "changes"), [FAMILIES["whole layers"], FAMILIES["experts"]])
def test_otherwise_it_does_not(kernels: str, name: str, changes: dict[str, Any]) -> None:
    assert len(differing_rows(runner_of(model_of(name, **changes)), (3, 8))) > LONGEST // 2


def test_slices_compute_what_whole_batches_do() -> None:
    whole = runner_of(model_of("Llama", dtype=torch.float32))
    sliced = SlicedRunner(whole)
    assert sliced.num_rows == SLICE_ROWS
    outputs = []
    for runner in (whole, sliced):
        table, other = table_of(0), table_of(12)
        table.num_tokens = 0
        for pieces in ([Piece(table, TEXT[:9], 0)], [Piece(table, TEXT[9:14], 2), Piece(other, OTHER[:7], 1)]):
            output = runner.run(runner.flatten(pieces))
            table.num_tokens += len(pieces[0].token_ids)
        outputs.append(output)
    for own, wanted in zip((outputs[1].scores, outputs[1].hidden), (outputs[0].scores, outputs[0].hidden), strict=True):
        assert own is not None
        assert wanted is not None
        torch.testing.assert_close(own, wanted, atol=1e-4, rtol=1e-4)  # float32, sums in another order
    assert outputs[1].scores.shape == (3, 90)


def test_angles_come_from_a_table_whatever_is_asked_for_first() -> None:
    model = model_of("Llama")
    rotary, x = model.model.rotary_emb, torch.zeros(1, 1, 128, dtype=torch.bfloat16)
    positions = torch.tensor([[0, 300, 255, 7]])
    with torch.inference_mode():
        own = rotary(x, positions)
        table, other = AngleTable(rotary), AngleTable(rotary)
        other(x, torch.tensor([[700]]))
        for found in (table(x, positions), other(x, positions)):
            for part, wanted in zip(found, own, strict=True):
                assert part.shape == wanted.shape
                assert torch.equal(part, wanted)  # rounded to bfloat16, which hides a last bit
    assert all(torch.equal(part, wanted) for part, wanted in zip(table(x, positions), own, strict=True))


# The same through the engine.

NUM_NEW = 10
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9)
TIGHT = 96  # tokens of KV memory: two of the requests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose layers are wide enough to run whole on the kernels."""
    return make_tiny_target(tmp_path_factory.mktemp("wide"), hidden=128)


@pytest.fixture(scope="module")
def drafter_folder(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    return make_tiny_drafter(tmp_path_factory.mktemp("drafter"), folder)


@pytest.fixture
def model(kernels: str, folder: Path) -> Any:
    loaded = load(folder).bfloat16().requires_grad_(False)
    pack_linears(loaded)
    return loaded


def asked(prefix: str = "") -> list[Any]:
    """Greedy and seeded requests."""
    prompts = [*PROMPTS[:6], [*PROMPTS[2], 7, 8], [*PROMPTS[5], 9]]
    options = [{"sampling": SAMPLED, "seed": i} if i % 2 else {} for i in range(len(prompts))]
    return [request(p, f"{prefix}{i}", max_tokens=NUM_NEW, **options[i]) for i, p in enumerate(prompts)]


def texts(engine: Any, prefix: str = "") -> list[list[int]]:
    requests = asked(prefix)
    outputs = run(engine, requests)
    return [ids_of(outputs[one.request_id]) for one in requests]


def ways(model: Any, drafter: Any, **settings: Any) -> Iterator[list[list[int]]]:
    """The texts as they come out however they are served."""

    def drafts() -> Any:
        return paged_runner(drafter, num_pages=512, page_size=4)

    yield texts(make_engine(model, max_batch_tokens=16, **settings))
    yield texts(make_engine(model, max_running_requests=3, **settings))
    engine = make_engine(model, drafts(), **settings)
    yield texts(engine)
    yield texts(engine, "again ")
    assert engine.stats.prefix_cache_hits > 0 < engine.stats.drafted_tokens
    tight = make_engine(model, drafts(), kv_tokens=TIGHT, verify_length=2, **settings)
    yield texts(tight)
    assert tight.stats.preemptions > 0
    copying = make_engine(model, drafts(), lookup=LookupConfig(min_match=1, max_match=3), **settings)
    yield texts(copying)
    assert copying.stats.copied > 0


def test_every_way_of_serving_gives_one_text(model: Any, drafter_folder: Path) -> None:
    drafter = load_drafter(drafter_folder, dtype=torch.bfloat16)
    alone = texts(make_engine(model, max_running_requests=1, prefix_cache=False, deterministic=True))
    assert len({tuple(ids) for ids in alone}) == len(alone)
    for found in ways(model, drafter, deterministic=True):
        assert found == alone


@pytest.mark.parametrize("kernels", ["pytorch"], indirect=True)
def test_in_the_default_mode_some_way_gives_another(model: Any, drafter_folder: Path) -> None:
    drafter = load_drafter(drafter_folder, dtype=torch.bfloat16)
    alone = texts(make_engine(model, max_running_requests=1, prefix_cache=False))
    assert any(found != alone for found in ways(model, drafter))
