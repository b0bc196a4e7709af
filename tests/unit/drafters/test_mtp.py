"""MTP modules on disk and from a target; what they cannot be built from is refused."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from dspark.drafters.checkpoint import from_deepspec, load_drafter, save_drafter
from dspark.drafters.initialize_autoregressive import new_autoregressive_drafter
from dspark.drafters.mtp import MTPConfig, one_layer_config
from dspark.targets import TargetConfig, load_target
from random_autoregressive import mtp_config, random_autoregressive_drafter
from tiny_drafter import make_tiny_drafter


@pytest.mark.parametrize("num_modules", [1, 4])
def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path, num_modules: int):
    drafter = random_autoregressive_drafter(architecture="mtp", num_modules=num_modules, draft_vocab_size=30)
    save_drafter(drafter, tmp_path / "one", dtype=torch.float32)
    loaded = load_drafter(tmp_path / "one")
    save_drafter(loaded, tmp_path / "two", dtype=torch.float32)
    one, two = (load_file(str(tmp_path / name / "model.safetensors")) for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one.keys() | two.keys())
    assert loaded.config == drafter.config
    assert torch.equal(loaded.backbone.d2t, drafter.backbone.d2t)


def test_rotary_frequencies_stay_float32_in_bf16(tmp_path: Path):
    drafter = random_autoregressive_drafter(architecture="mtp")
    before = drafter.backbone.layers[0].decoder.rotary_emb.inv_freq.clone()
    save_drafter(drafter, tmp_path, dtype=torch.bfloat16)
    loaded = load_drafter(tmp_path, dtype=torch.bfloat16)
    assert loaded.backbone.layers[0].eh_proj.weight.dtype == torch.bfloat16
    assert torch.equal(loaded.backbone.layers[0].decoder.rotary_emb.inv_freq, before)


def test_a_config_without_the_layers_own_is_refused(tmp_path: Path):
    save_drafter(random_autoregressive_drafter(architecture="mtp"), tmp_path, dtype=torch.float32)
    content = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ValueError, match="has no block; take it from the checkpoint"):
        from_deepspec({name: value for name, value in content.items() if name != "block"})


def test_modules_are_one_or_as_many_as_draft_tokens():
    with pytest.raises(ValueError, match="num_modules 2 with block_size 4; use 1"):
        mtp_config(num_modules=2)


def test_a_layer_that_keeps_another_state_is_refused_by_name():
    shape = transformers.Qwen3_5TextConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2,
        linear_num_value_heads=2,
    )  # fmt: skip
    block = one_layer_config(shape) | {"layer_types": ["linear_attention"]}
    with pytest.raises(ValueError, match="Qwen3_5DecoderLayer does not go through the library's attention interface"):
        random_autoregressive_drafter(architecture="mtp", block=block)


def test_a_warm_start_is_the_targets_last_layer_over_its_state(tmp_path: Path, tiny_target: Path):
    folder = make_tiny_drafter(tmp_path, tiny_target, architecture="mtp", layer_ids=(5,), num_modules=4)
    drafter = load_drafter(folder)
    assert isinstance(drafter.config, MTPConfig)
    target = load_target(TargetConfig(name=str(tiny_target), dtype="float32", device="cpu"))
    last, norm = target.model.layers[-1].state_dict(), target.model.norm.weight
    for module in drafter.backbone.layers:
        found = module.decoder.layers[0].state_dict()
        assert found.keys() == last.keys()
        assert all(torch.equal(found[name], last[name]) for name in last)
        assert torch.equal(module.decoder.norm.weight, norm)
        assert torch.equal(module.eh_proj.weight[:, 64:], torch.eye(64))


def test_a_warm_start_from_a_layer_of_another_form_is_refused(tmp_path: Path, tiny_target: Path):
    target = load_target(TargetConfig(name=str(tiny_target), dtype="float32", device="cpu"))
    del target.model.layers[-1].mlp.up_proj
    config = mtp_config(hidden_size=64, vocab_size=320, block=one_layer_config(target.config))
    message = r"mlp\.up_proj\.weight is None, not \[128, 64\]; set drafter\.warm_start false"
    with pytest.raises(ValueError, match=message):
        new_autoregressive_drafter(
            config,
            target,
            draft_to_target=torch.arange(320),
            sample_features=torch.randn(4, 64),
            warm_start=True,
            seed=0,
        )
