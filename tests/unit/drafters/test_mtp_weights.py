"""MTP modules read from a target's own files draft what the library's own MTP code drafts with them."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from dspark.drafters.autoregressive import AutoregressiveDrafter
from dspark.drafters.base import BlockBatch
from dspark.drafters.mtp_weights import own_name, read_modules, target_mtp_drafter
from dspark.errors import Mismatch, MissingInput
from tiny_mtp_target import HIDDEN, LAYERS, TARGETS, VOCABULARY, write_mtp_target

PROMPT = 11


@pytest.mark.parametrize("kind", TARGETS)
@torch.no_grad()
def test_they_draft_what_the_librarys_own_code_drafts(kind: str, tmp_path: Path):
    target = write_mtp_target(tmp_path, kind)
    if kind != "qwen":  # the library knows the layer's number of the published model only
        numbers = [rf"model\.layers\.{LAYERS + module}.*" for module in range(TARGETS[kind][1])]
        target._keys_to_ignore_on_load_unexpected = numbers
    drafter = target_mtp_drafter(target, valid_vocab_size=VOCABULARY, block_size=1 if TARGETS[kind][1] == 1 else None)
    num_modules = drafter.config.num_modules
    assert drafter.block_size == num_modules == TARGETS[kind][1]
    ids = torch.randint(0, VOCABULARY, (1, PROMPT + 1), generator=torch.Generator().manual_seed(3))
    states = torch.randn(1, PROMPT, HIDDEN, generator=torch.Generator().manual_seed(4))

    theirs = MtpModel.from_pretrained(target)
    cache = MtpCache(config=target.config.get_mtp_config())
    positions = torch.arange(1, PROMPT + 1)[None]
    drafted, logits, _ = theirs(ids[:, 1:], states, None, positions, cache)

    state = drafter.new_state()
    drafter.extend_ids(state, ids[0].tolist())
    drafter.extend_context(state, states[0])
    proposal = drafter.propose(state, int(ids[0, -1]), max_tokens=num_modules, temperature=0.0)
    assert proposal.token_ids.tolist() == drafted[0].tolist()
    batch = taught(drafter, torch.cat([ids, drafted], dim=1), states)
    found = drafter(batch, torch.ones(1, 1, num_modules, dtype=torch.bool)).logits
    torch.testing.assert_close(found, logits[0], atol=1e-4, rtol=1e-4)


def taught(drafter: AutoregressiveDrafter, ids: Tensor, states: Tensor) -> BlockBatch:
    hidden = torch.zeros(1, ids.shape[1], HIDDEN)
    hidden[:, :PROMPT] = states
    return BlockBatch(ids, hidden, torch.tensor([[PROMPT]]), torch.ones(1, 1, dtype=torch.bool))


def test_the_layout_says_which_state_they_read(tmp_path: Path):
    write_mtp_target(tmp_path / "glm", "glm")
    write_mtp_target(tmp_path / "qwen", "qwen")
    assert read_modules(str(tmp_path / "glm"), LAYERS).hidden_state == "after_norm"
    assert read_modules(str(tmp_path / "qwen"), LAYERS).hidden_state == "before_norm"


def test_files_in_several_parts_are_read_by_their_index(tmp_path: Path):
    write_mtp_target(tmp_path / "whole", "glm")
    whole = read_modules(str(tmp_path / "whole"), LAYERS)
    tensors = load_file(str(tmp_path / "whole" / "model.safetensors"))
    (tmp_path / "parts").mkdir()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, str(tmp_path / "parts" / file))
    weight_map = {name: file for file, part in parts.items() for name in part}
    (tmp_path / "parts" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found = read_modules(str(tmp_path / "parts"), LAYERS)
    assert found.tensors.keys() == whole.tensors.keys()
    assert all(torch.equal(found.tensors[name], whole.tensors[name]) for name in found.tensors)


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("model.layers.4.eh_proj.weight", "layers.0.eh_proj.weight"),
        ("model.language_model.layers.5.shared_head.norm.weight", "layers.1.decoder.norm.weight"),
        ("model.layers.4.mlp.gate.weight", "layers.0.decoder.layers.0.mlp.gate.weight"),
        ("model.layers.3.mlp.gate.weight", None),
        ("model.layers.4.embed_tokens.weight", None),
        ("mtp.fc.weight", "layers.0.eh_proj.weight"),
        ("mtp.layers.0.self_attn.q_proj.weight", "layers.0.decoder.layers.0.self_attn.q_proj.weight"),
        ("model.norm.weight", None),
        ("lm_head.weight", None),
    ],
)
def test_names(name: str, own: str | None):
    assert own_name(name, LAYERS) == own


def test_a_target_without_modules_is_told_so(tiny_target: Path):
    target = transformers.AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    with pytest.raises(MissingInput, match=r"brings no MTP modules .* train some with drafter\.architecture=mtp"):
        target_mtp_drafter(target, valid_vocab_size=320)


def test_a_tensor_that_is_missing_or_of_another_shape_is_named(tmp_path: Path):
    target = write_mtp_target(tmp_path, "glm")
    path = str(tmp_path / "model.safetensors")
    tensors = load_file(path)
    name = f"model.layers.{LAYERS}.enorm.weight"
    save_file({n: v for n, v in tensors.items() if n != name}, path)
    with pytest.raises(Mismatch, match=r"layers\.0\.enorm\.weight of its MTP modules is missing"):
        target_mtp_drafter(target, valid_vocab_size=VOCABULARY)
    save_file(tensors | {name: torch.ones(HIDDEN + 1)}, path)
    with pytest.raises(Mismatch, match=r"layers\.0\.enorm\.weight of its MTP modules has shape \[33\]"):
        target_mtp_drafter(target, valid_vocab_size=VOCABULARY)


def test_modules_come_from_the_revision_of_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    repository, name = tmp_path / "hub" / "models--someone--model", "layers.0.enorm.weight"
    for branch, letter in (("main", "a"), ("old", "b")):
        commit = repository / "snapshots" / (letter * 40)
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / branch).write_text(letter * 40)
        write_mtp_target(commit, "glm")
        tensors = load_file(str(commit / "model.safetensors"))
        tensors[f"model.layers.{LAYERS}.enorm.weight"].fill_(ord(letter))
        save_file(tensors, str(commit / "model.safetensors"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for revision, letter in ((None, "a"), ("b" * 40, "b")):
        found = read_modules("someone/model", LAYERS, revision=revision).tensors[name]
        assert set(found.tolist()) == {ord(letter)}


def test_a_target_whose_head_is_more_than_a_matrix_is_refused(tmp_path: Path):
    target = write_mtp_target(tmp_path, "glm")
    target.config.logits_scaling = 4.0
    with pytest.raises(ValueError, match=r"scales, soft-caps or adds .* mtp drafters do not"):
        target_mtp_drafter(target, valid_vocab_size=VOCABULARY)
