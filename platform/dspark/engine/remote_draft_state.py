"""What an engine knows of drafting elsewhere: its settings, each request's context there, the link's state."""

import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from pydantic import Field

from dspark.attention.page_pool import PageTable
from dspark.config import Config
from dspark.engine.draft_messages import ContextPart, DraftAnswer

MOST_CLOSED = 4096  # handles that are said; of older ones the draft replica notices that nobody speaks of them
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 5.0  # of a link that is down


class RemoteDraftConfig(Config):
    """How long an engine waits for a draft replica, and what it keeps for it."""

    deadline_s: float | None = Field(None, gt=0)
    """Seconds that a step waits for its proposals at most; None takes three times what the cost curve says of drafting,
    and slack_s."""
    slack_s: float = Field(0.02, ge=0)
    """Seconds for the way there and back and for another engine's turn."""
    deadline_without_curve_s: float = Field(0.25, gt=0)
    """The deadline as long as no cost curve was measured on this hardware."""
    top_k: int = Field(64, ge=1)
    """Most likely tokens that a sampled draft token is drawn from: fewer travel faster, more are accepted oftener."""
    max_feature_bytes: int = Field(8_000_000_000, ge=1)
    """Bytes of host memory for the target's features of all tokens in KV memory, from which lost contexts are rebuilt;
    an engine that needs more does not start."""


@dataclass(eq=False)
class RemoteMemory:
    """One request's context. num_features: tokens whose features are in the store; num_there: at the draft replica.

    is_ahead: a part of it is on its way; rests_until: on the clock, after a refusal.
    """

    handle: int
    table: PageTable
    token_ids: list[int]
    num_features: int
    num_there: int = 0
    is_ahead: bool = False
    rests_until: float = 0.0

    @property
    def num_behind(self) -> int:
        return self.num_features - self.num_there

    def part(self, stop: int) -> ContextPart:
        """What is committed behind the draft replica's context up to `stop`; the anchor, too, if that is all."""
        last = len(self.token_ids) if stop == self.num_features else stop
        return ContextPart(
            self.handle, self.num_there, tuple(self.token_ids[self.num_there : last]), stop - self.num_there
        )


@dataclass(frozen=True, eq=False)
class Sent:
    """A message on its way. closed: what it says is not needed any more; memories, handles: of its parts, the
    former as long as their requests run."""

    answer: "Future[DraftAnswer]"
    closed: tuple[int, ...]
    memories: list["weakref.ref[RemoteMemory]"]
    handles: frozenset[int]
    num_tokens: int


class ClosedHandles:
    """Contexts that are not needed any more, as far as the draft replica is not known to have heard of it; the newest
    ones, so that a link that is down makes no message longer and longer. has_news: there are some that no message
    says yet."""

    def __init__(self) -> None:
        self.has_news = False
        self._handles: dict[int, None] = {}

    def add(self, handles: Iterable[int]) -> None:
        """They are closed."""
        for handle in handles:
            self._handles[handle] = None
            self.has_news = True
        while len(self._handles) > MOST_CLOSED:
            self._handles.pop(next(iter(self._handles)), None)

    def said(self) -> tuple[int, ...]:
        """All of them, for a message."""
        self.has_news = False  # first: what is added by another thread meanwhile is news again
        return tuple(self._handles)

    def drop(self, handles: Iterable[int]) -> None:
        """There is no need to say these again."""
        for handle in handles:
            self._handles.pop(handle, None)


@dataclass
class RemoteDraftStats:
    """Cumulative, but for is_up: whether what was sent last was answered.

    failures: deadlines missed and links lost; undrafted: proposals wanted that did not come; refused: for want of room;
    rebuilt: contexts that the draft replica had lost; wait_s: seconds that steps waited.
    """

    is_up: bool = True
    messages: int = 0
    failures: int = 0
    undrafted: int = 0
    refused: int = 0
    rebuilt: int = 0
    wait_s: float = 0.0


@dataclass
class Pause:
    """Of a link that failed: it is not asked before its end. Each failure in a row doubles the next one."""

    clock: Callable[[], float]
    until: float = 0.0
    next_s: float = FIRST_PAUSE_S

    @property
    def is_over(self) -> bool:
        return self.clock() >= self.until

    def begin(self) -> None:
        """After a failure; one of what was sent before the pause began changes nothing."""
        if self.is_over:
            self.until = self.clock() + self.next_s
            self.next_s = min(2 * self.next_s, LONGEST_PAUSE_S)

    def end(self) -> None:
        """After an answer."""
        self.until, self.next_s = 0.0, FIRST_PAUSE_S
