"""What a run has to say, held while the store that should hear it is away."""

import json
import logging
import math
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

NUM_HELD = 10_000  # measured values; beyond that the oldest are lost
PAUSE_S = 60.0  # after a failure nothing is sent for so long: a dead store must cost a job next to nothing
NONFINITE = ".nonfinite"

Measured = tuple[str, float, int, int]  # name, value, time in ms since 1970, step
Send = Callable[[list[Measured], dict[str, str], dict[str, str]], None]

log = logging.getLogger("dspark.tracking")


class StoreAway(Exception):
    """The store did not answer; what was to be sent is worth another try."""


def flatten_params(nested: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """{"a": {"b": 1}} as {"a.b": "1"}; lists become JSON, strings stay as they are."""
    flat: dict[str, str] = {}
    for key, value in nested.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flatten_params(value, f"{name}.")
        else:
            flat[clean_name(name)] = (
                value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
            )
    return flat


def clean_name(name: str) -> str:
    """A name MLflow takes: at most 250 of letters, digits and `_-. :/`."""
    return re.sub(r"[^\w\-. :/]", "_", name)[:250]


class Outbox:
    """Metrics, params and tags on their way to `send(metrics, params, tags)`, which may raise StoreAway."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._metrics: deque[Measured] = deque(maxlen=NUM_HELD)
        self._params: dict[str, str] = {}
        self._tags: dict[str, str] = {}
        self._known_params: dict[str, str] = {}
        self._num_nonfinite: dict[str, int] = {}
        self._num_pushed_out = 0
        self._resume_at: float | None = None  # monotonic time before which nothing is sent; None: all is well

    @property
    def num_lost(self) -> int:
        """Measured values that would be lost if the run ended now."""
        return self._num_pushed_out + len(self._metrics)

    def continue_from(self, params: Mapping[str, str], metrics: Mapping[str, float]) -> None:
        """Take over what the store has of a run from earlier: its params, and its counts of non-finite values."""
        self._known_params = dict(params)
        counts = {name.removesuffix(NONFINITE): n for name, n in metrics.items() if name.endswith(NONFINITE)}
        self._num_nonfinite = {name: int(n) for name, n in counts.items()}

    def add_metric(self, name: str, value: float, step: int) -> None:
        """Hold a value. Stores keep NaN and infinity as numbers like 1.8e308, so those are counted instead."""
        name = clean_name(name)
        if not math.isfinite(value):
            self.add_tag(f"dspark.nonfinite.{name}", f"{value} at step {step}")
            self._num_nonfinite[name] = self._num_nonfinite.get(name, 0) + 1
            name, value = name + NONFINITE, float(self._num_nonfinite[name])
        self._num_pushed_out += len(self._metrics) == NUM_HELD
        self._metrics.append((name, value, int(time.time() * 1000), step))

    def add_param(self, name: str, value: str) -> None:
        """Hold a param. Stores never change one, so another value than before becomes a tag."""
        if name not in self._known_params:
            self._known_params[name] = self._params[name] = value
        elif self._known_params[name] != value:
            self.add_tag(f"dspark.changed.{name}", value)

    def add_tag(self, name: str, value: str) -> None:
        """Hold a tag; a later value replaces an earlier one."""
        self._tags[clean_name(name)] = value

    def flush(self, *, force: bool = False) -> None:
        """Send everything, unless the store failed less than PAUSE_S ago; force=True tries all the same."""
        if self._resume_at is not None and time.monotonic() < self._resume_at and not force:
            return
        while self._metrics or self._params or self._tags:
            # MLflow takes at most 1000 entries in one batch, 100 of them params and 100 tags.
            metrics = list(islice(self._metrics, 500))
            params, tags = dict(islice(self._params.items(), 90)), dict(islice(self._tags.items(), 90))
            try:
                self._send(metrics, params, tags)
            except StoreAway as error:
                self.pause(str(error))
                return
            self._forget(len(metrics), params, tags)

    def pause(self, reason: str) -> None:
        """Send nothing for a while; said once, until the store is back."""
        if self._resume_at is None:
            log.warning("tracking paused, what is measured is held for later: %s", reason)
        self._resume_at = time.monotonic() + PAUSE_S

    def _forget(self, num_metrics: int, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        for _ in range(num_metrics):
            self._metrics.popleft()
        self._params = {name: value for name, value in self._params.items() if name not in params}
        self._tags = {name: value for name, value in self._tags.items() if name not in tags}
        if self._resume_at is not None:
            self._resume_at = None
            log.info("tracking works again")
