"""Shares: none where nothing is scarce, else nearly the best use of what is, and a tier's minimum before all."""

import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.drafting_choice import choose_drafting
from dspark.speculation.fleet import (
    FREE,
    DraftSupply,
    ReplicaReport,
    RequestGroup,
    Share,
    _batches,
    allocate_shares,
    summarise,
)
from dspark.speculation.fleet_options import options_of
from fleet_toys import (
    Plan,
    best_by_brute_force,
    followed,
    least_shortfall,
    random_report,
    requests_of,
    step_seconds,
    use,
    worth,
    yields_of,
)

CURVE = CostCurve((1, 8, 64, 512), (0.010, 0.012, 0.018, 0.100), (1, 64), (0.002, 0.006), request_s=0.0001)


def row(confidence: float, num_slots: int = 7) -> tuple[float, ...]:
    return tuple(itertools.accumulate([confidence] * num_slots, lambda a, c: a * c))


def report(name: str, *groups: RequestGroup, **fields: object) -> ReplicaReport:
    return ReplicaReport(name, 1, groups, "c", CURVE, **fields)  # type: ignore[arg-type]


def small_fleet(
    rng: random.Random, tiers: tuple[int, ...] = (0,), *, convex: bool | None = None
) -> list[ReplicaReport]:
    """Few enough plans to try them all. convex: of all curves; None: as it comes."""
    sizes = rng.choice([(2, 3), (3, 3), (1, 2, 2), (2, 3, 1), (1, 2, 3, 2)])
    return [random_report(rng, str(i), num_requests=size, tiers=tiers, convex=convex) for i, size in enumerate(sizes)]


def supply_for(rng: random.Random, reports: list[ReplicaReport]) -> DraftSupply:
    """Drafters that can serve some share of what would be asked of them."""
    table = rng.choice([{}, {"requests": (1, 4), "cost": (1.0, 1.6)}])
    wanted = sum(use(followed(FREE, one), one, DraftSupply(1.0, **table)) for one in reports)
    return DraftSupply(max(1e-3, rng.uniform(0.0, 1.1) * wanted), **table)


def drafting(plans: Sequence[Plan], reports: Sequence[ReplicaReport], supply: DraftSupply) -> float:
    return sum(use(plan, one, supply) for plan, one in zip(plans, reports, strict=True))


def test_what_shares_nothing_and_owes_nothing_is_left_to_its_local_rule() -> None:
    reports = [report("a", RequestGroup(0, 9, row(0.8))), report("b", RequestGroup(0, 2, row(0.3)))]
    assert allocate_shares(reports) == {"a": FREE, "b": FREE}
    assert allocate_shares([]) == {}


@pytest.mark.parametrize("seed", range(20))
def test_with_drafters_enough_and_speed_enough_every_share_is_free(seed: int) -> None:
    rng = random.Random(seed)
    reports = small_fleet(rng, tiers=(0, -1))
    assert all(share == FREE for share in allocate_shares(reports, DraftSupply(1e6), {-1: 1e-6}).values())


def test_500_small_fleets_are_at_most_2_percent_below_every_choice_there_is() -> None:
    """Whoever is drafted for and however much of it is verified: a share leaves both to the local rule's orders."""
    ratios = []
    for seed in range(500):
        rng = random.Random(seed)
        reports = small_fleet(rng)
        supply = supply_for(rng, reports)
        shares = allocate_shares(reports, supply)
        plans = [followed(shares[one.replica_id], one) for one in reports]
        assert drafting(plans, reports, supply) <= supply.per_s * (1 + 1e-9)
        ours = sum(worth(plan, one, {}) for plan, one in zip(plans, reports, strict=True))
        ratios.append(ours / best_by_brute_force(reports, supply))
    assert max(ratios) <= 1 + 1e-9
    assert min(ratios) >= 0.98
    assert sum(ratios) / 500 >= 0.9999


def served(share: Share, report: ReplicaReport) -> Plan:
    """What the very rule of an engine makes of a share, on curves as they are now."""
    assert report.curve is not None
    curve = replace(
        report.curve,
        verify_s=tuple(report.drift * seconds for seconds in report.curve.verify_s),
        draft_s=tuple(report.draft_drift * seconds for seconds in report.curve.draft_s),
    )
    found = choose_drafting(
        [one.survival for one in requests_of(report)],
        curve,
        max_drafted=share.max_drafted,
        capacity=share.capacity,
        floor=share.floor,
    )
    return tuple(n if is_drafted else None for is_drafted, n in zip(found.drafted, found.lengths, strict=True))


