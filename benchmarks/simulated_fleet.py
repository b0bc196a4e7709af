"""Policies in a simulated fleet: static lengths, a threshold, Algorithm 1 alone, lagged, and under the fleet scheduler.

    python benchmarks/simulated_fleet.py [--curve runs/demo/drafter/cost_curve.json]
        [--rounds runs/demo/evaluation/rollouts.jsonl --calibration runs/demo/drafter/calibration.json]
        [--concurrency 2 32] [--copies 32] [--draft-replicas 4] [--loads 1 2 4 8 16 32 64] [--output simulated_fleet]
        [--minimum 40 --owed 4] [--drift 1.1] [--threads 1] [--measured measured.json --policy fleet]

--concurrency lists the requests at once of each replica, --copies repeats the list. Without --curve and --rounds both
are modelled, of a processor that is flat up to some tens of tokens. Copying (engine.lookup) is not simulated.
--minimum: tokens per second owed to the users of the first --owed places of every replica.
--measured: what shared_drafters.py printed in its last line, or one rule's figures, tokens_per_s and verify_length;
only --policy is run then and the ratios of predicted to measured are printed. --drift is what the target's part of
real steps took over what the curve predicts, of all replicas or of each. What is not given of --drift, --prompt-tokens
(that are read, not found in a cache) and --call-ms is that of the other rule of --measured: taken from the very runs
that are to be predicted it would be fitted to them. Waiting for a drafter is in no drift, since the simulated drafters
have a queue of their own.
The last line of stdout is one JSON object; plots go to OUTPUT.html.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dspark.evaluation.fleet_comparison import (
    COLUMNS,
    beside_measured,
    compare,
    policies,
    sections,
    shared_drafters,
    shown,
    simulate,
    sweep,
)
from dspark.evaluation.fleet_simulator import FleetSetup
from dspark.evaluation.html import write_page
from dspark.evaluation.simulated_rounds import RoundPool, modelled_rounds, read_rollouts, recorded_rounds
from dspark.speculation.calibration import Calibration
from dspark.speculation.cost_curve import CostCurve, hardware_fingerprint

OWED_TIER = -1
PROMPT_TOKENS = 100
MODELLED = CostCurve(
    (1, 8, 64, 256, 1024), (0.010, 0.0105, 0.014, 0.030, 0.110), (1, 8, 64), (0.0025, 0.003, 0.006), request_s=2e-5
)


def main() -> None:
    options = _parser().parse_args()
    try:
        setup, pool = _setup(options), _pool(options)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    pool = replace(pool, tokens=np.minimum(pool.tokens, options.output_tokens))
    run: dict[str, Any] = {"seconds": options.seconds, "warmup_s": options.warmup, "seed": options.seed}
    every = policies(pool.block_size, min_gain=options.min_gain)
    if options.measured:
        (policy,) = [one for one in every if one.name == options.policy]
        measured, told = measured_by(json.loads(Path(options.measured).read_text(encoding="utf-8")), options)
        row = simulate(replace(setup, **told), policy, pool, **run)
        ratios = beside_measured(row, measured)
        print(f"taken of the other rule: {told}")
        print("\n".join(f"{name}: predicted / measured {ratio:.3f}" for name, ratio in ratios.items()))
        print(json.dumps({"predicted": row, "measured": measured, "told": told, "ratios": ratios}))
        return
    rows = compare(setup, every, pool, **run)
    widths = [max(map(len, column)) for column in zip(COLUMNS, *shown(rows), strict=True)]
    for line in [COLUMNS, *shown(rows)]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
    swept = sweep(setup, every, pool, options.loads, **run) if options.loads else {}
    if options.output:
        note = f"{len(setup.concurrency)} replicas, {options.draft_replicas or 'no'} shared drafters"
        write_page(f"{options.output}.html", "Simulated fleet", sections(rows, swept, note))
    print(json.dumps({"fleet": rows, "sweep": swept}))


def measured_by(content: dict[str, Any], options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """The figures of --policy, and what of the setup is to be that of the other rule."""
    rows = {row["rule"]: row for row in content.get("rows", [])}
    measured = rows.pop(options.policy, None) if rows else content
    if measured is None:
        raise SystemExit(f"{options.measured} has no runs of {options.policy}, only of {', '.join(rows)}")
    others = [row["first half"] for row in rows.values() if "first half" in row]
    if options.drift is None and len(others) != 1:
        raise SystemExit(f"{options.measured} has no other rule's runs whose drift could be taken; give --drift")
    if len(others) != 1:
        return measured, {}
    (other,) = others
    told = {
        "drift": tuple(other["drift"]) if options.drift is None else None,
        "prompt_tokens": round(other["read_tokens"]) if options.prompt_tokens is None else None,
        "call_s": other["call_ms"] / 1000 if options.call_ms is None else None,
    }
    return measured, {name: value for name, value in told.items() if value is not None}


def _setup(options: argparse.Namespace) -> FleetSetup:
    curve = MODELLED
    if options.curve:
        wanted = (
            hardware_fingerprint("cpu", options.dtype, options.threads, options.target) if options.threads else None
        )
        curve = CostCurve.load(options.curve, wanted)
    concurrency = tuple(options.concurrency * options.copies)
    owed = [[OWED_TIER] * min(options.owed, load) + [0] * max(load - options.owed, 0) for load in concurrency]
    return FleetSetup(
        curve,
        concurrency,
        tiers=tuple(map(tuple, owed)) if options.minimum else None,
        minimum={OWED_TIER: options.minimum} if options.minimum else {},
        supply=shared_drafters(curve, options.draft_replicas),
        num_drafters=max(1, options.draft_replicas),
        call_s=(options.call_ms or 0.0) / 1000,
        drift=1.0 if options.drift is None else tuple(options.drift) if len(options.drift) > 1 else options.drift[0],
        prompt_tokens=PROMPT_TOKENS if options.prompt_tokens is None else options.prompt_tokens,
    )


def _pool(options: argparse.Namespace) -> RoundPool:
    if not options.rounds:
        return modelled_rounds(np.random.default_rng(options.seed), acceptance=options.acceptance)
    rows = read_rollouts(options.rounds, mode=options.mode)
    block_size = max((r["num_proposed"] for row in rows for turn in row["turns"] for r in turn["rounds"]), default=0)
    scales = None
    if options.calibration:
        scales = Calibration.load(options.calibration).for_mode(options.mode)
    return recorded_rounds(rows, block_size=block_size, scales=scales)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curve", help="cost_curve.json of one machine")
    parser.add_argument("--threads", type=int, help="which of a file's curves: this machine's with so many threads")
    parser.add_argument("--target", default="bundled:smollm2-135m-instruct", help="the same")
    parser.add_argument("--dtype", default="bfloat16", help="the same")
    parser.add_argument("--rounds", help="rollouts.jsonl of jobs/evaluate.py")
    parser.add_argument("--calibration", help="calibration.json of the drafter that the rounds are of")
    parser.add_argument("--mode", default="greedy", help="of the rollouts")
    parser.add_argument("--acceptance", type=float, default=0.75, help="of a modelled slot, given those before it")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[2, 32])
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--draft-replicas", type=int, default=0, help="shared by all; 0: each replica has its own")
    parser.add_argument("--call-ms", type=float, help="of a call to a shared drafter, on its way; default: 0")
    parser.add_argument("--prompt-tokens", type=int, help=f"default: {PROMPT_TOKENS}")
    parser.add_argument("--output-tokens", type=int, default=128, help="of an answer, at most")
    parser.add_argument("--drift", type=float, nargs="+", help="default: 1")
    parser.add_argument("--min-gain", type=float, default=0.0, help="as engine.min_gain")
    parser.add_argument("--minimum", type=float)
    parser.add_argument("--owed", type=int, default=1)
    parser.add_argument("--loads", type=int, nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--warmup", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measured")
    parser.add_argument("--policy", default="fleet", help="the one that the measured fleet followed")
    parser.add_argument("--output", help="for OUTPUT.html")
    return parser


if __name__ == "__main__":
    main()
