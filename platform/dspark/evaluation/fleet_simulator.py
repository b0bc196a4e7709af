"""Replays a fleet: many replicas with one cost curve, shared drafters, a scheduler, and requests that come and go.

Legend: N replicas, R places for requests of each, K slots of a block, W windows of a second, G tiers.

Each replica has a clock of its own. Those whose clocks are nearly equal make their next steps together, as arrays:

    admit -> choose who drafts -> draft (wait for shared drafters) -> allocate -> verify -> commit

which decides as `engine/policy.py` does, and shares come from the very function that the scheduler's actor calls.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dspark.engine.curve_correction import RESTED
from dspark.engine.policy import NUM_AHEAD
from dspark.evaluation.simulated_estimates import Estimates
from dspark.evaluation.simulated_results import FleetResult, Windows
from dspark.evaluation.simulated_rounds import RoundPool
from dspark.evaluation.simulated_rules import (
    Costs,
    Flags,
    Floats,
    Indices,
    Policy,
    admit,
    best_totals,
    choose_drafted,
    threshold_lengths,
)
from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.draft_supply import CallSeconds, joined
from dspark.speculation.fleet import FREE, DraftSupply, ReplicaReport, Share, allocate_shares, summarise

SLICE = 0.2  # of the shortest step: replicas that begin one within it do so together
MEASURED_WEIGHT = 0.05  # of a step in what drafting is expected to cost beside the curve
LAG = 2


@dataclass(frozen=True)
class FleetSetup:
    """What is simulated. concurrency: of each replica, requests at once (a closed loop) or places (an open one).

    rates: requests per second at each replica, arriving at random; None keeps every place taken. tiers: of a replica's
    places, its tier; None: all 0. minimum: tokens per second that users of a tier are owed. supply: drafters that all
    share, requests queueing for them; None: each replica has its own. call_s: what a call takes on its way there and
    back. drift: measured over predicted seconds of a step, of all replicas or of each. prompt_tokens: read before a
    request decodes; max_batch_tokens: of a step. tick_s: between two rounds of shares. max_draft_load, speed_headroom:
    as `FleetConfig`.
    """

    curve: CostCurve
    concurrency: tuple[int, ...]
    rates: tuple[float, ...] | None = None
    tiers: tuple[tuple[int, ...], ...] | None = None
    minimum: Mapping[int, float] = field(default_factory=dict)
    supply: DraftSupply | None = None
    num_drafters: int = 1
    call_s: float = 0.0
    drift: float | tuple[float, ...] = 1.0
    prompt_tokens: int = 0
    max_batch_tokens: int = 512
    tick_s: float = 0.2
    max_draft_load: float = 0.9
    speed_headroom: float = 0.15

    def __post_init__(self) -> None:
        if isinstance(self.drift, tuple) and len(self.drift) != len(self.concurrency):
            found = f"drift has {len(self.drift)} entries and concurrency {len(self.concurrency)}"
            raise ValueError(f"{found}; give one for each replica, or one for all")


class Drafters:
    """Shared drafters as a queue: a call takes the first that is free. supply: all of them, a call's cost in seconds.

    They offer what draft replicas offer: what their calls lately took.
    """

    def __init__(self, supply: DraftSupply, number: int) -> None:
        self._supply = supply
        self._calls = CallSeconds(replace(supply, per_s=1.0))
        self._free_at = [0.0] * number

    def wait(self, now: Floats, num_drafted: Indices) -> Floats:
        """Seconds of waiting for a drafter, per call, in the order of their times; 0 where nobody is drafted for."""
        seconds = np.interp(num_drafted, self._supply.requests, self._supply.cost)
        waits = np.zeros(len(now))
        for i in np.argsort(now, kind="stable"):
            if num_drafted[i]:
                self._calls.note(int(num_drafted[i]), float(seconds[i]))
                begins = max(float(now[i]), self._free_at[0])
                waits[i] = begins - now[i]
                heapq.heapreplace(self._free_at, begins + float(seconds[i]))
        return waits

    def offered(self, max_load: float) -> DraftSupply | None:
        """What the scheduler makes of their offers."""
        one = self._calls.supply()
        return None if one is None else joined([one] * len(self._free_at), max_load=max_load)


class FleetSimulator:
    """One run of a policy. Everything random comes from the seed, so that policies meet the same requests."""

    def __init__(self, setup: FleetSetup, policy: Policy, pool: RoundPool, *, seed: int = 0) -> None:
        self.setup, self.policy, self.pool = setup, policy, pool
        num, places = len(setup.concurrency), max(setup.concurrency)
        self._drift = np.broadcast_to(np.asarray(setup.drift, dtype=np.float64), num)
        self._rng = np.random.default_rng(seed)
        self._clock = self._rng.uniform(0, setup.curve.verify_s[0], num)
        self._exists = np.arange(places) < np.array(setup.concurrency)[:, None]
        self._tier = np.zeros((num, places), dtype=np.int64)
        for i, tiers in enumerate(setup.tiers or ()):
            self._tier[i, : len(tiers)] = tiers
        shape = (num, places)
        self._is_active = np.zeros(shape, dtype=np.bool_)
        self._answer, self._round, self._offset = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        self._unread, self._left = (np.zeros(shape, dtype=np.int64) for _ in range(2))
        self._estimates = Estimates(num, places, pool.block_size)
        self._waiting = np.zeros(num, dtype=np.int64)
        self._next_arrival = np.zeros(num)
        self._wait_s = np.zeros(num)
        self._totals = np.full((LAG, num), np.inf)
        self._shares: list[Share] = [FREE] * num
        self._shared_at = -np.inf
        self._drafters = None if setup.supply is None else Drafters(setup.supply, setup.num_drafters)

    def run(self, seconds: float, *, warmup_s: float = 0.0) -> FleetResult:
        """Simulate so many seconds; what happens in the warm-up is not counted."""
        windows = Windows(self._tier, start_s=warmup_s, end_s=seconds, tiers=sorted({int(t) for t in self._tier.flat}))
        while True:
            begin = float(self._clock.min())
            if begin >= seconds:
                return windows.result(self.policy.name)
            if self.policy.kind == "fleet" and begin - self._shared_at >= self.setup.tick_s:
                self._share(begin)
            near = begin + SLICE * self.setup.curve.verify_s[0] * float(self._drift.min())
            self._step(np.flatnonzero(self._clock <= near), windows)

    def _step(self, rows: Indices, windows: Windows) -> None:
        """The next step of some replicas."""
        self._admit_requests(rows)
        busy = self._is_active[rows].any(axis=1)
        idle = rows[~busy]
        self._clock[idle] = np.maximum(self._clock[idle] + 1e-4, self._next_arrival[idle])
        rows = rows[busy]
        if not len(rows):
            return
        read, decoding = self._read(rows)
        costs = Costs(
            self.setup.curve,
            tokens=(decoding.sum(axis=1) + read.sum(axis=1)).astype(np.float64),
            requests=(decoding | (read > 0)).sum(axis=1).astype(np.float64),
            drift=self._drift[rows],
            wait_s=self._wait_s[rows] if self.policy.sees_wait else np.zeros(len(rows)),
        )
        widths = self._choose(rows, decoding, costs)
        seen, stands = self.pool.drafts(self._round[rows], self._offset[rows])
        is_drafted = np.arange(self.pool.block_size) < widths[..., None]
        survival = np.where(is_drafted, self._estimates.corrected(rows, seen), 0.0)
        drafted = widths > 0
        num_drafted = drafted.sum(axis=1)
        wait_s = self._wait(rows, num_drafted)
        lengths = self._allocate(rows, decoding, survival, costs, num_drafted, is_final=True)
        real = Costs(costs.curve, costs.tokens, costs.requests, costs.drift, wait_s)
        step_s = real.padded_seconds(lengths.sum(axis=1)[:, None])[:, 0] + real.draft_seconds(num_drafted)
        accepted = np.minimum(lengths, stands)
        self._estimates.observe(rows, survival, is_drafted)
        self._estimates.learn(rows, seen, lengths, accepted)
        is_first = (read > 0) & (self._unread[rows] == 0)
        tokens = np.minimum(np.where(decoding, accepted + 1, 0) + is_first, self._left[rows])
        moved = np.where(decoding, accepted + 1, 0)
        self._round[rows], self._offset[rows] = self.pool.advance(
            self._answer[rows], self._round[rows], self._offset[rows], moved
        )
        self._left[rows] -= tokens
        self._clock[rows] += step_s
        windows.add(rows, self._clock[rows], step_s, tokens, decoding, lengths, drafted)
        ended = self._is_active[rows] & (self._left[rows] <= 0)
        self._is_active[rows] &= ~ended

    def _choose(self, rows: Indices, decoding: Flags, costs: Costs) -> Indices:
        """Slots to draft, [n, R]: a few beyond those that past rounds make worth verifying, where that is decided."""
        if self.policy.kind == "static":
            return np.where(decoding, self.policy.length, 0)
        if self.policy.kind == "threshold":
            return np.where(decoding, self.pool.block_size, 0)
        weights = self._weights(rows)
        expected = np.where(decoding[..., None], self._estimates.survival(rows), 0.0)
        bounds = [share.max_drafted for share in self._shares_of(rows)]
        most = np.array([np.inf if bound is None else float(bound) for bound in bounds])
        tau = (weights * decoding).sum(axis=1)
        chosen = choose_drafted(expected, weights, tau, costs, most=most, min_gain=self.policy.min_gain) & decoding
        lengths = self._allocate(rows, decoding, np.where(chosen[..., None], expected, 0.0), costs, chosen.sum(axis=1))
        return np.where(chosen, np.minimum(lengths + NUM_AHEAD, self.pool.block_size), 0)

    def _allocate(
        self,
        rows: Indices,
        decoding: Flags,
        survival: Floats,
        costs: Costs,
        num_drafted: Indices,
        *,
        is_final: bool = False,
    ) -> Indices:
        """Draft tokens to verify. is_final: of this step's own drafts, not of what is expected of them."""
        if self.policy.kind == "static":
            return np.where(survival[..., 0] > 0, self.policy.length, 0)
        if self.policy.kind == "threshold":
            return threshold_lengths(survival, self.policy.threshold)
        weights, draft_s = self._weights(rows), costs.draft_seconds(num_drafted)
        tau = (weights * decoding).sum(axis=1)
        shares = self._shares_of(rows)
        capacity = np.array([np.inf if share.capacity is None else share.capacity for share in shares])
        floor = np.array([float(share.floor) for share in shares])
        if is_final and self.policy.kind == "lagged":
            known = np.isfinite(self._totals[0, rows])
            capacity = np.where(known, self._totals[0, rows], np.inf)
            floor = np.where(known, self._totals[0, rows], 0.0)
            totals = best_totals(survival, weights, tau, costs, draft_s)
            self._totals[:, rows] = np.stack((self._totals[1, rows], totals))
        return admit(survival, weights, tau, costs, draft_s, capacity=capacity, floor=floor)

    def _wait(self, rows: Indices, num_drafted: Indices) -> Floats:
        """Seconds spent waiting for shared drafters, which replicas remember."""
        if self._drafters is None:
            return np.zeros(len(rows))
        wait_s = self._drafters.wait(self._clock[rows], num_drafted) + self.setup.call_s
        called = rows[num_drafted > 0]
        self._wait_s[called] += MEASURED_WEIGHT * (wait_s[num_drafted > 0] - self._wait_s[called])
        idle = rows[num_drafted == 0]  # what was seen is forgotten, as `CurveCorrection` forgets it
        self._wait_s[idle] *= RESTED
        return wait_s

    def _admit_requests(self, rows: Indices) -> None:
        """Fill places with requests that wait; in a closed loop all of them."""
        vacant = self._exists[rows] & ~self._is_active[rows]
        if self.setup.rates is None:
            starts = vacant
        else:
            self._arrive(rows)
            starts = vacant & (np.cumsum(vacant, axis=1) <= self._waiting[rows][:, None])
            self._waiting[rows] -= starts.sum(axis=1)
        where = (rows[np.nonzero(starts)[0]], np.nonzero(starts)[1])
        answers = self._rng.integers(len(self.pool.first), size=len(where[0]))
        self._answer[where], self._round[where], self._offset[where] = answers, self.pool.first[answers], 0
        self._unread[where], self._left[where] = self.setup.prompt_tokens, self.pool.tokens[answers]
        self._estimates.reset(where)
        self._is_active[where] = True

    def _arrive(self, rows: Indices) -> None:
        assert self.setup.rates is not None
        for i in rows:
            while self._next_arrival[i] <= self._clock[i]:
                self._waiting[i] += 1
                self._next_arrival[i] += self._rng.exponential(1.0 / self.setup.rates[i])

    def _read(self, rows: Indices) -> tuple[Indices, Flags]:
        """Prompt tokens read beside the decodes, [n, R], and who decodes: [n, R]."""
        unread = np.where(self._is_active[rows], self._unread[rows], 0)
        decoding = self._is_active[rows] & (unread == 0)
        room = np.maximum(self.setup.max_batch_tokens - decoding.sum(axis=1), 1)
        before = np.cumsum(unread, axis=1) - unread
        read = np.clip(room[:, None] - before, 0, unread)
        self._unread[rows] -= read
        return read, decoding

    def _weights(self, rows: Indices) -> Floats:
        weights = np.ones(self._tier[rows].shape)
        for row, share, tiers in zip(weights, self._shares_of(rows), self._tier[rows], strict=True):
            for tier, weight in share.weights.items():
                row[tiers == tier] = weight
        return weights

    def _shares_of(self, rows: Indices) -> Sequence[Share]:
        return [self._shares[i] for i in rows]

    def _share(self, now: float) -> None:
        """What the scheduler's actor does with the newest reports."""
        setup = self.setup
        reports = []
        expected = self._estimates.survival(np.arange(len(self._tier)))
        for i, (active, tiers) in enumerate(zip(self._is_active, self._tier, strict=True)):
            rows = [(int(tiers[r]), expected[i, r].tolist()) for r in np.flatnonzero(active)]
            groups = summarise(rows)
            reports.append(ReplicaReport(str(i), 1, groups, "curve", setup.curve, drift=float(self._drift[i])))
        supply = None if self._drafters is None else self._drafters.offered(setup.max_draft_load)
        minimum = {tier: (1 + setup.speed_headroom) * speed for tier, speed in setup.minimum.items()}
        shares = allocate_shares(reports, supply, minimum)
        self._shares = [shares[str(i)] for i in range(len(reports))]
        self._shared_at = now