@pytest.mark.parametrize(
    ("convex", "most_short", "most_over", "mean"), [(True, 0, 1, 0.9999), (None, 25, 4, 0.997)], ids=["convex", "any"]
)
def test_the_engines_own_rule_makes_of_shares_what_they_were_given_for(
    convex: bool | None, most_short: int, most_over: int, mean: float
) -> None:
    """Where more tokens never get cheaper: to 2 % of the best. On a jagged curve the rule stops early, which keeps
    sampled output exact, and in one fleet of 20 costs more. A step that is shorter for it drafts more often.
    """
    ratios, used = [], []
    for seed in range(500):
        rng = random.Random(seed)
        reports = small_fleet(rng, convex=convex)
        supply = supply_for(rng, reports)
        shares = allocate_shares(reports, supply)
        plans = [served(shares[one.replica_id], one) for one in reports]
        ours = sum(worth(plan, one, {}) for plan, one in zip(plans, reports, strict=True))
        ratios.append(ours / best_by_brute_force(reports, supply))
        used.append(drafting(plans, reports, supply) / supply.per_s)
    assert sum(ratio < 0.98 for ratio in ratios) <= most_short
    assert sum(share > 1.02 for share in used) <= most_over
    assert sum(ratios) / 500 >= mean


@pytest.mark.parametrize("seed", range(20))
def test_a_large_fleet_has_the_first_order_alone_which_is_one_of_a_small_ones(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    batches = _batches(small_fleet(rng), {})
    several = options_of(batches)
    monkeypatch.setattr("dspark.speculation.fleet_options.MOST_ORDERED", 1)
    alone = options_of(batches)
    number = alone.value.shape[1]
    assert several.value.shape[1] == 5 * number
    for name in ("num_drafted", "num_verified", "value"):
        assert np.array_equal(getattr(several, name)[:, :number], getattr(alone, name))


def test_a_tiers_minimum_is_kept_wherever_brute_force_keeps_it() -> None:
    kept = possible = 0
    for seed in range(150):
        rng = random.Random(seed)
        reports = small_fleet(rng, tiers=(0, 0, -1))
        supply = supply_for(rng, reports)
        minimum = {-1: rng.uniform(1.0, 1.6) / max(step_seconds((None,) * len(requests_of(r)), r) for r in reports)}
        shares = allocate_shares(reports, supply, minimum)
        plans = [followed(shares[one.replica_id], one) for one in reports]
        assert drafting(plans, reports, supply) <= supply.per_s * (1 + 1e-9)
        speeds = [
            sum(own) / len(own) / step_seconds(plan, one)
            for plan, one in zip(plans, reports, strict=True)
            if (own := [y for y, r in zip(yields_of(plan, one), requests_of(one), strict=True) if r.tier == -1])
        ]
        if speeds and least_shortfall(reports, supply, minimum) < 1e-9:
            possible += 1
            kept += min(speeds) >= minimum[-1] * 0.98
    assert possible > 50
    assert kept >= 0.95 * possible


def test_scarce_drafters_go_where_a_call_brings_most() -> None:
    busy, quiet = report("busy", RequestGroup(0, 48, row(0.8))), report("quiet", RequestGroup(0, 2, row(0.8)))
    shares = allocate_shares([busy, quiet], DraftSupply(150.0))
    assert shares["quiet"] == Share(max_drafted=2)
    assert 0 <= (shares["busy"].max_drafted or 0) < 10


def test_less_of_the_drafters_is_never_more_for_anybody_in_all() -> None:
    reports = [report(str(n), RequestGroup(0, n, row(0.5 + n / 100))) for n in (2, 9, 24)]
    totals = []
    for per_s in (10.0, 50.0, 200.0, 800.0, 1e5):
        shares = allocate_shares(reports, DraftSupply(per_s))
        totals.append(sum(n if (x := shares[str(n)].max_drafted) is None else x for n in (2, 9, 24)))
    assert totals == sorted(totals)
    assert totals[0] < totals[-1]


def test_a_tier_short_of_its_minimum_gets_weight_and_others_make_way() -> None:
    gold, bulk = RequestGroup(-1, 2, row(0.7)), RequestGroup(0, 40, row(0.7))
    free = allocate_shares([report("a", gold, bulk)], None, {-1: 1.0})["a"]
    assert free == FREE
    share = allocate_shares([report("a", gold, bulk)], None, {-1: 130.0})["a"]
    assert share.weights[-1] > 1
    assert share.capacity is not None or share.max_drafted is not None
    alone = allocate_shares([report("a", gold)], None, {-1: 130.0})["a"]
    assert alone == FREE


def test_tiers_with_higher_minima_weigh_more() -> None:
    groups = RequestGroup(-2, 2, row(0.7)), RequestGroup(-1, 4, row(0.7)), RequestGroup(0, 40, row(0.7))
    weights = allocate_shares([report("a", *groups)], None, {-1: 100.0, -2: 135.0})["a"].weights
    assert weights[-2] > weights[-1] > 1


def test_fixed_lengths_give_way_to_a_share_the_longest_first() -> None:
    assert Share().bound([3, None, 2], [False] * 3) == [3, None, 2]
    assert Share(capacity=4).bound([7, None, 2], [False] * 3) == [2, None, 2]
    assert Share(capacity=0).cut([3, None]) == [0, None]
    assert Share(capacity=-2).cut([3]) == [0]
    assert Share(max_drafted=1).bound([0, 3, 2, None, 4], [False, True, False, False, False]) == [0, 3, 2, None, 0]


def test_weights_are_by_tier_and_none_where_there_are_none() -> None:
    assert Share(weights={-1: 4.0}).weights_for([0, -1]) == [1.0, 4.0]
    assert FREE.weights_for([0, -1]) is None


def test_a_replica_without_a_curve_takes_its_measured_step() -> None:
    flat = [
        ReplicaReport(name, 1, (RequestGroup(0, 4, row(confidence)),), step_s=0.1)
        for name, confidence in (("a", 0.2), ("b", 0.9))
    ]
    shares = allocate_shares(flat, DraftSupply(60.0))
    assert (shares["a"].max_drafted, shares["b"].max_drafted) == (2, 4)
    unknown = ReplicaReport("c", 1, (RequestGroup(0, 4, row(0.9)),))
    assert allocate_shares([*flat, unknown], DraftSupply(60.0))["c"] == FREE  # one step, after which its pace is known


def test_nobody_to_serve_and_nothing_to_hope_for() -> None:
    hopeless = report("h", RequestGroup(0, 3, (0.0, 0.0)))
    shares = allocate_shares([report("idle"), hopeless], DraftSupply(1.0))
    assert shares["idle"] == FREE
    assert shares["h"].max_drafted in (None, 0)


def test_a_summary_keeps_every_request_while_there_is_a_group_for_each() -> None:
    rows = [(0, row(0.9)), (-1, row(0.5, 3)), (0, row(0.2))]
    groups = summarise(rows)
    assert [(group.tier, group.num_requests) for group in groups] == [(-1, 1), (0, 1), (0, 1)]
    assert groups[1].survival == pytest.approx(row(0.9))


def test_a_summary_of_many_is_small_and_keeps_their_mean() -> None:
    rng = random.Random(1)
    rows = [(rng.choice([0, -1]), row(rng.random())) for _ in range(100)]
    groups = summarise(rows)
    assert len(groups) <= 8
    assert sum(group.num_requests for group in groups) == 100
    assert sum(g.num_requests * g.survival[0] for g in groups) == pytest.approx(sum(one[0] for _, one in rows))


def big_fleet(number: int) -> list[ReplicaReport]:
    rng = random.Random(0)
    return [
        ReplicaReport(str(i), 1, summarise([(0, row(rng.uniform(0.2, 0.95))) for _ in range(64)]), "c", CURVE)
        for i in range(number)
    ]


def test_a_thousand_replicas_of_64_requests_take_less_than_a_second() -> None:
    seconds = {}
    for number in (250, 1000):
        reports, times = big_fleet(number), []
        for _ in range(3):
            started = time.process_time()
            shares = allocate_shares(reports, DraftSupply(150.0 * number))
            times.append(time.process_time() - started)
        seconds[number] = min(times)
        assert any(share.max_drafted for share in shares.values())
    assert seconds[1000] < 1.0
    assert seconds[1000] < 6 * seconds[250]  # linear, with room for a busy machine
