"""A draft replica: one drafter that proposes for several target replicas, asked through `draft`.

event loop       draft() -> inbox                                             future of the message -> draft()
worker thread               everything that waits, in one pass of the drafter
"""

import asyncio
import logging
import queue
import threading
import time
import uuid
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import ray

from dspark.config import build_config
from dspark.engine.draft_loading import load_draft_server
from dspark.engine.draft_messages import DraftAnswer, DraftMessage
from dspark.engine.draft_server import DraftServer
from dspark.engine.drafter_folder import DRAFTER_FILES, WITHOUT_FOLDER, is_drafter_folder
from dspark.errors import DsparkError, one_line
from dspark.serving.config import HotConfig, ServeConfig
from dspark.serving.draft_inputs import DraftInputs
from dspark.serving.scheduler_actor import offer_drafter
from dspark.transfer import local_folder

OFFERS_PER_LEASE = 4

log = logging.getLogger("dspark")


class DraftReplicaStopped(DsparkError):
    """The drafter's thread has ended; nothing more comes from it."""


@dataclass(frozen=True)
class _Waiting:
    """A message, where its answer goes, and when it came (monotonic)."""

    message: DraftMessage
    answer: "Future[DraftAnswer]" = field(default_factory=Future)
    arrived: float = field(default_factory=time.monotonic)

    def wanted(self) -> DraftMessage:
        """The message; without requests for proposals that nobody waits for any more: its contexts are kept anyway."""
        is_wanted = self.answer.set_running_or_notify_cancel()
        is_late = time.monotonic() - self.arrived > self.message.timeout_s
        return self.message if is_wanted and not is_late else replace(self.message, asks=())


