"""Policies side by side in simulated fleets: over load, over shared drafters, and beside what a real fleet measured."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dspark.evaluation.fleet_simulator import FleetSetup, FleetSimulator
from dspark.evaluation.html import picture, table
from dspark.evaluation.plots import fleet_plot
from dspark.evaluation.simulated_rounds import RoundPool
from dspark.evaluation.simulated_rules import Policy
from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.draft_supply import drafter_of, joined
from dspark.speculation.fleet import DraftSupply

Row = dict[str, Any]

COLUMNS = ("policy", "tokens/s", "of a user", "verify length", "drafted", "minimum kept")


def policies(block_size: int, *, min_gain: float = 0.0) -> list[Policy]:
    """What is compared, the plainest first. min_gain: as in the engine, of those that decide whether to draft."""
    every = [
        Policy("plain", "static", 0),
        Policy("static 1", "static", min(1, block_size)),
        Policy("static 3", "static", min(3, block_size)),
        Policy(f"static {block_size}", "static", block_size),
        Policy("threshold 0.5", "threshold", threshold=0.5),
        Policy("local, blind to queues", "local", sees_wait=False),
        Policy("local", "local"),
        Policy("lagged", "lagged"),
        Policy("fleet", "fleet"),
    ]
    return [replace(policy, min_gain=min_gain) for policy in every]


def shared_drafters(curve: CostCurve, number: int) -> DraftSupply | None:
    """So many drafters as fast as the curve says, as draft replicas offer them that know it; None for 0: each replica
    has its own. Raises: ValueError where the curve says nothing of drafting."""
    drafter = drafter_of(curve)
    if number and drafter is None:
        raise ValueError("the cost curve says nothing of drafting; profile with a drafter, or share none")
    return joined([drafter] * number) if drafter is not None else None


def simulate(
    setup: FleetSetup, policy: Policy, pool: RoundPool, *, seconds: float, warmup_s: float, seed: int = 0
) -> Row:
    """Figures of one run, and the share of windows in which minima were kept where there are any."""
    result = FleetSimulator(setup, policy, pool, seed=seed).run(seconds, warmup_s=warmup_s)
    kept = {"kept": result.kept(setup.minimum)} if setup.minimum else {}
    return result.figures() | kept


def compare(setup: FleetSetup, every: Sequence[Policy], pool: RoundPool, **run: Any) -> list[Row]:
    """The same fleet under one policy after another."""
    return [simulate(setup, policy, pool, **run) for policy in every]


def sweep(
    setup: FleetSetup, every: Sequence[Policy], pool: RoundPool, loads: Sequence[int], **run: Any
) -> dict[str, list[Row]]:
    """Every policy at each load, the same one on all replicas."""
    num_replicas = len(setup.concurrency)
    rows: dict[str, list[Row]] = {policy.name: [] for policy in every}
    for load in loads:
        at_load = replace(setup, concurrency=(load,) * num_replicas, tiers=None, minimum={})
        for row in compare(at_load, every, pool, **run):
            rows[row["policy"]].append(row | {"concurrency": load})
    return rows


def beside_measured(row: Row, measured: Mapping[str, float]) -> dict[str, float]:
    """Predicted over measured, of the figures that were measured under the same name."""
    return {name: row[name] / measured[name] for name in sorted(measured) if measured[name] and name in row}


def shown(rows: Sequence[Row]) -> list[list[str]]:
    """Lines of `COLUMNS`."""
    return [
        [
            row["policy"],
            f"{row['tokens_per_s']:,.0f}",
            f"{row['user_tokens_per_s']:.1f}",
            f"{row['verify_length']:.2f}",
            f"{row['drafted_share']:.0%}",
            f"{row['kept']:.1%}" if "kept" in row else "",
        ]
        for row in rows
    ]


def sections(rows: Sequence[Row], swept: Mapping[str, Sequence[Row]], note: str) -> list[str]:
    """Of a page: the fleet as given, and the same over load."""
    return [
        table("The fleet", COLUMNS, shown(rows), num_text=1, note=note),
        picture("Over load", fleet_plot(swept), "All replicas at the same load, drafters as given."),
    ]
