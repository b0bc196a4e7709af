"""What a target worker sends to a trainer worker, and what it keeps for later."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.data.capture import CaptureWorker, PlannedSample, is_finite
from dspark.data.target_cache import CachedSample


@dataclass(frozen=True)
class CapturedGroup:
    """What a target worker sends back: a sample's fields by name, in the order they were asked for.

    States are bfloat16, which numpy does not know: they travel as int16 of the same bits. num_captured: for how many
    the target ran, seconds: how long.
    """

    samples: list[dict[str, Any]]
    not_finite: list[str]
    num_captured: int
    seconds: float
    process: str

    def sample(self, place: int) -> CachedSample:
        """The place-th sample, its tensors own their memory."""
        values: dict[str, Any] = {
            name: _to_tensor(value) if isinstance(value, tuple) else value
            for name, value in self.samples[place].items()
        }
        return CachedSample(**values)


class KeptStates:
    """States that stay in a target worker's memory for later epochs: the first ones that come, as many as fit.

    Each epoch asks for every sample once, so that giving up some for others would gain nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self._free_bytes = max_bytes
        self._samples: dict[str, dict[str, Any]] = {}

    def get(self, name: str) -> dict[str, Any] | None:
        return self._samples.get(name)

    def offer(self, sample: dict[str, Any]) -> None:
        """Keep it if there is room."""
        size = sum(value[0].nbytes for value in sample.values() if isinstance(value, tuple))
        if size <= self._free_bytes and sample["id"] not in self._samples:
            self._samples[sample["id"]] = sample
            self._free_bytes -= size


def capture_group(
    worker: CaptureWorker, planned: list[PlannedSample], kept: KeptStates, *, process: str
) -> CapturedGroup:
    """States of some samples; those of a sample that are not finite are zeros, and it carries no loss."""
    started = time.monotonic()
    found = {one.id: known for one in planned if (known := kept.get(one.id)) is not None}
    missing = {one.id: one for one in planned if one.id not in found}
    not_finite = []
    for sample in worker.capture(list(missing.values())):
        if not is_finite(sample):
            not_finite.append(sample.id)
            sample = _without_loss(sample)
        found[sample.id] = {field.name: _to_array(getattr(sample, field.name)) for field in fields(CachedSample)}
        if sample.id not in not_finite:
            kept.offer(found[sample.id])
    samples = [found[one.id] for one in planned]
    return CapturedGroup(samples, not_finite, len(missing), time.monotonic() - started, process)


def merged(parts: Sequence[tuple[Sequence[int], CapturedGroup]]) -> CapturedGroup:
    """The answer to a request that went to several target workers; with each part, the places of its samples."""
    by_place = {place: sample for places, part in parts for place, sample in zip(places, part.samples, strict=True)}
    return CapturedGroup(
        samples=[by_place[place] for place in range(len(by_place))],
        not_finite=[name for _, part in parts for name in part.not_finite],
        num_captured=sum(part.num_captured for _, part in parts),
        seconds=sum(part.seconds for _, part in parts),
        process=", ".join(part.process for _, part in parts),
    )


def _without_loss(sample: CachedSample) -> CachedSample:
    zeros: dict[str, Any] = {
        f.name: torch.zeros_like(value)
        for f in fields(CachedSample)
        if isinstance(value := getattr(sample, f.name), Tensor) and (value.is_floating_point() or f.name == "loss_mask")
    }
    return replace(sample, **zeros)


def _to_array(value: Any) -> Any:
    """(array, name of the dtype) of a tensor; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    bits = value.view(torch.int16) if value.dtype == torch.bfloat16 else value
    return bits.contiguous().numpy(), str(value.dtype).removeprefix("torch.")


def _to_tensor(value: tuple[np.ndarray, str]) -> Tensor:
    array, dtype = value
    # What comes from the object store is read-only; torch warns of that, and padding copies the rows anyway.
    return torch.from_numpy(array.copy()).view(getattr(torch, dtype))
