"""The runs of a contest, kept as they come: the same command goes on behind those that were done before."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dspark.data.prompts import read_prompts
from dspark.evaluation.benchmarking import choose_prompts
from dspark.evaluation.contest import Contest, run_keys
from dspark.evaluation.load_config import ContestConfig
from dspark.evaluation.load_run import LoadRun
from dspark.provenance import fingerprint


def folder_of(config: ContestConfig, output: str) -> Path:
    """Below `output`, made if need be: other settings have other runs."""
    folder = Path(output) / fingerprint(config.model_dump(mode="json"))[:8]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def resumed_runs(
    config: ContestConfig, folder: Path, figures: Callable[[LoadRun], dict[str, Any]]
) -> list[dict[str, Any]]:
    """A row per run, in turn: its `key` (mode, load, repeat, entrant), and what `figures` makes of it."""
    path = folder / "runs.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {tuple(row["key"]) for row in rows}
    to_do = [key for key in run_keys(config) if key not in done]
    if not to_do:
        return rows
    prompts = read_prompts(config.prompts, seed=config.seed, heldout_fraction=config.heldout_fraction)
    contest = Contest(config, choose_prompts(prompts, config))
    contest.warm_up()
    for number, key in enumerate(to_do):
        _, concurrency, _, entrant = key
        rows.append({"key": key} | figures(contest.run(entrant, config.modes[0], concurrency)))
        with path.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        print(f"\r{number + 1} of {len(to_do)} runs", end="", flush=True)
    print()
    return rows
