"""Target replicas at unequal load, on one draft replica or each with its own drafter: what they do in all.

    python benchmarks/shared_drafters.py --drafter runs/demo/drafter --prompts prompts/heldout.jsonl
        [--deployment deployments/dspark.yaml] [--concurrency 2 32] [--rules local fleet] [--rounds 3] [--seconds 30]
        [--tokens 128] [--beside] [--minimum 12 --owed 4]

Each rule has target replicas of its own, as Ray Serve makes them of the deployment file, and a draft replica that they
share; --beside: none, each replica drafts for itself. Only one rule's are asked at a time, in turns. "local": every
replica decides alone; "fleet": by the fleet scheduler's leases. Every replica is asked by as many clients as its place
in --concurrency says, each of which asks on as soon as it has its answer; only whole seconds after the first two count.

--minimum: tokens per second owed to the users of the first --owed clients of each replica, in the mean over them; told
is in how many seconds they had them. The last line of stdout is one JSON object, each rule's figures in it as
`simulated_fleet.py --measured` takes them.
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
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import ray
import yaml
from ray import serve

from dspark.config import build_config
from dspark.data.prompts import PromptSource, read_prompts
from dspark.serving.app import draft_deployment, target_deployment
from dspark.serving.config import ServeConfig
from dspark.serving.engine_client import Delta
from dspark.serving.openai_schema import ChatRequest
from dspark.storage import absolute
from served import print_table

LOGICAL_CPUS = 16  # bookkeeping only
WARM_S = 2
OWED = -1
LOCAL, FLEET = "local", "fleet"


@dataclass
class Seen:
    """Tokens of one replica's users in each second since the start, all and the owed ones'."""

    all: Counter[int] = field(default_factory=Counter)
    owed: Counter[int] = field(default_factory=Counter)


class Fleet:
    """The replicas of one rule. handles: one per target replica, each an application of its own."""

    def __init__(self, rule: str, options: argparse.Namespace) -> None:
        config = config_of(rule, options)
        drafts = None
        if config.draft_replicas is not None:
            bound = draft_deployment(config.draft_replicas).bind(config)
            drafts = serve.run(bound, name=f"{rule}-drafts", route_prefix=None)
        self.model = config.model_name
        self.handles = [
            serve.run(target_deployment(config).bind(config, drafts), name=f"{rule}-{place}", route_prefix=None)
            for place in range(len(options.concurrency))
        ]

    async def counters(self) -> Counter[str]:
        """What the replicas have counted so far, together."""
        found: Counter[str] = Counter()
        for handle in self.handles:
            for family in await handle.metrics.remote():
                for sample in family.samples:
                    if sample.name.startswith("dspark_"):
                        found[sample.name] += sample.value
        return found


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
    before, number = await fleet.counters(), count()
    seen, started = [Seen() for _ in fleet.handles], time.monotonic()
    stop = started + WARM_S + options.seconds

    async def ask_on(handle: Any, own: Seen, is_owed: bool) -> None:
        stream = handle.options(stream=True).generate
        while time.monotonic() < stop:
            request = ChatRequest(
                model=fleet.model,
                messages=prompts[next(number) % len(prompts)],
                max_tokens=options.tokens,
                temperature=0.0,
                priority=OWED if is_owed else 0,
            )
            async for delta in stream.remote(uuid.uuid4().hex, request):
                if not isinstance(delta, Delta):
                    raise SystemExit(f"a request was refused: {delta}")
                second = int(time.monotonic() - started)
                own.all[second] += len(delta.token_ids)
                own.owed[second] += len(delta.token_ids) * is_owed

    places = zip(fleet.handles, seen, options.concurrency, strict=True)
    await asyncio.gather(
        *(ask_on(handle, own, n < options.owed) for handle, own, clients in places for n in range(clients))
    )
    return figures(seen, await fleet.counters() - before, options)


def figures(seen: Sequence[Seen], counted: Counter[str], options: argparse.Namespace) -> dict[str, Any]:
    seconds = range(WARM_S, WARM_S + options.seconds)
    each = [statistics.fmean(own.all[second] for second in seconds) for own in seen]
    row: dict[str, Any] = {
        "tokens_per_s": sum(each),
        "of_each": each,
        "verify_length": counted["dspark_verified_tokens_total"] / max(1, counted["dspark_decodes_total"]),
        "drafted": counted["dspark_drafted_decodes_total"] / max(1, counted["dspark_decodes_total"]),
        "accepted": counted["dspark_accepted_tokens_total"] / max(1, counted["dspark_verified_tokens_total"]),
        "drift": counted["dspark_measured_step_seconds_total"]
        / max(1e-9, counted["dspark_predicted_step_seconds_total"]),
    }
    if options.minimum:
        users = [min(options.owed, clients) for clients in options.concurrency]
        kept = [own.owed[s] >= options.minimum * n for own, n in zip(seen, users, strict=True) for s in seconds]
        row["minimum_kept"] = sum(kept) / len(kept)
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
    print_table([{name: value for name, value in row.items() if name != "of_each"} for row in table])
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
        is_list = isinstance(value, list)
        found[name] = (
            [statistics.median(own) for own in zip(*values, strict=True)] if is_list else statistics.median(values)
        )
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
    return parser.parse_args()


if __name__ == "__main__":
    main()
