"""The replica's side of a lease: taken, held, lost, taken again, and never waited for."""

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draft_pool import DirectLink, make_server, remote_runner
from dspark.drafters.checkpoint import load_drafter
from dspark.drafters.ngram import NGramDrafter
from dspark.engine.draft_runner import NGramDraftRunner
from dspark.engine.engine import Engine
from dspark.engine.lookup import LookupConfig
from dspark.engine.running import RunningRequest
from dspark.serving.config import FleetConfig
from dspark.serving.fleet_link import NEWEST_WEIGHT, FleetLink, LoadMeter
from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.fleet import FREE, Lease, ReplicaReport, Share
from tiny_drafter import make_tiny_drafter
from tiny_engine import PROMPTS, load, make_engine, request


class Fleet:
    """A scheduler that can be away; time stands still unless told otherwise."""

    def __init__(self, *, capacity: int | None = 7) -> None:
        self.capacity, self.epoch, self.now, self.is_there = capacity, 1, 100.0, True
        self.sequences: list[int] = []
        self.curves: list[bool] = []
        self.every_s, self.wants_curve = 0.0, False
        self.num_connects = 0
        config = FleetConfig(lease_ttl_s=1.0)
        self.link = FleetLink(config, report=self.report, connect=self.connect, clock=lambda: self.now)

    def report(self, sequence: int, with_curve: bool) -> ReplicaReport:
        self.curves.append(with_curve)
        return ReplicaReport("a", sequence, step_s=0.01)

    def connect(self, config: FleetConfig) -> Any:
        self.num_connects += 1
        return self.exchange

    def exchange(self, report: ReplicaReport) -> Lease:
        if not self.is_there:
            raise ConnectionError("the actor died")
        self.sequences.append(report.sequence)
        return Lease(Share(capacity=self.capacity), 1.0, self.epoch, self.every_s, self.wants_curve)


def test_without_a_lease_there_is_no_bound_and_no_fallback() -> None:
    fleet = Fleet()
    assert (fleet.link.share().capacity, fleet.link.is_attached, fleet.link.num_fallbacks) == (None, False, 0)


def test_a_lease_bounds_until_it_runs_out() -> None:
    fleet = Fleet()
    fleet.link.exchange_once()
    fleet.now += 0.99
    assert (fleet.link.share().capacity, fleet.link.is_attached) == (7, True)
    fleet.now += 0.02
    assert (fleet.link.share().capacity, fleet.link.is_attached, fleet.link.num_fallbacks) == (None, False, 1)
    assert fleet.link.share().capacity is None
    assert fleet.link.num_fallbacks == 1  # once per loss, however often it is asked


def test_a_replica_attaches_again_by_itself() -> None:
    fleet = Fleet()
    fleet.link.exchange_once()
    fleet.is_there = False
    for _ in range(12):
        fleet.now += 0.1
        fleet.link.exchange_once()
    assert (fleet.link.share().capacity, fleet.link.num_fallbacks) == (None, 1)
    fleet.is_there, fleet.epoch, fleet.capacity = True, 2, 3
    fleet.link.exchange_once()
    assert (fleet.link.share().capacity, fleet.link.is_attached, fleet.link.num_fallbacks) == (3, True, 1)
    assert fleet.num_connects > 2


def test_a_short_absence_is_no_fallback() -> None:
    fleet = Fleet()
    fleet.link.exchange_once()
    fleet.is_there = False
    fleet.now += 0.5
    fleet.link.exchange_once()
    fleet.is_there = True
    fleet.link.exchange_once()
    assert (fleet.link.share().capacity, fleet.link.num_fallbacks) == (7, 0)


