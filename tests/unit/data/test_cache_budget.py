"""What a cache takes on disk, and which answers fit into a budget."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark import provenance
from dspark.data import target_cache
from dspark.data.cache_budget import SHARD_BYTES, AnswerSize, choose, max_shards
from dspark.data.capture import CacheConfig, CachePlan, PlannedSample, plan_cache
from dspark.data.target_cache import CachedSample, TargetCache, TargetCacheWriter

HIDDEN, LAYERS = 8, 2
REQUEST = {"target": {"name": "t" * 100}, "chat": {"system": "s" * 500}, "target_layer_ids": [0, 2]}
# Names as they may come from outside: one character of them takes up to six bytes in JSON.
NAMES = st.text(alphabet=st.sampled_from('abc"\\\n\u00e9\u4e2d\U0001f600'), min_size=1, max_size=30)
ANSWERS = st.lists(st.tuples(NAMES, st.integers(16, 120)), min_size=1, max_size=25, unique_by=lambda one: one[0])


class Answers:
    """Rows as `AnswerSet.rows` gives them; 10 prompt tokens each, the rest is answer."""

    def __init__(self, lengths: list[tuple[str, int]]) -> None:
        self._lengths = lengths

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "id": name,
                "split": "train",
                "domain": "chat",
                "status": "ok",
                "turns": [{"prompt_ids": [3] * 10, "output_ids": [5] * (length - 10), "finish_reason": "stop"}],
            }
            for name, length in self._lengths
        ]


def plan_of(lengths: list[tuple[str, int]], **changes: Any) -> CachePlan:
    config = CacheConfig(**{"answers": "", "output": "", "min_loss_tokens": 2} | changes)
    return plan_cache(Answers(lengths), config, hidden_size=HIDDEN, num_layers=LAYERS, request=REQUEST)  # type: ignore[arg-type]


def captured(planned: PlannedSample) -> CachedSample:
    supervised = sum(planned.loss_mask)
    return CachedSample(
        id=planned.id,
        input_ids=torch.tensor(planned.input_ids),
        loss_mask=torch.tensor(planned.loss_mask, dtype=torch.uint8),
        hidden=torch.zeros(len(planned.input_ids), LAYERS * HIDDEN, dtype=torch.bfloat16),
        last_hidden=torch.zeros(supervised, HIDDEN, dtype=torch.bfloat16),
        log_z=torch.zeros(supervised),
    )


def write_shard(writer: TargetCacheWriter, plan: CachePlan, shard: int) -> None:
    writer.write_shard(shard, ((captured(one), one.split, one.domain) for one in plan.shards[shard]))


class Watched:
    """The largest size of a folder, looked at whenever a file is whole and before it takes another's place."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.peak = folder, 0
        save_file, replace = target_cache.save_file, os.replace

        def watched_save(*arguments: Any) -> None:
            save_file(*arguments)
            self.look()

        def watched_replace(*arguments: Any) -> None:
            self.look()
            replace(*arguments)

        patch.setattr(target_cache, "save_file", watched_save)
        patch.setattr(provenance.os, "replace", watched_replace)

    def look(self) -> int:
        size = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        self.peak = max(self.peak, size)
        return size


@settings(max_examples=40, deadline=None)
@given(
    lengths=ANSWERS,
    shard_tokens=st.integers(20, 400),
    share=st.floats(0.3, 1.1),
    seed=st.integers(0, 3),
    harmed=st.integers(0, 24),
)
def test_a_cache_never_exceeds_its_budget(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[tuple[str, int]],
    shard_tokens: int,
    share: float,
    seed: int,
    harmed: int,
):
    everything = plan_of(lengths, shard_tokens=shard_tokens)
    budget = int(share * everything.disk_bytes)
    plan = plan_of(lengths, shard_tokens=shard_tokens, max_cache_bytes=budget, seed=seed)
    folder = tmp_path_factory.mktemp("cache")
    writer = TargetCacheWriter(folder)
    with pytest.MonkeyPatch.context() as patch:
        watched = Watched(folder, patch)
        writer.begin(REQUEST, fresh=False)
        for shard in range(len(plan.shards)):
            # What a worker that died in the middle leaves, at the worst moment: the whole shard and no sidecar.
            if shard == harmed % len(plan.shards):
                write_shard(writer, plan, shard)
                (folder / f"shard-{shard:05d}.safetensors").rename(folder / f".tmp-1-ab-shard-{shard:05d}.safetensors")
            write_shard(writer, plan, shard)
        for _ in range(2):  # the second time as after a repair: the manifest is there already
            writer.finish(REQUEST, len(plan.shards), {"target_config": {}, "result": {"note": "r" * 1000}})
        final = watched.look()
    assert not list(folder.glob(".tmp-*"))
    if plan.shards:
        assert watched.peak <= plan.disk_bytes <= budget
        assert final <= watched.peak
        assert len(TargetCache(folder)) == sum(len(shard) for shard in plan.shards)


@given(lengths=ANSWERS, shard_tokens=st.integers(1, 400))
def test_max_shards_is_never_below_what_the_dealing_makes(lengths: list[tuple[str, int]], shard_tokens: int):
    plan = plan_of(lengths, shard_tokens=shard_tokens, max_cache_bytes=10**9)
    assert len(plan.shards) <= max_shards(plan.num_tokens, shard_tokens)


SIZES = st.lists(
    st.builds(AnswerSize, NAMES, st.integers(1, 50), st.integers(1, 9000)), max_size=20, unique_by=lambda a: a.id
)


def bytes_with(answers: list[AnswerSize], shard_tokens: int) -> int:
    tokens = sum(answer.num_tokens for answer in answers)
    return sum(answer.num_bytes for answer in answers) + SHARD_BYTES * max_shards(tokens, shard_tokens)


@given(answers=SIZES, max_bytes=st.integers(0, 60_000), shard_tokens=st.integers(1, 100), seed=st.integers(0, 5))
def test_as_many_as_fit_are_chosen_and_no_more(answers: list[AnswerSize], max_bytes: int, shard_tokens: int, seed: int):
    places = choose(answers, max_bytes=max_bytes, shard_tokens=shard_tokens, seed=seed)
    chosen = [answers[place] for place in places]
    assert not chosen or bytes_with(chosen, shard_tokens) <= max_bytes
    for place in set(range(len(answers))) - set(places):
        assert bytes_with([*chosen, answers[place]], shard_tokens) > max_bytes


@given(answers=SIZES.flatmap(lambda one: st.tuples(st.just(one), st.permutations(one))), seed=st.integers(0, 5))
def test_the_choice_depends_on_seed_and_ids_and_not_on_the_order(
    answers: tuple[list[AnswerSize], list[AnswerSize]], seed: int
):
    found = [
        {some[place].id for place in choose(some, max_bytes=30_000, shard_tokens=50, seed=seed)} for some in answers
    ]
    assert found[0] == found[1]


def test_another_seed_chooses_others():
    answers = [AnswerSize(str(number), 10, 1000) for number in range(100)]
    first, second = (choose(answers, max_bytes=50_000, shard_tokens=100, seed=seed) for seed in (0, 1))
    assert len(first) == len(second) > 20
    assert first != second


def test_the_files_beside_the_states_take_a_percent_at_real_sizes():
    lengths = [(f"prompt-{number}", 300) for number in range(400)]
    config = CacheConfig(answers="", output="")
    plan = plan_cache(Answers(lengths), config, hidden_size=576, num_layers=4, request=REQUEST)  # type: ignore[arg-type]
    assert plan.projected_bytes < plan.disk_bytes < 1.01 * plan.projected_bytes
