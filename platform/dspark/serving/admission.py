"""Who is taken in: at most so many at once, and nobody who would wait longer than is allowed."""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from dspark.serving.config import LimitsConfig
from dspark.serving.openai_schema import Refusal

WINDOW_S = 30.0  # over which the pace is measured
LEAST_ENDINGS = 4  # that make a pace
LONGEST_RETRY_S = 60


@dataclass(frozen=True)
class Room:
    """Of a replica, or of all of them together, in choices: those that are open, that run at once, and that may be open
    at most. per_s: those that end in a second, of late; None while there is no pace."""

    num_open: int
    max_running: int
    most: int
    per_s: float | None

    def wait_s(self, num_before: float) -> float | None:
        """Seconds until so many have ended; None while there is no pace."""
        return None if self.per_s is None else num_before / self.per_s


class Pace:
    """Endings of late. clock: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._endings: deque[float] = deque()

    def ended(self, num_choices: int) -> None:
        """They have, in whatever way."""
        self._endings.extend([self._clock()] * num_choices)

    @property
    def per_s(self) -> float | None:
        """Endings per second; None while there are too few."""
        now = self._clock()
        while self._endings and now - self._endings[0] > WINDOW_S:
            self._endings.popleft()
        if len(self._endings) < LEAST_ENDINGS:
            return None
        return len(self._endings) / max(now - self._endings[0], 1e-3)


def refusal(room: Room, limits: LimitsConfig, *, num_new: int, may_wait: bool = False) -> Refusal | None:
    """Why so many more choices are not taken, with the seconds after which they may be; None where they are.

    Those that wait although there is room for them will not wait long: what has to end first is what is over it.
    may_wait: however long.
    """
    num_open, most_s = room.num_open + num_new, limits.max_wait_s
    if num_open > room.most:
        return _busy(room, f"{room.most} requests are running or waiting", num_open - room.most)
    num_before = max(0, num_open - room.max_running)
    wait_s = room.wait_s(num_before)
    if most_s is not None and wait_s is not None and wait_s > most_s and not may_wait:
        message = f"a request would wait about {math.ceil(wait_s)} s; at most {most_s:g} s are allowed"
        return _busy(room, message, math.ceil(num_before * (1 - most_s / wait_s)))
    return None


def _busy(room: Room, why: str, num_before: int) -> Refusal:
    wait_s = room.wait_s(num_before)
    retry_s = 1 if wait_s is None else min(LONGEST_RETRY_S, max(1, math.ceil(wait_s)))
    return Refusal(429, f"{why}; try again later", code="rate_limit_exceeded", retry_after_s=retry_s)
