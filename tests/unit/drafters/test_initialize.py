"""An untrained drafter from a target: shape, frozen parts, mask token and warm start."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dspark.drafters.base import BlockBatch
from dspark.drafters.dflash import DFlashDrafter
from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.initialize import DrafterShape, drafter_config, new_drafter, resolve_mask_token
from dspark.engine.hidden_states import HiddenStateCapture
from dspark.targets import TargetConfig, load_target, load_tokenizer, vocabulary_size
from tiny_families import FAMILIES, make_family_target
from tiny_target import make_tiny_target, tiny_tokenizer

LAYER_IDS = (0, 2)
MASK_TOKEN = "system"


def small_model(kind: str, **changes: Any) -> Any:
    """A random model of another kind than the shared tiny target."""
    config: transformers.PretrainedConfig
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=320, n_embd=32, n_layer=4, n_head=4)
    else:
        sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
        config = transformers.AutoConfig.for_model(kind, **sizes, **heads, **changes)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def drafter_for(
    target: Any, tokenizer: Any, draft_to_target: torch.Tensor | None = None, **shape: Any
) -> DSparkDrafter | DFlashDrafter:
    options: dict[str, Any] = {"num_layers": 2, "block_size": 4, "mask_token": MASK_TOKEN, "markov_rank": 8} | shape
    config = drafter_config(
        DrafterShape(**options),
        target.config,
        tokenizer,
        target_layer_ids=LAYER_IDS,
        valid_vocab_size=vocabulary_size(tokenizer),
    )
    features = torch.randn(64, config.feature_size, generator=torch.Generator().manual_seed(0))
    return new_drafter(
        config,
        target,
        draft_to_target=torch.arange(config.draft_vocab_size) if draft_to_target is None else draft_to_target,
        sample_features=features,
        warm_start=bool(options.get("warm_start", False)),
        seed=0,
    )


ROTARY = [name for name in FAMILIES if name != "bloom"]  # a drafter takes its target's angles, and Bloom has none


@pytest.fixture(scope="module", params=["tied", "untied", "padded", *ROTARY])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Target and tokenizer; `padded` and other families' targets have 7 head rows more than there are tokens."""
    folder, kind = tmp_path_factory.mktemp(request.param), request.param
    if kind in FAMILIES:
        make_family_target(folder, kind)
    else:
        make_tiny_target(folder, tied=kind != "untied", padded_rows=7 if kind == "padded" else 0)
    config = TargetConfig(name=str(folder), dtype="float32", device="cpu")
    return load_target(config), load_tokenizer(config)


@pytest.fixture(scope="module")
def plain(tiny_target: Path) -> tuple[Any, Any]:
    config = TargetConfig(name=str(tiny_target), dtype="float32", device="cpu")
    return load_target(config), load_tokenizer(config)


def test_the_head_on_the_targets_own_state_gives_the_targets_logits(loaded: tuple[Any, Any]):
    target, tokenizer = loaded
    input_ids = torch.randint(3, 300, (1, 12), generator=torch.Generator().manual_seed(1))
    last_hidden = target.model(input_ids).last_hidden_state
    logits = target(input_ids).logits[..., : len(tokenizer)]
    for warm_start in (False, True) if target.config.model_type == "llama" else (False,):
        backbone = drafter_for(target, tokenizer, warm_start=warm_start).backbone
        torch.testing.assert_close(backbone.base_logits(last_hidden), logits, atol=1e-4, rtol=0)


def test_a_reduced_head_holds_the_targets_rows_of_the_chosen_tokens(loaded: tuple[Any, Any]):
    target, tokenizer = loaded
    chosen = torch.arange(5, 205, 2)
    backbone = drafter_for(target, tokenizer, chosen, draft_vocab_size=100).backbone
    input_ids = torch.randint(3, 300, (1, 12), generator=torch.Generator().manual_seed(1))
    last_hidden = target.model(input_ids).last_hidden_state
    expected = target(input_ids).logits[..., chosen]
    torch.testing.assert_close(backbone.base_logits(last_hidden), expected, atol=1e-4, rtol=0)
    assert torch.equal(backbone.d2t, chosen)


