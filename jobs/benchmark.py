"""Measure tokens per second with and without speculation, on an engine in this process or on a running server."""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import runner
from dspark.data.prompts import Prompt, read_prompts
from dspark.engine.loading import CALIBRATION, COST_CURVE, DRAFTER_FILES, WITHOUT_FOLDER, check_drafter, drafter_target
from dspark.evaluation.benchmarking import (
    SIDES,
    choose_prompts,
    format_pairs,
    key_of,
    measure_pairs,
    pair_keys,
    summarize_pairs,
)
from dspark.evaluation.http_load import HttpLoad
from dspark.evaluation.load import EngineLoad, Load
from dspark.evaluation.load_config import BenchmarkConfig
from dspark.evaluation.profiling import fingerprint_of
from dspark.provenance import file_sha256, fingerprint, git_revision, read_json, write_json
from dspark.storage import locate
from dspark.targets import TargetConfig, target_identity

BENCHMARK = "benchmark.json"

log = logging.getLogger("dspark.benchmark")


def run(config: BenchmarkConfig, *, fresh: bool = False, dry_run: bool = False) -> dict[str, Any]:
    """Measure the pairs that are not measured yet; returns throughputs and their ratios."""
    prompt_set = read_prompts(config.prompts, seed=config.seed, heldout_fraction=config.heldout_fraction)
    prompts = choose_prompts(prompt_set, config)
    request = _request(config, prompts)
    path = Path(config.output).resolve() / BENCHMARK
    rows = [] if fresh else _earlier_rows(path, request)
    keys = pair_keys(config)
    rows = [row for row in rows if key_of(row) in keys]
    to_do = [key for key in keys if key not in {key_of(row) for row in rows}]
    _print_plan(config, len(prompts), done=len(rows), to_do=len(to_do))
    if dry_run:
        return {"stage": "benchmark", "output": config.output, "dry_run": True, "to_do": len(to_do)}
    if not to_do:
        log.info("every pair is measured in %s", path)
        return _finish(config, request, rows, path, notes=read_json(path).get("notes", [])) | {"skipped": True}
    with runner.track(config, "benchmark") as tracked:
        load: Load = EngineLoad(config, prompts) if config.base_url is None else HttpLoad(config, prompts)
        for row in measure_pairs(load, config, to_do):
            rows.append(row)
            write_json(path, {"request": request, "pairs": rows})
            log.info("%s, %d at once, pair %d: %.2f", row["mode"], row["concurrency"], row["pair"] + 1, row["ratio"])
        result = _finish(config, request, rows, path, notes=load.notes)
        for mode, by_concurrency in result["load"].items():
            for concurrency, figures in by_concurrency.items():
                named = {f"{mode}/{name}": value for name, value in runner.figures(figures).items()}
                tracked.log_metrics(named, step=int(concurrency))
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
    config: BenchmarkConfig,
    request: dict[str, Any],
    rows: list[dict[str, Any]],
    path: Path,
    *,
    notes: Sequence[str],
) -> dict[str, Any]:
    """Write the figures and print the table."""
    summary = summarize_pairs(rows)
    runs = [row[side] for row in rows for side in SIDES]
    tokens, seconds = (sum(measured[name] for measured in runs) for name in ("output_tokens", "seconds"))
    result = {
        "stage": "benchmark",
        "output": config.output,
        "load": {
            mode: {
                concurrency: {
                    "plain": figures["plain"]["tokens_per_s"],
                    "speculative": figures["speculative"]["tokens_per_s"],
                    "ratio": figures["ratio"]["median"],
                    "verify_length": figures["speculative"]["verify_length"],
                    "accepted_length": figures["speculative"]["accepted_length"],
                }
                for concurrency, figures in by_concurrency.items()
            }
            for mode, by_concurrency in summary.items()
        },
        "pairs": len(rows),
        "tokens": tokens,
        "seconds": round(seconds, 1),
        "tokens_per_s": round(tokens / seconds, 1),
    }
    write_json(
        path,
        {
            "request": request,
            "config": config.model_dump(mode="json"),
            "pairs": rows,
            "summary": summary,
            "notes": list(notes),
            "result": result,
        },
    )
    print("\n".join([format_pairs(summary), *(f"note: {note}" for note in notes)]), flush=True)
    return result


def _print_plan(config: BenchmarkConfig, num_prompts: int, *, done: int, to_do: int) -> None:
    per_pair = [config.num_requests(concurrency) for concurrency in config.concurrency]
    print(
        f"benchmark of {config.base_url or config.drafter}: {num_prompts:,} held-out prompts, "
        f"{', '.join(f'{r} requests {c} at a time' for r, c in zip(per_pair, config.concurrency, strict=True))}; "
        f"{done} pairs are there, {to_do} to measure, "
        f"at most {2 * sum(per_pair) * len(config.modes) * config.pairs * config.max_tokens:,} tokens",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(runner.main(BenchmarkConfig, run, default_config="benchmark.yaml"))
