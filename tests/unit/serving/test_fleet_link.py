"""The replica's side of a lease: taken, held, lost, taken again, and never waited for."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dspark.drafters.ngram import NGramDrafter
from dspark.engine.draft_runner import NGramDraftRunner
from dspark.serving.config import FleetConfig
from dspark.serving.fleet_link import FleetLink, LoadMeter
from dspark.speculation.fleet import Lease, ReplicaReport
from tiny_engine import PROMPTS, load, make_engine, request


class Fleet:
    """A scheduler that can be away; time stands still unless told otherwise."""

    def __init__(self, *, capacity: int | None = 7) -> None:
        self.capacity, self.epoch, self.now, self.is_there = capacity, 1, 100.0, True
        self.sequences: list[int] = []
        self.num_connects = 0
        config = FleetConfig(lease_ttl_s=1.0)
        self.link = FleetLink(config, report=self.report, connect=self.connect, clock=lambda: self.now)

    def report(self, sequence: int) -> ReplicaReport:
        return ReplicaReport("a", sequence, 0, 0, 0.5, 0.01)

    def connect(self, config: FleetConfig) -> Any:
        self.num_connects += 1
        return self.exchange

    def exchange(self, report: ReplicaReport) -> Lease:
        if not self.is_there:
            raise ConnectionError("the actor died")
        self.sequences.append(report.sequence)
        return Lease(self.capacity, 1.0, self.epoch)


def test_without_a_lease_there_is_no_bound_and_no_fallback() -> None:
    fleet = Fleet()
    assert (fleet.link.capacity(), fleet.link.is_attached, fleet.link.num_fallbacks) == (None, False, 0)


def test_a_lease_bounds_until_it_runs_out() -> None:
    fleet = Fleet()
    fleet.link.exchange_once()
    fleet.now += 0.99
    assert (fleet.link.capacity(), fleet.link.is_attached) == (7, True)
    fleet.now += 0.02
    assert (fleet.link.capacity(), fleet.link.is_attached, fleet.link.num_fallbacks) == (None, False, 1)
    assert fleet.link.capacity() is None
    assert fleet.link.num_fallbacks == 1  # once per loss, however often it is asked


def test_a_replica_attaches_again_by_itself() -> None:
    fleet = Fleet()
    fleet.link.exchange_once()
    fleet.is_there = False
    for _ in range(12):
        fleet.now += 0.1
        fleet.link.exchange_once()
    assert (fleet.link.capacity(), fleet.link.num_fallbacks) == (None, 1)
    fleet.is_there, fleet.epoch, fleet.capacity = True, 2, 3
    fleet.link.exchange_once()
    assert (fleet.link.capacity(), fleet.link.is_attached, fleet.link.num_fallbacks) == (3, True, 1)
    assert fleet.num_connects > 2


def test_a_short_absence_is_no_fallback() -> None:
    fleet = Fleet()
    fleet.link.exchange_once()
    fleet.is_there = False
    fleet.now += 0.5
    fleet.link.exchange_once()
    fleet.is_there = True
    fleet.link.exchange_once()
    assert (fleet.link.capacity(), fleet.link.num_fallbacks) == (7, 0)


def test_a_lease_of_an_earlier_scheduler_is_void() -> None:
    fleet = Fleet()
    fleet.epoch = 5
    fleet.link.exchange_once()
    fleet.epoch, fleet.capacity = 4, 1
    fleet.link.exchange_once()
    assert fleet.link.capacity() == 7


def test_reports_are_numbered() -> None:
    fleet = Fleet()
    for _ in range(3):
        fleet.link.exchange_once()
    assert fleet.sequences == [1, 2, 3]


def test_a_scheduler_that_hangs_holds_up_nobody() -> None:
    answered = threading.Event()

    def connect(config: FleetConfig) -> Any:
        def exchange(report: ReplicaReport) -> Lease:
            answered.wait(5)
            return Lease(1, 1.0, 1)

        return exchange

    link = FleetLink(
        FleetConfig(report_every_s=0.01), report=lambda n: ReplicaReport("a", n, 0, 0, 0.5, 0.0), connect=connect
    )
    link.start()
    time.sleep(0.05)
    asked = time.monotonic()
    assert link.capacity() is None
    assert time.monotonic() - asked < 0.05
    answered.set()
    link.stop()


def test_the_meter_reports_what_happened_lately(tiny_target: Path) -> None:
    engine = make_engine(load(tiny_target), NGramDraftRunner(NGramDrafter()), verify_length=3)
    meter = LoadMeter(engine, "r")
    idle = meter.report(1)
    assert (idle.replica_id, idle.num_running, idle.step_s, idle.max_draft_tokens) == ("r", 0, 0.0, 0)
    for i, prompt in enumerate(PROMPTS[:3]):
        engine.add(request(prompt, str(i), max_tokens=60))
    for _ in range(30):
        engine.step()
    busy = meter.report(2)
    assert (busy.num_running, busy.max_draft_tokens) == (3, 3 * engine.block_size)
    assert busy.step_s == pytest.approx(engine.stats.step_s / engine.stats.steps)
    assert 0 < busy.expected_gain < 1
    assert meter.report(3).step_s == busy.step_s  # nothing new
