"""Runs an engine in a thread of its own and hands what each step yields to asyncio.

event loop      generate() -> inbox                                      queue of the request -> generate()
engine thread                 inbox, applied between two steps -> step() -> queue of the request

What only adds requests is applied in the midst of a step, too, while the target computes.
"""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from dspark.engine.engine import Engine
from dspark.engine.request import FinishReason, GenerationRequest
from dspark.engine.step import StepOutput
from dspark.errors import DsparkError
from dspark.serving.admission import Pace
from dspark.serving.metrics import ReplicaMetrics
from dspark.speculation.fleet import Share

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
    receiver: _Receiver


@dataclass(frozen=True)
class _Replace:
    make: Callable[[], Engine]
    done: "Future[None]" = field(default_factory=Future)


_Command = _Add | _Abort | _Replace


class EngineLoop:
    """Owns the thread that steps the engine. `generate` is for one event loop, the rest for any thread.

    share: asked before every step for the bounds on what it drafts and verifies; it must not wait for anything.
    pace: told of the steps in which more is open than runs at once. on_failure: called in the engine's thread when the
    engine has failed and every request has been told.
    """

    def __init__(
        self,
        engine: Engine,
        metrics: ReplicaMetrics,
        *,
        share: Callable[[], Share] | None = None,
        pace: Pace | None = None,
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        self.engine = engine
        engine.meanwhile = self._take_new
        self.num_open = 0
        self._open_by_priority: Counter[int] = Counter()
        self._metrics = metrics
        self._share = share
        self._pace = pace or Pace()
        self._on_failure = on_failure
        self._inbox: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._held: deque[_Abort | _Replace | None] = deque()  # taken out in the midst of a step, and not for then
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

    def num_ahead(self, priority: int) -> int:
        """Open requests that one of this priority would not pass."""
        return sum(number for other, number in self._open_by_priority.items() if other <= priority)

    async def generate(self, *requests: GenerationRequest, timeout_s: float) -> AsyncGenerator[StepOutput, None]:
        """Outputs of requests that begin together, one per step and request. Closing it, at any point, frees all pages.

        Raises: ValueError when the engine refuses one of them, TimeoutError after `timeout_s`, EngineStopped.
        """
        loop = asyncio.get_running_loop()
        receiver = _Receiver(loop)
        self._send(*(_Add(request, receiver) for request in requests))
        self.num_open += len(requests)
        self._open_by_priority.update(request.priority for request in requests)
        timer = loop.call_later(timeout_s, receiver.put, TimeoutError(f"no end after {timeout_s:g} s"))
        endings: dict[str, FinishReason] = {}
        otherwise = "abort"
        try:
            async with contextlib.aclosing(self._outputs(receiver, requests)) as outputs:
                async for output in outputs:
                    if output.finish_reason is not None:
                        endings[output.request_id] = output.finish_reason
                    yield output
        except TimeoutError:
            otherwise = "timeout"
            raise
        except (ValueError, EngineStopped):
            otherwise = "error"
            raise
        finally:
            timer.cancel()
            self.num_open -= len(requests)
            self._open_by_priority -= Counter(request.priority for request in requests)  # drops what is none
            for request in requests:
                self._metrics.count_ending(endings.get(request.request_id, otherwise))
            unended = [request.request_id for request in requests if request.request_id not in endings]
            with contextlib.suppress(EngineStopped):
                self._send(*(_Abort(name, receiver) for name in unended))

    async def replace_engine(self, make: Callable[[], Engine]) -> None:
        """Go on with the engine that `make` returns, called in the engine's thread between two steps. Open requests go
        on there, behind what they have.

        Raises: whatever `make` raises, and ValueError when the other engine cannot run an open request; then all stays
        as it was. EngineStopped.
        """
        command = _Replace(make)
        self._send(command)
        await asyncio.wrap_future(command.done)

    async def _outputs(
        self, receiver: _Receiver, requests: Sequence[GenerationRequest]
    ) -> AsyncGenerator[StepOutput, None]:
        started, num_open = time.monotonic(), len(requests)
        continued = {request.request_id for request in requests if request.output_ids}  # their first token was told
        newest: dict[str, float] = {}
        while num_open:
            item = await receiver.items.get()
            if isinstance(item, Exception):
                raise item
            now, name = time.monotonic(), item.request_id
            self._metrics.count_tokens(
                len(item.token_ids),
                now - newest.get(name, started),
                is_first=name not in newest and name not in continued,
            )
            newest[name] = now
            num_open -= item.finish_reason is not None
            yield item

    def _send(self, *commands: _Command) -> None:
        with self._sending:  # what is sent is either applied or refused here: none stays behind in the inbox
            self.check()
            for command in commands:
                self._inbox.put(command)

    def _run(self) -> None:
        reason, is_failed = EngineStopped("the engine was stopped"), False
        try:
            while self._apply_inbox():
                if self._share is not None:
                    self.engine.policy.share = self._share()
                for output in self._step():
                    self._deliver(output)
        except Exception as error:
            log.exception("the engine failed; its %d requests end", len(self._receivers))
            reason, is_failed = EngineStopped(f"the engine failed: {type(error).__name__}"), True
        with self._sending:
            self._ended = reason
        left = [*self._receivers.values(), *(add.receiver for add in self._drain())]
        for receiver in left:
            receiver.put(reason)
        if is_failed and self._on_failure is not None:
            self._on_failure()

    def _step(self) -> list[StepOutput]:
        engine, started = self.engine, time.monotonic()
        is_over = engine.num_running + engine.num_waiting > engine.config.max_running_requests
        outputs = engine.step()
        if is_over:
            num_ended = sum(output.finish_reason is not None for output in outputs)
            self._pace.waited(time.monotonic() - started, num_ended)
        return outputs

    def _apply_inbox(self) -> bool:
        """Apply what was sent; without work, wait for more. False when told to stop."""
        while True:
            is_idle = not self.engine.has_work
            if is_idle and self._inbox.empty():
                self.engine.check()  # nothing runs, so nothing may be held
            try:
                command = self._held.popleft() if self._held else self._inbox.get(block=is_idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            self._apply(command)

    def _take_new(self) -> None:
        """Queue requests up to the first command of another kind: what ends a request waits for the step's end."""
        while not self._held and not self._inbox.empty():
            command = self._inbox.get()
            if isinstance(command, _Add):
                self._apply(command)
            else:
                self._held.append(command)

    def _apply(self, command: _Command) -> None:
        if isinstance(command, _Replace):
            self._replace(command)
            return
        if isinstance(command, _Abort):
            if self._receivers.get(command.request_id) is command.receiver:  # else it ended, or was refused for its id
                del self._receivers[command.request_id]
                self.engine.abort(command.request_id)
            return
        try:
            self.engine.add(command.request)
        except ValueError as error:
            command.receiver.put(error)
        else:
            self._receivers[command.request.request_id] = command.receiver

    def _replace(self, command: _Replace) -> None:
        try:
            engine = command.make()
            for request in self.engine.open_requests():
                engine.add(at_most(request, block_size=engine.block_size))
        except Exception as error:  # what is loaded may fail in any way; the engine that runs must not notice
            command.done.set_exception(error)
            return
        engine.meanwhile = self._take_new
        self.engine = engine
        command.done.set_result(None)

    def _drain(self) -> list[_Add]:
        """Requests that were sent before the end was known, and never reached the engine."""
        added = []
        left: list[_Command | None] = list(self._held)
        while not self._inbox.empty():
            left.append(self._inbox.get())
        for command in left:
            if isinstance(command, _Add):
                added.append(command)
            elif isinstance(command, _Replace):
                command.done.set_exception(EngineStopped("the engine was stopped"))
        return added

    def _deliver(self, output: StepOutput) -> None:
        receiver = self._receivers[output.request_id]
        if output.finish_reason is not None:
            del self._receivers[output.request_id]
        receiver.put(output)


def at_most(request: GenerationRequest, *, block_size: int) -> GenerationRequest:
    """The request with no longer a forced verify length than an engine of that block size takes."""
    if request.verify_length is None:
        return request
    return replace(request, verify_length=min(request.verify_length, block_size))
