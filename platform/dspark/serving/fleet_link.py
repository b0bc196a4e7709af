"""A replica's side of the fleet: it reports, holds the lease, and decides alone whenever there is none."""

import logging
import threading
import time
from collections.abc import Callable

from dspark.engine.engine import Engine
from dspark.errors import one_line
from dspark.serving.config import FleetConfig
from dspark.serving.scheduler_actor import Exchange
from dspark.speculation.fleet import Lease, ReplicaReport

NEWEST_WEIGHT = 0.3  # of the newest interval in the running means

log = logging.getLogger("dspark")


class FleetLink:
    """Exchanges reports for leases in a thread of its own. `capacity` only looks at a lease and a clock."""

    def __init__(
        self,
        config: FleetConfig,
        *,
        report: Callable[[int], ReplicaReport],
        connect: Callable[[FleetConfig], Exchange],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_fallbacks = 0
        self._config = config
        self._report = report
        self._connect = connect
        self._clock = clock
        self._exchange: Exchange | None = None
        self._sequence = 0
        self._lease: Lease | None = None
        self._expires = 0.0
        self._newest_epoch = 0
        self._changing = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    @property
    def is_attached(self) -> bool:
        """Whether a lease holds now."""
        self.capacity()
        return self._lease is not None

    def capacity(self) -> int | None:
        """Most draft tokens of the next step; None when the lease sets no bound, or there is none."""
        with self._changing:
            if self._lease is not None and self._clock() >= self._expires:
                self._lease = None
                self.num_fallbacks += 1
                log.warning("the fleet scheduler's lease has run out: verify lengths are decided by this replica alone")
            return None if self._lease is None else self._lease.capacity

    def exchange_once(self) -> None:
        """One report for one lease. Whatever fails is tried again at the next time, by the actor's name."""
        self._sequence += 1
        sent_at = self._clock()
        try:
            if self._exchange is None:
                self._exchange = self._connect(self._config)
            lease = self._exchange(self._report(self._sequence))
        except Exception as error:  # the scheduler may be missing in any way; the engine must not notice
            self._exchange = None
            log.debug("no lease: %s: %s", type(error).__name__, one_line(error))
        else:
            self._accept(lease, sent_at)
        self.capacity()

    def _accept(self, lease: Lease, sent_at: float) -> None:
        with self._changing:
            if lease.epoch < self._newest_epoch:
                return
            if self._lease is None:
                log.info("attached to the fleet scheduler")
            self._newest_epoch = lease.epoch
            self._lease = lease
            self._expires = sent_at + lease.ttl_s  # from before it was asked for: never longer than it was meant

    def _run(self) -> None:
        while not self._stopping.wait(self._config.report_every_s):
            self.exchange_once()


class LoadMeter:
    """Reads an engine's counters and reports what happened between two looks."""

    def __init__(self, engine: Engine, replica_id: str) -> None:
        self._engine = engine
        self._replica_id = replica_id
        self._seen = (0, 0.0, 0, 0)
        self._step_s = 0.0
        self._gain = 1.0  # until something was verified, so that it gets the chance

    def report(self, sequence: int) -> ReplicaReport:
        """The replica's state now and its running means."""
        stats, engine = self._engine.stats, self._engine
        now = (stats.steps, stats.step_s, stats.scheduled_tokens, stats.rounds.accepted_tokens)
        steps, seconds, verified, accepted = (new - old for new, old in zip(now, self._seen, strict=True))
        self._seen = now
        if steps:
            weight = NEWEST_WEIGHT if self._step_s else 1.0
            self._step_s += weight * (seconds / steps - self._step_s)
        if verified:
            self._gain += NEWEST_WEIGHT * (accepted / verified - self._gain)
        return ReplicaReport(
            replica_id=self._replica_id,
            sequence=sequence,
            num_running=engine.num_running,
            max_draft_tokens=engine.num_running * engine.block_size,
            expected_gain=self._gain,
            step_s=self._step_s,
        )