class DraftLoop:
    """Owns the thread that drafts. What comes while it drafts is drafted together in its next pass."""

    def __init__(self, server: DraftServer) -> None:
        self.server = server
        self._inbox: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._is_behind = False
        self._ended: DraftReplicaStopped | None = None
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="drafts", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End after the present pass; what waits ends with DraftReplicaStopped."""
        self._inbox.put(None)
        self._thread.join(timeout_s)

    def check(self) -> None:
        """Raises: DraftReplicaStopped with the reason when nothing is drafted any more."""
        if self._ended is not None:
            raise DraftReplicaStopped(self._ended.message)

    def post(self, message: DraftMessage) -> "Future[DraftAnswer]":
        """From any thread. Raises: DraftReplicaStopped."""
        waiting = _Waiting(message)
        with self._sending:  # what is sent is either answered or refused here
            self.check()
            self._inbox.put(waiting)
        return waiting.answer

    def _run(self) -> None:
        reason = DraftReplicaStopped("the draft replica was stopped")
        batch: list[_Waiting] | None = []
        try:
            while (batch := self._take()) is not None:
                self._serve(batch)
                batch = []
                self._is_behind = self.server.hand_on()
        except Exception as error:  # the edge of the thread: whoever waits is told, and Serve replaces the replica
            log.exception("the draft replica failed")
            reason = DraftReplicaStopped(f"the draft replica failed: {type(error).__name__}: {error}")
        with self._sending:
            self._ended = reason
        for waiting in [*(batch or []), *self._drain()]:
            if not waiting.answer.done():
                waiting.answer.set_exception(reason)

    def _take(self) -> list[_Waiting] | None:
        """Everything that waits, or that comes if there is nothing else to do; None when told to stop."""
        batch: list[_Waiting] = []
        try:
            while True:
                waiting = self._inbox.get(block=not batch and not self._is_behind)
                if waiting is None:
                    self._inbox.put(None)  # for the next time, once these are answered
                    return batch or None
                batch.append(waiting)
        except queue.Empty:
            return batch

    def _serve(self, batch: list[_Waiting]) -> None:
        if not batch:
            return
        answers = self.server.serve([waiting.wanted() for waiting in batch])
        for waiting, answer in zip(batch, answers, strict=True):
            if not waiting.answer.cancelled():
                waiting.answer.set_result(answer)

    def _drain(self) -> list[_Waiting]:
        waiting = []
        while not self._inbox.empty():
            one = self._inbox.get()
            if one is not None:
                waiting.append(one)
        return waiting


class DraftReplica:
    """A Serve deployment's class that also works without Serve.

    Without a trained drafter it starts all the same and says so to whoever asks: target replicas copy text then.
    Raises: DsparkError when drafter and target do not belong together, so that it never starts.
    """

    def __init__(self, config: ServeConfig) -> None:
        settings = config.draft_replicas
        assert settings is not None, "a draft replica is deployed only where draft_replicas are configured"
        self._config, self._settings, self._drafter = config, settings, str(config.drafter)
        self._loop: DraftLoop | None = None
        self._stopping = threading.Event()
        self._num_invalid = 0
        self._swaps = {"done": 0, "refused": 0}
        if is_drafter_folder(self._drafter):
            self._use(*self._load(self._drafter))
        else:
            self._nothing = f"no trained drafter at {self._drafter}; train one with python jobs/train.py"
            log.warning("%s: this draft replica drafts nothing", self._nothing)
        if config.fleet.enabled and ray.is_initialized():
            threading.Thread(target=self._offer, args=(config,), name="offers", daemon=True).start()

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve's name for a change of the deployment file's `user_config`, a HotConfig, while the replica runs.

        Another drafter is loaded beside the one that drafts, then takes its place. Engines that go on with the one
        before decode plainly until they have changed as well. One that does not fit is refused: the log and `figures`
        say so, and all goes on with the one before.
        """
        named = str(user_config.get("drafter"))
        try:
            drafter = build_config(HotConfig, user_config, source="user_config").drafter
            if drafter == self._drafter and self._loop is not None:
                return
            if drafter in WITHOUT_FOLDER:
                raise ValueError("a draft replica drafts with a trained drafter; name its folder")
            loop, inputs = await asyncio.to_thread(self._load, str(drafter))
        except Exception as error:  # whatever it is: one that leaves here ends this replica, and the next one as well
            self._swaps["refused"] += 1
            log.error("drafter %s is refused, %s goes on: %s", named, self._drafter, one_line(error))
            return
        before, self._drafter = self._loop, str(drafter)
        self._use(loop, inputs)
        self._swaps["done"] += 1
        if before is not None:
            await asyncio.to_thread(before.stop)

    def _load(self, folder: str) -> tuple[DraftLoop, DraftInputs]:
        """Raises: what `load_draft_server` does."""
        target, settings = self._config.target, self._settings
        server = load_draft_server(target, folder, config=settings.contexts, num_threads=settings.threads)
        return DraftLoop(server), DraftInputs.of(local_folder(folder, DRAFTER_FILES))

    def _use(self, loop: DraftLoop, inputs: DraftInputs) -> None:
        loop.start()
        self._loop, self._inputs = loop, inputs
        log.info("drafting for %s with %s", self._config.target.name, self._drafter)

    def _offer(self, config: ServeConfig) -> None:
        """Tell the fleet scheduler again and again what this replica can do; it may be missing in any way."""
        name = uuid.uuid4().hex
        while not self._stopping.wait(config.fleet.lease_ttl_s / OFFERS_PER_LEASE):
            try:
                supply = None if self._loop is None else self._loop.server.calls.supply()
                if supply is not None:
                    offer_drafter(config.fleet, name, supply)
            except Exception as error:
                log.debug("no offer: %s: %s", type(error).__name__, one_line(error))

    async def draft(self, message: DraftMessage) -> DraftAnswer:
        """The answer to an engine's message. Raises: DraftReplicaStopped."""
        if self._loop is None:
            return DraftAnswer((), self._nothing)
        problem = self._inputs.problem(message)
        if problem is None:
            return await asyncio.wrap_future(self._loop.post(message))
        self._num_invalid += 1
        log.error("a message of %s is refused: %s", message.sender, problem)
        rest = replace(message, parts=(), asks=(), features=np.empty((0, 0), np.float32), dtype="float32")
        answer = await asyncio.wrap_future(self._loop.post(rest))  # that it means another drafter is said first
        return replace(answer, refusal=answer.refusal or f"the draft replica refuses this engine's message: {problem}")

    async def figures(self) -> dict[str, float]:
        """Drafters that took another's place or were refused, messages that do not fit the drafter; of the present one
        the counters of `DraftServerStats`, contexts kept and free pages."""
        own: dict[str, float] = {f"swaps_{outcome}": number for outcome, number in self._swaps.items()}
        own["invalid"] = self._num_invalid
        if self._loop is None:
            return own
        server = self._loop.server
        return asdict(server.stats) | own | {"contexts": server.num_contexts, "pages_free": server.pool.num_free}

    async def check_health(self) -> None:
        """Raises: DraftReplicaStopped when nothing is drafted any more; Serve then replaces the replica."""
        if self._loop is not None:
            self._loop.check()

    def close(self) -> None:
        """Stop the threads; what waits ends with an error."""
        self._stopping.set()
        if self._loop is not None:
            self._loop.stop()

    def __del__(self) -> None:  # how Serve tells a replica that it ends
        if hasattr(self, "_loop"):
            self.close()
