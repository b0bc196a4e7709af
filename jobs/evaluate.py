"""Measure a drafter's accepted length on held-out prompts, losslessly, on the workers of a Ray cluster."""

import json
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import runner
from dspark.data.prompts import Prompt, read_prompts
from dspark.errors import DsparkError, one_line
from dspark.evaluation.config import EvaluateConfig
from dspark.evaluation.engine_worker import EngineWorker
from dspark.evaluation.planning import Subject, WorkItem, open_subject, plan_work, select_prompts, split_done
from dspark.evaluation.summary import format_table, summarize
from dspark.evaluation.worker import EvaluationWorker
from dspark.provenance import fingerprint, git_revision, read_json, write_json
from dspark.run_contents import DatasetRecord

ROLLOUTS, METRICS = "rollouts.jsonl", "metrics.json"
MAX_DEATHS = 2  # of one worker; its items go to a new process

log = logging.getLogger("dspark.evaluate")


@dataclass(frozen=True)
class Plan:
    """What is to be decoded, and the rows of earlier runs that count. counts: rows read, kept and left out."""

    subject: Subject
    prompts: list[Prompt]
    items: list[WorkItem]
    done: list[dict[str, Any]]
    to_do: list[WorkItem]
    counts: dict[str, Any]


def run(config: EvaluateConfig, *, fresh: bool = False, dry_run: bool = False) -> dict[str, Any]:
    """Measure what is not measured yet; returns the accepted lengths."""
    plan = make_plan(config, fresh=fresh and not dry_run, outputs=(METRICS,))
    output = Path(config.output).resolve()
    print_plan("evaluation", config, plan)
    if dry_run:
        return {"stage": "evaluate", "output": config.output, "dry_run": True, "to_do": len(plan.to_do)} | plan.counts
    if not plan.to_do and (output / METRICS).is_file():
        log.info("every prompt is measured in %s", output)
        earlier = read_json(output / METRICS)["speed"]
        return _finish(config, plan, plan.done, output, speed=earlier) | {"skipped": True}
    with runner.track(config, "evaluate", drafter=plan.subject.drafter) as tracked:
        started = time.monotonic()
        tracked.log_datasets([dataset_of(config, plan, "evaluation")])
        measured = measure(config, plan)
        speed = speed_of(measured, time.monotonic() - started)
        result = _finish(config, plan, plan.done + measured, output, speed=speed)
        tracked.log_metrics(dict(_flat_metrics(result)), step=0)
        for name in (METRICS, ROLLOUTS):
            tracked.log_artifact(output / name)
        lengths = {f"accepted_length.{mode}": by["overall"] for mode, by in result["accepted_length"].items()}
        runner.mark_drafter(tracked, config.tracking, plan.subject.drafter_sha256, "evaluated", lengths)
    return result


def dataset_of(config: EvaluateConfig, plan: Plan, context: str) -> DatasetRecord:
    """The prompts, as a run records what it reads."""
    digest = fingerprint(sorted(fingerprint(prompt.messages) for prompt in plan.prompts))
    profile = {"prompts": len(plan.prompts), "turns": plan.counts["turns"]}
    return DatasetRecord("held-out prompts", digest, ", ".join(s.place for s in config.sources), context, profile)


def make_plan(config: EvaluateConfig, *, fresh: bool, outputs: Sequence[str] = ()) -> Plan:
    """Read prompts and earlier rows. fresh: these and the other `outputs` in the folder are removed first."""
    prompt_set = read_prompts(config.sources, seed=config.seed, heldout_fraction=config.heldout_fraction)
    prompts, left_out = select_prompts(prompt_set, config)
    subject = open_subject(config)
    output = Path(config.output).resolve()
    if fresh:
        for name in (ROLLOUTS, *outputs):
            (output / name).unlink(missing_ok=True)
    items = plan_work(config, subject, prompts)
    done, to_do = split_done(items, read_rows(output / ROLLOUTS))
    num_turns = sum(prompt.num_turns for prompt in prompts)
    counts = {"read": prompt_set.num_read, "prompts": len(prompts), "turns": num_turns, "left_out": left_out}
    return Plan(subject, prompts, items, done, to_do, counts)


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


def measure(config: EvaluateConfig, plan: Plan) -> list[dict[str, Any]]:
    """Rows of what is to do; each is on disk before the next one is waited for."""
    path = Path(config.output).resolve() / ROLLOUTS
    path.parent.mkdir(parents=True, exist_ok=True)
    rows, progress = [], runner.Progress(len(plan.to_do))
    with open(path, "a", encoding="utf-8") as stream:
        for row in _results(config, plan.subject, plan.to_do):
            stream.write(json.dumps(row) + "\n")
            stream.flush()
            rows.append(row)
            log.info("%s: %s, %s", progress.said(len(rows)), row["id"], row["error"] or row["mode"])
    return rows