def test_a_lease_of_an_earlier_scheduler_is_void() -> None:
    fleet = Fleet()
    fleet.epoch = 5
    fleet.link.exchange_once()
    fleet.epoch, fleet.capacity = 4, 1
    fleet.link.exchange_once()
    assert fleet.link.share().capacity == 7


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
            return Lease(Share(capacity=1), 1.0, 1)

        return exchange

    config = FleetConfig(report_every_s=0.01)
    link = FleetLink(config, report=lambda n, with_curve: ReplicaReport("a", n), connect=connect)
    link.start()
    time.sleep(0.05)
    asked = time.monotonic()
    assert link.share() == FREE
    assert time.monotonic() - asked < 0.05
    answered.set()
    link.stop()


def test_the_curve_is_sent_until_it_is_known_and_again_when_it_was_forgotten() -> None:
    fleet = Fleet()
    for wants_curve in (True, False, False, True, False):
        fleet.wants_curve = wants_curve
        fleet.link.exchange_once()
    assert fleet.curves == [True, True, False, False, True]
    fleet.is_there = False
    fleet.link.exchange_once()
    fleet.link.exchange_once()
    assert fleet.curves[-1]


def test_a_lease_has_an_age() -> None:
    fleet = Fleet()
    assert fleet.link.lease_age_s is None
    fleet.link.exchange_once()
    fleet.now += 0.25
    assert fleet.link.lease_age_s == pytest.approx(0.25)
    fleet.now += 1.0
    assert fleet.link.lease_age_s is None


def test_a_busy_scheduler_is_asked_less_often() -> None:
    fleet = Fleet()
    assert fleet.link._every_s() == FleetConfig().report_every_s
    fleet.every_s = 0.7
    fleet.link.exchange_once()
    assert fleet.link._every_s() == 0.7


def test_the_meter_reports_what_happened_lately(tiny_target: Path) -> None:
    curve = CostCurve((1, 64), (1e-4, 1e-3))
    engine = make_engine(load(tiny_target), NGramDraftRunner(NGramDrafter()), curve=curve)
    meter = LoadMeter(engine, "r")
    idle = meter.report(1)
    assert (idle.replica_id, idle.num_running, idle.step_s, idle.groups, idle.drift) == ("r", 0, 0.0, (), 1.0)
    assert (idle.curve, meter.report(2, True).curve) == (None, curve)
    for i, prompt in enumerate(PROMPTS[:3]):
        engine.add(request(prompt, str(i), max_tokens=60, priority=-1 if i == 2 else 0))
    for _ in range(30):
        engine.step()
    busy = meter.report(3)
    assert busy.num_running == 3
    assert sorted((group.tier, group.num_requests) for group in busy.groups) == [(-1, 1), (0, 1), (0, 1)]
    expected = {one.request.priority: one.estimate.survival(engine.block_size) for one in engine.running}
    assert busy.groups[0].survival == pytest.approx(expected[-1])
    assert busy.step_s == pytest.approx(engine.stats.step_s / engine.stats.steps)
    assert busy.drift > 1.5  # the curve promises far faster steps than these
    assert busy.prefill_tokens == pytest.approx(sum(map(len, PROMPTS[:3])) / engine.stats.steps)
    assert busy.curve_id == idle.curve_id != ""
    assert meter.report(4).step_s == busy.step_s  # nothing new


def test_a_meter_without_a_curve_has_a_measured_step(tiny_target: Path) -> None:
    engine = make_engine(load(tiny_target), NGramDraftRunner(NGramDrafter()), verify_length=3)
    meter = LoadMeter(engine, "r")
    engine.add(request(PROMPTS[0]))
    engine.step()
    report = meter.report(1, True)
    assert (report.curve, report.curve_id, report.drift) == (None, "", 1.0)
    assert report.step_s > 0


def told_of(engine: Engine) -> list[float]:
    """Survival of the only request, by the report."""
    (group,) = LoadMeter(engine, "r").report(1).groups
    assert group.num_requests == 1
    return list(group.survival)


