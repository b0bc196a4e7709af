"""The fleet scheduler: one named actor that answers each replica's report with a lease. It knows only what they report.

It may die at any time: replicas go on by their local rule, make it anew, and their next reports tell it everything.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray

from dspark.provenance import fingerprint
from dspark.serving.fleet_config import FleetConfig
from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.draft_supply import joined
from dspark.speculation.fleet import FREE, DraftSupply, Lease, ReplicaReport, Share, allocate_shares

Exchange = Callable[[ReplicaReport], Lease]
TICKS_PER_LEASE = 3  # reports that may be lost before a lease runs out
LOAD_WINDOW_S = 2.0
SLOWEST_S = 30.0


class ReportPace:
    """How often replicas are to report, so that this process stays below its share of a core.

    Its load is in proportion to the reports, so the interval is stretched by what the load is over the share, and
    shrinks again when it is under it. cpu_clock: seconds that the process has computed.
    """

    def __init__(
        self, shortest_s: float, max_load: float, *, cpu_clock: Callable[[], float] = time.process_time
    ) -> None:
        self.every_s = shortest_s
        self._shortest_s, self._max_load = shortest_s, max_load
        self._cpu_clock = cpu_clock
        self._since: tuple[float, float] | None = None

    def observe(self, now: float) -> None:
        """Look at the clocks; the interval changes every two seconds. now: monotonic seconds."""
        if self._since is None:
            self._since = now, self._cpu_clock()
        elapsed = now - self._since[0]
        if elapsed < max(LOAD_WINDOW_S, 2 * self.every_s):
            return
        load = (self._cpu_clock() - self._since[1]) / elapsed
        self.every_s = min(SLOWEST_S, max(self._shortest_s, self.every_s * load / self._max_load))
        self._since = now, self._cpu_clock()


class FleetScheduler:
    """Keeps the newest report of each replica that was heard of lately, and of each drafter what it can do."""

    def __init__(self, config: FleetConfig, *, cpu_clock: Callable[[], float] = time.process_time) -> None:
        self._config = config
        self._epoch = time.time_ns()  # rises from one life of the actor to the next, without memory
        self._reports: dict[str, ReplicaReport] = {}
        self._supplies: dict[str, DraftSupply] = {}
        self._heard: dict[str, float] = {}
        self._curves: dict[str, CostCurve] = {}
        self._shares: dict[str, Share] = {}
        self._shared_at = -SLOWEST_S
        self._pace = ReportPace(config.report_every_s, config.max_scheduler_load, cpu_clock=cpu_clock)
        self._minimum = {tier: (1 + config.speed_headroom) * s for tier, s in config.min_tokens_per_s.items()}
        self._idle_watch: asyncio.Task[None] | None = None

    async def report(self, report: ReplicaReport) -> Lease:
        """Take note of a replica and say what it may do. A report that was overtaken by a newer one changes nothing."""
        if self._idle_watch is None:
            self._idle_watch = asyncio.create_task(self._exit_when_idle())
        return self.lease(report, now=time.monotonic())

    async def offer(self, drafter_id: str, supply: DraftSupply) -> float:
        """Take note of a shared drafter; seconds within which it should say so again, or it counts as gone."""
        return self.take_offer(drafter_id, supply, now=time.monotonic())

    async def replicas(self) -> list[str]:
        """Ids of the replicas heard of lately."""
        return sorted(self._reports)

    def lease(self, report: ReplicaReport, *, now: float) -> Lease:
        """The replica's share among those heard of within the time a lease holds. now: monotonic seconds."""
        self._pace.observe(now)
        name = report.replica_id
        if report.curve is not None:
            self._curves[report.curve_id] = report.curve
        known = self._reports.get(name)
        if known is None or report.sequence > known.sequence:
            self._reports[name] = report
        self._heard[name] = now
        if now - self._shared_at >= self._pace.every_s:  # not for each replica that comes: a fleet starts at once
            self._allocate(now)
        return Lease(
            share=self._shares.get(name, FREE),
            ttl_s=self._ttl_s,
            epoch=self._epoch,
            report_every_s=self._pace.every_s,
            wants_curve=bool(report.curve_id) and report.curve_id not in self._curves,
        )

    def take_offer(self, drafter_id: str, supply: DraftSupply, *, now: float) -> float:
        """As `offer`. now: monotonic seconds."""
        self._supplies[drafter_id] = supply
        self._heard[drafter_id] = now
        return self._ttl_s / TICKS_PER_LEASE

    @property
    def _ttl_s(self) -> float:
        return max(self._config.lease_ttl_s, TICKS_PER_LEASE * self._pace.every_s)

    def _allocate(self, now: float) -> None:
        """New shares for all, without those who fell silent."""
        for name in [name for name, heard in self._heard.items() if now - heard > self._ttl_s]:
            del self._heard[name]
            self._reports.pop(name, None)
            self._supplies.pop(name, None)
        named = {one.curve_id for one in self._reports.values()}
        self._curves = {curve_id: curve for curve_id, curve in self._curves.items() if curve_id in named}
        reports = [replace(one, curve=self._curves.get(one.curve_id)) for one in self._reports.values()]
        self._shares = allocate_shares(reports, self._supply(), self._minimum)
        self._shared_at = now

    def _supply(self) -> DraftSupply | None:
        """What all drafters can do together; None while none says so: what one can do shows only in what it is asked
        for, and a replica whose drafter is away notices by itself."""
        if self._config.draft_blocks_per_s is not None:
            return DraftSupply(self._config.max_draft_load * self._config.draft_blocks_per_s)
        return joined(list(self._supplies.values()), max_load=self._config.max_draft_load)

    async def _exit_when_idle(self) -> None:
        """A detached actor outlives the application that made it; this one ends when nobody reports any more."""
        while time.monotonic() - max(self._heard.values()) < self._config.idle_exit_s:
            await asyncio.sleep(self._config.idle_exit_s / 4)
        ray.kill(ray.get_runtime_context().current_actor)


def scheduler_name(config: FleetConfig) -> str:
    """Name of the actor for exactly these settings: replicas with others have another scheduler."""
    return f"{config.name}-{fingerprint(config.model_dump())}"


def connect_scheduler(config: FleetConfig) -> Exchange:
    """A way to exchange a report for a lease within half of a lease's time; the actor is made if there is none.

    What is returned raises RayError when there was no answer.
    """
    actor = _scheduler(config)
    timeout_s = config.lease_ttl_s / 2

    def exchange(report: ReplicaReport) -> Lease:
        lease = ray.get(actor.report.remote(report), timeout=timeout_s)
        assert isinstance(lease, Lease)
        return lease

    return exchange


def offer_drafter(config: FleetConfig, drafter_id: str, supply: DraftSupply) -> None:
    """Tell the scheduler of a shared drafter, without waiting. To be said again before a lease's time is over."""
    _scheduler(config).offer.remote(drafter_id, supply)


def _scheduler(config: FleetConfig) -> Any:
    """The actor's handle; it is made if there is none."""
    options: dict[str, Any] = {"get_if_exists": True, "lifetime": "detached", "num_cpus": 0, "max_concurrency": 1000}
    remote = ray.remote(FleetScheduler).options(name=scheduler_name(config), namespace=config.namespace, **options)
    return remote.remote(config)
