"""The rules of verification for many simulated replicas at once: the twin of `prefix_scheduler`, row by row.

Legend: n replicas that begin a step, R places for requests, K slots, S = R*K slots of a replica in order of admission.
Everything is [n, ...]; a request that is not there, or was not drafted for, has survival 0.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.fleet_options import drafting_cost, padded

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Flags = NDArray[np.bool_]

NUM_SIZES = 17  # numbers of requests to draft for that are tried


@dataclass(frozen=True)
class Policy:
    """How a replica decides.

    kind: "static" verifies `length` tokens of everybody; "threshold" those whose survival is at least `threshold`;
    "local" follows Algorithm 1; "lagged" takes its total from the survival of two steps ago; "fleet" is "local" within
    the shares of the fleet scheduler. sees_wait: whether a replica counts what it has lately waited for shared
    drafters among the costs of drafting. min_gain: as in the engine.
    """

    name: str
    kind: Literal["static", "threshold", "local", "lagged", "fleet"]
    length: int = 0
    threshold: float = 0.5
    sees_wait: bool = True
    min_gain: float = 0.0


@dataclass(frozen=True)
class Costs:
    """What the steps of n replicas cost. tokens: [n] float64 without draft tokens; decoding: [n] requests of a step.

    drift, wait_s: [n], what the curve's seconds are multiplied with, and what drafting costs beside its own time.
    """

    curve: CostCurve
    tokens: Floats
    requests: Floats
    drift: Floats
    wait_s: Floats

    def verify_seconds(self, num_slots: Floats | Indices) -> Floats:
        """Of a step with so many draft tokens more, less what its other tokens cost whatever is decided: [n, ...]."""
        seconds = self.curve.smooth_verify_array(_add(self.tokens, num_slots))
        return self._scaled(seconds) - _add(self.other_tokens_s, np.zeros_like(seconds))

    @property
    def other_tokens_s(self) -> Floats:
        """Seconds of the tokens that are no request's next one: [n]."""
        with_them, without = (self.curve.smooth_verify_array(tokens) for tokens in (self.tokens, self.requests))
        return self.drift * (with_them - without)

    def padded_seconds(self, num_slots: Floats | Indices) -> Floats:
        """Of a whole step, with the curve's buckets."""
        tokens = _add(self.tokens, num_slots)
        return self._scaled(self.curve.smooth_verify_array(padded(tokens, self.curve.buckets)))

    def draft_seconds(self, num_drafted: Indices) -> Floats:
        """[n, ...]; nothing for nobody."""
        if not self.curve.draft_requests:
            own = np.zeros(num_drafted.shape)
        else:
            own = drafting_cost(num_drafted, self.curve.draft_requests, self.curve.draft_s)
        wait_s = self.wait_s.reshape(-1, *[1] * (num_drafted.ndim - 1))
        return np.where(num_drafted > 0, own + wait_s, 0.0)

    def _scaled(self, seconds: Floats) -> Floats:
        shape = (-1, *[1] * (seconds.ndim - 1))
        others_s = np.maximum(self.requests - 1, 0) * self.curve.request_s
        return self.drift.reshape(shape) * (seconds + others_s.reshape(shape))


def ranked(survival: Floats, weights: Floats) -> tuple[Indices, Floats, Floats]:
    """Slots in the order of admission, [n, S]: whose they are, their survival, and that times the weight."""
    num_places = survival.shape[1]
    flat = survival.transpose(0, 2, 1).reshape(len(survival), -1)
    weighted = flat * np.tile(weights, (1, survival.shape[2]))
    order = np.argsort(-weighted, axis=1, kind="stable")
    return order % num_places, np.take_along_axis(flat, order, 1), np.take_along_axis(weighted, order, 1)


def admit(
    survival: Floats, weights: Floats, tau: Floats, costs: Costs, draft_s: Floats, *, capacity: Floats, floor: Floats
) -> Indices:
    """Algorithm 1: draft tokens to verify, [n, R]. tau: [n], what the requests yield without any, weighted.

    capacity, floor: [n], as in `PrefixScheduler.allocate`; no bound is infinity.
    """
    requests, plain, slots = ranked(survival, weights)
    num_places = np.arange(slots.shape[1] + 1)
    total = tau[:, None] + np.concatenate((np.zeros((len(tau), 1)), np.cumsum(slots, axis=1)), axis=1)
    theta = total / (costs.verify_seconds(num_places[None, :]) + draft_s[:, None])
    open_slots = np.minimum((plain > 0).sum(axis=1), np.maximum(capacity, 0))
    floor = np.minimum(np.maximum(floor, 0), open_slots)
    stops = (theta[:, 1:] <= theta[:, :-1]) & (num_places[:-1] >= floor[:, None])
    first = np.where(stops.any(axis=1), stops.argmax(axis=1), slots.shape[1])
    number = np.minimum(first, open_slots)
    if costs.curve.buckets:
        edges = padded(costs.tokens + number, costs.curve.buckets) - costs.tokens
        number = np.minimum(edges, open_slots)
    return _lengths(requests, number.astype(np.int64), survival.shape[1])


