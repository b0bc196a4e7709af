"""Fused layers compute what the library's do, as exactly as bfloat16 allows, and the same bits in every batch."""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from dspark import native
from dspark.attention.flat_batch import Piece
from dspark.attention.page_pool import PageTable
from dspark.drafters.layers import DraftLayer
from dspark.engine.draft_runner import DraftRequest
from dspark.engine.fused_layers import TargetLayer, TargetLayers, fuse_layers
from dspark.engine.paged_draft_runner import PagedDraftRunner
from dspark.engine.target_runner import TargetRunner
from dspark.numerics import pack_linears
from random_drafter import random_drafter

available = native.kernels()
pytestmark = pytest.mark.skipif(
    available is None or not available.has_products, reason="this processor has no bfloat16 products of ours"
)

SMALL = {
    "vocab_size": 90,
    "hidden_size": 128,
    "intermediate_size": 200,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.12,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3 with a window": (
        "Qwen3",
        {"head_dim": 64, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "mistral with a window": ("Mistral", {"sliding_window": 6}),
}
TEXTS = [torch.randint(90, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (40, 13)]
CUTS = ((0, 16, 0, 1), (16, 17, 1, 6), (17, 40, 6, 13))


def model_of(name: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**SMALL | changes))
    for parameter in model.parameters():  # the library starts biases at 0 and norms at 1
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    model = model.bfloat16().eval().requires_grad_(False)
    pack_linears(model)
    return model


def read(runner: TargetRunner) -> tuple[Tensor, Tensor]:
    """Logits and features of both texts, read in turns: [40 + 13, …]."""
    tables = [PageTable([5, 3, 4, 9, 1, 2, 0, 8, 7, 6], 4), PageTable([11, 12, 13, 14], 4)]
    outputs: list[list[tuple[Tensor, Tensor]]] = [[], []]
    for cuts in CUTS:
        spans = [cuts[:2], cuts[2:]]
        pieces = [Piece(t, x[a:b], b - a) for t, x, (a, b) in zip(tables, TEXTS, spans, strict=True)]
        output = runner.run(batch := runner.flatten(pieces))
        assert output.hidden is not None
        for i, piece in enumerate(pieces):
            part = slice(batch.cu_seqlens_q[i], batch.cu_seqlens_q[i + 1])
            outputs[i].append((output.logits[part], output.hidden[part].float()))
            tables[i].num_tokens += len(piece.token_ids)
    logits, hidden = zip(*(part for parts in outputs for part in parts), strict=True)
    return torch.cat(logits), torch.cat(hidden)


def runner_of(model: Any, **options: Any) -> TargetRunner:
    return TargetRunner(model, vocabulary_size=90, layer_ids=(0, 1, 3), num_pages=16, page_size=4, **options)


@pytest.mark.parametrize(("name", "changes"), FAMILIES.values(), ids=FAMILIES)
def test_fused_layers_are_as_exact_as_the_librarys(name: str, changes: dict[str, Any]) -> None:
    model = model_of(name, **changes)
    exact = read(runner_of(copy.deepcopy(model).float(), use_kernels=False))
    eager = read(runner_of(model, use_kernels=False))
    fused = read(runner_of(model))
    assert all(type(layer.forward) is TargetLayer for layer in model.model.layers)
    for own, theirs, wanted in zip(fused, eager, exact, strict=True):
        error, their_error = (float((x - wanted).norm() / wanted.norm()) for x in (own, theirs))
        assert error < 0.03
        assert error < 1.2 * their_error


def test_a_row_gets_the_same_bits_alone_and_in_every_batch() -> None:
    runner = runner_of(model_of("Llama"))
    text = TEXTS[0]

    def rows(cuts: list[int], *, beside: bool) -> Tensor:
        table, other = PageTable(list(range(10)), 4), PageTable([11, 12, 13, 14], 4)
        parts = []
        for first, last in zip(cuts, [*cuts[1:], len(text)], strict=True):
            pieces = [Piece(table, text[first:last], last - first)]
            if beside:
                other.num_tokens = 0
                pieces.insert(0, Piece(other, TEXTS[1][: 1 + first % 9], 1))
            parts.append(runner.run(runner.flatten(pieces)).scores[int(beside) :])
            table.num_tokens = last
        return torch.cat(parts)

    one_by_one = rows(list(range(len(text))), beside=False)
    assert torch.equal(rows([0], beside=False), one_by_one)
    assert torch.equal(rows([0, 1, 9, 11, 30], beside=True), one_by_one)


@pytest.mark.parametrize("heard", [(), (1,), (0, 1, 2)])
def test_layers_in_one_call_give_the_bits_of_one_after_the_other(heard: tuple[int, ...]) -> None:
    """With what a layer was given and has given for those who listen."""
    runner = runner_of(model_of("Qwen3", head_dim=64, use_sliding_window=True, sliding_window=9, max_window_layers=1))
    model = runner.model.model
    assert type(model.forward) is TargetLayers
    states = []
    for number in heard:
        model.layers[number].register_forward_hook(lambda _module, inputs, output: states.extend([*inputs, output]))
    together = read(runner)
    assert len(states) == 2 * len(heard) * len(CUTS)
    del model.forward
    one_by_one = read(runner)
    assert all(torch.equal(a, b) for a, b in zip(together, one_by_one, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(states, states[2 * len(heard) * len(CUTS) :], strict=False))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_listener_may_change_what_a_layer_gives(number: int) -> None:
    runner = runner_of(model_of("Llama"))
    model = runner.model.model
    before = read(runner)
    hook = model.layers[number].register_forward_hook(lambda _module, _inputs, output: output * 0.5 + 1)
    together = read(runner)
    del model.forward
    one_by_one = read(runner)
    hook.remove()
    assert all(torch.equal(a, b) for a, b in zip(together, one_by_one, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(together, before, strict=True))


def test_on_other_attention_the_layers_are_the_librarys_own() -> None:
    """A model whose layers were fused for one runner serves another one whose plans are not the kernels'."""
    model = model_of("Llama")
    ids, memory = TEXTS[0], {"vocabulary_size": 90, "num_pages": 4, "page_size": 16}
    fused = TargetRunner(model, **memory)
    flex = TargetRunner(model, **memory, attention="flex")
    assert fused.uses_kernels
    assert type(model.model.forward) is TargetLayers
    own, other = (
        runner.run(runner.flatten([Piece(PageTable([3, 1, 2], 16), ids, len(ids))])).logits for runner in (fused, flex)
    )
    assert (own - other).norm() / own.norm() < 0.05
    assert not torch.equal(own, other)


def test_without_pages_the_layers_are_the_librarys_own() -> None:
    model = model_of("Llama")
    ids = torch.tensor([TEXTS[0]])
    before = model(input_ids=ids, use_cache=False).logits
    assert fuse_layers(model) == 3
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("Llama", {"hidden_act": "gelu"}), ("Olmo2", {}), ("Llama", {"num_key_value_heads": 1, "head_dim": 32})],
    ids=["another activation", "another family", "too narrow to be packed"],
)
def test_other_layers_stay_as_they_are(name: str, changes: dict[str, Any]) -> None:
    assert fuse_layers(model_of(name, **changes)) == 0


def test_draft_layers_are_as_exact_fused_as_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = random_drafter(hidden_size=128, intermediate_size=192, num_attention_heads=4, head_dim=32)
    drafter = drafter.bfloat16().eval().requires_grad_(False)
    wide = copy.deepcopy(drafter).float()
    pack_linears(drafter)

    def states(which: Any) -> Tensor:
        runner = PagedDraftRunner(which, num_pages=16, page_size=4)
        memories = [runner.new_memory(PageTable(pages, 4)) for pages in ([3, 1, 0, 2], [9, 8, 4, 5])]
        for memory, n in zip(memories, (9, 3), strict=True):
            features = torch.randn(n, which.config.feature_size, generator=torch.Generator().manual_seed(n))
            runner.extend(memory, [0] * n, features.to(which.backbone.fc.weight.dtype))
        requests = [DraftRequest(memory, 5 + i, 4, 0.0, None) for i, memory in enumerate(memories)]
        with torch.inference_mode():
            runner._store(memories)
            return runner._block_states(requests).float()

    exact, fused = states(wide), states(drafter)
    assert all("forward_flat" in vars(layer) for layer in drafter.backbone.layers if type(layer) is DraftLayer)
    for layer in drafter.backbone.layers:
        del layer.forward_flat
    monkeypatch.setattr("dspark.engine.paged_draft_runner.fuse_draft_layers", lambda layers: 0)
    eager = states(drafter)
    error, their_error = (float((x - exact).norm() / exact.norm()) for x in (fused, eager))
    assert error < 0.03
    assert error < 1.2 * their_error
