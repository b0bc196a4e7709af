"""The driver's side of a run: its claim on the folder, the initial drafter, and what is published."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dspark.config import build_config
from dspark.data.target_cache import TargetCache
from dspark.drafters.checkpoint import load_drafter, save_drafter
from dspark.errors import DsparkError, Mismatch, MissingInput
from dspark.training.config import TrainConfig
from dspark.training.trainer import most_frequent_tokens, prepare, publish
from foreign_drafter import make_foreign_drafter
from random_drafter import random_drafter
from tiny_cache import LAYER_IDS, make_tiny_cache
from tiny_drafter import make_tiny_drafter
from tiny_target import make_tiny_target


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> TargetCache:
    return make_tiny_cache(tmp_path_factory.mktemp("cache"), tiny_target, train=4, heldout=1)


def config_for(cache: TargetCache, output: Path, **changes: Any) -> TrainConfig:
    drafter = {"num_layers": 1, "block_size": 3, "mask_token": "system", "markov_rank": 4, "draft_vocab_size": 40}
    content = {"cache": str(cache.folder), "output": str(output), "drafter": drafter, "steps": 4}
    return build_config(TrainConfig, content | changes)


def test_the_initial_drafter_has_the_shape_that_was_asked_for(cache: TargetCache, tmp_path: Path):
    drafter = load_drafter(prepare(config_for(cache, tmp_path), cache, fresh=False))
    assert drafter.config.target_layer_ids == LAYER_IDS
    assert (drafter.config.num_hidden_layers, drafter.block_size) == (1, 3)
    frequent = most_frequent_tokens(cache, cache.indices("train"), 40, 320)
    assert torch.equal(drafter.backbone.d2t, frequent)


def test_an_initial_drafter_that_is_there_is_used(cache: TargetCache, tmp_path: Path):
    initial = prepare(config_for(cache, tmp_path), cache, fresh=False)
    before = (initial / "model.safetensors").stat().st_mtime_ns
    assert prepare(config_for(cache, tmp_path, log_every=3), cache, fresh=False) == initial
    assert (initial / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "changes", [{"learning_rate": 0.5}, {"seed": 9}, {"steps": 5}, {"num_workers": 2}], ids=lambda c: next(iter(c))
)
def test_another_request_on_the_same_folder_is_refused_by_field_name(
    cache: TargetCache, tmp_path: Path, changes: dict[str, Any]
):
    prepare(config_for(cache, tmp_path), cache, fresh=False)
    with pytest.raises(Mismatch, match=f"{next(iter(changes))} is .* is asked for; use --fresh or another output"):
        prepare(config_for(cache, tmp_path, **changes), cache, fresh=False)


def test_fresh_forgets_the_run_that_was_there(cache: TargetCache, tmp_path: Path):
    prepare(config_for(cache, tmp_path), cache, fresh=False)
    (tmp_path / "checkpoints").mkdir()
    for name in ("result.json", "history.jsonl", "mlflow_run.json"):
        (tmp_path / name).write_text("{}")
    prepare(config_for(cache, tmp_path, learning_rate=0.5), cache, fresh=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["initial", "request.json"]


def test_a_request_that_fails_can_be_corrected_without_starting_over(cache: TargetCache, tmp_path: Path):
    wrong = {"num_layers": 1, "block_size": 3, "mask_token": "<nothing>"}
    with pytest.raises(ValueError, match="is not a token of the target's tokenizer"):
        prepare(config_for(cache, tmp_path, drafter=wrong), cache, fresh=False)
    assert load_drafter(prepare(config_for(cache, tmp_path), cache, fresh=False)).block_size == 3


def test_training_can_go_on_from_a_drafter_and_keeps_its_vocabulary(cache, tmp_path: Path, tiny_target: Path):
    make_tiny_drafter(tmp_path / "given", tiny_target, draft_vocab_size=30)
    given = load_drafter(tmp_path / "given")
    config = config_for(cache, tmp_path / "run", initialize_from=str(tmp_path / "given"), drafter={})
    initial = load_drafter(prepare(config, cache, fresh=False))
    assert torch.equal(initial.backbone.d2t, given.backbone.d2t)
    assert torch.equal(initial.backbone.fc.weight, given.backbone.fc.weight)


def test_training_can_go_on_from_a_checkpoint_of_the_public_form(cache, tmp_path, tiny_target, caplog):
    make_foreign_drafter(tmp_path / "given", tiny_target)
    config = config_for(cache, tmp_path / "run", initialize_from=str(tmp_path / "given"), drafter={"block_size": 4})
    initial = prepare(config, cache, fresh=False)
    given = load_file(str(tmp_path / "given" / "model.safetensors"))
    written = load_file(str(initial / "model.safetensors"))
    assert given.keys() == written.keys()
    assert all(torch.equal(given[name], written[name]) for name in given)
    assert "calibrations of that drafter do not hold for the new one: run jobs/calibrate.py" in caplog.text
    publish(config, cache, initial, {"steps": 4})
    provenance = json.loads((tmp_path / "run" / "provenance.json").read_text())
    assert provenance["initialized_from"]["name"] == str(tmp_path / "given")
    assert provenance["initialized_from"]["sha256"].keys() == {"config.json", "model.safetensors"}


@pytest.mark.parametrize(
    ("given", "asked", "message"),
    [
        ({"layer_ids": (0, 1)}, {}, r"target_layer_ids is \[0, 1\] but \[0, 2\] is asked for; make the cache again"),
        ({}, {"block_size": 3}, "block_size is 4 but 3 is asked for; leave it out"),
        ({}, {"hyper_connections": {"hc_mult": 2}}, "hyper_connections is None but .* is asked for; leave it out"),
        ({}, {"layer_types": ["sliding_attention"]}, "layer_types is .*full_attention.* is asked for; leave it out"),
        ({}, {"draft_vocab_size": 40}, "draft_vocab_size is 320 but 40 is asked for"),
        ({"draft_vocab_size": 40}, {"draft_vocab_size": None}, "draft_vocab_size is 40 but 320 is asked for"),
        ({}, {"markov_head_type": "rnn"}, "markov_head_type is 'vanilla' but 'rnn' is asked for"),
        ({}, {"confidence_head": False}, "confidence_head is True but False is asked for"),
    ],
)
def test_a_drafter_to_go_on_from_has_to_fit_the_cache_and_the_config(
    cache, tmp_path, tiny_target, given, asked, message
):
    make_tiny_drafter(tmp_path / "given", tiny_target, **given)
    config = config_for(cache, tmp_path / "run", initialize_from=str(tmp_path / "given"), drafter=asked)
    with pytest.raises(Mismatch, match=message):
        prepare(config, cache, fresh=False)
    assert not (tmp_path / "run" / "request.json").exists()


def test_a_drafter_of_another_target_is_not_gone_on_from(cache, tmp_path):
    save_drafter(random_drafter(), tmp_path / "given", dtype=torch.float32)
    config = config_for(cache, tmp_path / "run", initialize_from=str(tmp_path / "given"), drafter={})
    with pytest.raises(
        Mismatch, match="hidden_size is 16 but 64 is asked for; use a drafter that was trained for this"
    ):
        prepare(config, cache, fresh=False)


def test_a_released_drafter_that_cannot_be_fetched_is_one_line(cache, tmp_path):
    config = config_for(cache, tmp_path, initialize_from="deepseek-ai/dspark_qwen3_4b_block7", drafter={})
    with pytest.raises(
        MissingInput, match="no drafter deepseek-ai/dspark_qwen3_4b_block7: no such folder, and the hub"
    ):
        prepare(config, cache, fresh=False)


def test_mtp_goes_on_with_the_state_that_it_read(tmp_path, tiny_target):
    cache = make_tiny_cache(
        tmp_path / "cache", tiny_target, train=2, heldout=0, final_states=("before_norm", "after_norm")
    )
    make_tiny_drafter(tmp_path / "given", tiny_target, architecture="mtp", layer_ids=(5,))
    asked = {"architecture": "mtp", "hidden_state": "before_norm"}
    config = config_for(cache, tmp_path / "run", initialize_from=str(tmp_path / "given"), drafter=asked)
    with pytest.raises(Mismatch, match=r"target_layer_ids is \[5\] but \[4\] is asked for; leave it out"):
        prepare(config, cache, fresh=False)


def test_two_starts_are_refused(cache, tmp_path):
    with pytest.raises(ValueError, match=r"initialize_from 'given' and drafter\.from_target are two starts"):
        config_for(cache, tmp_path, initialize_from="given", drafter={"architecture": "mtp", "from_target": True})


def test_a_revision_without_a_drafter_to_go_on_from_is_refused(cache, tmp_path):
    with pytest.raises(ValueError, match="initialize_revision 'main' has no effect without initialize_from"):
        config_for(cache, tmp_path, initialize_revision="main")


def test_the_most_frequent_answer_tokens_come_first_and_prompts_do_not_count(cache: TargetCache):
    counts = torch.zeros(320, dtype=torch.long)
    for index in cache.indices("train"):
        sample = cache.load(index)
        counts += torch.bincount(sample.input_ids[sample.loss_mask.bool()], minlength=320)
    kept = most_frequent_tokens(cache, cache.indices("train"), 10, 320)
    assert kept.tolist() == sorted(set(kept.tolist()))
    assert len(kept) == 10
    left_out = torch.ones(320, dtype=torch.bool)
    left_out[kept] = False
    assert counts[kept].min() >= counts[left_out].max()


def test_a_whole_vocabulary_has_every_token(cache: TargetCache):
    assert most_frequent_tokens(cache, cache.indices("train"), 320, 320).tolist() == list(range(320))


def test_a_cache_without_training_samples_is_an_error(tiny_target: Path, tmp_path: Path):
    cache = make_tiny_cache(tmp_path / "cache", tiny_target, train=0, heldout=2)
    with pytest.raises(DsparkError, match="has no samples to train on; check the prompts' splits and domains"):
        prepare(config_for(cache, tmp_path / "run"), cache, fresh=False)


def test_a_target_that_is_not_the_one_in_the_cache_is_refused_by_field_name(tmp_path: Path):
    folder = make_tiny_target(tmp_path / "target")
    cache = make_tiny_cache(tmp_path / "cache", folder, train=2, heldout=0)
    make_tiny_target(folder, seed=1)
    with pytest.raises(Mismatch, match=r"weights_fingerprint is .* make the cache again with jobs/cache\.py --fresh"):
        prepare(config_for(cache, tmp_path / "run"), cache, fresh=False)


def test_a_published_drafter_says_where_it_comes_from(cache: TargetCache, tmp_path: Path):
    config = config_for(cache, tmp_path)
    initial = prepare(config, cache, fresh=False)
    result = publish(config, cache, initial, {"steps": 4})
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert result["steps"] == 4
    provenance = json.loads((tmp_path / "provenance.json").read_text())
    assert provenance["target"] == cache.request["target"]
    assert provenance["chat"] == cache.request["chat"]
    assert provenance["training"]["learning_rate"] == config.learning_rate
    drafter = load_drafter(tmp_path)
    sizes = {name: value.numel() for name, value in load_file(str(tmp_path / "model.safetensors")).items()}
    frozen = sizes["embed_tokens.weight"] + sizes["lm_head.weight"]
    mask_row = drafter.config.hidden_size  # stored inside the embedding
    assert result["frozen_parameters"] == frozen + mask_row
    assert result["parameters"] == sum(sizes.values()) - frozen - sizes["d2t"]
