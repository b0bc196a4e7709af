"""What replicas may draft when they share drafters or owe a speed to some users: a pure function, reports to shares.

Legend: replica i drafts for x_i of its R_i requests, verifies n_i draft tokens and commits tau_i in a step of T_i
seconds; cost(x) is what a call for x blocks costs the shared drafters, S what they do per second; v_{i,t} = tokens per
second of one user of tier t.

    maximise    sum_i tau_i / T_i  -  PENALTY * sum_{i,t} users_{i,t} * max(0, minimum_t - v_{i,t})
    subject to  sum_i cost(x_i) / T_i <= S

Source: ALGORITHMS "Fleet". A price on drafting, found by bisection, lets every replica choose alone among options
(x, n, weight of the tiers): O(replicas * options). Where nothing is scarce each share leaves all to the local rule.
Everything here is known before a token is drawn, so no share can change what is output, only how fast.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.fleet_options import Batches, Indices, Options, drafting_cost, options_of, tier_ranks
from dspark.speculation.shared_capacity import choose_within

WEIGHTS = (1.0, 2.0, 4.0, 16.0, 256.0)
"""Of a tier with a minimum, against requests without one; the tier with the next higher minimum has the square. All but
the first are tried only where somebody stays below a minimum."""
MAX_GROUPS = 8
ROUNDING = 1e-9  # of a rate: a weight that changes nothing is not given


@dataclass(frozen=True)
class RequestGroup:
    """Requests of one tier that fare alike. tier: their priority; survival: of one's next draft tokens, by slot."""

    tier: int
    num_requests: int
    survival: tuple[float, ...]


@dataclass(frozen=True)
class ReplicaReport:
    """How a replica fares. sequence rises with each report of one replica.

    groups: its running requests. curve: what its steps cost, needed once per curve_id; a replica that has none ("")
    takes step_s for every step. step_s: seconds of a step, of late; 0 before the first. drift: measured seconds over
    those the curve predicts for contexts as long as measured at, of late, of a step without its drafting; draft_drift:
    of its drafting. prefill_tokens: of prompts, per step, of late.
    """

    replica_id: str
    sequence: int
    groups: tuple[RequestGroup, ...] = ()
    curve_id: str = ""
    curve: CostCurve | None = None
    step_s: float = 0.0
    drift: float = 1.0
    draft_drift: float = 1.0
    prefill_tokens: float = 0.0

    @property
    def num_running(self) -> int:
        return sum(group.num_requests for group in self.groups)


@dataclass(frozen=True)
class DraftSupply:
    """Drafters that replicas share. per_s: what they do per second, in the unit of cost.

    requests, cost: a call for so many blocks costs so much, interpolated; without them each block costs 1. With the
    measured seconds of a call as cost, per_s is the number of drafters.
    """

    per_s: float
    requests: tuple[int, ...] = ()
    cost: tuple[float, ...] = ()


@dataclass(frozen=True)
class Share:
    """Bounds on a replica's steps; without any of them the local rule decides everything.

    max_drafted: requests to draft for. capacity: draft tokens, drafted or copied, that are verified. floor: draft
    tokens that are verified by rank without asking the curve. weights: of a tier's tokens, by priority; others have 1.
    """

    max_drafted: int | None = None
    capacity: int | None = None
    floor: int = 0
    weights: Mapping[int, float] = field(default_factory=dict)

    def bound(self, lengths: Sequence[int | None], is_copied: Sequence[bool]) -> list[int | None]:
        """Fixed lengths within both bounds, None being an open one: the first requests are drafted for, the rest not.

        is_copied: per request, whether nothing has to be drafted for its length.
        """
        if self.max_drafted is None:
            return self.cut(lengths)
        num_drafted, kept = 0, list(lengths)
        for i, (length, copied) in enumerate(zip(lengths, is_copied, strict=True)):
            if length and not copied:
                is_over = num_drafted >= self.max_drafted
                kept[i] = 0 if is_over else length
                num_drafted += not is_over
        return self.cut(kept)

    def cut(self, lengths: Sequence[int | None]) -> list[int | None]:
        """Lengths whose sum is within the capacity, None being an open one: the longest give way first."""
        kept = list(lengths)
        if self.capacity is None:
            return kept
        slots = sorted((k, i) for i, length in enumerate(kept) for k in range(length or 0))
        for k, i in slots[max(0, self.capacity) :]:
            kept[i] = min(k, kept[i] or 0)
        return kept

    def weights_for(self, tiers: Iterable[int]) -> list[float] | None:
        """What a token of each request counts; None where all count alike."""
        return [self.weights.get(tier, 1.0) for tier in tiers] if self.weights else None


FREE = Share()


@dataclass(frozen=True)
class Lease:
    """A share that holds for ttl_s seconds.

    epoch: of the scheduler that gave it; a lease with a lower epoch than the newest is void. report_every_s: how often
    the scheduler can listen. wants_curve: it has forgotten what this replica's curve_id stands for.
    """

    share: Share
    ttl_s: float
    epoch: int
    report_every_s: float = 0.0
    wants_curve: bool = False


