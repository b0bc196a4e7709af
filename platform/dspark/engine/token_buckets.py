"""Decode and verify steps in a few fixed sizes, each captured once as a CUDA graph and replayed.

Legend: B rows (batch tokens) of a step, T rows of its bucket, V vocabulary, m captured layers, d hidden size.

    rows 0 … B-1    the step's
    rows B … T-1    padding: token 0 at position 0, stored in the scratch page, in no request's page table; its logits
                    are dropped

A graph reads and writes memory that stays where it is: each bucket has input tensors of its own, which a step is copied
into, and outputs that the next replay writes over. Its slow twin computes the same on the same tensors without a graph.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from dspark.attention.entry import CapturableEntry, FixedPlan, StepPlan
from dspark.attention.flat_batch import FlatBatch

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
WARMUP_RUNS = 3  # before a capture: kernels are compiled and chosen, workspaces taken

log = logging.getLogger("dspark.engine")

Outputs = tuple[Tensor, Tensor | None]
Compute = Callable[[Tensor, Tensor, StepPlan], Outputs]  # ids [T], positions [T] -> logits [T, V], features [T, m*d]


class Replay(Protocol):
    """Computes a bucket from its inputs once more."""

    def __call__(self) -> Outputs: ...


Capture = Callable[[Callable[[], Outputs]], Replay]


def uncaptured(compute: Callable[[], Outputs]) -> Replay:
    """The slow twin of `captured`."""
    return compute


def captured(compute: Callable[[], Outputs], pool: Any = None) -> Replay:
    """A CUDA graph of what `compute` does. pool: memory shared with other graphs, of which one is in use at a time.

    Raises: RuntimeError when it does what a graph cannot hold.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUP_RUNS):
            compute()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        outputs = compute()

    def replay() -> Outputs:
        graph.replay()
        return outputs

    return replay


def bucket_sizes(most_tokens: int) -> tuple[int, ...]:
    """Sizes up to most_tokens, which is one of them: finer where a step is short."""
    return (*(size for size in SIZES if size < most_tokens), most_tokens)


class Bucket:
    """One size: its inputs, and its graph or what stands for one."""

    def __init__(
        self, size: int, compute: Compute, plan: FixedPlan, *, scratch_slot: int, device: torch.device
    ) -> None:
        self.size, self.plan = size, plan
        self.input_ids = torch.zeros(size, dtype=torch.long, device=device)
        self.positions = torch.zeros(size, dtype=torch.long, device=device)
        self.slots = torch.full((size,), scratch_slot, dtype=torch.long, device=device)
        self._scratch_slot = scratch_slot
        self._compute = compute
        self.replay: Replay | None = None

    def compute(self) -> Outputs:
        return self._compute(self.input_ids, self.positions, self.plan)

    def fill(self, batch: FlatBatch) -> None:
        """Copy a step in."""
        n = batch.num_tokens
        for whole, part, padding in (
            (self.input_ids, batch.input_ids, 0),
            (self.positions, batch.positions, 0),
            (self.slots, batch.slot_mapping, self._scratch_slot),
        ):
            whole[:n].copy_(part)
            whole[n:] = padding
        self.plan.fill([piece.table for piece in batch.pieces], _spans(batch), self.slots)


class TokenBuckets:
    """All sizes up to most_tokens, for steps of up to max_requests requests with up to max_pages pages each."""

    def __init__(
        self,
        compute: Compute,
        entry: CapturableEntry,
        *,
        most_tokens: int,
        max_requests: int,
        max_pages: int,
        scratch_slot: int,
        device: torch.device,
        capture: Capture | None = None,
    ) -> None:
        """capture: None takes CUDA graphs. Raises: RuntimeError when the target cannot be captured."""
        self.sizes = bucket_sizes(most_tokens)
        self.num_runs = 0
        started = time.perf_counter()
        self._buckets = [
            Bucket(
                size,
                compute,
                entry.fixed_plan(num_tokens=size, num_requests=max_requests, max_pages=max_pages),
                scratch_slot=scratch_slot,
                device=device,
            )
            for size in self.sizes
        ]
        capture = capture or partial(captured, pool=torch.cuda.graph_pool_handle())
        with torch.inference_mode():
            for bucket in reversed(self._buckets):  # the largest first: the others fit into its memory
                bucket.replay = capture(bucket.compute)
        seconds = time.perf_counter() - started
        log.info("%d buckets of up to %d tokens took %.1f s", len(self.sizes), most_tokens, seconds)

    def holds(self, batch: FlatBatch) -> bool:
        """Whether a step is one of decodes and verifications alone that fits the largest bucket."""
        if batch.cu_logits != batch.cu_seqlens_q or batch.num_tokens > self.sizes[-1]:
            return False
        return self.bucket_of(batch.num_tokens).plan.holds(_spans(batch))

    def bucket_of(self, num_tokens: int) -> Bucket:
        """The smallest one that so many rows fit into."""
        return self._buckets[bisect_left(self.sizes, num_tokens)]

    @torch.inference_mode()
    def run(self, batch: FlatBatch) -> Outputs:
        """Logits [B, V], which the next run writes over, and features [B, m*d], which are the caller's."""
        bucket = self.bucket_of(batch.num_tokens)
        bucket.fill(batch)
        assert bucket.replay is not None
        logits, hidden = bucket.replay()
        self.num_runs += 1
        n = batch.num_tokens
        return logits[:n], None if hidden is None else hidden[:n].clone()


def most_decode_tokens(max_requests: int, num_ahead: int, max_batch_tokens: int) -> int:
    """Rows of the largest step that only decodes and verifies."""
    return min(max_requests * (1 + num_ahead), max(max_batch_tokens, max_requests), SIZES[-1])


def _spans(batch: FlatBatch) -> Sequence[tuple[int, int]]:
    return [(piece.start, piece.stop) for piece in batch.pieces]
