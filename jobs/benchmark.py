"""Measure tokens per second by the load: an engine in this process with and without speculation, or running servers."""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import runner
from dspark.data.prompts import Prompt, read_prompts
from dspark.engine.drafter_folder import (
    CALIBRATION,
    COST_CURVE,
    DRAFTER_FILES,
    WITHOUT_FOLDER,
    check_drafter,
    drafter_target,
)
from dspark.evaluation.benchmarking import PairBenchmark, choose_prompts
from dspark.evaluation.endpoint_contest import EndpointBenchmark
from dspark.evaluation.load_config import BenchmarkConfig
from dspark.evaluation.profiling import fingerprint_of
from dspark.provenance import file_sha256, fingerprint, git_revision, read_json, write_json
from dspark.storage import locate
from dspark.targets import TargetConfig, target_identity

BENCHMARK = "benchmark.json"

Key = tuple[str, Any, int]
Row = Mapping[str, Any]

log = logging.getLogger("dspark.benchmark")


class Benchmark(Protocol):
    """What is measured in rows, each under a key of its own: pairs of an engine's runs, or a run of each server."""

    notes: list[str]

    @property
    def subject(self) -> str: ...
    @property
    def plan(self) -> str: ...
    @property
    def most_tokens(self) -> int: ...
    def keys(self) -> Sequence[Key]: ...
    def key_of(self, row: Row) -> Key: ...
    def measure(self, prompts: Sequence[Prompt], keys: Sequence[Any]) -> Iterator[dict[str, Any]]: ...
    def runs(self, row: Row) -> list[Row]: ...
    def said(self, row: Row) -> str: ...
    def summarize(self, rows: Sequence[Row]) -> dict[str, Any]: ...
    def headline(self, summary: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]: ...
    def table(self, summary: Mapping[str, Any]) -> str: ...


def run(config: BenchmarkConfig, *, fresh: bool = False, dry_run: bool = False) -> dict[str, Any]:
    """Measure the rows that are not measured yet; returns throughputs and their ratios."""
    prompt_set = read_prompts(config.prompts, seed=config.seed, heldout_fraction=config.heldout_fraction)
    prompts = choose_prompts(prompt_set, config)
    request = _request(config, prompts)
    benchmark: Benchmark = EndpointBenchmark(config) if config.endpoints else PairBenchmark(config)
    path = Path(config.output).resolve() / BENCHMARK
    rows = [] if fresh else _earlier_rows(path, request)
    keys = benchmark.keys()
    rows = [row for row in rows if benchmark.key_of(row) in keys]
    to_do = [key for key in keys if key not in {benchmark.key_of(row) for row in rows}]
    print(
        f"benchmark of {benchmark.subject}: {len(prompts):,} held-out prompts, {benchmark.plan}; {len(rows)} pairs are "
        f"there, {len(to_do)} to measure, at most {benchmark.most_tokens:,} tokens",
        flush=True,
    )
    if dry_run:
        return {"stage": "benchmark", "output": config.output, "dry_run": True, "to_do": len(to_do)}
    if not to_do:
        log.info("every pair is measured in %s", path)
        benchmark.notes += read_json(path).get("notes", [])
        return _finish(config, benchmark, request, rows, path) | {"skipped": True}
    with runner.track(config, "benchmark") as tracked:
        progress = runner.Progress(len(to_do))
        for number, row in enumerate(benchmark.measure(prompts, to_do), 1):
            rows.append(row)
            write_json(path, {"request": request, "pairs": rows})
            log.info("%s (%s)", benchmark.said(row), progress.said(number))
        result = _finish(config, benchmark, request, rows, path)
        for mode, by_load in result["load"].items():
            for place, (load, figures) in enumerate(by_load.items()):
                named = {f"{mode}/{name}": value for name, value in runner.figures(figures).items()}
                tracked.log_metrics(named, step=int(load) if load.isdecimal() else place)
        tracked.log_artifact(path)
    return result


def _request(config: BenchmarkConfig, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What decides the figures: earlier pairs stand beside new ones only under the same.

    Raises: MissingInput without the drafter; Mismatch if it was trained for another target.
    """
    settings = config.model_dump(mode="json", exclude={"drafter", "output", "pairs", "prompts", "target", "tracking"})
    request = settings | {"prompts": fingerprint([p.messages for p in prompts]), "git_revision": git_revision()}
    if config.drafter is None:
        return request
    target = config.target or drafter_target(config.drafter)
    return request | {
        "target": target_identity(target),
        "drafter": drafter_files(config.drafter, target) or config.drafter,
        "hardware": fingerprint_of(target, config.threads),
    }


def drafter_files(drafter: str | None, target: TargetConfig) -> dict[str, str]:
    """Checksums of all that a drafter's folder says about decoding; none without a folder.

    Raises: MissingInput without the drafter; Mismatch if it was trained for another target.
    """
    if drafter is None or drafter in WITHOUT_FOLDER:
        return {}
    check_drafter(drafter, target)
    paths = {name: locate(drafter) / name for name in (*DRAFTER_FILES[:2], CALIBRATION, COST_CURVE)}
    return {name: file_sha256(path) for name, path in paths.items() if path.is_file()}


def _earlier_rows(path: Path, request: dict[str, Any]) -> list[dict[str, Any]]:
    """Pairs of an earlier run of the same request."""
    if not path.is_file():
        return []
    earlier = read_json(path)
    if fingerprint(earlier["request"]) != fingerprint(request):
        log.info("%s was measured for another request; its pairs are left out", path)
        return []
    return list(earlier["pairs"])


def _finish(
    config: BenchmarkConfig, benchmark: Benchmark, request: dict[str, Any], rows: list[dict[str, Any]], path: Path
) -> dict[str, Any]:
    """Write the figures and print the table."""
    summary = benchmark.summarize(rows)
    runs = [run for row in rows for run in benchmark.runs(row)]
    tokens, seconds = (sum(measured[name] for measured in runs) for name in ("output_tokens", "seconds"))
    result = {
        "stage": "benchmark",
        "output": config.output,
        "load": benchmark.headline(summary),
        "pairs": len(rows),
        "tokens": tokens,
        "seconds": round(seconds, 1),
        "tokens_per_s": round(tokens / seconds, 1),
    }
    notes = list(benchmark.notes)
    write_json(
        path,
        {
            "request": request,
            "config": config.model_dump(mode="json"),
            "pairs": rows,
            "summary": summary,
            "notes": notes,
            "result": result,
        },
    )
    print("\n".join([benchmark.table(summary), *(f"note: {note}" for note in notes)]), flush=True)
    return result


if __name__ == "__main__":
    sys.exit(runner.main(BenchmarkConfig, run, default_config="benchmark.yaml"))
