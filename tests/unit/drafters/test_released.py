"""A drafter from elsewhere: found or refused in one line, checked against the target, completed, written as ours."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.drafters.checkpoint import from_deepspec, load_drafter
from dspark.drafters.released import Source, find_drafter, require_fit, take_drafter
from dspark.errors import Mismatch, MissingInput
from dspark.provenance import file_sha256, read_json
from dspark.targets import TargetConfig, target_identity
from foreign_drafter import make_foreign_drafter
from tiny_target import make_tiny_target

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "deepspec"


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> TargetConfig:
    return TargetConfig(name=str(tiny_target), dtype="float32", device="cpu")


@pytest.fixture
def foreign(tmp_path: Path, tiny_target: Path) -> Path:
    return make_foreign_drafter(tmp_path / "foreign", tiny_target)


def take(folder: Path, target: TargetConfig, output: Path) -> Any:
    return take_drafter(find_drafter(str(folder)), target, target_identity(target), output)


def test_a_folder_is_found_as_it_is_and_digests_say_which(foreign):
    source = find_drafter(str(foreign))
    assert (source.folder, source.revision) == (foreign, None)
    assert source.to_dict()["sha256"]["model.safetensors"] == file_sha256(foreign / "model.safetensors")


@pytest.mark.parametrize("name", ["nowhere", "./no/where", "/no/where/at/all", "~/no"])
def test_a_path_without_a_drafter_is_not_looked_for_on_the_hub(name, target, tmp_path):
    with pytest.raises(MissingInput, match=r"no drafter at .*config\.json is missing"):
        take_drafter(find_drafter(name), target, {}, tmp_path)


def test_a_hub_id_without_a_network_is_one_line_with_the_remedy():
    with pytest.raises(MissingInput) as refusal:
        find_drafter("deepseek-ai/dspark_qwen3_4b_block7")
    message = refusal.value.message
    assert "no drafter deepseek-ai/dspark_qwen3_4b_block7: no such folder, and the hub did not give it" in message
    assert message.endswith("fetch it where there is a network and give its folder")
    assert "\n" not in message


def test_a_hub_id_gives_safetensors_and_config_only_and_its_commit(tmp_path, foreign, monkeypatch):
    """The network is the one thing that is stood in for."""
    asked = {}
    commit = tmp_path / "snapshots" / "0123abc"
    shutil.copytree(foreign, commit)

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.update(name=name, revision=revision, patterns=allow_patterns)
        return str(commit)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    source = find_drafter("deepseek-ai/dspark_qwen3_4b_block7", "v1")
    assert source == Source("deepseek-ai/dspark_qwen3_4b_block7", commit, "0123abc")
    assert asked["revision"] == "v1"
    assert asked["patterns"] == ["config.json", "model.safetensors"]


def test_a_revision_of_a_folder_is_refused(foreign):
    with pytest.raises(ValueError, match=r"revision = 'v1', but .* is no hub id"):
        find_drafter(str(foreign), "v1")


def test_what_is_taken_drafts_what_was_given(tmp_path, foreign, target):
    config = take(foreign, target, tmp_path / "ours")
    given, taken = load_drafter(foreign), load_drafter(tmp_path / "ours")
    assert config == taken.config
    assert given.state_dict().keys() == taken.state_dict().keys()
    assert all(torch.equal(value, taken.state_dict()[name]) for name, value in given.state_dict().items())
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == ["config.json", "model.safetensors"]


def test_embedding_and_head_come_from_the_target_where_the_file_has_none(tmp_path, foreign, target):
    path = foreign / "model.safetensors"
    whole = load_file(str(path))
    save_file({n: t for n, t in whole.items() if n not in ("embed_tokens.weight", "lm_head.weight")}, str(path))
    take(foreign, target, tmp_path / "ours")
    taken = load_file(str(tmp_path / "ours" / "model.safetensors"))
    assert taken.keys() == whole.keys()
    assert all(torch.equal(taken[name], whole[name]) for name in whole)


def test_padding_rows_of_the_target_are_barred_from_being_drafted(tmp_path):
    target = make_tiny_target(tmp_path / "target", padded_rows=64)
    foreign = make_foreign_drafter(tmp_path / "foreign", target)
    assert from_deepspec(read_json(foreign / "config.json")).valid_vocab_size == 384
    config = take(foreign, TargetConfig(name=str(target), dtype="float32", device="cpu"), tmp_path / "ours")
    assert (config.vocab_size, config.valid_vocab_size, config.draft_vocab_size) == (384, 320, 320)


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "num_hidden_layers"])
def test_a_drafter_of_another_target_is_refused_by_field(foreign, target, field):
    identity = target_identity(target) | {field: 7}
    config = from_deepspec(read_json(foreign / "config.json"))
    with pytest.raises(Mismatch, match=rf"{field} is \d+ but 7 is asked for; use a drafter that was trained for this"):
        require_fit(config, identity, "drafter and target")


def test_the_fixtures_fit_no_tiny_target(target, tmp_path):
    with pytest.raises(Mismatch, match="hidden_size is 32 but 64 is asked for"):
        take(FIXTURES / "dspark_vanilla", target, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_architecture_of_another_kind_is_refused_by_name(foreign, target, tmp_path):
    content = read_json(foreign / "config.json") | {"architectures": ["LlamaForCausalLM"]}
    (foreign / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"architectures \['LlamaForCausalLM'\] are not known"):
        take(foreign, target, tmp_path / "ours")
