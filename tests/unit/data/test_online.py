"""Online samples: what comes back is what the cache would hold, in the order and the number that was asked for."""

import gc
import weakref
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.config import build_config
from dspark.data.capture import PlannedSample
from dspark.data.captured import CapturedGroup
from dspark.data.online import OnlineSamples, OwnTarget, SampleTable
from dspark.data.target_cache import CachedSample, TargetCache
from dspark.training.config import TrainConfig
from tiny_cache import LAYER_IDS, make_tiny_cache


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> TargetCache:
    return make_tiny_cache(tmp_path_factory.mktemp("cache"), tiny_target, train=5, heldout=2)


class Watched:
    """The target in this process, with a record of what was asked and answered."""

    def __init__(self, target_config: dict[str, Any]) -> None:
        self._own = OwnTarget(target_config, LAYER_IDS, 2000)
        self.asked: list[list[str]] = []
        self.answered: list[list[str]] = []
        self.answers: list[weakref.ref[CapturedGroup]] = []

    def submit(self, planned: list[PlannedSample]) -> list[PlannedSample]:
        self.asked.append([one.id for one in planned])
        return self._own.submit(planned)

    def result(self, ticket: list[PlannedSample]) -> CapturedGroup:
        self.answered.append([one.id for one in ticket])
        answer = self._own.result(ticket)
        self.answers.append(weakref.ref(answer))
        return answer


def planned_of(cache: TargetCache) -> list[PlannedSample]:
    """The samples of a cache as they were before they were captured."""
    return [
        PlannedSample(entry.id, entry.split, entry.domain, *(column.tolist() for column in cache.tokens(index)))
        for index, entry in enumerate(cache.entries)
    ]


@pytest.fixture
def targets(cache: TargetCache) -> Watched:
    return Watched(cache.target_config)


@pytest.fixture
def online(cache: TargetCache, targets: Watched) -> OnlineSamples:
    table = SampleTable.of(planned_of(cache))
    return OnlineSamples(table, targets, folder="a", request=cache.request, target_config=cache.target_config)


def same(found: CachedSample, cached: CachedSample) -> None:
    assert found.id == cached.id
    for field in fields(CachedSample):
        a, b = getattr(found, field.name), getattr(cached, field.name)
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype, field.name
            # Another grouping sums in another order: a bf16 state may round the other way.
            torch.testing.assert_close(a.float(), b.float(), atol=1e-4, rtol=2**-7, msg=field.name)


def test_samples_are_those_of_the_cache_in_its_order(online: OnlineSamples, cache: TargetCache):
    assert [entry.id for entry in online.entries] == [entry.id for entry in cache.entries]
    assert [entry.num_tokens for entry in online.entries] == [entry.num_tokens for entry in cache.entries]
    assert online.indices("train") == cache.indices("train")
    online.expect([[0, 1], [2]])
    for index in (0, 1, 2, 3):
        same(online.load(index), cache.load(index))
        assert all(torch.equal(a, b) for a, b in zip(online.tokens(index), cache.tokens(index), strict=True))


def test_announced_groups_are_asked_at_once_and_answered_when_needed(online: OnlineSamples, targets: Watched):
    online.expect([[3, 1], [], [2]])
    ids = [entry.id for entry in online.entries]
    assert targets.asked == [[ids[3], ids[1]], [ids[2]]]
    assert targets.answered == []
    assert online.load(1).id == ids[1]
    assert online.load(3).id == ids[3]
    assert targets.answered == [[ids[3], ids[1]]]


def test_a_sample_that_nobody_announced_is_asked_alone(online: OnlineSamples, targets: Watched):
    assert online.load(4).id == online.entries[4].id
    assert targets.asked == targets.answered == [[online.entries[4].id]]


def test_a_sample_announced_twice_is_captured_twice_and_given_in_order(online: OnlineSamples, targets: Watched):
    online.expect([[0, 0], [0]])
    for number_answered in (1, 1, 2):
        online.load(0)
        assert len(targets.answered) == number_answered
    online.load(0)  # a fourth time was not announced
    assert len(targets.answered) == 3


def test_a_group_is_let_go_with_its_last_sample(online: OnlineSamples, targets: Watched):
    online.expect([[0, 1]])
    online.load(0)
    gc.collect()
    assert targets.answers[0]() is not None
    online.load(1)
    gc.collect()
    assert targets.answers[0]() is None


def test_what_is_given_is_counted_and_the_target_s_seconds_once_a_group(online: OnlineSamples):
    online.expect([[0, 1], [2]])
    for index in (0, 1, 2):
        online.load(index)
    counts = online.take_counts()
    assert (counts.samples, counts.not_finite, counts.captured) == (3, 0, 3)
    assert 0 < counts.target_s <= counts.wait_s  # here the target runs while the caller waits
    assert online.take_counts().values.tolist() == [0, 0, 0, 0, 0]


TRAIN = {"output": "o", "steps": 1, "drafter": {}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"data": {"mode": "online"}}, r"data\.mode online needs data\.answers, the folder made by jobs/generate\.py"),
        ({"cache": "c", "data": {"mode": "online", "answers": "a"}}, "cache = 'c' has no effect with data.mode online"),
        ({}, r"cache is required: the folder made by jobs/cache\.py"),
        ({"cache": "c", "data": {"steps_ahead": 3}}, r"data\.steps_ahead = 3 has no effect with data\.mode offline"),
        ({"cache": "c", "data": {"mode": "on-line"}}, r"data\.mode = 'on-line': .*'offline' or 'online'"),
        ({"cache": "c", "data": {"step_ahead": 3}}, "unknown key 'data.step_ahead'; did you mean 'steps_ahead'"),
    ],
)
def test_a_block_that_does_not_fit_its_mode_is_refused_in_one_line(content: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        build_config(TrainConfig, TRAIN | content)


def test_both_modes_have_a_config_that_is_accepted():
    assert build_config(TrainConfig, TRAIN | {"cache": "c"}).data.mode == "offline"
    online = build_config(TrainConfig, TRAIN | {"data": {"mode": "online", "answers": "a", "target_workers": 2}})
    assert online.with_changes(steps=3).data == online.data