def test_rows_beyond_the_tokenizer_are_never_proposed(loaded: tuple[Any, Any]):
    target, tokenizer = loaded
    drafter = drafter_for(target, tokenizer)
    assert drafter.config.valid_vocab_size == drafter.config.draft_vocab_size == len(tokenizer)
    assert drafter.config.vocab_size == target.config.vocab_size
    with torch.no_grad():
        drafter.backbone.lm_head.weight[len(tokenizer) :] *= 1000.0
    state = drafter.new_state()
    drafter.extend_context(state, torch.randn(3, drafter.config.feature_size))
    for anchor_id in range(40):
        for temperature in (0.0, 20.0):
            draft = drafter.propose(state, anchor_id, max_tokens=4, temperature=temperature)
            assert int(draft.token_ids.max()) < len(tokenizer)


def test_embedding_head_and_mask_row_are_the_targets(loaded: tuple[Any, Any]):
    target, tokenizer = loaded
    backbone = drafter_for(target, tokenizer).backbone
    assert torch.equal(backbone.embed_tokens.weight, target.get_input_embeddings().weight)
    assert torch.equal(backbone.lm_head.weight, target.get_output_embeddings().weight)
    assert torch.equal(backbone.mask_embedding, backbone.embed_tokens.weight[backbone.config.mask_token_id])


def test_block_inputs_are_embedded_as_the_target_embeds(loaded: tuple[Any, Any]):
    target, tokenizer = loaded
    backbone = drafter_for(target, tokenizer).backbone
    first_inputs: list[torch.Tensor] = []
    hook = target.model.layers[0].register_forward_pre_hook(lambda _module, inputs: first_inputs.append(inputs[0]))
    target(torch.tensor([[41, backbone.config.mask_token_id]]))
    hook.remove()
    found = backbone._block_inputs(torch.tensor([[41]]), torch.zeros(1, 1, 64))[0, 0]
    torch.testing.assert_close(found[:2], first_inputs[0][0], atol=1e-5, rtol=1e-5)


def test_a_gemma4_targets_drafter_has_layers_of_its_global_kind(tmp_path: Path):
    folder = make_family_target(tmp_path, "gemma4_text")
    target = load_target(TargetConfig(name=str(folder), dtype="float32", device="cpu"))
    drafter = drafter_for(target, tiny_tokenizer())
    config = drafter.config
    assert (config.model_type, config.head_dim, config.num_key_value_heads) == ("gemma4_text", 16, 1)
    assert config.rope_parameters == {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    }
    ours, theirs = (
        {name: value.shape for name, value in layer.state_dict().items()}
        for layer in (drafter.backbone.layers[0], target.model.layers[3])
    )
    assert ours == theirs


def test_a_gemma4_layer_on_its_own_tokens_is_the_targets_layer(tmp_path: Path):
    """Without context, and every slot alone, attention is over one key: then nothing tells the two layers apart."""
    folder = make_family_target(tmp_path, "gemma4_text")
    target = load_target(TargetConfig(name=str(folder), dtype="float32", device="cpu"))
    backbone = drafter_for(target, tiny_tokenizer(), block_size=1, num_layers=1).backbone
    layer, source = backbone.layers[0], target.model.layers[3]
    source.layer_scalar.fill_(0.7)
    layer.load_state_dict(source.state_dict())
    h = torch.randn(1, 3, 1, 64)
    positions = torch.tensor([[[0], [5], [9]]])
    nothing = (torch.zeros(1, 0, 1, 16), torch.zeros(1, 0, 1, 16))
    found = layer(h, nothing, *backbone.rotary(positions), torch.zeros(1, 3, 1, 0, dtype=torch.bool))
    for row in range(3):
        angles = target.model.rotary_emb(h[:, row], positions[:, row], "full_attention")
        expected = source(h[:, row], position_embeddings=angles, attention_mask=None, shared_kv_states={})
        torch.testing.assert_close(found[:, row], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "name"), [("granite", "GraniteDecoderLayer"), ("gemma4_text", "Gemma4TextDecoderLayer")]
)
def test_a_warm_start_from_layers_that_rescale_is_refused(tmp_path: Path, kind: str, name: str):
    folder = make_family_target(tmp_path, kind)
    target = load_target(TargetConfig(name=str(folder), dtype="float32", device="cpu"))
    with pytest.raises(ValueError, match=f"cannot start from {name}; set drafter.warm_start false"):
        drafter_for(target, tiny_tokenizer(), warm_start=True)


