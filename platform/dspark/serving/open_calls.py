"""How many calls each replica has open, as one caller knows it between two reports: requests that come together must
not all go where none was when the replica spoke last.

    calls at a replica now = this caller's own: those being sent there and those under way
                           + the others': what the replica said it had, less the most that this caller had there between
                             that word of it and the one before, since it is not known when it was said
"""

import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, TypeVar

VOID_S = 10.0  # after which a call that was neither sent nor chosen for again never will be: its request was cancelled

R = TypeVar("R", bound=Hashable)


class OpenCalls(Generic[R]):
    """Of one caller. clock: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sending: dict[str, tuple[R, float]] = {}  # the longest untouched first
        self._sent: dict[str, R] = {}
        self._own: Counter[R] = Counter()
        self._peaks: dict[R, int] = {}
        self._said: dict[R, tuple[Mapping[str, Any], float]] = {}

    def choose(self, call_id: str, replica: R) -> None:
        """A call is about to be sent there, until `send` says where it went."""
        now = self._clock()
        self.end(call_id)
        while self._sending:
            oldest, (_, chosen_at) = next(iter(self._sending.items()))
            if now - chosen_at <= VOID_S:
                break
            self.end(oldest)
        self._sending[call_id] = (replica, now)
        self._add(replica)

    def send(self, call_id: str, replica: R) -> None:
        """It was taken by a replica; of a call that has ended meanwhile this changes nothing."""
        if call_id in self._sending:
            self.end(call_id)
            self._sent[call_id] = replica
            self._add(replica)

    def end(self, call_id: str) -> None:
        """It is over, or was not taken. Calls that nobody chose for are passed over."""
        chosen = self._sending.pop(call_id, None)
        replica = self._sent.pop(call_id, None) if chosen is None else chosen[0]
        if replica is not None:
            self._own[replica] -= 1

    def num_at(self, replica: R, stats: Mapping[str, Any]) -> int:
        """Calls there now. stats: what the replica said last, with its calls as `num_calls`."""
        own = self._own[replica]
        if (said := self._said.get(replica)) is None or said[0] != stats:
            others = float(stats.get("num_calls", 0)) - max(own, self._peaks.get(replica, 0))
            self._said[replica] = said = (dict(stats), max(0.0, others))
            self._peaks[replica] = own
        return own + round(said[1])

    def keep(self, replicas: Mapping[R, Any]) -> None:
        """Forget those that are gone, but for what is still under way there."""
        for gone in self._said.keys() - replicas.keys():
            del self._said[gone]
            self._peaks.pop(gone, None)
        self._own = +self._own

    def _add(self, replica: R) -> None:
        self._own[replica] += 1
        self._peaks[replica] = max(self._peaks.get(replica, 0), self._own[replica])
