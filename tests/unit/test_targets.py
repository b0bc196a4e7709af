import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers

from dspark import targets
from dspark.engine.hidden_states import HiddenStateCapture
from dspark.targets import (
    TargetConfig,
    default_sampling,
    load_target,
    load_target_config,
    load_tokenizer,
    resolve_target,
    stop_token_ids,
    target_identity,
    vocabulary_size,
)
from tiny_target import make_tiny_target, tiny_tokenizer


@pytest.fixture
def copied_target(tiny_target: Path, tmp_path: Path) -> Path:
    """A tiny target that a test may change."""
    return Path(shutil.copytree(tiny_target, tmp_path / "target"))


def config_of(folder: Path, **options) -> TargetConfig:
    return TargetConfig(name=str(folder), device="cpu", **options)


def edit_json(path: Path, **changes) -> None:
    """Set keys of a JSON file; None removes one."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def test_folder_resolves_to_itself(tiny_target):
    assert resolve_target(config_of(tiny_target)) == str(tiny_target)


def test_hub_id_resolves_to_itself():
    assert resolve_target(TargetConfig(name="someone/model")) == "someone/model"


def test_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        resolve_target(config_of(tmp_path))


def test_folder_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ValueError, match="target folder not found"):
        resolve_target(config_of(tmp_path / "none"))


def test_unknown_bundled_name_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'bundled:smollm2-135m-instruct'"):
        resolve_target(TargetConfig(name="bundled:smolm2"))


@pytest.mark.parametrize("name", ["bundled:smollm2-135m-instruct", "/some/folder"])
def test_revision_of_what_has_none_is_refused(name):
    with pytest.raises(ValueError, match="leave it out"):
        resolve_target(TargetConfig(name=name, revision="abc"))


def test_hub_id_that_cannot_be_had_is_one_line_that_says_which_key_to_check():
    with pytest.raises(ValueError, match=r"cannot load target 'nobody/nothing'.*target\.name") as raised:
        load_tokenizer(TargetConfig(name="nobody/nothing"))
    assert "\n" not in str(raised.value)


def test_target_that_needs_its_own_code_names_the_key_that_allows_it(copied_target):
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    edit_json(copied_target / "config.json", model_type="own", auto_map=auto_map)
    (copied_target / "own.py").write_text("raise SystemExit('ran code from the target')")
    with pytest.raises(ValueError, match=r"target\.trust_remote_code=true"):
        load_target(config_of(copied_target))


def test_weights_that_would_be_unpickled_are_refused(copied_target):
    weights = copied_target / "model.safetensors"
    torch.save(safetensors.torch.load_file(weights), copied_target / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(ValueError, match="safetensors"):
        load_target(config_of(copied_target))


def test_tokenizer_pads_on_the_left_whatever_the_target_says(copied_target):
    edit_json(copied_target / "tokenizer_config.json", padding_side="right")
    assert load_tokenizer(config_of(copied_target)).padding_side == "left"


def test_tokenizer_without_a_padding_token_pads_with_eos(copied_target):
    edit_json(copied_target / "tokenizer_config.json", pad_token=None)
    tokenizer = load_tokenizer(config_of(copied_target))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2


def test_target_is_frozen_and_in_eval_mode(tiny_target):
    model = load_target(config_of(tiny_target))
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("dtype", "expected"), [("bfloat16", torch.bfloat16), ("float16", torch.float16), ("auto", torch.float32)]
)
def test_target_has_the_dtype_asked_for(tiny_target, dtype, expected):
    assert load_target(config_of(tiny_target, dtype=dtype)).dtype == expected


def test_target_uses_the_attention_asked_for(tiny_target):
    model = load_target(config_of(tiny_target), attn_implementation="eager")
    assert model.config._attn_implementation == "eager"


def test_loaded_target_computes_what_the_saved_one_did(tiny_target):
    ids = torch.tensor([[1, 5, 9, 200]])
    saved = transformers.LlamaForCausalLM.from_pretrained(tiny_target)
    loaded = load_target(config_of(tiny_target, dtype="float32"))
    torch.testing.assert_close(loaded(ids).logits, saved(ids).logits)


def test_target_config_is_the_text_config(tiny_target):
    config = load_target_config(config_of(tiny_target))
    assert (config.hidden_size, config.num_hidden_layers) == (64, 4)


def test_stop_tokens_are_all_that_a_list_declares(tiny_target):
    config = config_of(tiny_target)
    assert stop_token_ids(config, load_tokenizer(config)) == (2, 0)


def test_stop_token_may_be_a_single_number(tiny_target):
    generation = transformers.GenerationConfig(eos_token_id=0)
    assert stop_token_ids(generation, load_tokenizer(config_of(tiny_target))) == (0,)


def test_stop_tokens_fall_back_to_the_tokenizers_eos(tiny_target):
    generation = transformers.GenerationConfig()
    assert stop_token_ids(generation, load_tokenizer(config_of(tiny_target))) == (2,)


def test_stop_tokens_without_generation_config_come_from_the_model_config(copied_target):
    (copied_target / "generation_config.json").unlink()
    edit_json(copied_target / "config.json", eos_token_id=[0, 2, 0])
    config = config_of(copied_target)
    assert stop_token_ids(config, load_tokenizer(config)) == (0, 2)


def test_target_without_any_stop_token_is_refused():
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="declares no EOS token"):
        stop_token_ids(transformers.GenerationConfig(), tokenizer)


def test_default_sampling_is_what_the_target_recommends(tiny_target):
    assert default_sampling(config_of(tiny_target)) == {"temperature": 0.8, "top_p": 0.9, "top_k": 20}


def test_default_sampling_leaves_out_what_the_target_does_not_set(copied_target):
    edit_json(copied_target / "generation_config.json", temperature=None, top_k=None)
    assert default_sampling(config_of(copied_target)) == {"temperature": 1.0, "top_p": 0.9}


def test_default_sampling_of_a_target_that_does_not_sample_is_greedy(copied_target):
    (copied_target / "generation_config.json").unlink()
    assert default_sampling(config_of(copied_target)) == {"temperature": 0.0}


def test_vocabulary_leaves_out_padded_rows_of_the_target(tmp_path):
    folder = make_tiny_target(tmp_path, vocab_size=300, padded_rows=20, layers=1)
    config = config_of(folder)
    assert vocabulary_size(load_tokenizer(config)) == 300
    assert load_target_config(config).vocab_size == 320


def test_identity_is_plain_json_and_the_same_each_time(tiny_target):
    config = config_of(tiny_target)
    identity = target_identity(config)
    assert json.loads(json.dumps(identity)) == target_identity(config)
    assert identity["revision"] is None
    assert (identity["vocab_size"], identity["hidden_size"], identity["num_hidden_layers"]) == (320, 64, 4)


def test_identity_does_not_depend_on_how_the_target_is_loaded(tiny_target):
    assert target_identity(config_of(tiny_target)) == target_identity(config_of(tiny_target, dtype="float32"))


def changed_fields(folder: Path, change) -> set[str]:
    before = target_identity(config_of(folder))
    change(folder)
    after = target_identity(config_of(folder))
    return {field for field in before if before[field] != after[field]}


def test_identity_changes_with_the_weights(copied_target):
    def train(folder):
        weights = safetensors.torch.load_file(folder / "model.safetensors")
        changed = {name: tensor + 1e-3 for name, tensor in weights.items()}
        safetensors.torch.save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})

    assert changed_fields(copied_target, train) == {"weights_fingerprint"}


def test_identity_changes_with_the_chat_template(copied_target):
    def edit(folder):
        template = folder / "chat_template.jinja"
        template.write_text(template.read_text() + " ")

    assert changed_fields(copied_target, edit) == {"chat_template_sha256"}


def test_identity_changes_with_the_tokenizer(copied_target):
    def edit(folder):
        tiny_tokenizer(vocab_size=310).save_pretrained(folder)

    assert changed_fields(copied_target, edit) == {"tokenizer_sha256"}


def test_identity_changes_with_the_model_config(copied_target):
    def edit(folder):
        edit_json(folder / "config.json", rms_norm_eps=1e-4)

    assert changed_fields(copied_target, edit) == {"config_sha256"}


def test_tiny_tokenizer_round_trips_any_text():
    tokenizer = tiny_tokenizer()
    text = "hello  42, the question: é 漢 \n\n 3"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_untied_tiny_target_has_an_output_matrix_of_its_own(tmp_path):
    model = load_target(config_of(make_tiny_target(tmp_path, tied=False, layers=1)))
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


@pytest.fixture
def hub_target(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A hub id whose two revisions lie in the local hub cache: `main` is commit aaa…, `old` is commit bbb…."""
    repository = tmp_path / "hub" / "models--someone--model"
    for branch, letter in (("main", "a"), ("old", "b")):
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / branch).write_text(letter * 40)
        shutil.copytree(tiny_target, repository / "snapshots" / (letter * 40))
    edit_json(repository / "snapshots" / ("b" * 40) / "generation_config.json", temperature=0.3)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return "someone/model"


