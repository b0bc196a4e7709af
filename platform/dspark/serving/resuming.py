"""An answer that outlives its replica: what came of it is kept, and another replica is asked for the rest.

Greedy answers and those with a seed go on with the very tokens that they would have had. Others are drawn anew from
where they were cut, by the same distribution: whether a token arrived does not depend on which one it was.

One death never ends an answer. A second replica that dies before the answer got much further there is taken for the
request's doing, or for that of one beside it: it is not tried on a third one.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from typing import Literal

from dspark.serving.config import FailoverConfig
from dspark.serving.engine_client import Continuation, Delta
from dspark.serving.openai_schema import Refusal

POISON = "poison_request"  # code of a refusal: the request is taken to be what ends replicas
BUSY = (429, 503)  # statuses of a replica that may take the rest of an answer a little later
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
POISONED = (
    "two replicas failed one after the other while they worked on this request; it is not tried again, since it may be "
    "what ends them"
)

Answers = AsyncGenerator[Delta | Refusal, None]
Attempt = Callable[[int, Continuation | None], Answers]

log = logging.getLogger("dspark")


class ReplicaLost(Exception):
    """A replica ended before an answer did.

    how: it, or its engine, died; it was taken away on purpose, as by a rollout; or there was none to begin with.
    """

    def __init__(self, reason: str, how: Literal["died", "taken_away", "missing"] = "died") -> None:
        super().__init__(reason)
        self.how = how


@dataclass
class FailoverCounts:
    """Answers that lost a replica, each time: continued; given up; or taken to be the cause themselves."""

    continued: int = 0
    given_up: int = 0
    poison: int = 0


class Progress:
    """How far an answer has come, over all the replicas that worked on it."""

    def __init__(self, num_choices: int) -> None:
        self._output_ids: dict[int, list[int]] = {index: [] for index in range(num_choices)}
        self._num_cached: dict[int, int] = {}
        self._is_prompt_told = False
        self.num_tokens = 0  # of all choices, those that have ended included

    @property
    def is_complete(self) -> bool:
        return not self._output_ids

    def take(self, delta: Delta) -> Delta:
        """Note what came; as it is to be passed on: what the first replica said of the prompt stands."""
        self.num_tokens += len(delta.token_ids)
        if delta.finish_reason is None:
            self._output_ids[delta.index] += delta.token_ids
        else:
            del self._output_ids[delta.index]
        num_cached = self._num_cached.setdefault(delta.index, delta.num_cached_tokens)
        prompt_ids = None if self._is_prompt_told else delta.prompt_token_ids
        self._is_prompt_told |= prompt_ids is not None
        return replace(delta, num_cached_tokens=num_cached, prompt_token_ids=prompt_ids)

    def continuation(self) -> Continuation | None:
        """What is left to do; None while nothing was done."""
        if not self._num_cached:
            return None
        return Continuation({index: tuple(ids) for index, ids in self._output_ids.items()})


class Patience:
    """How long and how often an answer looks for a replica to go on with. clock: seconds.

    is_poison: replicas died one after the other, and the answer came no further in between.
    """

    def __init__(self, config: FailoverConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self.is_poison = False
        self._num_lost = 0
        self._tokens_then: int | None = None  # when a replica died last
        self._lost_at: float | None = None
        self._pause_s = 0.0

    @property
    def is_searching(self) -> bool:
        """Whether a replica was lost, and nothing came since."""
        return self._lost_at is not None

    @property
    def left_s(self) -> float | None:
        """Seconds in which something must come; None: no replica is being looked for."""
        return None if self._lost_at is None else self._lost_at + self._config.wait_s - self._clock()

    def found(self) -> None:
        """Something came."""
        self._lost_at, self._pause_s = None, 0.0

    def lost(self, lost: ReplicaLost, num_tokens: int) -> float | None:
        """Seconds to wait before the next replica is asked; None: no other one is. num_tokens: of the answer so far."""
        if lost.how == "died":  # a rollout takes replicas away one after the other, whatever they work on
            then, self._tokens_then = self._tokens_then, num_tokens
            self.is_poison = then is not None and num_tokens - then < self._config.min_progress_tokens
        self._num_lost += lost.how != "taken_away"
        if self._lost_at is None:
            self._lost_at = self._clock()
        return None if self.is_poison or self._num_lost > self._config.max_continuations else self.busy()

    def busy(self) -> float | None:
        """As `lost`, of a replica that has no room now."""
        pause_s, self._pause_s = self._pause_s, min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause_s))
        left_s = self.left_s
        return None if left_s is not None and left_s <= pause_s else pause_s


async def resumed(
    attempt: Attempt,
    *,
    num_choices: int,
    config: FailoverConfig,
    timeout_s: float,
    counts: FailoverCounts | None = None,
) -> Answers:
    """An answer from as many replicas as it takes; a refusal comes first, or last where no other could go on.

    attempt: asks a replica, by the number of those asked before, for all or the rest; raises ReplicaLost. timeout_s: of
    the whole answer, replicas that hang included.
    """
    progress, patience, counts = Progress(num_choices), Patience(config), counts or FailoverCounts()
    ends_at = time.monotonic() + timeout_s
    for number in itertools.count():
        try:
            async with contextlib.aclosing(attempt(number, progress.continuation())) as items:
                while not progress.is_complete:
                    item = await _next(items, ends_at, patience)
                    if isinstance(item, Refusal):
                        if not (patience.is_searching and item.status in BUSY):
                            yield item
                            return
                        pause_s = patience.busy()
                        break
                    patience.found()
                    yield progress.take(item)
                else:
                    return
        except ReplicaLost as lost:
            pause_s = patience.lost(lost, progress.num_tokens)
            counts.continued += pause_s is not None
            log.warning("an answer lost its replica: %s; %s", lost, "given up" if pause_s is None else "it goes on")
        except TimeoutError:
            pause_s = None
        if time.monotonic() >= ends_at:
            yield Refusal(504, f"the request took too long: no end after {timeout_s:g} s", code="timeout")
            return
        if patience.is_poison:
            counts.poison += 1
            yield Refusal(422, POISONED, code=POISON)
            return
        if pause_s is None:
            counts.given_up += 1
            yield Refusal(503, "the replicas that worked on this request failed; try again", code="replica_failed")
            return
        await asyncio.sleep(pause_s)


async def _next(items: Answers, ends_at: float, patience: Patience) -> Delta | Refusal:
    """Raises: ReplicaLost, TimeoutError."""
    left_s = ends_at - time.monotonic()
    if patience.left_s is not None:
        left_s = min(left_s, patience.left_s)
    async with asyncio.timeout(left_s):
        item = await anext(items, None)
    if item is None:
        raise ReplicaLost("its part ended without a finish reason")
    return item