def allocate_shares(
    reports: Sequence[ReplicaReport], supply: DraftSupply | None = None, minimum: Mapping[int, float] | None = None
) -> dict[str, Share]:
    """A share per replica id. supply: None where every replica drafts on its own hardware.

    minimum: tokens per second that a tier's users get, in the mean over a replica's and as far as that can be, by tier.
    A replica without requests, or of which no step was seen nor a curve is known, is left to its local rule.
    """
    shares = {report.replica_id: FREE for report in reports}
    minimum = dict(minimum or {})
    known = [report for report in reports if report.num_running and (report.curve is not None or report.step_s > 0)]
    if not known or (supply is None and not minimum):
        return shares
    batches = _batches(known, minimum)
    tables = [options_of(batches)]
    chosen, price = _choose(tables, supply)
    is_short = _is_short(tables[0], chosen)
    if is_short.any():
        tables += [options_of(batches, weight) for weight in WEIGHTS[1:]]
        tables[0].value[is_short] = -np.inf  # without weights whoever is drafted for would be so by luck
        chosen, price = _choose(tables, supply)
    num_options, ranks = tables[0].value.shape[1], tier_ranks(minimum)
    for i, report in enumerate(known):
        level, option = divmod(int(chosen[i]), num_options)
        weights = {tier: WEIGHTS[level] ** rank for tier, rank in ranks.items()} if level else {}
        shares[report.replica_id] = _share(tables[level], i, option, weights, is_scarce=price > 0)
    return shares


def _choose(tables: Sequence[Options], supply: DraftSupply | None) -> tuple[Indices, float]:
    """An option of one of the tables for each replica, [N], and the price of drafting."""
    value = np.concatenate([t.value - n * ROUNDING * t.rate for n, t in enumerate(tables)], axis=1)
    if supply is None:
        return np.argmax(value, axis=1), 0.0
    usage = [drafting_cost(t.num_drafted, supply.requests, supply.cost) / t.step_s for t in tables]
    return choose_within(value, np.concatenate(usage, axis=1), supply.per_s)


def _is_short(table: Options, chosen: Indices) -> NDArray[np.bool_]:
    """Which replicas leave a tier below its minimum: [N]."""
    rows = np.arange(len(chosen))
    return table.value[rows, chosen] < table.rate[rows, chosen] * (1 - ROUNDING)


def summarise(rows: Iterable[tuple[int, Sequence[float]]], *, max_groups: int = MAX_GROUPS) -> tuple[RequestGroup, ...]:
    """Groups of requests that are given as (tier, survival): of each tier, those that hope for about as much.

    Few groups keep a report small whatever the load; their survival is the mean, and with no more requests than
    groups nothing is lost.
    """
    by_tier: dict[int, list[Sequence[float]]] = {}
    for tier, survival in rows:
        by_tier.setdefault(tier, []).append(survival)
    groups = []
    for tier, members in sorted(by_tier.items()):
        members.sort(key=sum, reverse=True)
        num_parts = min(len(members), max(1, max_groups // len(by_tier)))
        for part in np.array_split(np.arange(len(members)), num_parts):
            own = [members[k] for k in part]
            width = max(map(len, own))
            padded = np.zeros((len(own), width))
            for row, survival in zip(padded, own, strict=True):
                row[: len(survival)] = survival
            groups.append(RequestGroup(tier, len(own), tuple(padded.mean(axis=0).tolist())))
    return tuple(groups)


def _batches(reports: Sequence[ReplicaReport], minimum: Mapping[int, float]) -> Batches:
    """The reports as arrays, short ones padded with groups of nobody. Of equals those without a minimum come first."""
    ranks = tier_ranks(minimum)
    num_groups = max(len(report.groups) for report in reports)
    num_slots = max(1, max(len(group.survival) for report in reports for group in report.groups))
    count = np.zeros((len(reports), num_groups), dtype=np.int64)
    tier = np.zeros((len(reports), num_groups), dtype=np.int64)
    survival = np.zeros((len(reports), num_groups, num_slots))
    for i, report in enumerate(reports):
        for g, group in enumerate(sorted(report.groups, key=lambda group: ranks.get(group.tier, 0))):
            count[i, g], tier[i, g] = group.num_requests, group.tier
            survival[i, g, : len(group.survival)] = group.survival
    return Batches(
        count=count,
        survival=np.minimum.accumulate(np.clip(survival, 0.0, 1.0), axis=2),
        tier=tier,
        minimum=minimum,
        curves=[_curve(report) for report in reports],
        drift=np.array([report.drift if report.curve is not None else 1.0 for report in reports]),
        draft_drift=np.array([report.draft_drift for report in reports]),
        prefill_tokens=np.array([report.prefill_tokens for report in reports]),
    )


def _curve(report: ReplicaReport) -> CostCurve:
    return report.curve or CostCurve((1,), (report.step_s,))


def _share(table: Options, i: int, option: int, weights: Mapping[int, float], *, is_scarce: bool) -> Share:
    """What keeps replica i's own rule, with these weights, at the option: nothing where it would be there anyway."""
    num_drafted, num_verified = int(table.num_drafted[i, option]), int(table.num_verified[i, option])
    own = int(np.argmax(table.weighted_rate[i]))
    alike = np.flatnonzero(table.num_drafted[i] == num_drafted)
    own_verified = int(table.num_verified[i, alike[np.argmax(table.weighted_rate[i, alike])]])
    is_bound = is_scarce or num_drafted != table.num_drafted[i, own]
    return Share(
        max_drafted=num_drafted if is_bound else None,
        capacity=num_verified if num_verified < own_verified else None,
        floor=num_verified if num_verified > own_verified else 0,
        weights=weights,
    )
