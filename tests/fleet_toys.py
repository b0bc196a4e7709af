"""Small random fleets, and what they can do by trying everything."""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import numpy as np

from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.drafting_choice import DEAR_SLOTS
from dspark.speculation.fleet import DraftSupply, ReplicaReport, RequestGroup, Share
from scheduling_toys import random_curve

PENALTY = 20.0
Plan = tuple[int | None, ...]  # per request: draft tokens verified, None where it is not drafted for


def random_report(
    rng: random.Random,
    name: str,
    *,
    num_requests: int,
    num_slots: int = 3,
    tiers: Sequence[int] = (0,),
    convex: bool | None = None,
) -> ReplicaReport:
    """Requests that each fare in their own way, on a curve of their replica's own: convex, jagged or in stairs.

    convex: always; None: as it comes.
    """
    groups = []
    for _ in range(num_requests):
        confidences = [rng.uniform(0.1, 0.98) for _ in range(rng.randint(1, num_slots))]
        survival = tuple(itertools.accumulate(confidences, lambda a, c: a * c))
        groups.append(RequestGroup(rng.choice(tiers), 1, survival))
    curve = random_curve(
        rng, 16, convex=convex or rng.random() < 0.5, buckets=() if convex else rng.choice([(), (), (2, 4, 8, 16)])
    )
    drift, draft_drift = rng.choice([0.8, 1.0, 1.3]), rng.choice([0.5, 1.0, 2.0])
    return ReplicaReport(name, 1, tuple(groups), name, curve, drift=drift, draft_drift=draft_drift)


def requests_of(report: ReplicaReport) -> list[RequestGroup]:
    return [group for group in report.groups for _ in range(group.num_requests)]


def yields_of(plan: Plan, report: ReplicaReport) -> list[float]:
    return [1.0 + sum(one.survival[: length or 0]) for one, length in zip(requests_of(report), plan, strict=True)]


def step_seconds(plan: Plan, report: ReplicaReport) -> float:
    assert report.curve is not None
    tokens = len(plan) + sum(length or 0 for length in plan) + report.prefill_tokens
    others_s = (len(plan) - 1) * report.curve.request_s
    verify_s = report.drift * (_verify_seconds(report.curve, tokens) + others_s)
    return verify_s + report.draft_drift * _draft_seconds(report.curve, drafted(plan))


@lru_cache(maxsize=4096)
def _verify_seconds(curve: CostCurve, tokens: float) -> float:
    return curve.verify_seconds(tokens)


@lru_cache(maxsize=4096)
def _draft_seconds(curve: CostCurve, requests: int) -> float:
    return curve.draft_seconds(requests)


def drafted(plan: Plan) -> int:
    return sum(length is not None for length in plan)


def worth(plan: Plan, report: ReplicaReport, minimum: Mapping[int, float]) -> float:
    """Tokens per second, less the penalty of users who are below their minimum."""
    return sum(yields_of(plan, report)) / step_seconds(plan, report) - PENALTY * shortfall(plan, report, minimum)


def shortfall(plan: Plan, report: ReplicaReport, minimum: Mapping[int, float]) -> float:
    """Tokens per second that tiers miss, each on the mean of its users here."""
    missed, step_s = 0.0, step_seconds(plan, report)
    for tier, speed in minimum.items():
        pairs = zip(requests_of(report), yields_of(plan, report), strict=True)
        own = [tokens for one, tokens in pairs if one.tier == tier]
        missed += max(0.0, len(own) * speed - sum(own) / step_s)
    return missed


def use(plan: Plan, report: ReplicaReport, supply: DraftSupply) -> float:
    """What the drafters do for it, per second."""
    number = drafted(plan)
    cost = float(np.interp(number, supply.requests, supply.cost)) if supply.requests else float(number)
    return cost / step_seconds(plan, report) if number else 0.0


def every_plan(report: ReplicaReport) -> list[Plan]:
    return list(itertools.product(*[(None, *range(len(one.survival) + 1)) for one in requests_of(report)]))