def test_whoever_is_not_drafted_for_takes_no_share_of_the_drafters(tiny_target: Path) -> None:
    """It decodes beside the others, and so it is counted; but nothing of it is up for drafting."""
    model, curve = load(tiny_target), CostCurve((1, 64), (1e-4, 1e-3))

    def engine_with(
        num_steps: int = 3, *, max_batch_tokens: int = 256, **options: Any
    ) -> tuple[Engine, RunningRequest]:
        drafts = NGramDraftRunner(NGramDrafter())
        lookup = LookupConfig()
        engine = make_engine(model, drafts, curve=curve, lookup=lookup, max_batch_tokens=max_batch_tokens)
        engine.add(request(PROMPTS[2], max_tokens=60, **options))
        for _ in range(num_steps):
            engine.step()
        return engine, engine.running[0]

    engine, running = engine_with()
    assert running.copies is not None
    running.copies.is_used = False
    expected = running.estimate.survival(engine.block_size)
    assert told_of(engine) == pytest.approx(expected)
    running.copies.is_used = True
    assert told_of(engine) == []
    running.copies.is_used, running.is_draftable = False, False  # longer than the drafter's context
    assert told_of(engine) == []
    assert told_of(engine_with(verify_length=0)[0]) == []
    engine, running = engine_with(verify_length=2)
    assert told_of(engine) == pytest.approx(running.estimate.survival(2))  # it is drafted for, to that length
    engine, running = engine_with(max_batch_tokens=8)
    assert not running.is_prefilled
    assert told_of(engine) == []


def test_the_wait_for_a_draft_replica_is_no_drift_of_the_targets_steps(tiny_target: Path, tmp_path: Path) -> None:
    """Shares charge drafting by the drafters' own seconds; a step that drafts for nobody waits for none."""
    curve = CostCurve((1, 64), (1e-4, 1e-3), (1, 8), (1e-5, 2e-5))
    drafter = load_drafter(make_tiny_drafter(tmp_path, tiny_target))

    class Far(DirectLink):
        def post(self, message: Any) -> Any:
            time.sleep(0.03 if message.asks else 0.0)
            return super().post(message)

    model = load(tiny_target)
    runner = remote_runner(drafter, Far(lambda: make_server(drafter)), deadline_s=5.0)
    engine = make_engine(model, runner, curve=curve, min_gain=0.0, probe_every=1)
    near, far = LoadMeter(engine, "r"), LoadMeter(engine, "r", is_remote=True)
    engine.add(request(PROMPTS[0], max_tokens=40, verify_length=2))
    engine.add(request(PROMPTS[1], "1", max_tokens=40))
    for _ in range(6):
        engine.step()
    counts = engine.stats.schedule
    assert counts.draft_s >= runner.stats.wait_s >= 3 * 0.03
    own = (counts.measured_s - counts.draft_s) / (counts.predicted_s - counts.predicted_draft_s)
    drafting = counts.draft_s / counts.predicted_draft_s
    first, other = near.report(1), far.report(1)
    assert first.drift == other.drift == pytest.approx(1 + NEWEST_WEIGHT * (own - 1))
    assert first.draft_drift == pytest.approx(1 + NEWEST_WEIGHT * (drafting - 1))
    assert other.draft_drift == 1.0


def test_what_long_contexts_add_is_in_the_drift_since_a_report_does_not_tell_them(tiny_target: Path) -> None:
    curve = CostCurve((1, 64), (1e-3, 2e-3))
    drifts = []
    for context_s in (0.0, 5.0):
        longer = replace(curve, context_s=context_s, context_tokens=1)
        engine = make_engine(load(tiny_target), NGramDraftRunner(NGramDrafter()), curve=longer, verify_length=0)
        meter = LoadMeter(engine, "r")
        engine.add(request(PROMPTS[0], max_tokens=8))
        for _ in range(6):
            engine.step()
        counts = engine.stats.schedule
        assert (counts.predicted_context_s > counts.predicted_s / 2) == (context_s > 0)
        expected = counts.measured_s / (6 * curve.verify_seconds(1))
        drifts.append(meter.report(1).drift)
        assert drifts[-1] == pytest.approx(1 + NEWEST_WEIGHT * (expected - 1), rel=0.2)  # the prompt is a longer step
