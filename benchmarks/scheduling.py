"""What scheduling itself costs: Algorithm 1, choosing whom to draft for, and the shares of a fleet.

    python benchmarks/scheduling.py [--repeats 30] [--requests 1 16 64 256] [--replicas 1 10 100 1000] [--slots 7]

Processor time of one thread, median and 99th percentile over the repeats; each repeat has other requests. The last line
of stdout is one JSON object.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.drafting_choice import choose_drafting
from dspark.speculation.fleet import DraftSupply, ReplicaReport, allocate_shares, summarise
from dspark.speculation.prefix_scheduler import PrefixScheduler

CURVE = CostCurve(
    (1, 8, 64, 256, 1024, 4096), (0.010, 0.0105, 0.014, 0.030, 0.110, 0.5), (1, 8, 64), (0.0025, 0.003, 0.006)
)
BLOCKS_PER_S = 150.0  # for each replica: too few for all
REQUESTS_PER_REPLICA = 64
MINIMUM = {-1: 60.0}


def rows_of(rng: np.random.Generator, num_requests: int, num_slots: int) -> list[list[float]]:
    """Survival of so many requests."""
    confidence = np.clip(
        rng.normal(rng.uniform(0.3, 0.9, (num_requests, 1)), 0.1, (num_requests, num_slots)), 0.02, 1.0
    )
    survival: list[list[float]] = np.cumprod(confidence, axis=1).tolist()
    return survival


def fleet_of(rng: np.random.Generator, num_replicas: int, num_slots: int) -> list[ReplicaReport]:
    """Every tenth request has a tier of its own."""
    reports = []
    for number in range(num_replicas):
        rows = rows_of(rng, REQUESTS_PER_REPLICA, num_slots)
        groups = summarise([(-1 if r % 10 == 0 else 0, row) for r, row in enumerate(rows)])
        reports.append(ReplicaReport(str(number), 1, groups, "curve", CURVE))
    return reports


def timed(repeats: int, prepare: Callable[[], Any], run: Callable[[Any], Any]) -> dict[str, float]:
    """Milliseconds: median and 99th percentile."""
    run(prepare())
    times = []
    for _ in range(repeats):
        content = prepare()
        started = time.process_time()
        run(content)
        times.append(1000 * (time.process_time() - started))
    p50, p99 = np.quantile(times, [0.5, 0.99]).tolist()
    return {"p50_ms": p50, "p99_ms": p99}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--slots", type=int, default=7)
    options = parser.parse_args()
    rng, allocate = np.random.default_rng(0), PrefixScheduler().allocate
    found: dict[str, dict[int, dict[str, float]]] = {"allocate": {}, "choose_drafting": {}, "shares": {}, "minima": {}}
    for number in options.requests:
        rows = partial(rows_of, rng, number, options.slots)
        found["allocate"][number] = timed(options.repeats, rows, lambda rows: allocate(rows, CURVE, draft_s=0.005))
        found["choose_drafting"][number] = timed(options.repeats, rows, lambda rows: choose_drafting(rows, CURVE))
    for number in options.replicas:
        supply = DraftSupply(BLOCKS_PER_S * number)
        fleet = partial(fleet_of, rng, number, options.slots)
        few = max(3, options.repeats // 10)
        found["shares"][number] = timed(few, fleet, partial(allocate_shares, supply=supply))
        found["minima"][number] = timed(few, fleet, partial(allocate_shares, supply=supply, minimum=MINIMUM))
    for name, by_size in found.items():
        for size, figures in by_size.items():
            print(f"{name:<16}{size:>6}  p50 {figures['p50_ms']:9.3f} ms  p99 {figures['p99_ms']:9.3f} ms")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
