"""Who is taken in: at most so many at once, and nobody who would wait longer than is allowed."""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from dspark.serving.config import LimitsConfig
from dspark.serving.openai_schema import Refusal

WINDOW_S = 30.0  # over which the pace is measured
SPELL_S = 1.0  # of it, summed up
LEAST_ENDINGS = 4  # that make a pace
LONGEST_RETRY_S = 60


@dataclass(frozen=True)
class Room:
    """Of a replica, or of all of them together, in choices: those that are open, that run at once, and that may be open
    at most. per_s: those that end in a second while others wait, of late; None while there is no pace. num_ahead: of
    those open, such as a new one does not pass by its priority; None: all."""

    num_open: int
    max_running: int
    most: int
    per_s: float | None
    num_ahead: int | None = None

    def wait_s(self, num_before: float) -> float | None:
        """Seconds until so many have ended; None while there is no pace."""
        return None if self.per_s is None else num_before / self.per_s


class Pace:
    """What a replica can do: endings of late, per second in which somebody waited for one. While nobody waits, as many
    end as come, which says nothing. Told by one thread and asked by another. clock: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spells: deque[_Spell] = deque()

    def waited(self, seconds: float, num_ended: int) -> None:
        """So long somebody waited just now, and so many choices ended meanwhile."""
        now = self._clock()
        while self._spells and now - self._spells[0].began > WINDOW_S:
            self._spells.popleft()
        if not self._spells or now - self._spells[-1].began > SPELL_S:
            self._spells.append(_Spell(now))
        self._spells[-1].seconds += seconds
        self._spells[-1].num_ended += num_ended

    @property
    def per_s(self) -> float | None:
        """Endings per second; None while there are too few."""
        now = self._clock()
        recent = [spell for spell in list(self._spells) if now - spell.began <= WINDOW_S]
        num_ended = sum(spell.num_ended for spell in recent)
        if num_ended < LEAST_ENDINGS:
            return None
        return num_ended / max(sum(spell.seconds for spell in recent), 1e-3)


@dataclass
class _Spell:
    """What happened within a second or so from `began` on, in the seconds of it in which somebody waited."""

    began: float
    seconds: float = 0.0
    num_ended: int = 0


def refusal(room: Room, limits: LimitsConfig, *, num_new: int, may_wait: bool = False) -> Refusal | None:
    """Why so many more choices are not taken, with the seconds after which they may be; None where they are.

    Those that wait although there is room for them will not wait long: what has to end first is what is over it.
    may_wait: however long.
    """
    num_open, most_s = room.num_open + num_new, limits.max_wait_s
    if num_open > room.most:
        return _busy(room, f"{room.most} requests are running or waiting", num_open - room.most)
    num_ahead = room.num_open if room.num_ahead is None else room.num_ahead
    num_before = max(0, num_ahead + num_new - room.max_running)
    wait_s = room.wait_s(num_before)
    if most_s is not None and wait_s is not None and wait_s > most_s and not may_wait:
        message = f"a request would wait about {math.ceil(wait_s)} s; at most {most_s:g} s are allowed"
        return _busy(room, message, math.ceil(num_before * (1 - most_s / wait_s)))
    return None


def _busy(room: Room, why: str, num_before: int) -> Refusal:
    wait_s = room.wait_s(num_before)
    retry_s = 1 if wait_s is None else min(LONGEST_RETRY_S, max(1, math.ceil(wait_s)))
    return Refusal(429, f"{why}; try again later", code="rate_limit_exceeded", retry_after_s=retry_s)
