"""What replicas may draft when they share a capacity for it: a pure function from their reports to their leases.

Legend: replica i verifies x_i draft tokens per step of T_i seconds, of which a share g_i is committed.

    maximise  sum_i g_i * x_i / T_i    subject to    sum_i x_i / T_i <= D,    0 <= x_i <= most_i
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ReplicaReport:
    """How a replica fares. sequence rises with each report of one replica.

    max_draft_tokens: most that its running requests could verify in a step. expected_gain: committed draft tokens per
    verified one, of late. step_s: seconds of a step, of late; 0 before the first.
    """

    replica_id: str
    sequence: int
    num_running: int
    max_draft_tokens: int
    expected_gain: float
    step_s: float


@dataclass(frozen=True)
class Lease:
    """What a replica may do for ttl_s seconds. capacity: draft tokens per step; None leaves it to its local rule.

    epoch: of the scheduler that gave it; one with a lower epoch than the newest is void.
    """

    capacity: int | None
    ttl_s: float
    epoch: int


def allocate_capacity(reports: Sequence[ReplicaReport], draft_tokens_per_s: float | None) -> dict[str, int | None]:
    """Draft tokens per step for each replica; None for all where nothing is shared: the local rule decides.

    The problem above is a fractional knapsack whose items all weigh the same, so giving to the highest gain first is
    optimal up to rounding: whole tokens cost each replica less than one per step. Equal gains go by replica id.
    """
    if draft_tokens_per_s is None:
        return {report.replica_id: None for report in reports}
    left = draft_tokens_per_s
    capacities: dict[str, int | None] = {}
    for report in sorted(reports, key=lambda report: (-report.expected_gain, report.replica_id)):
        if report.step_s <= 0:
            capacities[report.replica_id] = report.max_draft_tokens  # one step, after which its pace is known
            continue
        capacity = min(report.max_draft_tokens, math.floor(left * report.step_s))
        capacities[report.replica_id] = capacity
        left -= capacity / report.step_s
    return capacities
