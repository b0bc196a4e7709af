"""Budgets, survival, step times and leases as Prometheus text."""

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dspark.drafters.ngram import NGramDrafter
from dspark.engine.draft_runner import NGramDraftRunner
from dspark.engine.schedule_counts import PredictedSeconds
from dspark.serving.config import FleetConfig
from dspark.serving.fleet_link import FleetLink
from dspark.serving.metrics import render
from dspark.serving.schedule_metrics import fleet_families, schedule_families
from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.fleet import Lease, ReplicaReport, Share
from tiny_engine import load, make_engine


def values(families: list) -> dict[str, float]:
    parsed = text_string_to_metric_families(render(families).decode())
    return {
        sample.name + "".join(sample.labels.values()): sample.value for family in parsed for sample in family.samples
    }


def test_counts_become_a_histogram_and_counters_by_position(tiny_target: Path) -> None:
    curve = CostCurve((1, 256), (1.0, 1.0))
    engine = make_engine(load(tiny_target), NGramDraftRunner(NGramDrafter()), curve=curve)
    assert values(schedule_families(engine))["dspark_verify_length_count"] == 0
    counts = engine.stats.schedule
    counts.add_budgets([0, 2, 2])
    counts.add_round([0.9, 0.5], 1)
    counts.add_step(PredictedSeconds(0.25, 0.0, 0.25), 0.75, 0.25)
    found = values(schedule_families(engine))
    within = [found[f"dspark_verify_length_bucket{le}"] for le in ("0.0", "1.0", "2.0", "+Inf")]
    assert within == [1, 1, 3, 3]
    assert (found["dspark_verify_length_sum"], found["dspark_verify_length_count"]) == (4, 3)
    assert [found[f"dspark_position_judged_total{k}"] for k in (0, 1)] == [1, 1]
    assert [found[f"dspark_position_expected_total{k}"] for k in (0, 1)] == pytest.approx([0.9, 0.5])
    assert [found[f"dspark_position_stood_total{k}"] for k in (0, 1)] == [1, 0]
    assert found["dspark_predicted_step_seconds_total"] == 0.5
    assert found["dspark_measured_step_seconds_total"] == 0.75


def link_with(share: Share) -> FleetLink:
    return FleetLink(
        FleetConfig(),
        report=lambda sequence, with_curve: ReplicaReport("r", sequence),
        connect=lambda config: lambda report: Lease(share, 60.0, 1),
    )


def test_a_lease_shows_its_age_and_what_it_bounds() -> None:
    link = link_with(Share(max_drafted=3, capacity=9, floor=2))
    found = values(fleet_families(link))
    assert (found["dspark_fleet_attached"], found["dspark_fleet_fallbacks_total"]) == (0, 0)
    assert "dspark_lease_age_seconds" not in found
    link.exchange_once()
    found = values(fleet_families(link))
    assert found["dspark_fleet_attached"] == 1
    assert 0 <= found["dspark_lease_age_seconds"] < 10
    assert [found[f"dspark_lease_{name}"] for name in ("max_drafted", "capacity", "floor")] == [3, 9, 2]


def test_a_free_lease_shows_no_bounds() -> None:
    link = link_with(Share())
    link.exchange_once()
    found = values(fleet_families(link))
    assert found["dspark_lease_floor"] == 0
    assert "dspark_lease_capacity" not in found
    assert "dspark_lease_max_drafted" not in found
