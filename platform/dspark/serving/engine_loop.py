"""Runs an engine in a thread of its own and hands what each step yields to asyncio.

event loop      generate() -> inbox                                      queue of the request -> generate()
engine thread                 inbox, applied between two steps -> step() -> queue of the request
"""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from dspark.engine.engine import Engine
from dspark.engine.request import GenerationRequest
from dspark.engine.step import StepOutput
from dspark.errors import DsparkError
from dspark.serving.metrics import ReplicaMetrics

log = logging.getLogger("dspark")


class EngineStopped(DsparkError):
    """The engine has ended, by a failure or because it was told to; nothing more comes from it."""


@dataclass(frozen=True)
class _Receiver:
    """Where a request's outputs go, or the exception that ends it."""

    loop: asyncio.AbstractEventLoop
    items: "asyncio.Queue[StepOutput | Exception]" = field(default_factory=asyncio.Queue)

    def put(self, item: StepOutput | Exception) -> None:
        """From any thread; nothing is left to do when the event loop is closed."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.items.put_nowait, item)


@dataclass(frozen=True)
class _Add:
    request: GenerationRequest
    receiver: _Receiver


@dataclass(frozen=True)
class _Abort:
    request_id: str


class EngineLoop:
    """Owns the thread that steps the engine. `generate` is for one event loop, the rest for any thread.

    capacity: asked before every step for the most draft tokens it may verify; it must not wait for anything.
    """

    def __init__(
        self, engine: Engine, metrics: ReplicaMetrics, *, capacity: Callable[[], int | None] | None = None
    ) -> None:
        self.engine = engine
        self.num_open = 0
        self._metrics = metrics
        self._capacity = capacity
        self._inbox: queue.SimpleQueue[_Add | _Abort | None] = queue.SimpleQueue()
        self._receivers: dict[str, _Receiver] = {}  # the engine thread's own
        self._ended: EngineStopped | None = None
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 30.0) -> None:
        """End after the present step; open requests end with EngineStopped."""
        self._inbox.put(None)
        self._thread.join(timeout_s)

    def check(self) -> None:
        """Raises: EngineStopped with the reason when the engine no longer runs."""
        if self._ended is not None:
            raise EngineStopped(self._ended.message)

    async def generate(self, request: GenerationRequest, *, timeout_s: float) -> AsyncGenerator[StepOutput, None]:
        """The request's outputs, one per step that has some. Closing it, at any point, frees the request's pages.

        Raises: ValueError when the engine refuses the request, TimeoutError after `timeout_s`, EngineStopped.
        """
        loop = asyncio.get_running_loop()
        receiver = _Receiver(loop)
        self._send(_Add(request, receiver))
        self.num_open += 1
        timer = loop.call_later(timeout_s, receiver.put, TimeoutError(f"no end after {timeout_s:g} s"))
        ending = "abort"
        try:
            async with contextlib.aclosing(self._outputs(receiver)) as outputs:
                async for output in outputs:
                    ending = output.finish_reason or ending
                    yield output
        except TimeoutError:
            ending = "timeout"
            raise
        except (ValueError, EngineStopped):
            ending = "error"
            raise
        finally:
            timer.cancel()
            self.num_open -= 1
            self._metrics.count_ending(ending)
            if ending in ("abort", "timeout"):
                with contextlib.suppress(EngineStopped):
                    self._send(_Abort(request.request_id))

    async def _outputs(self, receiver: _Receiver) -> AsyncGenerator[StepOutput, None]:
        newest, is_first = time.monotonic(), True
        while True:
            item = await receiver.items.get()
            if isinstance(item, Exception):
                raise item
            now = time.monotonic()
            self._metrics.count_tokens(len(item.token_ids), now - newest, is_first=is_first)
            newest, is_first = now, False
            yield item
            if item.finish_reason is not None:
                return

    def _send(self, command: _Add | _Abort) -> None:
        with self._sending:  # what is sent is either applied or refused here: none stays behind in the inbox
            self.check()
            self._inbox.put(command)

    def _run(self) -> None:
        reason = EngineStopped("the engine was stopped")
        try:
            while self._apply_inbox():
                if self._capacity is not None:
                    self.engine.draft_capacity = self._capacity()
                for output in self.engine.step():
                    self._deliver(output)
        except Exception as error:
            log.exception("the engine failed; its %d requests end", len(self._receivers))
            reason = EngineStopped(f"the engine failed: {type(error).__name__}")
        with self._sending:
            self._ended = reason
        left = [*self._receivers.values(), *(add.receiver for add in self._drain())]
        for receiver in left:
            receiver.put(reason)

    def _apply_inbox(self) -> bool:
        """Apply what was sent; without work, wait for more. False when told to stop."""
        while True:
            is_idle = not self.engine.has_work
            if is_idle and self._inbox.empty():
                self.engine.check()  # nothing runs, so nothing may be held
            try:
                command = self._inbox.get(block=is_idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            self._apply(command)

    def _apply(self, command: _Add | _Abort) -> None:
        if isinstance(command, _Abort):
            self._receivers.pop(command.request_id, None)
            self.engine.abort(command.request_id)
            return
        try:
            self.engine.add(command.request)
        except ValueError as error:
            command.receiver.put(error)
        else:
            self._receivers[command.request.request_id] = command.receiver

    def _drain(self) -> list[_Add]:
        """Requests that were sent before the end was known, and never reached the engine."""
        added = []
        while not self._inbox.empty():
            command = self._inbox.get()
            if isinstance(command, _Add):
                added.append(command)
        return added

    def _deliver(self, output: StepOutput) -> None:
        receiver = self._receivers[output.request_id]
        if output.finish_reason is not None:
            del self._receivers[output.request_id]
        receiver.put(output)
