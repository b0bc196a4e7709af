"""What a run on shared drafters tells: drift without the queue, how busy the drafter was, and every user's minimum."""

from collections import Counter
from typing import Any

import pytest

from dspark.speculation.cost_curve import CostCurve

CURVE = CostCurve((1, 64), (0.010, 0.030), (1, 3), (0.002, 0.004))
NOTHING: dict[str, float] = {}


@pytest.fixture
def fleet_figures(script: Any) -> Any:
    return script("fleet_figures")


def target(*, steps: int, drafted: int, verify_s: float, waited_s: float, real: float = 1.0) -> dict[str, float]:
    """Counters of a replica all of whose steps draft for as many requests, and take `real` times what they should."""
    draft_s = CURVE.draft_seconds(drafted)
    return {
        "steps_total": steps,
        "draft_link_messages_total": steps + 3,
        "drafted_decodes_total": steps * drafted - 1,
        "draft_link_undrafted_total": 1,
        "predicted_step_seconds_total": steps * (verify_s + draft_s),
        "measured_step_seconds_total": steps * (real * verify_s + waited_s),
        "draft_link_wait_seconds_total": steps * waited_s,
        "step_seconds_total": steps * (real * verify_s + waited_s),
    }


def period(fleet_figures: Any, *targets: dict[str, float], seconds: float = 10.0, **drafts: float) -> Any:
    begin = fleet_figures.Snapshot(0.0, tuple(NOTHING for _ in targets))
    return fleet_figures.Period(begin, fleet_figures.Snapshot(seconds, targets, drafts, num_drafts=1))


@pytest.mark.parametrize("waited_s", [0.004, 0.050])
def test_drift_is_of_the_targets_part_however_long_the_drafters_queue(fleet_figures: Any, waited_s: float) -> None:
    low = target(steps=300, drafted=1, verify_s=0.010, waited_s=waited_s, real=1.2)
    high = target(steps=100, drafted=3, verify_s=0.025, waited_s=waited_s, real=1.2)
    assert fleet_figures.drift_of(period(fleet_figures, low, high), CURVE) == pytest.approx(1.2)


def test_a_simulation_is_told_of_each_replica_what_is_read_and_what_a_call_takes(fleet_figures: Any) -> None:
    low = target(steps=300, drafted=1, verify_s=0.010, waited_s=0.005, real=1.2) | {"prompt_tokens_total": 40.0}
    high = target(steps=100, drafted=3, verify_s=0.025, waited_s=0.007, real=1.5) | {"requests_total": 8.0}
    found = fleet_figures.circumstances(period(fleet_figures, low, high), CURVE)
    assert found["drift"] == pytest.approx([1.2, 1.5])
    assert found["read_tokens"] == 5.0
    assert found["call_ms"] == pytest.approx(3.0, rel=0.01)
    quick = target(steps=300, drafted=1, verify_s=0.010, waited_s=0.001)
    assert fleet_figures.circumstances(period(fleet_figures, quick), CURVE)["call_ms"] == 0.0
    assert fleet_figures.circumstances(period(fleet_figures, low), None)["call_ms"] == 0.0


def test_beside_the_target_drafting_is_in_both(fleet_figures: Any) -> None:
    own = {"predicted_step_seconds_total": 2.0, "measured_step_seconds_total": 3.0, "drafted_decodes_total": 50.0}
    assert fleet_figures.drift_of(period(fleet_figures, own), None) == 1.5


def test_without_a_curve_there_is_no_drift(fleet_figures: Any) -> None:
    with pytest.raises(ValueError, match="no cost curve"):
        fleet_figures.drift_of(period(fleet_figures, {"steps_total": 5.0}), CURVE)


def test_only_what_was_counted_in_between_counts(fleet_figures: Any) -> None:
    first = fleet_figures.Snapshot(0.0, ({"steps_total": 7.0},))
    last = fleet_figures.Snapshot(2.0, ({"steps_total": 10.0, "decodes_total": 4.0},))
    (between,) = fleet_figures.periods([first, last])
    assert between.targets == [{"steps_total": 3.0, "decodes_total": 4.0}]


def test_a_drafter_that_is_always_in_a_pass_is_saturated(fleet_figures: Any) -> None:
    own = target(steps=100, drafted=2, verify_s=0.010, waited_s=0.010)
    found = fleet_figures.speculation_figures(period(fleet_figures, own, draft_s=9.0, drafted=200, batches=100))
    assert found["drafters_busy"] == 0.9
    assert found["blocks_a_pass"] == 2.0
    assert found["waited"] == pytest.approx(0.5)


def test_a_minimum_kept_in_the_mean_may_be_missed_by_a_user(fleet_figures: Any) -> None:
    spoilt = Counter({0: 20, 1: 20, 2: 20, 3: 20})
    poor = Counter({0: 4, 1: 4, 2: 12, 3: 12})
    seen = [fleet_figures.Seen(owed=[spoilt, poor]), fleet_figures.Seen()]
    found = fleet_figures.minimum_figures(seen, range(4), 10.0)
    assert found == {"minimum_kept": 1.0, "minimum_kept_each": 0.75, "minimum_kept_worst": 0.5}
