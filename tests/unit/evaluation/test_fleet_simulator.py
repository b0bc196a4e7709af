"""Simulated fleets: what must come out where it can be said beforehand, and what the central view is for."""

import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from dspark.engine.curve_correction import RESTED
from dspark.evaluation.fleet_comparison import (
    beside_measured,
    compare,
    policies,
    sections,
    shared_drafters,
    simulate,
    sweep,
)
from dspark.evaluation.fleet_simulator import Drafters, FleetSetup, FleetSimulator
from dspark.evaluation.simulated_rounds import RoundPool, modelled_rounds
from dspark.evaluation.simulated_rules import Policy
from dspark.serving.config import FleetConfig
from dspark.serving.scheduler_actor import FleetScheduler
from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.draft_supply import LEAST_CALLS
from dspark.speculation.fleet import DraftSupply
from dspark.speculation.fleet_options import drafting_cost

CURVE = CostCurve(
    (1, 8, 64, 256, 1024), (0.010, 0.0105, 0.014, 0.030, 0.110), (1, 8, 64), (0.0025, 0.003, 0.006), request_s=2e-5
)
PLAIN, LOCAL, FLEET = Policy("plain", "static", 0), Policy("local", "local"), Policy("fleet", "fleet")
RUN: dict[str, Any] = {"seconds": 3.0, "warmup_s": 1.0}


@pytest.fixture(scope="module")
def pool() -> RoundPool:
    return modelled_rounds(np.random.default_rng(0))


