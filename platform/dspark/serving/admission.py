"""Who is taken in: at most so many at once, and nobody who would wait longer than is allowed."""

import math
import time
from collections import deque
from collections.abc import Callable

from dspark.serving.config import LimitsConfig
from dspark.serving.openai_schema import Refusal

WINDOW_S = 30.0  # over which the pace is measured
LEAST_ENDINGS = 4  # that make a pace
LONGEST_RETRY_S = 60


class Admission:
    """Refuses what is too much with the seconds after which it may not be. clock: seconds."""

    def __init__(self, limits: LimitsConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._endings: deque[float] = deque()

    def refusal(self, *, num_new: int, num_open: int, max_running: int) -> Refusal | None:
        """Why so many more choices are not taken, or None. max_running: those that run at once.

        Those that wait although there is room for them will not wait long: what has to end first is what is over it.
        """
        most, most_s = self._limits.max_concurrent_requests, self._limits.max_wait_s
        if num_open + num_new > most:
            return self._busy(f"{most} requests are running or waiting", (num_open + num_new - most))
        num_before = max(0, num_open + num_new - max_running)
        wait_s = self.wait_s(num_before)
        if most_s is not None and wait_s is not None and wait_s > most_s:
            message = f"a request would wait about {math.ceil(wait_s)} s; at most {most_s:g} s are allowed"
            return self._busy(message, math.ceil(num_before * (1 - most_s / wait_s)))
        return None

    def ended(self, num_choices: int) -> None:
        """They have, in whatever way."""
        self._endings.extend([self._clock()] * num_choices)

    def wait_s(self, num_before: int) -> float | None:
        """Seconds until so many have ended, at the pace of lately; None while there is none."""
        now = self._clock()
        while self._endings and now - self._endings[0] > WINDOW_S:
            self._endings.popleft()
        if len(self._endings) < LEAST_ENDINGS:
            return None
        return num_before * max(now - self._endings[0], 1e-3) / len(self._endings)

    def _busy(self, why: str, num_before: int) -> Refusal:
        wait_s = self.wait_s(num_before)
        retry_s = 1 if wait_s is None else min(LONGEST_RETRY_S, max(1, math.ceil(wait_s)))
        return Refusal(429, f"{why}; try again later", code="rate_limit_exceeded", retry_after_s=retry_s)
