"""What came of a run of target replicas on shared drafters, from what users got and what the replicas counted."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from dspark.speculation.cost_curve import CostCurve

PREFIX = "dspark_"

Figures = dict[str, float]


@dataclass
class Seen:
    """Tokens of one replica's users by the second since the start: of all, and of each user who is owed a minimum."""

    all: Counter[int] = field(default_factory=Counter)
    owed: list[Counter[int]] = field(default_factory=list)


@dataclass(frozen=True)
class Snapshot:
    """Counters at a time. at_s: monotonic seconds; targets: of each target replica, `/metrics` without "dspark_";
    drafts: `DraftServerStats` of the draft replicas together; num_drafts: how many there are."""

    at_s: float
    targets: tuple[Mapping[str, float], ...]
    drafts: Mapping[str, float] = field(default_factory=dict)
    num_drafts: int = 0


@dataclass(frozen=True)
class Period:
    """Between two snapshots."""

    begin: Snapshot
    end: Snapshot

    @property
    def seconds(self) -> float:
        return self.end.at_s - self.begin.at_s

    @property
    def targets(self) -> list[Figures]:
        """What each target replica counted."""
        return [_difference(*pair) for pair in zip(self.begin.targets, self.end.targets, strict=True)]

    @property
    def drafts(self) -> Figures:
        """What the draft replicas counted together."""
        return _difference(self.begin.drafts, self.end.drafts)


def speculation_figures(period: Period) -> Figures:
    """verify_length: draft tokens per decode of a request; drafted: share of the decodes; accepted: of those verified.

    waited: share of the target replicas' steps that went by waiting for the draft replica, its own time included.
    drafters_busy: share of the time that a draft replica was in passes of the drafter, 1 = saturated; taking contexts
    in and answering come on top of it. blocks_a_pass: proposals made together.
    """
    counted = summed(period.targets)
    found = {
        "verify_length": counted["verified_tokens_total"] / max(1, counted["decodes_total"]),
        "drafted": counted["drafted_decodes_total"] / max(1, counted["decodes_total"]),
        "accepted": counted["accepted_tokens_total"] / max(1, counted["verified_tokens_total"]),
    }
    if period.end.num_drafts:
        drafts = period.drafts
        found["waited"] = counted["draft_link_wait_seconds_total"] / max(1e-9, counted["step_seconds_total"])
        found["drafters_busy"] = drafts["draft_s"] / (period.end.num_drafts * period.seconds)
        found["blocks_a_pass"] = drafts["drafted"] / max(1, drafts["batches"])
    return found


def circumstances(period: Period, curve: CostCurve | None) -> dict[str, float | list[float]]:
    """What a simulation has to be told of a run.

    drift: of each target replica, see `drift_of`. read_tokens: of a request's prompt, those found in the prefix cache
    left out. call_ms: what waiting for a draft replica takes beyond the drafter's own time by the curve, per call.
    """
    counted = summed(period.targets)
    drafting = [] if curve is None else [_drafting(one, curve) for one in period.targets]
    calls, drafting_s = (sum(column) for column in zip((0.0, 0.0), *drafting, strict=True))
    beyond_s = counted["draft_link_wait_seconds_total"] - drafting_s
    return {
        "drift": [drift_of(period, curve, [one]) for one in period.targets],
        "read_tokens": counted["prompt_tokens_total"] / max(1.0, counted["requests_total"]),
        "call_ms": 1000 * max(0.0, beyond_s) / calls if calls else 0.0,
    }


def drift_of(period: Period, curve: CostCurve | None, targets: Sequence[Mapping[str, float]] | None = None) -> float:
    """Measured over predicted seconds of the target's part of a step, of all target replicas or of some.

    curve: that of the replicas, where a draft replica drafts: waiting for it is taken out of what was measured, and the
    drafter's own time by the curve out of what was predicted, each call at the mean number of its requests. None: each
    replica drafts for itself, and drafting is in both. Raises: ValueError where nothing was predicted.
    """
    measured = predicted = 0.0
    for one in period.targets if targets is None else targets:
        measured += one.get("measured_step_seconds_total", 0.0) - one.get("draft_link_wait_seconds_total", 0.0)
        predicted += one.get("predicted_step_seconds_total", 0.0) - (0.0 if curve is None else _drafting(one, curve)[1])
    if predicted <= 0:
        raise ValueError("no step was predicted: the replicas have no cost curve of this machine and their threads")
    return measured / predicted


def _drafting(one: Mapping[str, float], curve: CostCurve) -> tuple[float, float]:
    """Calls that a replica drafted with, and the seconds of it that its curve predicted. Messages that carry contexts
    alone are fewer than steps."""
    blocks = one.get("drafted_decodes_total", 0.0) + one.get("draft_link_undrafted_total", 0.0)
    calls = min(one.get("draft_link_messages_total", 0.0), one.get("steps_total", 0.0), blocks)
    if not calls:
        return 0.0, 0.0
    few = int(blocks / calls)
    share = blocks / calls - few
    return calls, calls * ((1 - share) * curve.draft_seconds(few) + share * curve.draft_seconds(few + 1))


def speed_figures(seen: Sequence[Seen], seconds: Sequence[int]) -> tuple[float, list[float]]:
    """Tokens per second of all replicas together, and of each."""
    each = [statistics.fmean(own.all[second] for second in seconds) for own in seen]
    return sum(each), each


def minimum_figures(seen: Sequence[Seen], seconds: Sequence[int], minimum: float) -> Figures:
    """In what share of the one-second windows owed users had `minimum` tokens per second.

    minimum_kept: a replica's, in the mean over them, which is what the fleet scheduler sees to; minimum_kept_each: all
    users' windows, each for itself; minimum_kept_worst: those of the user who missed it most.
    """
    replicas = [own.owed for own in seen if own.owed]
    means = [sum(user[s] for user in users) >= minimum * len(users) for users in replicas for s in seconds]
    shares = [statistics.fmean(user[s] >= minimum for s in seconds) for users in replicas for user in users]
    return {
        "minimum_kept": statistics.fmean(means),
        "minimum_kept_each": statistics.fmean(shares),
        "minimum_kept_worst": min(shares),
    }


def summed(counted: Iterable[Mapping[str, float]]) -> Figures:
    """Replicas' counters together; 0 for what none of them counts."""
    total: defaultdict[str, float] = defaultdict(float)
    for one in counted:
        for name, number in one.items():
            total[name] += number
    return total


def periods(snapshots: Sequence[Snapshot]) -> list[Period]:
    """The periods between snapshots."""
    return [Period(*pair) for pair in pairwise(snapshots)]


def _difference(begin: Mapping[str, float], end: Mapping[str, float]) -> Figures:
    return {name: value - begin.get(name, 0.0) for name, value in end.items()}
