"""A drafter on disk: what is written is what is read, and what does not fit together is refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.drafters.checkpoint import from_deepspec, load_drafter, rope_parameters, save_drafter, to_deepspec
from dspark.errors import Mismatch, MissingInput
from random_drafter import VARIANTS, random_batch, random_drafter

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "deepspec"
DEEPSPEC_KEYS = (
    "architectures",
    "target_layer_ids",
    "num_target_layers",
    "mask_token_id",
    "block_size",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "layer_types",
    "tie_word_embeddings",
    "rope_parameters",
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "hidden_act",
    "attention_bias",
    "sliding_window",
    "use_sliding_window",
    "max_position_embeddings",
    "vocab_size",
    "dtype",
)


def change_config(folder: Path, **changes: Any) -> None:
    content = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(content))


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(str(folder / "model.safetensors")) | changes
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, str(folder / "model.safetensors"), metadata={"format": "pt"})


@pytest.fixture
def reduced(tmp_path: Path) -> Path:
    save_drafter(random_drafter(draft_vocab_size=30), tmp_path / "drafter", dtype=torch.float32)
    return tmp_path / "drafter"


@pytest.mark.parametrize("shape", [*VARIANTS.values(), {"learned_mask_embedding": True}], ids=str)
def test_a_drafter_comes_back_as_it_was_saved(tmp_path: Path, shape: dict[str, Any]):
    drafter = random_drafter(**shape)
    with torch.no_grad():  # as the mask row is stored in the embedding, its token has to have it too
        drafter.backbone.embed_tokens.weight[drafter.config.mask_token_id] = drafter.backbone.mask_embedding
    save_drafter(drafter, tmp_path, dtype=torch.float32)
    loaded = load_drafter(tmp_path)
    assert loaded.config == drafter.config
    assert type(loaded) is type(drafter)
    assert torch.equal(loaded.backbone.d2t, drafter.backbone.d2t)
    for name, value in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


@pytest.mark.parametrize("shape", VARIANTS.values(), ids=VARIANTS)
def test_a_loaded_drafter_proposes_what_the_saved_one_does(tmp_path: Path, shape: dict[str, Any]):
    drafter = random_drafter(**shape)
    save_drafter(drafter, tmp_path, dtype=torch.float32)
    batch = random_batch(drafter.config, [[9]])
    proposals = []
    for one in (drafter, load_drafter(tmp_path)):
        state = one.new_state()
        one.extend_context(state, batch.target_hidden[0, :9])
        proposals.append(one.propose(state, 3, max_tokens=4, temperature=0.0).token_ids.tolist())
    assert proposals[0] == proposals[1]


@pytest.mark.parametrize("case", ["dspark_vanilla", "dspark_gated", "dspark_rnn", "gemma4_dspark_vanilla", "dflash"])
def test_a_checkpoint_of_the_public_code_keeps_its_tensors_and_config(tmp_path: Path, case: str):
    save_drafter(load_drafter(FIXTURES / case), tmp_path, dtype=torch.float32)
    theirs, ours = (load_file(str(folder / "model.safetensors")) for folder in (FIXTURES / case, tmp_path))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    their_config = json.loads((FIXTURES / case / "config.json").read_text())
    our_config = json.loads((tmp_path / "config.json").read_text())
    if case.startswith("gemma4"):  # of a target's two kinds of layer, ours names the one that draft layers are of
        their_config["rope_parameters"] = {"full_attention": their_config["rope_parameters"]["full_attention"]}
        their_config |= {"head_dim": their_config["global_head_dim"], "num_key_value_heads": 1}
        their_config |= {"sliding_window": None}  # of the target's other layers
    shared = their_config.keys() & our_config.keys()
    assert {name: our_config[name] for name in shared} == {name: their_config[name] for name in shared}
    assert {name for name in DEEPSPEC_KEYS if name in their_config} <= shared
    again = tmp_path / "again"
    save_drafter(load_drafter(tmp_path), again, dtype=torch.float32)
    assert (again / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
    assert (again / "config.json").read_bytes() == (tmp_path / "config.json").read_bytes()


def test_config_json_speaks_the_public_format():
    content = to_deepspec(random_drafter(draft_vocab_size=30).config, dtype="bfloat16")
    assert set(DEEPSPEC_KEYS) <= content.keys()
    assert content["architectures"] == ["Qwen3DSparkModel"]
    assert content["layer_types"] == ["full_attention", "full_attention"]
    assert content["tie_word_embeddings"] is False
    assert content["sample_from_anchor"] is True
    assert content["is_causal"] is False
    assert content["draft_vocab_size"] == 30
    assert json.loads(json.dumps(content)) == content
    assert "anchor_fusion" not in content


def test_what_a_targets_head_does_is_written_where_it_does_something():
    names = {"embedding_scale", "logit_scale", "final_logit_softcapping", "lm_head_bias", "attention_k_eq_v"}
    assert not names & to_deepspec(random_drafter().config, dtype="float32").keys()
    bent = to_deepspec(random_drafter(**VARIANTS["bent_head"]).config, dtype="float32")
    assert (bent["embedding_scale"], bent["logit_scale"], bent["final_logit_softcapping"]) == (3.0, 0.5, 4.0)
    assert bent["architectures"] == ["DSparkFusionModel"]  # the public class would leave all of it out


def test_a_gemma4_drafter_passes_for_the_public_class_only_where_it_is_one():
    shape = VARIANTS["gemma4"]
    content = to_deepspec(random_drafter(**shape).config, dtype="float32")
    assert (content["architectures"], content["model_type"]) == (["Gemma4DSparkModel"], "gemma4_text")
    assert (content["global_head_dim"], content["num_global_key_value_heads"]) == (8, 1)
    assert content["rope_parameters"]["full_attention"]["rope_type"] == "proportional"
    assert not {"embedding_scale", "hidden_act"} & content.keys()
    windowed = to_deepspec(random_drafter(**shape, sliding_window=6).config, dtype="float32")
    assert windowed["architectures"] == ["DSparkFusionModel"]
    assert from_deepspec(windowed).sliding_window == 6


@pytest.mark.parametrize("changes", [{"hidden_activation": "silu"}, {"enable_moe_block": True}])
def test_a_part_of_gemma4_that_draft_layers_do_not_have_is_refused(changes: dict[str, Any]):
    content = to_deepspec(random_drafter(**VARIANTS["gemma4"]).config, dtype="float32") | changes
    with pytest.raises(ValueError, match=next(iter(changes))):
        from_deepspec(content)


def test_a_gemma4_drafter_without_shared_keys_and_values_has_both(tmp_path: Path):
    drafter = random_drafter(**VARIANTS["gemma4"] | {"attention_k_eq_v": False, "num_key_value_heads": 2})
    save_drafter(drafter, tmp_path, dtype=torch.float32)
    assert "layers.0.self_attn.v_proj.weight" in load_file(str(tmp_path / "model.safetensors"))
    assert load_drafter(tmp_path).config == drafter.config


def test_a_sliding_window_is_told_per_layer():
    content = to_deepspec(random_drafter(sliding_window=6).config, dtype="float32")
    assert content["layer_types"] == ["sliding_attention", "sliding_attention"]
    assert (content["sliding_window"], content["use_sliding_window"]) == (6, True)


def test_a_drafter_with_our_extension_does_not_pass_for_one_that_others_can_read():
    content = to_deepspec(random_drafter(anchor_fusion=True).config, dtype="float32")
    assert content["architectures"] == ["DSparkFusionModel"]
    assert content["anchor_fusion"] is True


@pytest.mark.parametrize("extension", ["moe", "hyper_connections", "production"])
def test_a_drafter_of_our_own_form_names_it_in_the_words_of_other_configs(extension: str):
    config = random_drafter(**VARIANTS[extension]).config
    content = to_deepspec(config, dtype="float32")
    assert content["architectures"] == ["DSparkFusionModel"]
    assert ("n_routed_experts" in content) == ("mlp_layer_types" in content) == (config.moe is not None)
    assert ("hc_mult" in content) == (config.hyper_connections is not None)
    assert not {"moe", "hyper_connections"} & content.keys()
    assert from_deepspec(json.loads(json.dumps(content))) == config


def test_what_a_plain_drafters_config_repeats_of_its_target_makes_no_experts():
    content = to_deepspec(random_drafter().config, dtype="float32") | {"n_routed_experts": 64, "hc_mult": 4}
    assert from_deepspec(content) == random_drafter().config


def test_windows_of_their_own_are_told_per_layer():
    config = random_drafter(**VARIANTS["mixed_windows"]).config
    content = to_deepspec(config, dtype="float32")
    assert content["layer_types"] == ["sliding_attention", "full_attention"]
    assert (content["sliding_window"], content["use_sliding_window"]) == (6, True)
    assert from_deepspec(content) == config


def test_what_is_computed_in_float32_is_stored_in_float32(tmp_path: Path):
    drafter = random_drafter(**VARIANTS["production"])
    save_drafter(drafter, tmp_path, dtype=torch.bfloat16)
    stored = load_file(str(tmp_path / "model.safetensors"))
    exact = {name for name, value in stored.items() if value.dtype == torch.float32}
    assert {name.partition("layers.1.")[2] for name in exact if name.startswith("layers.1.")} == {
        *(f"{hc}.{name}" for hc in ("attn_hc", "ffn_hc") for name in ("fn", "base", "scale")),
        "mlp.gate.weight",
        "mlp.gate.e_score_correction_bias",
    }
    loaded = load_drafter(tmp_path, dtype=torch.bfloat16)
    for name in exact:
        assert torch.equal(loaded.backbone.state_dict()[name], drafter.backbone.state_dict()[name]), name
    save_drafter(loaded, tmp_path / "again", dtype=torch.bfloat16)
    again = load_file(str(tmp_path / "again" / "model.safetensors"))
    assert all(torch.equal(again[name], value) for name, value in stored.items())


def test_a_missing_expert_tensor_is_named(tmp_path: Path):
    save_drafter(random_drafter(**VARIANTS["moe"]), tmp_path, dtype=torch.float32)
    change_tensors(tmp_path, **{"layers.0.mlp.experts.down_proj": None})
    with pytest.raises(Mismatch, match=r"tensor layers\.0\.mlp\.experts\.down_proj is missing from model"):
        load_drafter(tmp_path)


def test_bf16_on_disk_costs_rounding_only(tmp_path: Path):
    drafter = random_drafter()
    save_drafter(drafter, tmp_path, dtype=torch.bfloat16)
    stored = load_file(str(tmp_path / "model.safetensors"))
    assert {value.dtype for value in stored.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = load_drafter(tmp_path)
    for name, value in drafter.state_dict().items():
        if not name.endswith(("mask_embedding", "embed_tokens.weight")):
            assert torch.equal(loaded.state_dict()[name], value.bfloat16().float()), name


def test_a_drafter_loaded_to_draft_is_frozen_and_one_to_train_is_not(tmp_path: Path):
    save_drafter(random_drafter(), tmp_path, dtype=torch.float32)
    assert not any(p.requires_grad for p in load_drafter(tmp_path).parameters())
    trainable = {name for name, p in load_drafter(tmp_path, trainable=True).named_parameters() if p.requires_grad}
    assert "backbone.fc.weight" in trainable
    assert not trainable & {"backbone.embed_tokens.weight", "backbone.lm_head.weight"}


def test_d2t_holds_offsets(reduced: Path):
    offsets = load_file(str(reduced / "model.safetensors"))["d2t"]
    expected = random_drafter(draft_vocab_size=30).backbone.d2t
    assert offsets.dtype == torch.int64
    assert (torch.arange(30) + offsets).tolist() == expected.tolist()
    assert load_drafter(reduced).backbone.d2t.tolist() == expected.tolist()


def test_d2t_with_absolute_ids_is_refused(reduced: Path):
    change_tensors(reduced, d2t=random_drafter(draft_vocab_size=30).backbone.d2t)
    with pytest.raises(Mismatch, match=r"outside the vocabulary of 61; it must hold offsets \(target id - draft id\)"):
        load_drafter(reduced)


def test_d2t_that_reaches_into_padding_rows_is_refused(tmp_path: Path):
    save_drafter(random_drafter(draft_vocab_size=30, valid_vocab_size=50), tmp_path, dtype=torch.float32)
    offsets = load_file(str(tmp_path / "model.safetensors"))["d2t"]
    offsets[-1] = 50 - 29
    change_tensors(tmp_path, d2t=offsets)
    with pytest.raises(Mismatch, match=r"d2t maps to ids \d+\.\.50 outside the vocabulary of 50"):
        load_drafter(tmp_path)


def test_d2t_that_maps_two_draft_ids_to_one_target_id_is_refused(reduced: Path):
    offsets = load_file(str(reduced / "model.safetensors"))["d2t"]
    offsets[4] = offsets[3] - 1
    change_tensors(reduced, d2t=offsets)
    with pytest.raises(Mismatch, match="d2t maps two draft ids to target id"):
        load_drafter(reduced)


@pytest.mark.parametrize(("offsets", "found"), [(None, "none"), (torch.zeros(29, dtype=torch.long), "29")])
def test_a_missing_or_short_d2t_is_refused(reduced: Path, offsets: torch.Tensor | None, found: str):
    change_tensors(reduced, d2t=offsets)
    with pytest.raises(Mismatch, match=f"d2t has {found} entries but draft_vocab_size is 30"):
        load_drafter(reduced)


def test_a_folder_without_a_drafter_names_the_job_that_makes_one(tmp_path: Path):
    with pytest.raises(MissingInput, match=r"no drafter at .*jobs/train\.py"):
        load_drafter(tmp_path)


def test_a_missing_tensor_is_named(reduced: Path):
    change_tensors(reduced, **{"layers.1.mlp.up_proj.weight": None})
    with pytest.raises(Mismatch, match=r"tensor layers\.1\.mlp\.up_proj\.weight is missing from model\.safetensors"):
        load_drafter(reduced)


def test_an_unknown_tensor_is_named(reduced: Path):
    change_tensors(reduced, **{"layers.0.self_attn.q_proj.bias": torch.zeros(32)})
    with pytest.raises(Mismatch, match=r"tensor layers\.0\.self_attn\.q_proj\.bias is unknown in model\.safetensors"):
        load_drafter(reduced)


def test_a_missing_embedding_is_named(reduced: Path):
    change_tensors(reduced, **{"embed_tokens.weight": None})
    with pytest.raises(Mismatch, match=r"tensor embed_tokens\.weight is missing from model\.safetensors"):
        load_drafter(reduced)


def test_a_tensor_of_another_shape_is_named(reduced: Path):
    change_config(reduced, markov_rank=6)
    with pytest.raises(Mismatch, match=r"tensor .* has shape .* config\.json asks for"):
        load_drafter(reduced)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, r"architectures \['LlamaForCausalLM'\] are not known"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding layers need a window"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, the drafter has 2"),
        ({"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ({"markov_head_type": "lstm"}, "markov_head_type"),
        ({"sample_from_anchor": False}, "sample_from_anchor"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "default"}}, "the rotary base is unknown"),
        ({"target_layer_ids": None}, "target_layer_ids"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_is_not_understood_is_refused(changes: dict[str, Any], message: str):
    content = to_deepspec(random_drafter().config, dtype="float32") | changes
    with pytest.raises(ValueError, match=message):
        from_deepspec({name: value for name, value in content.items() if value is not None})


def test_nested_and_flat_rope_settings_give_the_same_drafter(tmp_path: Path):
    scaling = {"factor": 2.0, "rope_type": "linear", "rope_theta": 5000.0}
    drafter = random_drafter(rope_parameters=scaling)
    save_drafter(drafter, tmp_path / "nested", dtype=torch.float32)
    shutil.copytree(tmp_path / "nested", tmp_path / "flat")
    content = json.loads((tmp_path / "flat" / "config.json").read_text())
    del content["rope_parameters"]
    content |= {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    (tmp_path / "flat" / "config.json").write_text(json.dumps(content))
    nested, flat = (load_drafter(tmp_path / name) for name in ("nested", "flat"))
    assert nested.config == flat.config
    positions = torch.arange(50)
    assert torch.equal(nested.backbone.rotary(positions)[0], flat.backbone.rotary(positions)[0])


def test_plain_rope_settings_have_both_forms():
    expected = {"rope_theta": 5000.0, "rope_type": "default"}
    assert rope_parameters({"rope_theta": 5000.0}) == expected
    assert rope_parameters({"rope_parameters": {"rope_theta": 5000.0}}) == expected
    assert rope_parameters({"rope_theta": 5000.0, "rope_scaling": None}) == expected


def test_a_config_without_a_rotary_base_is_an_error():
    with pytest.raises(ValueError, match=r"neither rope_parameters\.rope_theta nor rope_theta"):
        rope_parameters({"rope_scaling": {"rope_type": "linear", "factor": 2.0}})
