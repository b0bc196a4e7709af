"""A replica's side of the fleet: it reports, holds the lease, and decides alone whenever there is none."""

import logging
import threading
import time
from collections.abc import Callable

from dspark.engine.engine import Engine
from dspark.engine.running import RunningRequest
from dspark.errors import one_line
from dspark.provenance import fingerprint
from dspark.serving.fleet_config import FleetConfig
from dspark.serving.scheduler_actor import Exchange
from dspark.speculation.fleet import FREE, Lease, ReplicaReport, Share, summarise

NEWEST_WEIGHT = 0.3  # of the newest interval in the running means

log = logging.getLogger("dspark")


class FleetLink:
    """Exchanges reports for leases in a thread of its own. `share` only looks at a lease and a clock.

    report: makes the report of a number, with the cost curve if that is asked for.
    """

    def __init__(
        self,
        config: FleetConfig,
        *,
        report: Callable[[int, bool], ReplicaReport],
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
        self._received_at = 0.0
        self._expires = 0.0
        self._wants_curve = True
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
        return self.lease_age_s is not None

    @property
    def lease_age_s(self) -> float | None:
        """Seconds since the lease that holds was asked for; None where none holds."""
        self.share()
        with self._changing:
            return None if self._lease is None else self._clock() - self._received_at

    def share(self) -> Share:
        """Bounds on the next step; none without a lease."""
        with self._changing:
            if self._lease is not None and self._clock() >= self._expires:
                self._lease = None
                self.num_fallbacks += 1
                log.warning("the fleet scheduler's lease has run out: verify lengths are decided by this replica alone")
            return FREE if self._lease is None else self._lease.share

    def exchange_once(self) -> None:
        """One report for one lease. Whatever fails is tried again at the next time, by the actor's name."""
        self._sequence += 1
        sent_at = self._clock()
        try:
            if self._exchange is None:
                self._exchange = self._connect(self._config)
            lease = self._exchange(self._report(self._sequence, self._wants_curve))
        except Exception as error:  # the scheduler may be missing in any way; the engine must not notice
            self._exchange = None
            self._wants_curve = True  # whoever answers next may know nothing
            log.debug("no lease: %s: %s", type(error).__name__, one_line(error))
        else:
            self._accept(lease, sent_at)
        self.share()

    def _accept(self, lease: Lease, sent_at: float) -> None:
        with self._changing:
            if lease.epoch < self._newest_epoch and self._lease is not None:
                return  # of a life of the actor that is over; without a lease its clock may just be behind
            if self._lease is None:
                log.info("attached to the fleet scheduler")
            self._newest_epoch = lease.epoch
            self._lease = lease
            self._wants_curve = lease.wants_curve
            self._received_at = sent_at
            self._expires = sent_at + lease.ttl_s  # from before it was asked for: never longer than it was meant

    def _run(self) -> None:
        while not self._stopping.wait(self._every_s()):
            self.exchange_once()

    def _every_s(self) -> float:
        asked = 0.0 if self._lease is None else self._lease.report_every_s
        return max(self._config.report_every_s, asked)


class LoadMeter:
    """Reads an engine's counters and reports what happened between two looks.

    is_remote: drafting is waited for and not done here. Then it has no drift: the fleet charges drafting by what it
    costs the drafters, and the wait for them is none of that.
    """

    def __init__(self, engine: Engine, replica_id: str, *, is_remote: bool = False) -> None:
        self._engine = engine
        self._replica_id = replica_id
        self._is_remote = is_remote
        self._seen = dict.fromkeys(self._counters(), 0.0)
        self._step_s = 0.0
        self._drift = self._draft_drift = 1.0
        self._prefill_tokens = 0.0
        curve = engine.policy.measured_curve
        self._curve_id = "" if curve is None else fingerprint(curve.to_dict())

    def report(self, sequence: int, with_curve: bool = False) -> ReplicaReport:
        """The replica's requests now, and the running means of what its steps cost."""
        now = self._counters()
        new = {name: value - self._seen[name] for name, value in now.items()}
        self._seen = now
        if new["steps"]:
            weight = NEWEST_WEIGHT if self._step_s else 1.0
            self._step_s += weight * (new["seconds"] / new["steps"] - self._step_s)
            self._prefill_tokens += weight * (new["read"] / new["steps"] - self._prefill_tokens)
        if new["predicted_s"] > 0:
            self._drift += NEWEST_WEIGHT * (new["measured_s"] / new["predicted_s"] - self._drift)
        if new["predicted_draft_s"] > 0 and not self._is_remote:
            self._draft_drift += NEWEST_WEIGHT * (new["draft_s"] / new["predicted_draft_s"] - self._draft_drift)
        engine = self._engine
        rows = [(one.request.priority, _up_for_drafting(one, engine)) for one in engine.running]
        return ReplicaReport(
            replica_id=self._replica_id,
            sequence=sequence,
            groups=summarise(rows),
            curve_id=self._curve_id,
            curve=engine.policy.measured_curve if with_curve else None,
            step_s=self._step_s,
            drift=self._drift,
            draft_drift=self._draft_drift,
            prefill_tokens=self._prefill_tokens,
        )

    def _counters(self) -> dict[str, float]:
        stats, schedule = self._engine.stats, self._engine.stats.schedule
        return {
            "steps": stats.steps,
            "seconds": stats.step_s,
            "read": stats.prompt_tokens + stats.reread_tokens,
            # A report has no lengths of contexts: what they add is in the drift.
            "predicted_s": schedule.predicted_s - schedule.predicted_draft_s - schedule.predicted_context_s,
            "measured_s": schedule.measured_s - schedule.draft_s,
            "predicted_draft_s": schedule.predicted_draft_s,
            "draft_s": schedule.draft_s,
        }


def _up_for_drafting(running: RunningRequest, engine: Engine) -> list[float]:
    """Survival of the draft tokens that the request may get from the drafter: none while it reads, has a copy, or is
    not drafted for at all."""
    if running.is_copied or not running.is_prefilled or not running.is_draftable:
        return []
    fixed = engine.policy.fixed_length(running)
    return running.estimate.survival(engine.block_size)[:fixed]
