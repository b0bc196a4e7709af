"""DeepSpec's step in a process of its own, so that it runs in the environment its own launcher gives it."""

import multiprocessing
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection

import torch

from dspark.data.target_cache import CachedSample
from public_step import PublicShape
from subjects import Clock, PublicStep


@contextmanager
def as_by_default(names: Iterable[str]) -> Iterator[None]:
    """Processes started meanwhile do not inherit these environment variables."""
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


class PublicProcess:
    """A `Subject` that takes its steps elsewhere; what it takes to send the samples is not counted."""

    def __init__(self, name: str, shape: PublicShape, threads: int, *, without: Iterable[str]) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        with as_by_default(without):
            context.Process(target=_serve, args=(theirs, shape, threads), daemon=True).start()

    def step(self, samples: Sequence[CachedSample], epoch: int, clock: Clock) -> int:
        self._connection.send((samples, epoch))
        num_blocks, seconds = self._connection.recv()
        clock.seconds.update(seconds)
        return num_blocks


def _serve(connection: Connection, shape: PublicShape, threads: int) -> None:
    torch.set_num_threads(threads)
    subject = PublicStep("", shape)
    while True:
        try:
            samples, epoch = connection.recv()
        except EOFError:  # the benchmark is over
            return
        clock = Clock()
        num_blocks = subject.step(samples, epoch, clock)
        connection.send((num_blocks, dict(clock.seconds)))