@pytest.mark.parametrize(("revision", "commit"), [(None, "a" * 40), ("old", "b" * 40)])
def test_identity_of_a_hub_id_records_the_commit_behind_its_revision(hub_target, revision, commit):
    assert target_identity(TargetConfig(name=hub_target, revision=revision))["revision"] == commit


def test_everything_of_a_hub_id_comes_from_the_revision_asked_for(hub_target):
    assert default_sampling(TargetConfig(name=hub_target, revision="old"))["temperature"] == 0.3
    assert default_sampling(TargetConfig(name=hub_target))["temperature"] == 0.8


def test_importing_targets_does_not_load_torch():
    """Jobs import configs first and set the OpenMP environment after, which must come before torch."""
    code = "import sys, dspark.targets; sys.exit('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(Path(targets.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_device_map_is_passed_on_and_gives_the_same_model(tiny_target, monkeypatch):
    passed = []
    from_pretrained = transformers.AutoModelForCausalLM.from_pretrained

    def noting(*arguments, **options):
        passed.append(options.get("device_map"))
        return from_pretrained(*arguments, **options)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", noting)
    spread = load_target(TargetConfig(name=str(tiny_target), dtype="float32", device_map="auto"))
    whole = load_target(config_of(tiny_target, dtype="float32"))
    assert passed == ["auto", None]
    ids = torch.arange(12)[None]
    with HiddenStateCapture(spread, (-1, 0, 2)) as ours, HiddenStateCapture(whole, (-1, 0, 2)) as theirs:
        assert torch.equal(spread(input_ids=ids).logits.cpu(), whole(input_ids=ids).logits)
        assert torch.equal(ours.hidden().cpu(), theirs.hidden())
    assert not spread.training
    assert not any(parameter.requires_grad for parameter in spread.parameters())


def test_device_map_without_accelerate_is_refused_with_the_remedy(tiny_target, monkeypatch):
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"device_map needs the accelerate package: pip install accelerate"):
        load_target(TargetConfig(name=str(tiny_target), device_map="auto"))


def test_a_device_beside_device_map_is_refused(tiny_target):
    with pytest.raises(ValueError, match="device 'cpu' has no effect with device_map"):
        config_of(tiny_target, device_map="auto")


def test_a_target_that_does_not_fit_its_devices_is_refused(tiny_target, monkeypatch, tmp_path):
    from_pretrained = transformers.AutoModelForCausalLM.from_pretrained

    def cramped(*arguments, **options):
        places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
        places |= {f"model.layers.{layer}": "cpu" if layer < 2 else "disk" for layer in range(4)}
        return from_pretrained(*arguments, offload_folder=str(tmp_path), **options | {"device_map": places})

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", cramped)
    with pytest.raises(ValueError, match=r"does not fit into the devices .*model\.layers\.2.*gpus_per_worker"):
        load_target(TargetConfig(name=str(tiny_target), dtype="float32", device_map="auto"))