def test_a_new_drafter_is_a_function_of_its_seed(plain: tuple[Any, Any]):
    first, again = drafter_for(*plain), drafter_for(*plain)
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), again.state_dict().values(), strict=True))


def test_the_shape_follows_from_the_target(plain: tuple[Any, Any]):
    config = drafter_for(*plain).config
    target = plain[0].config
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (64, 128, 320)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    assert config.rope_parameters["rope_theta"] == target.rope_parameters["rope_theta"]
    assert config.num_target_layers == 4
    assert config.target_layer_ids == LAYER_IDS


def test_a_dflash_shape_has_no_heads_whatever_the_defaults(plain: tuple[Any, Any]):
    config = drafter_for(*plain, architecture="dflash").config
    assert (config.markov_rank, config.enable_confidence_head, config.confidence_head_with_markov) == (0, False, False)


def test_a_warm_start_copies_the_last_layers_and_folds_their_input_norm(plain: tuple[Any, Any]):
    target, tokenizer = plain
    target.model.layers[3].input_layernorm.weight.copy_(torch.linspace(0.5, 1.5, 64))
    layer = drafter_for(target, tokenizer, warm_start=True).backbone.layers[1]
    source = target.model.layers[3]
    folded = source.self_attn.k_proj.weight * source.input_layernorm.weight
    assert torch.equal(layer.self_attn.k_proj.weight, folded)
    assert torch.equal(layer.input_layernorm.weight, torch.ones(64))
    assert torch.equal(layer.mlp.down_proj.weight, source.mlp.down_proj.weight)
    source.input_layernorm.weight.fill_(1.0)


def test_a_warm_start_reads_the_last_captured_layer(plain: tuple[Any, Any]):
    backbone = drafter_for(*plain, warm_start=True).backbone
    features = torch.randn(5, backbone.config.feature_size)
    expected = backbone.hidden_norm(features[:, -64:])
    torch.testing.assert_close(backbone.context_features(features), expected)


def test_a_warm_start_sets_the_head_norms_to_the_scale_of_the_targets_queries_and_keys(plain: tuple[Any, Any]):
    attention = drafter_for(*plain, warm_start=True).backbone.layers[0].self_attn
    for norm in (attention.q_norm, attention.k_norm):
        assert len(set(norm.weight.tolist())) == 1
        assert 0.1 < norm.weight[0].item() < 100
        assert norm.weight[0].item() != 1.0


def test_a_warm_start_takes_the_head_norms_of_a_target_that_has_them():
    target = small_model("qwen3")
    target.model.layers[3].self_attn.q_norm.weight.copy_(torch.linspace(0.5, 2.0, 8))
    layer = drafter_for(target, tiny_tokenizer(), warm_start=True).backbone.layers[1]
    assert torch.equal(layer.self_attn.q_norm.weight, target.model.layers[3].self_attn.q_norm.weight)


@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize("fusion", [False, True])
def test_a_warm_started_drafter_is_finite_on_real_states(plain: tuple[Any, Any], num_layers: int, fusion: bool):
    target, tokenizer = plain
    drafter = drafter_for(target, tokenizer, num_layers=num_layers, warm_start=True, anchor_fusion=fusion)
    input_ids = torch.randint(3, 300, (1, 16), generator=torch.Generator().manual_seed(1))
    with HiddenStateCapture(target, LAYER_IDS) as capture:
        target(input_ids)
        hidden = capture.hidden()
    batch = BlockBatch(input_ids, hidden, torch.tensor([[4, 9]]), torch.ones(1, 2, dtype=torch.bool))
    output = drafter(batch, torch.ones(1, 2, 4, dtype=torch.bool))
    assert output.logits.isfinite().all()
    assert output.logits.abs().max() < 1e4


EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "routed_scaling_factor": 2.0}


def test_hyper_connections_and_experts_start_as_the_plain_drafter_does(plain: tuple[Any, Any]):
    dense = drafter_for(*plain, warm_start=True).backbone
    # A shared and a routed expert together are as wide as the target's layer.
    wide = drafter_for(*plain, warm_start=True, moe=EXPERTS, hyper_connections={"hc_mult": 4}).backbone
    features = torch.randn(1, 16, dense.config.feature_size, generator=torch.Generator().manual_seed(2))
    input_ids = torch.randint(3, 300, (1, 16), generator=torch.Generator().manual_seed(1))
    batch = BlockBatch(input_ids, features, torch.tensor([[4, 9]]), torch.ones(1, 2, dtype=torch.bool))
    found, expected = wide.block_states(batch), dense.block_states(batch)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


def test_the_choice_of_layers_reaches_the_drafters_config(plain: tuple[Any, Any]):
    shape = {"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"], "moe": EXPERTS}
    config = drafter_for(*plain, **shape, mlp_layer_types=["sparse", "dense"], hyper_connections={"hc_mult": 2}).config
    assert [config.window_of(layer) for layer in range(2)] == [None, 16]
    assert [config.is_sparse(layer) for layer in range(2)] == [True, False]
    assert config.hyper_connections is not None
    assert config.hyper_connections.hc_mult == 2


def test_a_warm_start_from_layers_with_bias_says_how_to_do_without():
    target = small_model("qwen2")
    with pytest.raises(
        ValueError, match=r"from Qwen2DecoderLayer: its self_attn\..*bias is .*drafter.warm_start false"
    ):
        drafter_for(target, tiny_tokenizer(), warm_start=True)
    drafter_for(target, tiny_tokenizer(), warm_start=False)


def test_a_warm_start_from_more_layers_than_there_are_is_an_error(plain: tuple[Any, Any]):
    with pytest.raises(ValueError, match="num_layers 5 is more than the 4 layers of the target"):
        drafter_for(*plain, num_layers=5, warm_start=True)


def test_a_target_of_another_kind_is_an_error():
    with pytest.raises(ValueError, match="target of type 'gpt2' has no intermediate_size"):
        drafter_for(small_model("gpt2"), tiny_tokenizer())


def test_a_target_with_an_unknown_rope_type_is_an_error():
    target = small_model("llama")
    target.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match="rope_type 'dynamic' is not supported"):
        drafter_for(target, tiny_tokenizer())


def test_a_mask_token_is_given_as_text_or_id_or_by_the_tokenizer():
    tokenizer = tiny_tokenizer()
    system = tokenizer.convert_tokens_to_ids(MASK_TOKEN)
    assert resolve_mask_token(MASK_TOKEN, tokenizer, 320) == system
    assert resolve_mask_token(17, tokenizer, 320) == 17
    tokenizer.add_special_tokens({"mask_token": MASK_TOKEN})
    assert resolve_mask_token(None, tokenizer, 320) == system


@pytest.mark.parametrize(
    ("mask_token", "message"),
    [
        (None, "has no mask token; set drafter.mask_token"),
        ("<|im_end|>", r"'<\|im_end\|>' is the padding or end token \(id 2\)"),
        (2, r"2 is the padding or end token \(id 2\)"),
        ("<no such token>", "'<no such token>' is not a token of the target's tokenizer"),
        (320, "id 320 is outside the target's vocabulary of 320"),
        (-1, "id -1 is outside the target's vocabulary of 320"),
    ],
)
def test_a_mask_token_that_cannot_serve_is_an_error(mask_token: str | int | None, message: str):
    with pytest.raises(ValueError, match=message):
        resolve_mask_token(mask_token, tiny_tokenizer(), 320)


def test_a_mask_token_of_its_own_that_is_padding_is_an_error():
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "<|im_end|>"})
    with pytest.raises(ValueError, match="is the padding or end token"):
        resolve_mask_token(None, tokenizer, 320)
