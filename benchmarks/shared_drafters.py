"""Target replicas at unequal load, on one draft replica or each with its own drafter: what they do in all.

    python benchmarks/shared_drafters.py --drafter runs/demo/drafter --prompts prompts/heldout.jsonl
        [--deployment deployments/dspark.yaml] [--concurrency 2 32] [--rules local fleet] [--rounds 3] [--seconds 30]
        [--tokens 128] [--beside] [--minimum 12 --owed 4]

Each rule has target replicas of its own, as Ray Serve makes them of the deployment file, and a draft replica that they
share, for which the drafter needs a cost curve of this machine and --threads; --beside: none, each replica drafts for
itself. Only one rule's are asked at a time, in turns. "local": every replica decides alone; "fleet": by the fleet
scheduler's leases. Every replica is asked by as many clients as its place in --concurrency says, each of which asks on
as soon as it has its answer; only whole seconds after the first two count, for the replicas' own counters too.

drafters_busy, waited: how far the draft replica is saturated, see `speculation_figures`. drift: measured over predicted
seconds of the target's part of a step, in the first half of those seconds. In the JSON: what of that half a simulation
has to be told, see `circumstances`.

--minimum: tokens per second owed to each user of the first --owed clients of each replica; told is in what share of the
one-second windows they had them, in the mean over a replica's owed users, each for himself, and the worst of them.
The last line of stdout is one JSON object, which `simulated_fleet.py --measured` takes.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import ray
import torch
import yaml
from ray import serve

from dspark.config import build_config
from dspark.data.prompts import PromptSource, read_prompts
from dspark.engine.drafter_folder import COST_CURVE
from dspark.serving.app import draft_deployment, target_deployment
from dspark.serving.config import ServeConfig
from dspark.serving.engine_client import Delta
from dspark.serving.openai_schema import ChatRequest
from dspark.speculation.cost_curve import CostCurve, hardware_fingerprint
from dspark.storage import absolute
from fleet_figures import (
    PREFIX,
    Period,
    Seen,
    Snapshot,
    circumstances,
    drift_of,
    minimum_figures,
    periods,
    speculation_figures,
    speed_figures,
    summed,
)
from served import print_table

LOGICAL_CPUS = 16  # bookkeeping only
WARM_S = 2
OWED = -1
LOCAL, FLEET = "local", "fleet"


class Fleet:
    """The replicas of one rule. handles: one per target replica, each an application of its own."""

    def __init__(self, rule: str, options: argparse.Namespace) -> None:
        config = config_of(rule, options)
        self.drafts = None
        self.curve = None
        if config.draft_replicas is not None:
            self.curve = curve_of(config)
            bound = draft_deployment(config.draft_replicas).bind(config)
            self.drafts = serve.run(bound, name=f"{rule}-drafts", route_prefix=None)
        self.model = config.model_name
        self.handles = [
            serve.run(target_deployment(config).bind(config, self.drafts), name=f"{rule}-{place}", route_prefix=None)
            for place in range(len(options.concurrency))
        ]

    async def snapshot(self) -> Snapshot:
        """What all replicas have counted so far."""
        families = [await handle.metrics.remote() for handle in self.handles]
        told = [] if self.drafts is None else await asyncio.to_thread(self._of_drafts)
        return Snapshot(time.monotonic(), tuple(counters(own) for own in families), summed(told), len(told))

    def _of_drafts(self) -> list[dict[str, float]]:
        """Of each draft replica; waits."""
        assert self.drafts is not None
        return list(self.drafts.broadcast("figures").results())


def counters(families: Sequence[Any]) -> dict[str, float]:
    """A replica's samples by their name without "dspark_"."""
    samples = [sample for family in families for sample in family.samples if sample.name.startswith(PREFIX)]
    return summed({sample.name.removeprefix(PREFIX): sample.value} for sample in samples)


def curve_of(config: ServeConfig) -> CostCurve:
    """The curve that target replicas go by where a draft replica drafts. Raises: MissingInput if there is none."""
    target, device = config.target, config.target.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    wanted = hardware_fingerprint(device, target.dtype, config.threads, target.name)
    return CostCurve.load(Path(str(config.drafter)) / COST_CURVE, wanted)


def config_of(rule: str, options: argparse.Namespace) -> ServeConfig:
    (application,) = yaml.safe_load(Path(options.deployment).read_text(encoding="utf-8"))["applications"]
    args = application["args"] | {"drafter": absolute(options.drafter), "threads": options.threads}
    args["profile_without_curve"] = True
    args["engine"] = {key: value for key, value in args["engine"].items() if key != "lookup"}
    minimum = {OWED: options.minimum} if options.minimum and rule == FLEET else {}
    args["fleet"] = args["fleet"] | {"enabled": rule == FLEET, "name": f"{rule}-fleet", "min_tokens_per_s": minimum}
    if options.beside:
        args.pop("draft_replicas", None)
    return build_config(ServeConfig, args, source=options.deployment)