def unequal(num_drafters: int, number: int = 64) -> FleetSetup:
    """Half the replicas at two requests, half at 32, and few drafters for all."""
    supply = shared_drafters(CURVE, num_drafters)
    return FleetSetup(CURVE, (2, 32) * (number // 2), supply=supply, num_drafters=num_drafters)


def test_plain_decoding_is_one_token_per_request_and_step(pool: RoundPool) -> None:
    row = simulate(FleetSetup(CURVE, (8,)), PLAIN, pool, seconds=5.0, warmup_s=1.0)
    expected = 8 / (CURVE.verify_seconds(8) + 7 * CURVE.request_s)
    assert row["tokens_per_s"] == pytest.approx(expected, rel=0.01)
    assert row["user_tokens_per_s"] == pytest.approx(expected / 8, rel=0.01)
    assert (row["verify_length"], row["drafted_share"], row["round_tokens"]) == (0.0, 0.0, pytest.approx(1.0))


def test_a_fixed_length_commits_the_pools_own_accepted_length(pool: RoundPool) -> None:
    row = simulate(FleetSetup(CURVE, (4,)), Policy("s", "static", 7), pool, seconds=20.0, warmup_s=0.0)
    assert row["verify_length"] == 7.0
    per_answer = 1 + pool.accepted.reshape(len(pool.first), -1).mean(axis=1)
    rounds_per_answer = pool.tokens / per_answer  # hard answers take more of the time
    assert row["round_tokens"] == pytest.approx(pool.tokens.mean() / rounds_per_answer.mean(), rel=0.06)
    step_s = CURVE.verify_seconds(4 * 8) + 3 * CURVE.request_s + CURVE.draft_seconds(4)
    assert row["tokens_per_s"] == pytest.approx(4 * row["round_tokens"] / step_s, rel=0.02)


def test_slower_steps_make_fewer_tokens(pool: RoundPool) -> None:
    fast, slow = (simulate(FleetSetup(CURVE, (8,), drift=drift), PLAIN, pool, **RUN) for drift in (1.0, 2.0))
    assert slow["tokens_per_s"] == pytest.approx(fast["tokens_per_s"] / 2, rel=0.02)


def test_each_replica_may_drift_by_itself(pool: RoundPool) -> None:
    row = simulate(FleetSetup(CURVE, (8, 8), drift=(1.0, 2.0)), PLAIN, pool, **RUN)
    fast, slow = row["replica_tokens_per_s"]
    assert slow == pytest.approx(fast / 2, rel=0.02)
    with pytest.raises(ValueError, match="drift has 3 entries and concurrency 2; give one for each replica"):
        FleetSetup(CURVE, (8, 8), drift=(1.0, 2.0, 3.0))


def test_waiting_that_was_seen_once_is_forgotten_as_the_engine_forgets_it(pool: RoundPool) -> None:
    simulator = FleetSimulator(unequal(1, number=2), LOCAL, pool)
    rows, drafted = np.array([0, 1]), np.array([0, 2])
    simulator._wait_s[:] = 0.1
    simulator._wait(rows, drafted)
    assert simulator._wait_s[0] == pytest.approx(0.1 * RESTED)
    assert 0.09 < simulator._wait_s[1] < 0.1  # no wait this time, and the drafter is asked at once


def test_reading_prompts_costs_time(pool: RoundPool) -> None:
    rows = [simulate(FleetSetup(CURVE, (16,), prompt_tokens=n), PLAIN, pool, **RUN) for n in (0, 300)]
    assert rows[1]["tokens_per_s"] < 0.95 * rows[0]["tokens_per_s"]


def test_requests_that_arrive_at_random_are_all_served(pool: RoundPool) -> None:
    setup = FleetSetup(CURVE, (32,) * 8, rates=(4.0,) * 8)
    row = simulate(setup, LOCAL, pool, seconds=9.0, warmup_s=3.0)
    assert row["tokens_per_s"] == pytest.approx(8 * 4.0 * pool.tokens.mean(), rel=0.2)


def test_budgets_fall_with_load_and_local_rules_are_no_worse_than_the_best_static_length(pool: RoundPool) -> None:
    every = [one for one in policies(7) if one.name in ("plain", "static 1", "static 3", "static 7", "local")]
    swept = sweep(FleetSetup(CURVE, (1,) * 4), every, pool, [1, 8, 64], seconds=4.0, warmup_s=2.0)
    budgets = [row["verify_length"] for row in swept["local"]]
    assert all(more > less for more, less in pairwise(budgets))
    for k in range(3):
        best = max(rows[k]["tokens_per_s"] for name, rows in swept.items() if name != "local")
        assert swept["local"][k]["tokens_per_s"] > 0.95 * best
    assert "data:image/png" in "".join(sections([], swept, "note"))


def test_the_fleet_rule_is_the_local_one_where_nothing_is_shared(pool: RoundPool) -> None:
    setup = FleetSetup(CURVE, (2, 32))
    local, fleet = (simulate(setup, policy, pool, **RUN) for policy in (LOCAL, FLEET))
    assert {**fleet, "policy": ""} == {**local, "policy": ""}


def test_the_lagged_rule_is_close_to_the_local_one(pool: RoundPool) -> None:
    local, lagged = (
        simulate(FleetSetup(CURVE, (8,)), policy, pool, seconds=10.0, warmup_s=1.0)
        for policy in (LOCAL, Policy("lagged", "lagged"))
    )
    assert lagged["tokens_per_s"] == pytest.approx(local["tokens_per_s"], rel=0.05)


def test_64_replicas_on_saturated_drafters_gain_a_tenth_over_local_rules(pool: RoundPool) -> None:
    """Over the better of the two local ones: one counts what it waits for drafters as the cost that it is."""
    every = [PLAIN, LOCAL, Policy("blind", "local", sees_wait=False), FLEET]
    setup = unequal(4)
    speed = {row["policy"]: row["tokens_per_s"] for row in compare(setup, every, pool, seconds=2.0, warmup_s=0.5)}
    assert speed["fleet"] >= 1.1 * max(speed["local"], speed["blind"])
    assert speed["fleet"] >= 1.1 * speed["plain"]


def test_a_tiers_minimum_is_kept_in_99_percent_of_windows_where_local_rules_miss_it(pool: RoundPool) -> None:
    minimum = {-1: 90.0}
    tiers = tuple((-1,) * 8 + (0,) * 40 for _ in range(12))
    setup = FleetSetup(CURVE, (48,) * 12, tiers=tiers, minimum=minimum)
    local, fleet = (simulate(setup, policy, pool, seconds=8.0, warmup_s=1.0) for policy in (LOCAL, FLEET))
    assert fleet["kept"] >= 0.99
    assert local["kept"] < 0.7
    assert fleet["tokens_per_s"] > 0.93 * local["tokens_per_s"]


def test_calls_queue_for_the_drafter_that_is_free_first() -> None:
    drafters = Drafters(DraftSupply(2.0, (1, 11), (0.1, 1.1)), 2)
    now, sizes = np.array([0.0, 0.0, 0.05, 0.02]), np.array([1, 11, 1, 0])
    assert drafters.wait(now, sizes) == pytest.approx([0.0, 0.0, 0.05, 0.0])


def test_simulated_drafters_offer_what_draft_replicas_offer(pool: RoundPool) -> None:
    """Both say what their calls took, and the actor's way of putting offers together is the simulator's."""
    simulator = FleetSimulator(unequal(3, number=6), FLEET, pool)
    drafters = simulator._drafters
    assert drafters is not None
    before, by_curve = drafters.offered(1.0), shared_drafters(CURVE, 3)
    assert before is not None
    assert by_curve is not None
    assert (before.requests, before.per_s) == (by_curve.requests, by_curve.per_s)
    assert before.cost == pytest.approx(by_curve.cost)
    simulator.run(0.5)
    one, together = drafters._calls.supply(), drafters.offered(FleetConfig().max_draft_load)
    assert drafters._calls.num_calls > LEAST_CALLS
    assert one is not None
    assert together is not None
    scheduler = FleetScheduler(FleetConfig(), cpu_clock=lambda: 0.0)
    for name in ("a", "b", "c"):
        scheduler.take_offer(name, one, now=0.0)
    assert scheduler._supply() == together
    assert together.per_s == pytest.approx(3 * FleetConfig().max_draft_load)
    sizes = np.arange(1, 17)
    told = drafting_cost(sizes, together.requests, together.cost)
    # A mean per range of sizes, and straight lines from one to the next.
    assert told == pytest.approx(drafting_cost(sizes, CURVE.draft_requests, CURVE.draft_s), rel=0.05)


def test_equal_seeds_are_equal_runs(pool: RoundPool) -> None:
    setup = unequal(2, number=4)
    first, again, other = (simulate(setup, FLEET, pool, **RUN, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


def test_200_replicas_take_seconds(pool: RoundPool) -> None:
    started = time.process_time()
    FleetSimulator(unequal(12, number=200), FLEET, pool).run(0.5)
    assert time.process_time() - started < 10.0


def test_a_prediction_stands_beside_what_was_measured(pool: RoundPool) -> None:
    row = simulate(FleetSetup(replace(CURVE), (8,)), LOCAL, pool, **RUN)
    ratios = beside_measured(row, {"tokens_per_s": row["tokens_per_s"] / 2, "verify_length": 0.0, "unknown": 3.0})
    assert ratios == {"tokens_per_s": pytest.approx(2.0)}