def threshold_lengths(survival: Floats, threshold: float) -> Indices:
    """Slots that stand at least with this chance: [n, R]."""
    return np.asarray((survival >= threshold).sum(axis=2))


def best_totals(survival: Floats, weights: Floats, tau: Floats, costs: Costs, draft_s: Floats) -> Floats:
    """Draft tokens of a step by full search over the curve with its buckets, [n]: the capacity of the lagged form."""
    _, _, slots = ranked(survival, weights)
    total = tau[:, None] + np.concatenate((np.zeros((len(tau), 1)), np.cumsum(slots, axis=1)), axis=1)
    seconds = costs.padded_seconds(np.arange(slots.shape[1] + 1)[None, :]) + (draft_s - costs.other_tokens_s)[:, None]
    return np.asarray((total / seconds).argmax(axis=1), dtype=np.float64)


def choose_drafted(
    expected: Floats, weights: Floats, tau: Floats, costs: Costs, *, most: Floats, min_gain: float
) -> Flags:
    """Whom to draft for, [n, R]: the number of them with the highest rate, those that gain most first.

    In one order, that of the curve's own price; `choose_drafting` tries some more, which brings a tenth of a percent,
    and knows a share's capacity.

    expected: survival from past rounds. most: [n], of the requests drafted for; infinity is no bound.
    """
    requests, plain, slots = ranked(expected, weights)
    num_slots = (plain > 0).sum(axis=1)
    ends = costs.verify_seconds(np.stack((np.zeros(len(tau)), num_slots), axis=1))
    price = (ends[:, 1] - ends[:, 0]) / np.maximum(num_slots, 1) * tau / ends[:, 0]
    hope = weights[..., None] * expected
    gain = np.maximum(hope - price[:, None, None], 0.0).sum(axis=2)
    order = np.lexsort((-hope.sum(axis=2), -gain), axis=1)
    place = np.argsort(order, axis=1)
    largest = np.minimum((hope.sum(axis=2) > 0).sum(axis=1), np.maximum(most, 0)).astype(np.int64)
    spread = np.linspace(0, 1, NUM_SIZES)[None, :] * np.maximum(largest, NUM_SIZES - 1)[:, None]
    sizes = np.minimum(np.round(spread).astype(np.int64), largest[:, None])  # [n, C]
    is_drafted = np.take_along_axis(place, requests, axis=1)[:, None, :] < sizes[..., None]
    yields = np.cumsum(np.where(is_drafted, slots[:, None, :], 0.0), axis=2)
    tokens = np.cumsum(is_drafted & (plain > 0)[:, None, :], axis=2)
    draft_s = costs.draft_seconds(sizes)
    rates = (tau[:, None, None] + yields) / (costs.verify_seconds(tokens) + draft_s[..., None])
    bare = tau[:, None] / (ends[:, :1] + draft_s)
    rate = np.maximum(rates.max(axis=2), bare)
    best = rate.argmax(axis=1)
    rows = np.arange(len(tau))
    pays = rate[rows, best] >= (1.0 + min_gain) * rate[:, 0]
    chosen = np.where(pays, sizes[rows, best], 0)
    return np.asarray(place < chosen[:, None])


def _lengths(requests: Indices, number: Indices, num_places: int) -> Indices:
    """How many of the first so many slots are whose: [n, R]."""
    is_in = np.arange(requests.shape[1]) < number[:, None]
    rows = np.arange(len(requests))[:, None] * num_places
    counts = np.bincount((rows + requests)[is_in], minlength=len(requests) * num_places)
    return np.asarray(counts.reshape(len(requests), num_places))


def _add(tokens: Floats, more: Floats | Indices) -> Floats:
    return np.asarray(tokens.reshape(-1, *[1] * (np.ndim(more) - 1)) + more)
