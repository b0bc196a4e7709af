"""Online samples: the target runs along the answers while the drafter trains, and its states are never stored.

The trainer asks for the samples of its own micro-batches, some steps ahead and no further; the target workers answer
in any order. What was asked for and not yet loaded bounds what lies in memory.

Legend: L tokens of a sample, S supervised tokens of it, m captured layers, d hidden size.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import pydantic
import torch
from torch import Tensor

from dspark.config import Config
from dspark.data.capture import CaptureWorker, PlannedSample
from dspark.data.captured import CapturedGroup, KeptStates, capture_group
from dspark.data.sample_counts import SampleCounts
from dspark.data.target_cache import CachedSample, SampleEntry
from dspark.drafters.base import FinalState


class DataConfig(Config):
    """Where the train stage's samples come from.

    mode: offline reads the target cache; online has target workers run the target along the answers meanwhile and
    writes nothing to disk. All other fields are for online. answers: folder made by jobs/generate.py.
    target_layer_ids, final_states: as in the cache stage, but no more than the drafter reads. dtype, max_length,
    min_loss_tokens: as in the cache stage. batch_tokens: of one forward pass of the target. target_workers: each holds
    the target; add some while data_wait_s is a large part of step_s. gpus_per_target_worker: None gives each one where
    the cluster has any. max_target_restarts: how often a target worker that died is replaced. steps_ahead: steps whose
    states are captured before they are needed, held in the memory of Ray's object store; 0 has trainer and target take
    turns. keep_bytes: memory of each target worker for states that later epochs ask for again; with 0 the target runs
    once per sample and epoch.
    """

    mode: Literal["offline", "online"] = "offline"
    answers: str | None = None
    target_layer_ids: tuple[int, ...] | None = None
    final_states: tuple[FinalState, ...] = ()
    dtype: str = "bfloat16"
    max_length: int = pydantic.Field(default=4096, gt=1)
    min_loss_tokens: int = pydantic.Field(default=14, ge=2)
    batch_tokens: int = pydantic.Field(default=4_096, gt=0)
    target_workers: int = pydantic.Field(default=1, gt=0)
    threads_per_target_worker: int = pydantic.Field(default=1, gt=0)
    gpus_per_target_worker: float | None = pydantic.Field(default=None, ge=0)
    max_target_restarts: int = pydantic.Field(default=3, ge=0)
    steps_ahead: int = pydantic.Field(default=1, ge=0)
    keep_bytes: int = pydantic.Field(default=0, ge=0)

    def require_consistent(self, cache: str | None) -> None:
        """Raises: ValueError for a field that the mode needs and lacks, or that it would ignore.

        cache: the train stage's field of that name.
        """
        if self.mode == "online":
            if self.answers is None:
                raise ValueError("data.mode online needs data.answers, the folder made by jobs/generate.py")
            if cache is not None:
                raise ValueError(f"cache = {cache!r} has no effect with data.mode online; leave it out")
            return
        if cache is None:
            raise ValueError("cache is required: the folder made by jobs/cache.py (or set data.mode online)")
        for name, field in type(self).model_fields.items():
            if getattr(self, name) != field.default:
                raise ValueError(
                    f"data.{name} = {getattr(self, name)!r} has no effect with data.mode offline; "
                    "leave it out or set data.mode online"
                )


@dataclass(frozen=True)
class SampleTable:
    """Tokens of all samples, one after another: input_ids [T] int32, loss_mask [T] uint8, as numpy arrays.

    Arrays, so that all trainer workers of a node share one copy in Ray's object store.
    """

    entries: list[SampleEntry]
    input_ids: np.ndarray
    loss_mask: np.ndarray

    @staticmethod
    def of(samples: Iterable[PlannedSample]) -> "SampleTable":
        """The samples in this order, as they would stand in a cache."""
        entries: list[SampleEntry] = []
        ids: list[np.ndarray] = [np.zeros(0, dtype=np.int32)]
        masks: list[np.ndarray] = [np.zeros(0, dtype=np.uint8)]
        start = first = 0
        for sample in samples:
            stop, supervised = start + len(sample.input_ids), sum(sample.loss_mask)
            entries.append(SampleEntry(sample.id, sample.split, sample.domain, start, stop, first, supervised))
            ids.append(np.asarray(sample.input_ids, dtype=np.int32))
            masks.append(np.asarray(sample.loss_mask, dtype=np.uint8))
            start, first = stop, first + supervised
        return SampleTable(entries, np.concatenate(ids), np.concatenate(masks))

    def planned(self, index: int) -> PlannedSample:
        """The sample as a target worker takes it."""
        entry = self.entries[index]
        tokens = slice(entry.start, entry.stop)
        ids, mask = self.input_ids[tokens].tolist(), self.loss_mask[tokens].tolist()
        return PlannedSample(entry.id, entry.split, entry.domain, ids, mask)


class Targets(Protocol):
    """Whoever runs the target for a trainer."""

    def submit(self, planned: list[PlannedSample]) -> Any:
        """Ask for the states of some samples; returns at once, with what `result` wants."""

    def result(self, ticket: Any) -> CapturedGroup:
        """Waits for them."""


class OwnTarget:
    """The target in this very process, loaded at the first use: for the few samples that a driver needs."""

    def __init__(self, target: dict[str, Any], layer_ids: tuple[int, ...], batch_tokens: int) -> None:
        self._arguments = (target, layer_ids, None, batch_tokens, torch.get_num_threads())
        self._worker: CaptureWorker | None = None
        self._kept = KeptStates(0)

    def submit(self, planned: list[PlannedSample]) -> list[PlannedSample]:
        return planned

    def result(self, ticket: list[PlannedSample]) -> CapturedGroup:
        self._worker = self._worker or CaptureWorker(*self._arguments)
        return capture_group(self._worker, ticket, self._kept, process="own")

    def release(self) -> None:
        """Give its memory back; it is loaded again when it is needed again."""
        self._worker = None


@dataclass
class _Expected:
    """A group on its way, and its answer once that was needed."""

    ticket: Any
    answer: CapturedGroup | None = None


class OnlineSamples:
    """The online SampleSource. Samples stand in the answers' order, all usable ones, as in a cache without a budget.

    request, target_config: as in `TargetCache`. The states are a function of the sample alone, so the data position
    after a resume is the step number and nothing else.
    """

    def __init__(
        self,
        table: SampleTable,
        targets: Targets,
        *,
        folder: str,
        request: dict[str, Any],
        target_config: dict[str, Any],
        origin: dict[str, Any] | None = None,
        steps_ahead: int = 0,
    ) -> None:
        self.table, self.targets, self.entries = table, targets, table.entries
        self.request, self.target_config, self.origin = request, target_config, origin or {}
        self.description, self.steps_ahead = f"answers {folder}", steps_ahead
        self._expected: dict[int, deque[tuple[_Expected, int]]] = {}
        self._counts = SampleCounts()

    def __len__(self) -> int:
        return len(self.entries)

    def indices(self, split: str) -> list[int]:
        return [index for index, entry in enumerate(self.entries) if entry.split == split]

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        sample = self.table.planned(index)
        return torch.tensor(sample.input_ids), torch.tensor(sample.loss_mask, dtype=torch.uint8)

    def expect(self, groups: Iterable[Sequence[int]]) -> None:
        for group in groups:
            if not group:
                continue
            expected = _Expected(self.targets.submit([self.table.planned(index) for index in group]))
            for place, index in enumerate(group):
                self._expected.setdefault(index, deque()).append((expected, place))

    def load(self, index: int) -> CachedSample:
        """The sample of the earliest group that was announced with it, else asked for now, alone."""
        started = time.monotonic()
        if index not in self._expected:
            self.expect([[index]])
        waiting = self._expected[index]
        expected, place = waiting.popleft()
        if not waiting:
            del self._expected[index]
        if expected.answer is None:
            expected.answer = self.targets.result(expected.ticket)
            expected.ticket = None  # frees the object store's copy; the last load of a group frees ours
            self._counts.target_s += expected.answer.seconds
            self._counts.captured += expected.answer.num_captured
        sample = expected.answer.sample(place)
        self._counts.samples += sample.id not in expected.answer.not_finite
        self._counts.not_finite += sample.id in expected.answer.not_finite
        self._counts.wait_s += time.monotonic() - started
        return sample

    def take_counts(self) -> SampleCounts:
        counts, self._counts = self._counts, SampleCounts()
        return counts
