"""Which source a config gives, what it plans, and how much of it may be on its way."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.config import build_config
from dspark.data.online import OnlineSamples
from dspark.data.target_cache import TargetCache, bytes_of
from dspark.errors import DsparkError, Mismatch, MissingInput
from dspark.training.config import TrainConfig
from dspark.training.samples import (
    most_bytes_on_the_way,
    open_samples,
    plan_of,
    rank_samples,
    require_room,
    split_indices,
    with_layers,
)
from dspark.training.trainer import train_request
from tiny_answers import make_tiny_answers
from tiny_cache import LAYER_IDS, make_tiny_cache

HIDDEN = 64


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    return make_tiny_answers(tmp_path_factory.mktemp("answers"), tiny_target, ok=12, empty=2, short=1)


def config_for(source: dict[str, Any], **changes: Any) -> TrainConfig:
    content = {"output": "o", "steps": 3, "drafter": {}, "sequences_per_step": 4, "validation_samples": 2}
    return build_config(TrainConfig, content | source | changes)


def online(answers: Path, **changes: Any) -> dict[str, Any]:
    data = {"mode": "online", "answers": str(answers), "dtype": "float32", "target_layer_ids": LAYER_IDS}
    return {"data": data | changes}


def test_every_answer_is_a_sample_or_rejected_by_reason(answers: Path):
    source = open_samples(config_for(online(answers)))
    assert isinstance(source, OnlineSamples)
    assert source.origin["rejected"] == {"answer empty": 2, "under 14 supervised tokens": 1}
    assert source.origin["answers"] == source.origin["answers_kept"] + 3 == 15
    assert len(source) == 12
    assert source.request["target_layer_ids"] == list(LAYER_IDS)
    assert sorted(source.indices("train") + source.indices("heldout")) == list(range(12))


def test_a_cache_is_opened_where_one_is_named(tiny_target: Path, tmp_path: Path):
    cache = make_tiny_cache(tmp_path, tiny_target, train=2, heldout=1)
    config = config_for({"cache": str(cache.folder)})
    for source in (open_samples(config), rank_samples(config, None, rank=0)):
        assert isinstance(source, TargetCache)
    assert plan_of(config, cache) == {}


def test_a_drafter_gets_the_layers_that_it_reads(tiny_target: Path, tmp_path: Path):
    cache = make_tiny_cache(tmp_path, tiny_target, train=2, heldout=1, final_states=("after_norm",))
    config = config_for({"cache": str(cache.folder)})
    whole = cache.load(0).hidden.split(HIDDEN, dim=1)
    for source in (with_layers(cache, (5,)), rank_samples(config, None, rank=0, layer_ids=(5,))):
        assert torch.equal(source.load(0).hidden, whole[2])


def test_online_just_what_the_drafter_reads_is_captured(answers: Path):
    source = open_samples(config_for(online(answers, target_layer_ids=(), final_states=("after_norm",))))
    assert source.request["target_layer_ids"] == [5]
    assert with_layers(source, (5,)) is source
    more = open_samples(config_for(online(answers, final_states=("after_norm",))))
    with pytest.raises(
        Mismatch,
        match=r"is \[0, 2, 5\] but \[5\] is asked for; set data\.target_layer_ids and data\.final_states",
    ):
        with_layers(more, (5,))


def test_absent_answers_name_the_job_that_makes_them(tmp_path: Path):
    with pytest.raises(MissingInput, match=r"answers not found: .*jobs/generate\.py"):
        open_samples(config_for(online(tmp_path / "nothing")))


def test_what_may_be_on_its_way_is_the_longest_samples_of_the_steps_ahead(answers: Path):
    source = open_samples(config_for(online(answers)))
    assert isinstance(source, OnlineSamples)

    def size(index: int) -> int:
        entry = source.entries[index]
        return bytes_of(entry.num_tokens, entry.num_supervised, hidden_size=HIDDEN, num_layers=len(LAYER_IDS))

    train, heldout = (sorted(map(size, source.indices(split)), reverse=True) for split in ("train", "heldout"))
    for steps_ahead in (0, 2):
        config = config_for(online(answers, steps_ahead=steps_ahead))
        expected = (1 + steps_ahead) * sum(train[:4]) + sum(heldout[:2])
        assert most_bytes_on_the_way(config, source) == plan_of(config, source)["max_object_store_bytes"] == expected
    many = config_for(online(answers, steps_ahead=0), sequences_per_step=25, validation_samples=0)
    assert most_bytes_on_the_way(many, source) >= 25 * sum(train) / len(train)


def test_states_that_would_spill_to_disk_are_refused_beforehand(answers: Path):
    config = config_for(online(answers))
    source = open_samples(config)
    assert isinstance(source, OnlineSamples)
    needed = most_bytes_on_the_way(config, source)
    require_room(config, source, needed)
    with pytest.raises(DsparkError, match=rf"up to {needed:,} bytes .* holds {needed - 1:,}; lower data.steps_ahead"):
        require_room(config, source, needed - 1)


def test_a_run_may_go_on_with_other_target_workers_but_not_with_other_states(answers: Path):
    def request(**changes: Any) -> dict[str, Any]:
        config = config_for(online(answers, **changes))
        return train_request(config, open_samples(config))

    assert request() == request(target_workers=3, steps_ahead=4, keep_bytes=10, batch_tokens=100)
    assert request() != request(target_layer_ids=(0, 1))
    assert request() != request(max_length=30)


@pytest.mark.parametrize(
    ("domains", "wanted"),
    [((), [0, 1, 2, 3]), (("math",), [0, 1]), (("math/gsm8k",), [1]), (("chat", "math/gsm8k"), [1, 3])],
)
def test_only_samples_of_the_domains_asked_for_are_trained_on(tiny_target: Path, tmp_path: Path, domains, wanted):
    cache = make_tiny_cache(tmp_path, tiny_target, train=4, heldout=1)
    domain_of = dict(zip(cache.indices("train"), ("math", "math/gsm8k", "code", "chat"), strict=True))
    cache.entries[:] = [replace(entry, domain=domain_of.get(i, "math")) for i, entry in enumerate(cache.entries)]
    config = config_for({"cache": str(cache.folder)}, domains=domains)
    assert split_indices(config, cache, "train") == [cache.indices("train")[place] for place in wanted]
    is_named = "domains" in train_request(config, cache)
    assert is_named == bool(domains)  # a run without stays the same as before there were any


def test_a_domain_that_is_not_there_is_named(tiny_target: Path, tmp_path: Path):
    cache = make_tiny_cache(tmp_path, tiny_target, train=2, heldout=1)
    with pytest.raises(ValueError, match=r"domains \['law'\] are not in .*; there are \['chat'\]"):
        split_indices(config_for({"cache": str(cache.folder)}, domains=["law"]), cache, "train")
