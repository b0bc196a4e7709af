"""Targets of several architectures compute on paged attention what they compute by themselves; others are refused."""

from typing import Any

import pytest
import torch
import transformers

from dspark.attention.choice import Choice, TorchEntry
from dspark.attention.flat_batch import Piece
from dspark.attention.page_pool import PageTable
from dspark.engine.dense_target_runner import DenseTargetRunner
from dspark.engine.hidden_states import HiddenStateCapture
from dspark.engine.target_runner import NotPageable, TargetRunner, kv_bytes_per_token

SMALL = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def model_of(name: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    kind = f"{name}TextConfig" if name in ("Llama4", "Gemma4") else f"{name}Config"
    config = getattr(transformers, kind)(**SMALL | changes)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


FITTING = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral with a window": ("Mistral", {"sliding_window": 6}),
    "gemma2 with soft-capped scores": ("Gemma2", {"head_dim": 8, "sliding_window": 6, "attn_logit_softcapping": 2.0}),
    "attention sinks": (
        "GptOss",
        {"head_dim": 8, "sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "keys wider than values": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 12,
            "v_head_dim": 10,
            "first_k_dense_replace": 3,
        },
    ),
    "mixture of experts": (
        "Qwen3Moe",
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
}


@pytest.mark.parametrize("use_kernels", [True, False])
@pytest.mark.parametrize(("name", "changes"), FITTING.values(), ids=FITTING)
def test_logits_and_features_are_the_models_own(name, changes, use_kernels):
    alone, model = model_of(name, **changes), model_of(name, **changes)
    memory = {"num_pages": 24, "page_size": 4}
    runner = TargetRunner(model, vocabulary_size=60, layer_ids=(-1, 1), use_kernels=use_kernels, **memory)
    texts = [
        torch.randint(60, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (14, 5)
    ]
    tables = [PageTable([5, 3, 4, 9], 4), PageTable([6, 7], 4)]
    parts = [[], []]
    for cuts in ((0, 6, 0, 1), (6, 7, 1, 4), (7, 14, 4, 5)):
        pieces = [
            Piece(table, text[first:last], num_logits=last - first)
            for table, text, first, last in zip(tables, texts, cuts[::2], cuts[1::2], strict=True)
        ]
        batch = runner.flatten(pieces)
        output = runner.run(batch)
        for i, piece in enumerate(pieces):
            rows = slice(batch.cu_seqlens_q[i], batch.cu_seqlens_q[i + 1])
            parts[i].append((output.logits[rows], output.hidden[rows]))
            tables[i].num_tokens = piece.stop
    for text, found in zip(texts, parts, strict=True):
        with torch.no_grad(), HiddenStateCapture(alone, (-1, 1)) as capture:
            expected = alone(torch.tensor([text])).logits[0]
            hidden = capture.hidden()[0]
        torch.testing.assert_close(torch.cat([logits for logits, _ in found]), expected, atol=2e-4, rtol=1e-3)
        torch.testing.assert_close(torch.cat([states for _, states in found]), hidden, atol=2e-4, rtol=1e-3)


WIDE = {"hidden_size": 64, "head_dim": 16}
SHARED = {"global_head_dim": 16, "vocab_size_per_layer_input": 60, "sliding_window": 6, "num_kv_shared_layers": 2}
ON_CUDA_S_KIND = {
    "llama": ("Llama", {}),
    "gemma2 with soft-capped scores": ("Gemma2", {"sliding_window": 6, "attn_logit_softcapping": 2.0}),
    "shared keys": (
        "Gemma4",
        {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2} | SHARED,
    ),
}


@pytest.mark.parametrize(("name", "changes"), ON_CUDA_S_KIND.values(), ids=ON_CUDA_S_KIND)
def test_on_attention_of_a_gpu_s_kind_logits_are_the_model_s_own(name, changes):
    alone, model = (model_of(name, **WIDE | changes) for _ in range(2))
    runner = TargetRunner(model, vocabulary_size=60, num_pages=4, page_size=16, attention="flex")
    text = torch.randint(60, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    table, parts = PageTable([2, 0, 3], 16), []
    for first, last in ((0, 17), (17, 18), (18, 40)):
        output = runner.run(runner.flatten([Piece(table, text[first:last], num_logits=last - first)]))
        parts.append(output.logits)
        table.num_tokens = last
    with torch.no_grad():
        expected = alone(torch.tensor([text])).logits[0]
    torch.testing.assert_close(torch.cat(parts), expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", [TargetRunner, DenseTargetRunner])
def test_a_token_that_the_model_has_no_logit_for_is_none_of_its_ids(kind):
    model = model_of("Llama")
    rows = model.lm_head.weight.shape[0]
    for given, expected in ((rows + 9, rows), (rows - 9, rows - 9)):
        runner = kind(model, vocabulary_size=given, num_pages=4, page_size=16)
        assert runner.vocabulary_size == expected


def test_sinks_are_seen_at_the_start_and_refused_to_entries_that_know_none():
    model = model_of("GptOss", **WIDE, num_local_experts=2, num_experts_per_tok=1)
    memory = {"vocabulary_size": 60, "num_pages": 4, "page_size": 16}
    assert TargetRunner(model, **memory).kv_cache.has_sinks
    assert not TargetRunner(model_of("Llama"), **memory).kv_cache.has_sinks
    with pytest.raises(ValueError, match="'flex' does not serve here: it knows no attention sinks"):
        TargetRunner(model, **memory, attention="flex")


class Failing:
    """An entry whose kernel does not run."""

    name = "flex"

    def plan(self, batch: Any) -> Any:
        raise RuntimeError("out of resources")


def test_an_entry_that_fails_gives_way_to_the_next_and_one_line_says_why(monkeypatch, caplog):
    choice = Choice([Failing(), TorchEntry()], {"flash": "flash_attn is not installed"})
    monkeypatch.setattr("dspark.engine.target_runner.choose_entries", lambda kv_cache, page_size: choice)
    runner = TargetRunner(model_of("Llama"), vocabulary_size=60, num_pages=24, page_size=4)
    assert runner.attention.name == "torch"
    assert not runner.uses_kernels
    assert caplog.messages == [
        "attention: torch; not flash: flash_attn is not installed; not flex: target class LlamaForCausalLM does not "
        "run on paged attention (out of resources)"
    ]


def test_where_every_entry_fails_the_target_is_refused_and_left_as_it_was(monkeypatch):
    monkeypatch.setattr(
        "dspark.engine.target_runner.choose_entries", lambda kv_cache, page_size: Choice([Failing(), Failing()], {})
    )
    model = model_of("Llama")
    with pytest.raises(NotPageable, match=r"does not run on paged attention \(out of resources\)"):
        TargetRunner(model, vocabulary_size=60, num_pages=24, page_size=4)
    assert model.config._attn_implementation == "sdpa"


REFUSED = {
    "convolution layers": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "Lfm2ForCausalLM"),
    "a recurrent state beside attention": ("FalconH1", {}, "FalconH1ForCausalLM keeps a LinearAttentionAnd"),
    "attention in chunks": (
        "Llama4",
        {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 32},
        "Llama4ForCausalLM attends in layer 0 with window None, but its cache keeps 8192",
    ),
}


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED.values(), ids=REFUSED)
def test_a_target_it_cannot_compute_is_refused_by_name(name, changes, message):
    with pytest.raises(ValueError, match=message):
        TargetRunner(model_of(name, **changes), vocabulary_size=60, num_pages=24, page_size=4)


def test_a_model_that_computes_something_else_is_refused_with_the_difference(monkeypatch):
    monkeypatch.setattr("dspark.attention.paged.causal_mask", lambda *a, **o: None)
    with pytest.raises(ValueError, match="computes something else on paged attention"):
        TargetRunner(model_of("Llama"), vocabulary_size=60, num_pages=24, page_size=4, use_kernels=False)


def test_positions_that_turn_otherwise_in_long_texts_bound_the_context():
    factors = [1.0, 1.1, 1.2, 1.3]
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": factors}
    model = model_of("Phi3", rope_parameters=rope, original_max_position_embeddings=64)
    assert TargetRunner(model, vocabulary_size=60, num_pages=24, page_size=4).max_context_tokens == 64
    plain = TargetRunner(model_of("Phi3"), vocabulary_size=60, num_pages=24, page_size=4)
    assert plain.max_context_tokens == 128


def test_layers_that_share_keys_share_their_memory():
    changes = {"head_dim": 8, "global_head_dim": 8, "vocab_size_per_layer_input": 60, "sliding_window": 6}
    layers = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    model = model_of("Gemma4", num_kv_shared_layers=2, **changes | layers)
    runner = TargetRunner(model, vocabulary_size=60, num_pages=24, page_size=4)
    assert runner.kv_cache.keys[2] is runner.kv_cache.keys[0]
    assert runner.kv_cache.values[3] is runner.kv_cache.values[1]
    assert runner.kv_cache.num_bytes == 24 * 4 * kv_bytes_per_token(model)


def test_padding_ids_have_no_probability():
    runner = TargetRunner(model_of("Llama"), vocabulary_size=50, num_pages=24, page_size=4)
    output = runner.run(runner.flatten([Piece(PageTable([0], 4), [1, 2], num_logits=2)]))
    assert torch.isinf(output.logits[:, 50:]).all()
    assert torch.isfinite(output.logits[:, :50]).all()
    assert output.hidden is None


def test_two_runners_share_a_model_one_with_and_one_without_features():
    model = model_of("Llama")
    with_features = TargetRunner(model, vocabulary_size=60, layer_ids=(0,), num_pages=24, page_size=4)
    without = TargetRunner(model, vocabulary_size=60, num_pages=24, page_size=4)
    for runner, has_features in ((with_features, True), (without, False), (with_features, True)):
        output = runner.run(runner.flatten([Piece(PageTable([0], 4), [1, 2], num_logits=1)]))
        assert (output.hidden is not None) == has_features
