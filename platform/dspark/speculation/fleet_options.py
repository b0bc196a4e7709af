"""What every replica of a fleet could do with its next step, as arrays.

Legend: N replicas, G groups of like requests, K slots of a block, C sets of requests drafted, of every number in some
orders, L numbers of draft tokens verified, S = G*K ranked slots. An option is a pair (c, l); there are C*L of each
replica.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.drafting_choice import DEAR_SLOTS

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

PENALTY = 20.0  # tokens per second given up at most to bring one user a token per second nearer to the minimum
NUM_DRAFTED_TRIED = 17  # all of 0..16 requests; of more, so many numbers evenly spread
NUM_VERIFIED_TRIED = 33
MOST_ORDERED = 128  # replicas whose requests are put in several orders: it takes five times as long


@dataclass(frozen=True)
class Batches:
    """The running requests of N replicas. count: [N, G]; survival: [N, G, K], non-increasing in K.

    tier: [N, G]; minimum: tokens per second owed to a tier's users. curves, drift, draft_drift, prefill_tokens: [N],
    what a step costs, see `ReplicaReport`.
    """

    count: Indices
    survival: Floats
    tier: Indices
    minimum: Mapping[int, float]
    curves: Sequence[CostCurve]
    drift: Floats
    draft_drift: Floats
    prefill_tokens: Floats


@dataclass(frozen=True)
class Options:
    """[N, C*L] each. rate: tokens per second; weighted_rate: the same with the tiers' weights, which the local rule
    maximises; value: rate less the penalty of users below their minimum. Equal options are there more than once."""

    num_drafted: Indices
    num_verified: Indices
    step_s: Floats
    rate: Floats
    weighted_rate: Floats
    value: Floats


def options_of(batches: Batches, weight: float = 1.0) -> Options:
    """All options of all replicas, requests being taken in the orders that the local rule tries.

    weight: of the tier with the lowest minimum against requests without one; its square that of the next one.
    """
    ranks = tier_ranks(batches.minimum)
    is_own = {tier: (batches.tier == tier) & (batches.count > 0) for tier in ranks}
    weights = np.ones(batches.tier.shape)
    for tier, rank in ranks.items():
        weights[is_own[tier]] = weight**rank
    num_requests = batches.count.sum(axis=1)
    drafted = _drafted(batches, weights)  # [N, C, G]
    slots = batches.survival.transpose(0, 2, 1)  # slot by slot: a stable sort keeps ties in that order
    weighted_slots = (weights[:, None, :] * slots).reshape(len(weights), -1)
    ranked = np.argsort(-weighted_slots, axis=1, kind="stable")
    survival = np.take_along_axis(slots.reshape(len(weights), -1), ranked, axis=1)  # [N, S]
    group = ranked % batches.count.shape[1]
    width = np.take_along_axis(drafted, group[:, None, :].repeat(drafted.shape[1], axis=1), axis=2)  # [N, C, S]
    width = width * (survival > 0)[:, None, :]  # beyond a block's end there is nothing to verify
    num_verified = _levels(width.sum(axis=2), NUM_VERIFIED_TRIED)  # [N, C, L]
    lower, share = _located(num_verified, _cumulated(width))

    def gained(own: Floats) -> Floats:
        """Tokens that the first so many slots bring, [N, C, L]. own: [N, S], of each ranked slot."""
        sums = _cumulated(width * own[:, None, :]).ravel()
        return np.asarray(sums[lower] + share * (sums[lower + 1] - sums[lower]))

    num_drafted = drafted.sum(axis=2)
    step_s = _step_seconds(batches, num_requests, num_drafted, num_verified)
    tau = num_requests[:, None, None] + gained(survival)
    weighted, shortfall = tau.copy(), np.zeros(step_s.shape)
    for tier, minimum in batches.minimum.items():
        users = (batches.count * is_own[tier]).sum(axis=1)[:, None, None]
        yields = users + gained(np.take_along_axis(is_own[tier], group, axis=1) * survival)
        weighted += (weight ** ranks[tier] - 1.0) * yields
        shortfall += np.maximum(0.0, users * minimum - yields / step_s)
    flat = (len(weights), -1)
    return Options(
        num_drafted=np.broadcast_to(num_drafted[..., None], step_s.shape).reshape(flat),
        num_verified=num_verified.reshape(flat),
        step_s=step_s.reshape(flat),
        rate=(tau / step_s).reshape(flat),
        weighted_rate=(weighted / step_s).reshape(flat),
        value=(tau / step_s - PENALTY * shortfall).reshape(flat),
    )


def tier_ranks(minimum: Mapping[int, float]) -> dict[int, int]:
    """1 for the tier with the lowest minimum, and so on."""
    return {tier: rank for rank, tier in enumerate(sorted(minimum, key=lambda tier: minimum[tier]), start=1)}


def drafting_cost(num_drafted: Indices, requests: Sequence[int], cost: Sequence[float]) -> Floats:
    """What a call for so many blocks costs; nothing for none. requests, cost: as in `DraftSupply`."""
    if not requests:
        return num_drafted.astype(np.float64)
    slope = (cost[-1] - cost[-2]) / (requests[-1] - requests[-2]) if len(cost) > 1 else 0.0
    beyond = np.maximum(num_drafted - requests[-1], 0)
    return np.where(num_drafted > 0, np.interp(num_drafted, requests, cost) + slope * beyond, 0.0)


def _drafted(batches: Batches, weights: Floats) -> Indices:
    """How many of each group are drafted for when 0, 1, ... requests are, in several orders of them: [N, C, G]."""
    hope = weights[..., None] * batches.survival
    total = hope.sum(axis=2)
    is_hopeful = (total > 0) & (batches.count > 0)
    levels = _levels((batches.count * is_hopeful).sum(axis=1), NUM_DRAFTED_TRIED)
    parts = []
    for price in _prices(batches, weights, hope):
        gain = np.maximum(hope - price[:, None, None], 0.0).sum(axis=2)
        order = np.lexsort((-total, -gain, ~is_hopeful), axis=1)
        count = np.take_along_axis(batches.count, order, axis=1)
        before = np.cumsum(count, axis=1) - count
        taken = np.clip(levels[..., None] - before[:, None, :], 0, count[:, None, :])
        place = np.argsort(order, axis=1)
        parts.append(np.take_along_axis(taken, place[:, None, :].repeat(taken.shape[1], axis=1), axis=2))
    return np.concatenate(parts, axis=1)


def _prices(batches: Batches, weights: Floats, hope: Floats) -> list[Floats]:
    """Of a slot, in tokens, at which `choose_drafting` orders requests by gain: [N] each, its first one first.

    hope: [N, G, K], what a slot brings. A large fleet has the first one alone.
    """
    count = batches.count
    num_requests, num_slots = count.sum(axis=1), (count * (batches.survival > 0).sum(axis=2)).sum(axis=1)
    nobody = np.zeros((len(count), 1), dtype=np.int64)
    ends = np.stack((np.zeros_like(num_slots), num_slots), axis=1)[:, None, :]
    seconds = _step_seconds(batches, num_requests, nobody, ends)[:, 0]
    rise_s = (seconds[:, 1] - seconds[:, 0]) / np.maximum(num_slots, 1)
    prices = [np.asarray(rise_s * (weights * count).sum(axis=1) / seconds[:, 0])]
    if len(count) > MOST_ORDERED:
        return prices
    ranked = hope.reshape(len(hope), -1)
    order = np.argsort(-ranked, axis=1, kind="stable")
    ranked = np.take_along_axis(ranked, order, axis=1)
    reached = np.cumsum(np.take_along_axis(count, order // hope.shape[2], axis=1), axis=1)
    for part in DEAR_SLOTS:
        place = (reached <= (num_slots // part)[:, None]).sum(axis=1)
        prices.append(np.take_along_axis(ranked, np.minimum(place, ranked.shape[1] - 1)[:, None], axis=1)[:, 0])
    return [*prices, np.zeros(len(count))]


def _levels(most: Indices, number: int) -> Indices:
    """0..most, each if they are fewer than `number`, else evenly spread: [..., number], the last repeated."""
    spread = np.linspace(0.0, 1.0, number) * np.maximum(most, number - 1)[..., None]
    return np.minimum(spread.round().astype(np.int64), most[..., None])


def _cumulated(values: NDArray[np.float64] | Indices) -> Floats:
    """Sums over the last axis, from 0: one longer."""
    zeros = np.zeros((*values.shape[:-1], 1))
    return np.concatenate((zeros, np.cumsum(values, axis=-1)), axis=-1)


def _located(at: Indices, places: Floats) -> tuple[Indices, Floats]:
    """Where `at` lies in its row of places: index of the lower neighbour in the flat table, and how far on, 0..1.

    All rows are searched at once: laid end to end, each shifted beyond the one before.
    """
    width = places.shape[-1]
    row = np.arange(places.size // width).reshape(places.shape[:-1])[..., None]
    shift = row * (places.max() + 1.0)
    flat, wanted = (places + shift).ravel(), at + shift
    lower = np.maximum(np.searchsorted(flat, wanted) - 1, row * width)
    gap = flat[lower + 1] - flat[lower]
    share = np.divide(wanted - flat[lower], gap, out=np.zeros(at.shape), where=gap > 0)
    return lower, np.clip(share, 0.0, 1.0)


def _step_seconds(batches: Batches, num_requests: Indices, num_drafted: Indices, num_verified: Indices) -> Floats:
    """Seconds of each option's step, [N, C, L]: one curve after another, since a fleet has few different ones."""
    tokens = num_requests[:, None, None] + batches.prefill_tokens[:, None, None] + num_verified
    step_s = np.empty(tokens.shape)
    of_curve: dict[int, list[int]] = {}
    for i, curve in enumerate(batches.curves):
        of_curve.setdefault(id(curve), []).append(i)
    for rows in of_curve.values():
        curve = batches.curves[rows[0]]
        verify_s = curve.smooth_verify_array(padded(tokens[rows], curve.buckets))
        others_s = (num_requests[rows] - 1) * curve.request_s
        draft_s = drafting_cost(num_drafted[rows], curve.draft_requests, curve.draft_s) if curve.draft_requests else 0.0
        draft_s = np.asarray(draft_s).reshape(*np.shape(draft_s), 1) * batches.draft_drift[rows, None, None]
        step_s[rows] = (verify_s + others_s[:, None, None]) * batches.drift[rows, None, None] + draft_s
    return step_s


def padded(tokens: Floats, buckets: Sequence[int]) -> Floats:
    """`CostCurve.padded_tokens` of many."""
    if not buckets:
        return tokens
    edges = np.array([*buckets, np.inf])
    bucket = edges[np.searchsorted(edges[:-1], tokens)]
    return np.where(np.isfinite(bucket), bucket, tokens)
