"""A draft replica in this process, over a link that pickles what it carries and fails where a test says so."""

import pickle
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal

import torch

from dspark.engine.draft_messages import DraftAnswer, DraftMessage, DraftUnavailable
from dspark.engine.draft_server import DraftServer, DraftServerConfig
from dspark.engine.feature_store import FeatureStore
from dspark.engine.loading import paged_runner
from dspark.engine.remote_draft_runner import RemoteDraftRunner
from dspark.engine.remote_draft_state import RemoteDraftConfig

IDENTITY = "this drafter on this target"
PAGE_SIZE = 4

Fate = Literal["arrives", "lost", "unanswered", "silent", "restart"]


class Ticks:
    """A clock that moves on with every look, so that no test waits."""

    def __init__(self, step_s: float = 0.02) -> None:
        self.now, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now


def make_server(drafter: Any, *, clock: Callable[[], float] | None = None, **settings: Any) -> DraftServer:
    config = DraftServerConfig(**{"page_size": PAGE_SIZE, "kv_tokens": 4096} | settings)
    runner = paged_runner(drafter, num_pages=config.num_pages, page_size=config.page_size)
    return DraftServer(runner, identity=IDENTITY, config=config, clock=clock or Ticks())


class Silence(Future[DraftAnswer]):
    """An answer that never comes; how long it is waited for is noted down, and no time passes."""

    def __init__(self, waits_s: list[float | None]) -> None:
        super().__init__()
        self._waits_s = waits_s

    def result(self, timeout: float | None = None) -> DraftAnswer:
        self._waits_s.append(timeout)
        raise TimeoutError


class DirectLink:
    """Serves every message at once. fate: of the n-th message, from 0; a restart loses all contexts before it."""

    def __init__(self, make: Callable[[], DraftServer], fate: Callable[[int], Fate] = lambda n: "arrives") -> None:
        self._make, self._fate = make, fate
        self.server = make()
        self.messages: list[DraftMessage] = []
        self.waits_s: list[float | None] = []  # how long an answer was waited for that never came

    def post(self, message: DraftMessage) -> "Future[DraftAnswer]":
        fate = self._fate(len(self.messages))
        self.messages.append(message)
        answer: Future[DraftAnswer] = Future()
        if fate == "restart":
            self.server = self._make()
        if fate == "silent":
            return Silence(self.waits_s)
        if fate == "lost":
            answer.set_exception(DraftUnavailable("the link is cut"))
            return answer
        (found,) = self.server.serve([pickle.loads(pickle.dumps(message))])
        while self.server.hand_on():
            pass
        if fate == "unanswered":
            answer.set_exception(DraftUnavailable("the answer was lost"))
        else:
            answer.set_result(pickle.loads(pickle.dumps(found)))
        return answer


def remote_runner(drafter: Any, link: Any, *, num_pages: int = 512, **settings: Any) -> RemoteDraftRunner:
    """An engine's side of it, for an engine whose KV memory has so many pages of four tokens."""
    store = FeatureStore(
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        feature_size=drafter.config.feature_size,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return RemoteDraftRunner(
        drafter.config,
        link,
        store,
        name=settings.pop("name", "engine"),
        identity=settings.pop("identity", IDENTITY),
        device=torch.device("cpu"),
        clock=settings.pop("clock", Ticks()),
        config=RemoteDraftConfig(**settings),
    )
