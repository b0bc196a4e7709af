"""What a target worker answers: every bit of what it captured, what is not finite without loss, what it keeps once."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.data.capture import CaptureWorker, PlannedSample
from dspark.data.captured import CapturedGroup, KeptStates, capture_group, merged
from dspark.data.online import OnlineSamples, SampleTable
from dspark.data.target_cache import CachedSample

LAYER_IDS = (0, 2)


@pytest.fixture
def worker(tiny_target: Path) -> CaptureWorker:
    target = {"name": str(tiny_target), "dtype": "float32", "device": "cpu"}
    return CaptureWorker(target, LAYER_IDS, None, 2000, 1)


def planned(name: str, length: int) -> PlannedSample:
    ids = torch.randint(3, 300, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    return PlannedSample(name, "train", "chat", ids, [0] * 4 + [1] * (length - 4))


def same_bits(a: CachedSample, b: CachedSample) -> bool:
    pairs = [(getattr(a, field.name), getattr(b, field.name)) for field in fields(CachedSample)]
    return all(torch.equal(x, y) and x.dtype == y.dtype if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


def group_of(worker: CaptureWorker, samples: list[PlannedSample], kept: KeptStates | None = None) -> CapturedGroup:
    return capture_group(worker, samples, kept or KeptStates(0), process="p")


def test_what_travels_keeps_every_bit_and_the_order_of_the_request(worker: CaptureWorker):
    samples = [planned("a", 40), planned("b", 9), planned("c", 23)]
    captured = {one.id: one for one in worker.capture(samples)}
    group = group_of(worker, samples)
    assert group.num_captured == 3
    for place, one in enumerate(samples):
        assert same_bits(group.sample(place), captured[one.id])


def test_a_sample_asked_for_twice_in_a_group_is_captured_once(worker: CaptureWorker):
    group = group_of(worker, [planned("a", 20), planned("a", 20)])
    assert group.num_captured == 1
    assert same_bits(group.sample(0), group.sample(1))


def test_states_that_are_not_finite_carry_no_loss_and_are_counted(worker: CaptureWorker):
    worker._weight = worker._weight.clone()  # tied to the embedding, one row of which is spoilt
    with torch.no_grad():
        worker._model.get_input_embeddings().weight[7] = torch.nan
    samples = [
        PlannedSample("good", "train", "chat", [3, 4, 5, 6], [0, 1, 1, 1]),
        PlannedSample("bad", "train", "chat", [3, 7, 5, 6], [0, 1, 1, 1]),
    ]
    kept = KeptStates(10**6)
    group = group_of(worker, samples, kept)
    assert group.not_finite == ["bad"]
    assert group.sample(0).loss_mask.tolist() == [0, 1, 1, 1]
    bad = group.sample(1)
    assert (bad.id, bad.input_ids.tolist(), bad.loss_mask.tolist()) == ("bad", [3, 7, 5, 6], [0, 0, 0, 0])
    assert not any(bool(tensor.any()) for tensor in (bad.hidden, bad.last_hidden, bad.log_z))
    assert kept.get("good") is not None
    assert kept.get("bad") is None

    class Answered:
        def submit(self, planned: list[PlannedSample]) -> Any:
            return None

        def result(self, ticket: Any) -> CapturedGroup:
            return group

    online = OnlineSamples(SampleTable.of(samples), Answered(), folder="", request={}, target_config={})
    online.expect([[0, 1]])
    online.load(0)
    online.load(1)
    counts = online.take_counts()
    assert (counts.samples, counts.not_finite) == (1, 1)


def test_kept_states_are_given_again_until_the_memory_is_used_up(worker: CaptureWorker):
    samples = [planned("a", 20), planned("b", 20), planned("c", 20)]
    size = sum(value[0].nbytes for value in group_of(worker, samples[:1]).samples[0].values() if type(value) is tuple)
    kept = KeptStates(2 * size)
    first = group_of(worker, samples, kept)
    again = group_of(worker, samples, kept)
    assert (first.num_captured, again.num_captured) == (3, 1)
    assert sum(kept.get(name) is not None for name in "abc") == 2
    for place in range(3):
        a, b = first.sample(place), again.sample(place)
        assert torch.equal(a.input_ids, b.input_ids)
        torch.testing.assert_close(a.hidden.float(), b.hidden.float(), atol=1e-4, rtol=2**-7)


def test_parts_of_a_request_come_together_in_its_order(worker: CaptureWorker):
    samples = [planned(name, 20 + n) for n, name in enumerate("abcd")]
    whole = group_of(worker, samples)
    parts = [(places, group_of(worker, [samples[place] for place in places])) for places in ([3, 0], [1, 2])]
    found = merged(parts)
    assert [found.sample(place).id for place in range(4)] == ["a", "b", "c", "d"]
    assert found.num_captured == whole.num_captured == 4
    assert found.seconds == sum(part.seconds for _, part in parts)
