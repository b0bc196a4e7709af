"""Tokens per second with the drafter beside the target, behind a draft replica, and without one, on this machine.

    python benchmarks/draft_placement.py --prompts prompts.jsonl --drafter runs/demo/drafter
                                         [--num-prompts 48] [--tokens 128] [--concurrency 1 4 16] [--rounds 3]
                                         [--draft-threads 2] [--deadline-s 0.25] [--temperature 0]

All answer the same requests in turns, on the same weights; only the way to the drafter differs, which is Ray Serve's as
in deployments/dspark.yaml, on a cluster of this run's own. Greedy answers are counted that are equal to those of plain
decoding; on ties in bfloat16 they may differ. The last line of stdout is one JSON object.
"""

import json
import statistics
import tempfile
from typing import Any

import ray
from ray import serve

from dspark.config import build_config
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.engine.loading import load_engine
from dspark.engine.remote_draft_state import RemoteDraftStats
from dspark.engine.remote_drafts import RemoteDrafts
from dspark.engine.request import GenerationRequest
from dspark.engine.sampling import SamplingParams
from dspark.evaluation.load import closed_loop
from dspark.evaluation.load_run import LoadRun
from dspark.serving.app import draft_deployment
from dspark.serving.config import ServeConfig
from dspark.serving.draft_link import ServeDraftLink
from dspark.storage import absolute
from dspark.targets import TargetConfig
from served import Subject, first_difference, parser_of, print_table

LOGICAL_CPUS = 4  # Ray's bookkeeping
PLAIN, BESIDE, BEHIND = "plain", "beside", "behind"


def main() -> None:
    parser = parser_of(__doc__, num_prompts=48, tokens=128)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--draft-threads", type=int, default=2)
    parser.add_argument("--deadline-s", type=float, help="that a step waits; without it what the cost curve says")
    options = parser.parse_args()
    if options.drafter is None:
        parser.error("--drafter: name the folder of a trained drafter")
    requests, engines, remote = prepare(options)
    runs: dict[tuple[str, int], list[LoadRun]] = {}
    waits: dict[int, list[float]] = {}
    for number in range(options.rounds):
        for concurrency in options.concurrency:
            names = list(engines)
            for name in names[number % len(names) :] + names[: number % len(names)]:  # none is always the first
                waited = remote.wait_s
                run = closed_loop(engines[name], requests, concurrency=concurrency)
                runs.setdefault((name, concurrency), []).append(run)
                if name == BEHIND:
                    waits.setdefault(concurrency, []).append((remote.wait_s - waited) / run.seconds)
                print(f"{number}: {name}, {concurrency} at once: {run.tokens_per_s:.1f} tokens/s", flush=True)
    rows = [row_of(name, at_once, runs, waits) for name, at_once in sorted(runs, key=lambda key: key[1])]
    print_table(rows)
    print(json.dumps({"rows": rows, "link": vars(remote)}))
    serve.shutdown()
    ray.shutdown()


def prepare(options: Any) -> tuple[list[GenerationRequest], dict[str, Engine], RemoteDraftStats]:
    """The requests, an engine per placement, and what becomes of the link to the draft replica."""
    subject = Subject(options, options.dtype)
    sampling = SamplingParams(temperature=options.temperature, seeded="rejection")
    stop_ids = subject.loaded.stop_ids
    requests = [
        GenerationRequest(str(i), ids, sampling, options.tokens, stop_ids, seed=i if options.temperature else None)
        for i, ids in enumerate(subject.prompts())
    ]
    longest = max(len(one.prompt_ids) for one in requests) + options.tokens + 64
    config = EngineConfig(kv_tokens=max(options.concurrency) * longest, prefix_cache=False)
    remote = connect(options, kv_tokens=config.num_pages * config.page_size)
    target = TargetConfig(name=options.target, dtype=options.dtype, device=options.device)
    shared: dict[str, Any] = {"config": config, "num_threads": options.threads, "shared": subject.loaded}
    engines = {
        PLAIN: load_engine(target, None, **shared).engine,
        BESIDE: load_engine(target, options.drafter, **shared).engine,
        BEHIND: load_engine(target, options.drafter, remote=remote, **shared).engine,
    }
    for engine in engines.values():  # what is made at the first use is made before anything is timed
        closed_loop(engine, requests[:4], concurrency=4)
    return requests, engines, remote.stats


def connect(options: Any, *, kv_tokens: int) -> RemoteDrafts:
    """A draft replica on a local cluster, and the way there."""
    config = build_config(
        ServeConfig,
        {
            "target": {"name": options.target, "dtype": options.dtype, "device": options.device},
            "drafter": absolute(options.drafter),
            "draft_replicas": {
                "threads": options.draft_threads,
                "contexts": {"kv_tokens": 2 * kv_tokens},
                "link": {"deadline_s": options.deadline_s},
            },
        },
    )
    assert config.draft_replicas is not None
    ray.init(address="local", _temp_dir=tempfile.mkdtemp(), num_cpus=LOGICAL_CPUS, include_dashboard=False)
    serve.start(proxy_location="Disabled")
    handle = serve.run(draft_deployment(config.draft_replicas).bind(config), route_prefix=None)
    return RemoteDrafts(ServeDraftLink(handle, 0), "benchmark", config.draft_replicas.link)


def row_of(
    name: str, at_once: int, runs: dict[tuple[str, int], list[LoadRun]], waits: dict[int, list[float]]
) -> dict[str, Any]:
    """Medians over the rounds. to plain: of tokens per second; waiting: share of the time in which steps wait."""
    own = runs[name, at_once]
    speeds = [run.tokens_per_s for run in own]
    pairs = list(zip(own, runs[PLAIN, at_once], strict=True))
    ratios = [run.tokens_per_s / plain.tokens_per_s for run, plain in pairs]
    first = [(a.output_ids, b.output_ids) for a, b in zip(pairs[0][0].answers, pairs[0][1].answers, strict=True)]
    counts = own[0].counts
    return {
        "placement": f"{name}, {at_once} at once",
        "tokens/s": statistics.median(speeds),
        "least": min(speeds),
        "most": max(speeds),
        "to plain": statistics.median(ratios),
        "accepted length": counts.accepted_length if counts is not None and counts.rounds else 1.0,
        "drafted": own[0].num_drafted / max(1, own[0].num_decodes),
        "waiting": statistics.median(waits[at_once]) if name == BEHIND else 0.0,
        "equal to plain": f"{sum(first_difference(a, b) is None for a, b in first)}/{len(first)}",
    }


if __name__ == "__main__":
    main()
