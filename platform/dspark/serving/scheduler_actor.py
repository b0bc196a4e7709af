"""The fleet scheduler: one named actor that answers each replica's report with a lease. It knows only what they report.

It may die at any time: replicas go on by their local rule, make it anew, and their next reports tell it everything.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import ray

from dspark.provenance import fingerprint
from dspark.serving.config import FleetConfig
from dspark.speculation.fleet import Lease, ReplicaReport, allocate_capacity

Exchange = Callable[[ReplicaReport], Lease]


class FleetScheduler:
    """Keeps the newest report of each replica that was heard of lately."""

    def __init__(self, config: FleetConfig) -> None:
        self._config = config
        self._epoch = time.time_ns()  # rises from one life of the actor to the next, without memory
        self._reports: dict[str, ReplicaReport] = {}
        self._heard: dict[str, float] = {}
        self._idle_watch: asyncio.Task[None] | None = None

    async def report(self, report: ReplicaReport) -> Lease:
        """Take note of a replica and say what it may do. A report that was overtaken by a newer one changes nothing."""
        if self._idle_watch is None:
            self._idle_watch = asyncio.create_task(self._exit_when_idle())
        return self.lease(report, now=time.monotonic())

    def lease(self, report: ReplicaReport, *, now: float) -> Lease:
        """The replica's share among those heard of within the time a lease holds. now: monotonic seconds."""
        known = self._reports.get(report.replica_id)
        if known is None or report.sequence > known.sequence:
            self._reports[report.replica_id] = report
        self._heard[report.replica_id] = now
        for replica_id in [name for name, heard in self._heard.items() if now - heard > self._config.lease_ttl_s]:
            del self._reports[replica_id], self._heard[replica_id]
        capacities = allocate_capacity(list(self._reports.values()), self._config.draft_tokens_per_s)
        return Lease(capacities[report.replica_id], self._config.lease_ttl_s, self._epoch)

    async def replicas(self) -> list[str]:
        """Ids of the replicas heard of lately."""
        return sorted(self._reports)

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
    actor: Any = (
        ray.remote(FleetScheduler)
        .options(
            name=scheduler_name(config),
            namespace=config.namespace,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            max_concurrency=1000,
        )
        .remote(config)
    )
    timeout_s = config.lease_ttl_s / 2

    def exchange(report: ReplicaReport) -> Lease:
        lease = ray.get(actor.report.remote(report), timeout=timeout_s)
        assert isinstance(lease, Lease)
        return lease

    return exchange