def _results(config: EvaluateConfig, subject: Subject, items: Sequence[WorkItem]) -> Iterator[dict[str, Any]]:
    """Rows as conversations end. Each worker is kept full: it gets as many items as it gave rows back."""
    import ray  # heavy, and not needed for --dry-run

    if not items:
        return
    runner.start_ray()
    is_engine = config.through == "engine"
    num_at_once = config.concurrency if is_engine else 1
    num_gpus = runner.gpus_per_worker(config.gpus_per_worker)
    actor: Any = ray.remote(num_cpus=1, num_gpus=num_gpus)(EngineWorker if is_engine else EvaluationWorker)
    hands = [_Hand(lambda: actor.remote(config, subject)) for _ in range(min(config.num_workers, len(items)))]
    waiting = deque(items)
    share = min(num_at_once, -(-len(items) // len(hands)))  # few items are spread over all workers
    calls = {hand.give(_take(waiting, share)): hand for hand in hands}
    try:
        while calls:
            (call, *_), _ = ray.wait(list(calls))
            hand = calls.pop(call)
            rows, lost = hand.receive(call)
            yield from rows
            waiting.extendleft(reversed(lost))
            more = _take(waiting, num_at_once - len(hand.items))
            if more or hand.items:
                calls[hand.give(more)] = hand
    finally:
        for hand in hands:
            hand.kill()


def _take(waiting: deque[WorkItem], number: int) -> list[WorkItem]:
    return [waiting.popleft() for _ in range(min(number, len(waiting)))]


class _Hand:
    """One worker process and the items it has. When it dies another takes its place, and its items are handed back."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self.items: dict[tuple[str, str], WorkItem] = {}
        self._start = start
        self._actor = start()
        self._num_deaths = 0

    def give(self, items: Sequence[WorkItem]) -> Any:
        """The call that answers with the next rows of all the worker has."""
        self.items |= {(item.prompt.id, item.mode.name): item for item in items}
        return self._actor.advance.remote(items)

    def receive(self, call: Any) -> tuple[list[dict[str, Any]], list[WorkItem]]:
        """(rows, items that were lost with the process). Raises what the worker raised, or its death when too many."""
        import ray  # heavy, and loaded by whoever asks

        try:
            rows = ray.get(call)
        except ray.exceptions.RayActorError as death:
            self._num_deaths += 1
            if death.actor_init_failed or self._num_deaths > MAX_DEATHS:
                raise
            log.warning("a worker died with %d items, another takes its place: %s", len(self.items), one_line(death))
            self.kill()
            self._actor = self._start()
            lost = list(self.items.values())
            self.items = {}
            return [], lost
        for row in rows:
            del self.items[row["id"], row["mode"]]
        return rows, []

    def kill(self) -> None:
        import ray  # heavy, and loaded by whoever asks

        ray.kill(self._actor)


def _finish(
    config: EvaluateConfig, plan: Plan, rows: list[dict[str, Any]], output: Path, *, speed: dict[str, float]
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
        "target": plan.subject.identity | {"dtype": plan.subject.target.dtype},
        "drafter": {"folder": config.drafter, "sha256": plan.subject.drafter_sha256},
        "counts": plan.counts,
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
        **plan.counts,
        "failed": {mode: sum(content["failed"].values()) for mode, content in metrics["modes"].items()},
        "accepted_length": lengths,
        "speedup": {mode: figures["speedup"] for mode, figures in overall.items()},
        "generate_comparison": {name: comparison[name] for name in ("checked", "identical", "dtype")},
        "tokens": sum(figures["output_tokens"] for figures in overall.values()),
        **speed,
    }


def speed_of(measured: list[dict[str, Any]], seconds: float) -> dict[str, float]:
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


def print_plan(what: str, config: EvaluateConfig, plan: Plan) -> None:
    """What will be decoded, and what was left out for which reason."""
    counts, modes = plan.counts, ", ".join(mode.name for mode in config.modes)
    print(
        f"{what}: {counts['prompts']:,} prompts of {counts['read']:,} rows, {counts['turns']:,} turns, "
        f"modes {modes}; {len(plan.done):,} results are there, {len(plan.to_do):,} to measure, "
        f"at most {counts['turns'] * len(config.modes) * config.max_new_tokens:,} tokens"
    )
    for reason, count in sorted(counts["left_out"].items()):
        print(f"  left out: {count:,} rows ({reason})")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(runner.main(EvaluateConfig, run, default_config="evaluate.yaml"))
