"""Measure a drafter's accepted length on held-out prompts, losslessly, on the workers of a Ray cluster."""

import json
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import runner
from dspark.data.prompts import read_prompts
from dspark.errors import DsparkError
from dspark.evaluation.config import EvaluateConfig
from dspark.evaluation.planning import Subject, WorkItem, open_subject, plan_work, select_prompts, split_done
from dspark.evaluation.summary import format_table, summarize
from dspark.evaluation.worker import EvaluationWorker
from dspark.provenance import git_revision, read_json, write_json

ROLLOUTS, METRICS = "rollouts.jsonl", "metrics.json"

log = logging.getLogger("dspark.evaluate")


def run(config: EvaluateConfig, *, fresh: bool = False, dry_run: bool = False) -> dict[str, Any]:
    """Measure what is not measured yet; returns the accepted lengths."""
    prompt_set = read_prompts(config.sources, seed=config.seed, heldout_fraction=config.heldout_fraction)
    prompts, left_out = select_prompts(prompt_set, config)
    subject = open_subject(config)
    output = Path(config.output).resolve()
    if fresh and not dry_run:
        for name in (ROLLOUTS, METRICS):
            (output / name).unlink(missing_ok=True)
    rows = read_rows(output / ROLLOUTS)
    done, to_do = split_done(plan_work(config, subject, prompts), rows)
    num_turns = sum(prompt.num_turns for prompt in prompts)
    counts = {"read": prompt_set.num_read, "prompts": len(prompts), "turns": num_turns, "left_out": left_out}
    _print_plan(config, counts, done=len(done), to_do=len(to_do))
    if dry_run:
        return {"stage": "evaluate", "output": config.output, "dry_run": True, "to_do": len(to_do)} | counts
    if not to_do and (output / METRICS).is_file():
        log.info("every prompt is measured in %s", output)
        earlier = read_json(output / METRICS)["speed"]
        return _finish(config, subject, counts, done, output, speed=earlier) | {"skipped": True}
    with runner.track(config, "evaluate", drafter=subject.drafter) as tracked:
        started = time.monotonic()
        measured = _measure(config, subject, to_do, output / ROLLOUTS)
        speed = _speed(measured, time.monotonic() - started)
        result = _finish(config, subject, counts, done + measured, output, speed=speed)
        tracked.log_metrics(dict(_flat_metrics(result)), step=0)
        for name in (METRICS, ROLLOUTS):
            tracked.log_artifact(output / name)
    return result


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Result rows of earlier runs. A line cut short by a kill is removed, so that the next one starts on its own."""
    if not path.is_file():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with open(path, "r+b") as stream:
            stream.truncate(len(whole))
    return [json.loads(line) for line in whole.splitlines()]


def _measure(config: EvaluateConfig, subject: Subject, items: list[WorkItem], path: Path) -> list[dict[str, Any]]:
    """Run the items; each row is on disk before the next one is waited for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    with open(path, "a", encoding="utf-8") as stream:
        for row in _results(config, subject, items):
            stream.write(json.dumps(row) + "\n")
            stream.flush()
            rows.append(row)
            log.info("%d of %d: %s, %s", len(rows), len(items), row["id"], row["error"] or row["mode"])
    return rows


def _results(config: EvaluateConfig, subject: Subject, items: list[WorkItem]) -> Iterator[dict[str, Any]]:
    import ray  # heavy, and not needed for --dry-run

    if not items:
        return
    runner.start_ray()
    num_gpus = runner.gpus_per_worker(config.gpus_per_worker)
    # A worker that dies is started again, with the item it was at.
    actor: Any = ray.remote(num_cpus=1, num_gpus=num_gpus, max_restarts=2, max_task_retries=2)(EvaluationWorker)
    workers = [actor.remote(config, subject) for _ in range(min(config.num_workers, len(items)))]
    try:
        yield from ray.util.ActorPool(workers).map_unordered(lambda worker, item: worker.evaluate.remote(item), items)
    finally:
        for worker in workers:
            ray.kill(worker)


def _finish(
    config: EvaluateConfig,
    subject: Subject,
    counts: dict[str, Any],
    rows: list[dict[str, Any]],
    output: Path,
    *,
    speed: dict[str, float],
) -> dict[str, Any]:
    """Write the figures, print the table. Raises: DsparkError when a mode has no prompt that went well."""
    rows = sorted(rows, key=lambda row: (row["mode"], row["id"]))  # not by who finished first
    metrics = summarize(rows, config.modes, seed=config.seed)
    for mode, content in metrics["modes"].items():
        if not content["overall"]["prompts"]:
            reason = next(iter(content["failed"]), "no result")
            raise DsparkError(f"no prompt could be measured in mode {mode!r}: {reason}")
    metrics |= {
        "config": config.model_dump(mode="json"),
        "target": subject.identity | {"dtype": subject.target.dtype},
        "drafter": {"folder": config.drafter, "sha256": subject.drafter_sha256},
        "counts": counts,
        "speed": speed,
        "git_revision": git_revision(),
    }
    write_json(output / METRICS, metrics)
    print(format_table(metrics), flush=True)
    lengths = {
        mode: {name: figures["accepted_length"] for name, figures in content["domains"].items()}
        | {"overall": content["overall"]["accepted_length"]}
        for mode, content in metrics["modes"].items()
    }
    overall = {mode: content["overall"] for mode, content in metrics["modes"].items()}
    comparison = metrics["generate_comparison"]
    return {
        "stage": "evaluate",
        "output": config.output,
        **counts,
        "failed": {mode: sum(content["failed"].values()) for mode, content in metrics["modes"].items()},
        "accepted_length": lengths,
        "speedup": {mode: figures["speedup"] for mode, figures in overall.items()},
        "generate_comparison": {name: comparison[name] for name in ("checked", "identical", "dtype")},
        "tokens": sum(figures["output_tokens"] for figures in overall.values()),
        **speed,
    }


def _speed(measured: list[dict[str, Any]], seconds: float) -> dict[str, float]:
    """Wall time of this run, and tokens output in it."""
    tokens = sum(len(turn["output_ids"]) for row in measured for turn in row["turns"])
    return {"seconds": round(seconds, 1), "tokens_per_s": round(tokens / seconds, 1) if tokens else 0.0}


def _flat_metrics(result: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for mode, lengths in result["accepted_length"].items():
        for domain, value in lengths.items():
            if value is not None:
                yield f"{mode}/{domain}/accepted_length", value
        if result["speedup"][mode] is not None:
            yield f"{mode}/speedup", result["speedup"][mode]


def _print_plan(config: EvaluateConfig, counts: dict[str, Any], *, done: int, to_do: int) -> None:
    modes = ", ".join(mode.name for mode in config.modes)
    print(
        f"evaluation: {counts['prompts']:,} prompts of {counts['read']:,} rows, {counts['turns']:,} turns, "
        f"modes {modes}; {done:,} results are there, {to_do:,} to measure, "
        f"at most {counts['turns'] * len(config.modes) * config.max_new_tokens:,} tokens"
    )
    for reason, count in sorted(counts["left_out"].items()):
        print(f"  left out: {count:,} rows ({reason})")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(runner.main(EvaluateConfig, run, default_config="evaluate.yaml"))
