"""The scheduler's answers, without the actor around it: tests/ray has that."""

import pytest

from dspark.serving.config import FleetConfig
from dspark.serving.scheduler_actor import FleetScheduler, ReportPace, scheduler_name
from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.fleet import FREE, DraftSupply, ReplicaReport, RequestGroup, Share

CURVE = CostCurve((1, 256), (0.1, 0.1))
SURVIVAL = (0.8, 0.6)


def report(name: str, sequence: int, *, requests: int = 10, gain: float = 1.0, tier: int = 0) -> ReplicaReport:
    """Of a replica that makes ten steps a second whatever it verifies."""
    groups = (RequestGroup(tier, requests, tuple(gain * a for a in SURVIVAL)),)
    return ReplicaReport(name, sequence, groups, curve_id="c", curve=CURVE)


def shared(**changes: object) -> FleetScheduler:
    """A hundred blocks a second, all of which are given out."""
    settings = {"draft_blocks_per_s": 100.0, "max_draft_load": 1.0, "lease_ttl_s": 1.0} | changes
    return FleetScheduler(FleetConfig(**settings), cpu_clock=lambda: 0.0)  # type: ignore[arg-type]


def test_one_replica_that_shares_nothing_is_free() -> None:
    scheduler = FleetScheduler(FleetConfig(lease_ttl_s=2.0))
    lease = scheduler.lease(report("a", 1), now=0.0)
    assert (lease.share, lease.ttl_s) == (FREE, 2.0)


def test_what_is_shared_is_divided_among_those_who_report() -> None:
    scheduler = shared()
    assert scheduler.lease(report("a", 1, gain=0.5), now=0.0).share == FREE  # all that it can use
    scheduler.lease(report("b", 1, requests=8), now=0.2)
    assert scheduler.lease(report("a", 2, gain=0.5), now=0.4).share == Share(max_drafted=2)
    assert scheduler.lease(report("b", 2, requests=8), now=0.4).share == Share(max_drafted=8)


def test_shares_are_made_anew_once_per_interval_and_not_per_report() -> None:
    scheduler = shared(report_every_s=0.1)
    scheduler.lease(report("b", 1, requests=8), now=0.0)
    assert scheduler.lease(report("a", 1, gain=0.5), now=0.05).share == FREE
    assert scheduler.lease(report("a", 2, gain=0.5), now=0.11).share == Share(max_drafted=2)


def test_the_share_of_one_that_is_silent_is_free_again() -> None:
    scheduler = shared()
    scheduler.lease(report("b", 1, requests=8), now=0.0)
    assert scheduler.lease(report("a", 1, gain=0.5), now=0.9).share == Share(max_drafted=2)
    assert scheduler.lease(report("a", 2, gain=0.5), now=1.1).share == FREE


def test_a_report_that_was_overtaken_or_comes_twice_changes_nothing() -> None:
    scheduler = shared(draft_blocks_per_s=50.0)
    scheduler.lease(report("a", 2, requests=3), now=0.0)
    assert scheduler.lease(report("a", 1, requests=9), now=0.2).share == FREE
    assert scheduler.lease(report("a", 2, requests=9), now=0.4).share == FREE
    assert scheduler.lease(report("a", 3, requests=9), now=0.6).share == Share(max_drafted=5)


def test_a_later_scheduler_has_a_higher_epoch() -> None:
    first, second = (FleetScheduler(FleetConfig()).lease(report("a", 1), now=0.0).epoch for _ in range(2))
    assert second > first


def test_a_curve_is_asked_for_once_per_kind() -> None:
    scheduler = shared()
    bare = ReplicaReport("a", 1, report("a", 1).groups, curve_id="c")
    assert scheduler.lease(bare, now=0.0).wants_curve
    assert not scheduler.lease(report("a", 2), now=0.1).wants_curve
    assert not scheduler.lease(bare, now=0.2).wants_curve
    assert not scheduler.lease(ReplicaReport("b", 1), now=0.2).wants_curve  # it has none


def test_drafters_say_what_they_can_do_until_they_go() -> None:
    scheduler = shared(draft_blocks_per_s=None)
    assert scheduler.lease(report("a", 1), now=0.0).share == FREE
    half = DraftSupply(0.3, (1, 11), (0.01, 0.06))  # 5 ms a block and as much a call: 0.3 s of it a second
    assert scheduler.take_offer("d", half, now=0.1) == pytest.approx(1 / 3)
    scheduler.take_offer("e", half, now=0.1)
    assert scheduler.lease(report("a", 2), now=0.2).share == FREE  # ten calls of 55 ms each second
    scheduler.take_offer("e", half, now=1.3)
    assert scheduler.lease(report("a", 3), now=1.4).share == Share(max_drafted=5)


def test_without_any_offer_the_local_rule_is_free_or_drafting_would_never_come_back() -> None:
    """A drafter says what it can do by what it did: who forbids drafting until it says so waits for ever."""
    scheduler = shared(draft_blocks_per_s=None)
    scheduler.take_offer("d", DraftSupply(20.0), now=0.0)
    assert scheduler.lease(report("a", 1), now=0.1).share == Share(max_drafted=2)
    assert scheduler.lease(report("a", 2), now=3.0).share == FREE
    scheduler.take_offer("another", DraftSupply(30.0), now=3.1)
    assert scheduler.lease(report("a", 3), now=3.3).share == Share(max_drafted=3)


def test_unlike_drafters_count_as_what_they_are_together() -> None:
    """By the table of the first one alone it would be twice as many."""
    scheduler = shared(draft_blocks_per_s=None)
    scheduler.take_offer("fast", DraftSupply(1.0, (1, 11), (0.019, 0.209)), now=0.0)
    scheduler.take_offer("slow", DraftSupply(1.0, (1, 11), (0.059, 0.649)), now=0.0)
    assert scheduler.lease(report("a", 1), now=0.1).share == Share(max_drafted=5)  # of 39 ms each, in 2 s a second


def test_a_tier_below_its_minimum_gets_weight() -> None:
    scheduler = shared(draft_blocks_per_s=20.0, min_tokens_per_s={-1: 17.0}, speed_headroom=0.1)
    scheduler.lease(report("a", 1, requests=2, gain=0.7, tier=-1), now=0.0)
    scheduler.lease(report("b", 1, requests=2), now=0.2)
    assert scheduler.lease(report("a", 2, requests=2, gain=0.7, tier=-1), now=0.4).share == Share(max_drafted=2)
    assert scheduler.lease(report("b", 2, requests=2), now=0.4).share == Share(max_drafted=0)


def test_other_settings_are_another_scheduler() -> None:
    assert scheduler_name(FleetConfig()) == scheduler_name(FleetConfig())
    assert scheduler_name(FleetConfig()) != scheduler_name(FleetConfig(lease_ttl_s=3.0))
    assert scheduler_name(FleetConfig()) != scheduler_name(FleetConfig(min_tokens_per_s={-1: 3.0}))


def test_reports_are_asked_for_less_often_until_the_load_is_what_it_may_be() -> None:
    computed, now = 0.0, 0.0
    pace = ReportPace(0.1, 0.4, cpu_clock=lambda: computed)
    loads = []
    for num_replicas in [500] * 60 + [10] * 60:  # a report takes 1 ms here
        load = num_replicas * 0.001 / pace.every_s
        loads.append(load)
        computed, now = computed + load, now + 1.0
        pace.observe(now)
    assert max(loads[10:60]) < 0.5
    assert loads[59] == pytest.approx(0.4, rel=0.05)
    assert pace.every_s == 0.1