def best_by_brute_force(
    reports: Sequence[ReplicaReport], supply: DraftSupply, minimum: Mapping[int, float] | None = None
) -> float:
    """The highest total worth of all plans of all replicas that the drafters can serve."""
    return _best(reports, supply, lambda plan, report: worth(plan, report, minimum or {}))


def least_shortfall(reports: Sequence[ReplicaReport], supply: DraftSupply, minimum: Mapping[int, float]) -> float:
    """What tiers must miss, whatever is done."""
    return -_best(reports, supply, lambda plan, report: -shortfall(plan, report, minimum))


def _best(
    reports: Sequence[ReplicaReport],
    supply: DraftSupply,
    score: Callable[[Plan, ReplicaReport], float],
) -> float:
    total, used = np.zeros(1), np.zeros(1)
    for report in reports:
        plans = every_plan(report)
        total = np.add.outer(total, [score(plan, report) for plan in plans]).ravel()
        used = np.add.outer(used, [use(plan, report, supply) for plan in plans]).ravel()
        order = np.lexsort((-total, used))
        order = order[used[order] <= supply.per_s]
        before = np.maximum.accumulate(np.concatenate(([-np.inf], total[order][:-1])))
        order = order[total[order] > before]  # what uses more and scores less is part of no best combination
        total, used = total[order], used[order]
    return float(total.max())


def followed(share: Share, report: ReplicaReport) -> Plan:
    """The plan of the highest weighted rate within a share, requests being taken in the orders of the local rule."""
    weights = [share.weights.get(one.tier, 1.0) for one in requests_of(report)]
    plans = [plan for plan in ranked_plans(report, weights) if is_within(share, plan)]
    floor = min(share.floor, max(map(num_verified, plans)))

    def rate(plan: Plan) -> float:
        weighted = [w * tokens for w, tokens in zip(weights, yields_of(plan, report), strict=True)]
        return sum(weighted) / step_seconds(plan, report)

    return max((plan for plan in plans if num_verified(plan) >= floor), key=rate)


def ranked_plans(report: ReplicaReport, weights: Sequence[float] | None = None) -> list[Plan]:
    """Every number of requests drafted for, by hope at several prices, and of their slots, by weighted survival."""
    requests = requests_of(report)
    weights = [1.0] * len(requests) if weights is None else weights
    plans: dict[Plan, None] = {}
    for order in _orders(report, requests, weights):
        for number in range(len(requests) + 1):
            chosen = set(order[:number])
            ranked = sorted((-weights[r] * a, k, r) for r in chosen for k, a in enumerate(requests[r].survival))
            for stop in range(len(ranked) + 1):
                verified = [r for _, _, r in ranked[:stop]]
                plans[tuple(verified.count(r) if r in chosen else None for r in range(len(requests)))] = None
    return list(plans)


def _orders(report: ReplicaReport, requests: Sequence[RequestGroup], weights: Sequence[float]) -> list[list[int]]:
    """As `choose_drafting` says: at the price that the curve puts on a slot, at those of dear slots, and at none."""
    most: Plan = tuple(len(one.survival) for one in requests)
    none: Plan = (None,) * len(requests)
    rows = [[w * a for a in one.survival] for one, w in zip(requests, weights, strict=True)]
    slots = sorted(itertools.chain.from_iterable(rows), reverse=True)
    rise_s = step_seconds(most, report) - step_seconds((0,) * len(requests), report)
    curves_own = rise_s / len(slots) * sum(weights) / step_seconds(none, report)
    orders = []
    for price in (curves_own, *(slots[len(slots) // part] for part in DEAR_SLOTS), 0.0):
        hope = [sum(max(0.0, a - price) for a in row) for row in rows]
        orders.append(sorted(range(len(requests)), key=lambda r: (-hope[r], -sum(rows[r]))))
    return orders


def num_verified(plan: Plan) -> int:
    return sum(length or 0 for length in plan)


def is_within(share: Share, plan: Plan) -> bool:
    is_drafted = share.max_drafted is None or drafted(plan) <= share.max_drafted
    return is_drafted and (share.capacity is None or num_verified(plan) <= share.capacity)