async def measured(fleet: Fleet, prompts: Sequence[Any], options: argparse.Namespace) -> dict[str, Any]:
    """All clients of all replicas for so many seconds."""
    number, started = count(), time.monotonic()
    seen = [
        Seen(owed=[Counter() for _ in range(min(options.owed, clients))] if options.minimum else [])
        for clients in options.concurrency
    ]
    stop = started + WARM_S + options.seconds

    async def ask_on(handle: Any, own: Seen, place: int) -> None:
        stream = handle.options(stream=True).generate
        counted = [own.all, *own.owed[place : place + 1]]
        while time.monotonic() < stop:
            request = ChatRequest(
                model=fleet.model,
                messages=prompts[next(number) % len(prompts)],
                max_tokens=options.tokens,
                temperature=0.0,
                priority=OWED if place < options.owed else 0,
            )
            async for delta in stream.remote(uuid.uuid4().hex, request):
                if not isinstance(delta, Delta):
                    raise SystemExit(f"a request was refused: {delta}")
                for tokens in counted:
                    tokens[int(time.monotonic() - started)] += len(delta.token_ids)

    async def snapshot_at(seconds: float) -> Snapshot:
        await asyncio.sleep(started + seconds - time.monotonic())
        return await fleet.snapshot()

    snapshots = [asyncio.create_task(snapshot_at(WARM_S + part * options.seconds)) for part in (0.0, 0.5, 1.0)]
    places = zip(fleet.handles, seen, options.concurrency, strict=True)
    await asyncio.gather(*(ask_on(handle, own, n) for handle, own, clients in places for n in range(clients)))
    return figures(seen, await asyncio.gather(*snapshots), fleet.curve, options)


def figures(
    seen: Sequence[Seen], snapshots: Sequence[Snapshot], curve: CostCurve | None, options: argparse.Namespace
) -> dict[str, Any]:
    """A round's. snapshots: at the begin, in the middle and at the end of what counts."""
    seconds = range(WARM_S, WARM_S + options.seconds)
    together, each = speed_figures(seen, seconds)
    row: dict[str, Any] = {"tokens_per_s": together, "of_each": each}
    row |= speculation_figures(Period(snapshots[0], snapshots[-1]))
    row["drift"] = drift_of(periods(snapshots)[0], curve)
    row["first half"] = circumstances(periods(snapshots)[0], curve)
    if options.minimum:
        row |= minimum_figures(seen, seconds, options.minimum)
    return row


def main() -> None:
    options = parsed()
    source = PromptSource(path=options.prompts, split="heldout")
    prompts = [one.opening for one in read_prompts([source], seed=0, heldout_fraction=0.0).prompts]
    ray.init(address="local", _temp_dir=tempfile.mkdtemp(), num_cpus=LOGICAL_CPUS, include_dashboard=False)
    serve.start(proxy_location="Disabled")
    rows: dict[str, list[dict[str, Any]]] = {rule: [] for rule in options.rules}
    try:
        fleets = {rule: Fleet(rule, options) for rule in options.rules}
        for turn in range(options.rounds):
            for rule in options.rules[:: 1 if turn % 2 == 0 else -1]:
                rows[rule].append(asyncio.run(measured(fleets[rule], prompts, options)))
                print(f"{turn}: {rule}: {rows[rule][-1]['tokens_per_s']:.1f} tokens/s", flush=True)
    finally:
        serve.shutdown()
        ray.shutdown()
    table = [{"rule": rule} | median_of(own) for rule, own in rows.items()]
    print_table([{name: value for name, value in row.items() if isinstance(value, float | str)} for row in table])
    ratios = []
    if {LOCAL, FLEET} <= rows.keys():
        pairs = zip(rows[FLEET], rows[LOCAL], strict=True)
        ratios = [fleet["tokens_per_s"] / local["tokens_per_s"] for fleet, local in pairs]
        print(f"fleet over local: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    print(json.dumps({"rows": table, "rounds": rows, "fleet over local": ratios}))


def median_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in rows[0].items():
        values = [row[name] for row in rows]
        if isinstance(value, dict):
            found[name] = median_of(values)
        elif isinstance(value, list):
            found[name] = [statistics.median(own) for own in zip(*values, strict=True)]
        else:
            found[name] = statistics.median(values)
    return found


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deployment", default="deployments/dspark.yaml")
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[2, 32])
    parser.add_argument("--rules", nargs="+", choices=[LOCAL, FLEET], default=[LOCAL, FLEET])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1, help="of each target replica")
    parser.add_argument("--beside", action="store_true")
    parser.add_argument("--minimum", type=float)
    parser.add_argument("--owed", type=int, default=0)
    options = parser.parse_args()
    if bool(options.minimum) != bool(options.owed):
        parser.error("--minimum and --owed go together: so many tokens per second, to so many clients of each replica")
    return options


if __name__ == "__main__":
    main()
