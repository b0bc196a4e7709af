"""The scheduler's answers, without the actor around it: tests/ray has that."""

from dspark.serving.config import FleetConfig
from dspark.serving.scheduler_actor import FleetScheduler, scheduler_name
from dspark.speculation.fleet import ReplicaReport


def report(name: str, sequence: int, *, gain: float = 0.5, most: int = 10) -> ReplicaReport:
    return ReplicaReport(name, sequence, 2, most, gain, 1.0)


def test_one_replica_that_shares_nothing_is_unbounded() -> None:
    scheduler = FleetScheduler(FleetConfig(lease_ttl_s=2.0))
    lease = scheduler.lease(report("a", 1), now=0.0)
    assert (lease.capacity, lease.ttl_s) == (None, 2.0)


def test_a_shared_capacity_is_divided_among_those_who_report() -> None:
    scheduler = FleetScheduler(FleetConfig(draft_tokens_per_s=12.0))
    assert scheduler.lease(report("a", 1, gain=0.4), now=0.0).capacity == 10
    assert scheduler.lease(report("b", 1, gain=0.9), now=0.1).capacity == 10
    assert scheduler.lease(report("a", 2, gain=0.4), now=0.2).capacity == 2


def test_the_share_of_one_that_is_silent_is_free_again() -> None:
    scheduler = FleetScheduler(FleetConfig(draft_tokens_per_s=12.0, lease_ttl_s=1.0))
    scheduler.lease(report("b", 1, gain=0.9), now=0.0)
    assert scheduler.lease(report("a", 1), now=0.9).capacity == 2
    assert scheduler.lease(report("a", 2), now=1.1).capacity == 10


def test_a_report_that_was_overtaken_changes_nothing() -> None:
    scheduler = FleetScheduler(FleetConfig(draft_tokens_per_s=100.0))
    assert scheduler.lease(report("a", 2, most=3), now=0.0).capacity == 3
    assert scheduler.lease(report("a", 1, most=9), now=0.1).capacity == 3
    assert scheduler.lease(report("a", 3, most=9), now=0.2).capacity == 9


def test_a_later_scheduler_has_a_higher_epoch() -> None:
    first, second = (FleetScheduler(FleetConfig()).lease(report("a", 1), now=0.0).epoch for _ in range(2))
    assert second > first


def test_other_settings_are_another_scheduler() -> None:
    assert scheduler_name(FleetConfig()) == scheduler_name(FleetConfig())
    assert scheduler_name(FleetConfig()) != scheduler_name(FleetConfig(lease_ttl_s=3.0))
