"""Train several drafters on the same data and steps, measure them alike, then set ways of decoding in a row."""

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cache
import evaluate
import runner
import train
from benchmark import drafter_files
from dspark.config import Config, load_config
from dspark.data.capture import CacheConfig
from dspark.data.prompts import Prompt, read_prompts
from dspark.errors import Mismatch, MissingInput
from dspark.evaluation.benchmarking import choose_prompts
from dspark.evaluation.comparison_report import format_lengths, write_comparison
from dspark.evaluation.config import EvaluateConfig
from dspark.evaluation.contest import (
    Contest,
    contest_target,
    format_contest,
    key_of,
    measure,
    run_keys,
    summarize_contest,
    whole_groups,
)
from dspark.evaluation.load_config import ContestConfig
from dspark.evaluation.profiling import fingerprint_of
from dspark.provenance import fingerprint, git_revision, read_json, require_same, write_json
from dspark.run_contents import share_view, view_hint
from dspark.targets import target_identity
from dspark.tracking import Run, TrackingConfig, start_run
from dspark.training.config import TrainConfig
from dspark.training.progress import read_history
from dspark.training.samples import open_samples

CONTEST, COMPARISON, REPORT = "contest.json", "comparison.json", "comparison.html"
EQUAL_IN_TRAINING = ("steps", "sequences_per_step", "anchors_per_sequence", "seed", "initialize_from")
EQUAL_IN_DATA = ("answers_fingerprint", "target", "dtype", "max_length", "min_loss_tokens", "seed")

log = logging.getLogger("dspark.compare")


class CompareConfig(Config):
    """The compare stage. Trained drafters and caches are kept, also with --fresh: start those over by their own jobs.

    caches: config files of jobs/cache.py, made where they are not there. drafters: by name, config files of
    jobs/train.py, which must agree in steps, batch, anchors, seed and answers. evaluate: a config file of
    jobs/evaluate.py, used for each of them. contest: ways of decoding under load, whose entrants name folders.
    output: gets evaluation/<name>, contest.json, comparison.json and comparison.html.
    """

    output: str
    caches: list[str] = []
    drafters: dict[str, str]
    evaluate: str
    contest: ContestConfig
    tracking: TrackingConfig = TrackingConfig()


def run(config: CompareConfig, *, fresh: bool = False, dry_run: bool = False) -> dict[str, Any]:
    """Do what is not done yet; returns accepted lengths and throughputs."""
    training = {name: load_config(TrainConfig, path) for name, path in config.drafters.items()}
    require_alike(training)
    caches = [cache.run(load_config(CacheConfig, path), dry_run=dry_run) for path in config.caches]
    if dry_run:
        return _plan(config, training, caches)
    require_same_answers(training)
    trained = {name: train.run(one) for name, one in training.items()}
    measured = {name: evaluate.run(one, fresh=fresh) for name, one in _evaluations(config, training).items()}
    path = Path(config.output).resolve() / CONTEST
    prompts = contest_prompts(config.contest)
    request = contest_request(config.contest, prompts)
    rows = [] if fresh else earlier_runs(path, request, config.contest)
    to_do = [key for key in run_keys(config.contest) if key not in {key_of(row) for row in rows}]
    log.info("%d runs under load are there, %d to measure", len(rows), len(to_do))
    done = not to_do and all(result.get("skipped") for result in [*trained.values(), *measured.values()])
    if done and (path.parent / COMPARISON).is_file():
        return _finish(config, training, trained, measured, rows) | {"skipped": True}
    with runner.track(config, "compare") as parent:
        if to_do:
            runner.stop_ray()  # what training and evaluation left running would share the cores with what is timed
            rows += measure_runs(config.contest, prompts, to_do, path, request, rows)
        result = _finish(config, training, trained, measured, rows)
        for name in (COMPARISON, REPORT):
            parent.log_artifact(path.parent / name)
        _record_drafters(config, parent, training, result)
        _record_entrants(config, parent, result)
        if view := _shared_view(config, parent, result):
            print(view_hint(parent, view), flush=True)
    return result


def require_alike(training: Mapping[str, TrainConfig]) -> None:
    """Raises: Mismatch when drafters are not trained with the same steps, batch, anchors and seed."""
    if not training:
        raise Mismatch("there is nothing to compare; give drafters")
    (first, wanted), *others = training.items()
    outputs = [one.output for one in training.values()]
    if len(set(outputs)) < len(outputs):
        raise Mismatch(f"drafters need an output each, got {outputs}")
    for name, one in others:
        expected, found = ({key: getattr(c, key) for key in EQUAL_IN_TRAINING} for c in (wanted, one))
        require_same(f"train configs of {name} and {first}", expected, found, remedy="give them the same budget")


def require_same_answers(training: Mapping[str, TrainConfig]) -> None:
    """Raises: Mismatch when they are not trained on the same answers; MissingInput for a cache that is not there."""
    opened = {name: open_samples(one) for name, one in training.items()}
    data = {
        name: {key: source.request.get(key) for key in EQUAL_IN_DATA}
        | {split: len(source.indices(split)) for split in ("train", "heldout")}
        for name, source in opened.items()
    }
    (first, wanted), *others = data.items()
    for name, found in others:
        require_same(f"data of {name} and {first}", wanted, found, remedy="train both on the same answers")


def _plan(
    config: CompareConfig, training: Mapping[str, TrainConfig], caches: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """What would be done, as far as the inputs are there."""
    stages: dict[str, Any] = {"caches": caches}
    for kind, job, configs in (("train", train, training), ("evaluate", evaluate, _evaluations(config, training))):
        for name, one in configs.items():
            try:
                stages[f"{kind} {name}"] = job.run(one, dry_run=True)
            except MissingInput as missing:
                log.info("%s %s cannot be planned yet: %s", kind, name, missing)
    num_runs = len(run_keys(config.contest))
    print(f"contest: {len(config.contest.entrants)} entrants, {num_runs} runs", flush=True)
    return {"stage": "compare", "output": config.output, "dry_run": True, "stages": stages, "runs": num_runs}


def _evaluations(config: CompareConfig, training: Mapping[str, TrainConfig]) -> dict[str, EvaluateConfig]:
    common = load_config(EvaluateConfig, config.evaluate)
    return {
        name: common.with_changes(
            drafter=one.output,
            output=str(Path(config.output) / "evaluation" / name),
            tracking=common.tracking.with_changes(run_name=f"evaluate {name}"),
        )
        for name, one in training.items()
    }


def contest_prompts(config: ContestConfig) -> list[Prompt]:
    prompt_set = read_prompts(config.prompts, seed=config.seed, heldout_fraction=config.heldout_fraction)
    return choose_prompts(prompt_set, config)


def contest_request(config: ContestConfig, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What decides the figures: earlier runs stand beside new ones only under the same."""
    target = contest_target(config)
    settings = config.model_dump(mode="json", exclude={"repeats", "prompts", "target"})
    return settings | {
        "prompts": fingerprint([prompt.messages for prompt in prompts]),
        "git_revision": git_revision(),
        "target": target_identity(target),
        "files": {name: drafter_files(entrant.drafter, target) for name, entrant in config.entrants.items()},
        "hardware": fingerprint_of(target, config.threads),
    }


def earlier_runs(path: Path, request: dict[str, Any], config: ContestConfig) -> list[dict[str, Any]]:
    """Runs of an earlier start with the same request."""
    if not path.is_file():
        return []
    earlier = read_json(path)
    if fingerprint(earlier["request"]) != fingerprint(request):
        log.info("%s was measured for another request; its runs are left out", path)
        return []
    return whole_groups(earlier["runs"], config)


def measure_runs(
    config: ContestConfig,
    prompts: Sequence[Prompt],
    to_do: Sequence[Any],
    path: Path,
    request: dict[str, Any],
    earlier: Sequence[dict[str, Any]],
) -> list[dict[str, Any]]:
    """New rows; each is on disk before the next one is measured."""
    contest = Contest(config, prompts)
    rows: list[dict[str, Any]] = []
    progress = runner.Progress(len(to_do))
    for row in measure(contest, config, to_do):
        rows.append(row)
        write_json(path, {"request": request, "runs": [*earlier, *rows], "notes": contest.notes})
        place = f"{row['entrant']}, {row['mode']}, {row['concurrency']} at once"
        log.info("%s: %s: %.1f tokens/s", progress.said(len(rows)), place, row["tokens_per_s"])
    return rows


def _finish(
    config: CompareConfig,
    training: Mapping[str, TrainConfig],
    trained: Mapping[str, dict[str, Any]],
    measured: Mapping[str, dict[str, Any]],
    rows: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Write the figures and the report, print the tables."""
    output = Path(config.output).resolve()
    summary = summarize_contest(rows, config.contest)
    names = ("parameters", "steps", "anchors", "seconds", "steps_per_s")
    lengths = {name: result["accepted_length"] for name, result in measured.items()}
    result = {
        "stage": "compare",
        "output": config.output,
        "drafters": {
            name: {"draft_tokens": training[name].drafter.block_size} | {key: result[key] for key in names}
            for name, result in trained.items()
        },
        "accepted_length": lengths,
        "contest": summary,
        "notes": read_json(output / CONTEST)["notes"],
        "tokens": sum(row["output_tokens"] for row in rows),
        "seconds": round(sum(row["seconds"] for row in rows), 1),
    }
    result["tokens_per_s"] = round(result["tokens"] / result["seconds"], 1) if result["seconds"] else 0.0
    write_json(output / COMPARISON, result | {"config": config.model_dump(mode="json")})
    folders = {name: Path(result["output"]) for name, result in measured.items()}
    write_comparison(
        output / REPORT,
        target=contest_target(config.contest).name,
        drafters=result["drafters"],
        evaluations={name: read_json(folder / evaluate.METRICS) for name, folder in folders.items()},
        histories={name: read_history(one.output) for name, one in training.items()},
        contest=summary,
    )
    draft_tokens = {name: one.drafter.block_size for name, one in training.items()}
    print("\n".join([format_lengths(lengths, draft_tokens), "", format_contest(summary)]))
    print("\n".join([*(f"note: {note}" for note in result["notes"]), f"report: {output / REPORT}"]), flush=True)
    return result


def _record_drafters(
    config: CompareConfig, parent: Run, training: Mapping[str, TrainConfig], result: dict[str, Any]
) -> None:
    """A child run per drafter: settings, accepted lengths, acceptance by position, its learning curve."""
    for name, one in training.items():
        with _child(config, parent, name, "drafter", one.model_dump(mode="json")) as child:
            child.log_metrics(runner.figures(result["drafters"][name]), step=0)
            for mode, by_domain in result["accepted_length"][name].items():
                known = {f"{mode}/{domain}/accepted_length": v for domain, v in by_domain.items() if v is not None}
                child.log_metrics(known, step=0)
            metrics = read_json(Path(config.output) / "evaluation" / name / evaluate.METRICS)
            for mode, content in metrics["modes"].items():
                for position, rate in enumerate(content["overall"]["conditional_acceptance"], 1):
                    if rate is not None:
                        child.log_metrics({f"{mode}/conditional_acceptance": rate}, step=position)
            for row in read_history(one.output):
                if "heldout" in row:
                    length = row["heldout"]["expected_accepted_length"]
                    child.log_metrics({"heldout/expected_accepted_length": length}, step=row["step"])


def _record_entrants(config: CompareConfig, parent: Run, result: dict[str, Any]) -> None:
    """A child run per way of decoding: throughputs and their ratios, concurrency as the step."""
    for name, entrant in config.contest.entrants.items():
        with _child(config, parent, name, "decoding", entrant.model_dump(mode="json")) as child:
            for mode, by_concurrency in result["contest"].items():
                for concurrency, by_entrant in by_concurrency.items():
                    f = by_entrant[name]
                    values = {"tokens_per_s": f["tokens_per_s"]["median"], "ratio": f["ratio"]["median"]}
                    values |= {key: f[key] for key in ("accepted_length", "verify_length")}
                    known = {f"{mode}/{key}": value for key, value in values.items() if value is not None}
                    child.log_metrics(known, step=int(concurrency))


def _shared_view(config: CompareConfig, parent: Run, result: dict[str, Any]) -> str | None:
    """The children of this comparison beside each other, in MLflow's page."""
    modes: dict[str, Any] = next(iter(result["accepted_length"].values()), {})
    columns = ["tags.kind", "params.architecture", *(f"metrics.{mode}/overall/accepted_length" for mode in modes)]
    columns += ["metrics.parameters", "metrics.seconds", "metrics.steps_per_s"]
    columns += [f"metrics.{mode}/{name}" for mode in result["contest"] for name in ("ratio", "tokens_per_s")]
    search = f"tags.mlflow.parentRunId = '{parent.run_id}'"
    return share_view(parent, name="compare", columns=columns, search=search, order_by=columns[2])


def _child(config: CompareConfig, parent: Run, name: str, kind: str, params: dict[str, Any]) -> Run:
    tags = {"stage": "compare", "kind": kind, "git_revision": str(git_revision())}
    if parent.run_id is not None:
        tags["mlflow.parentRunId"] = parent.run_id
    return start_run(config.tracking.with_changes(run_name=f"{kind}: {name}"), params=params, tags=tags)


if __name__ == "__main__":
    sys.exit(runner.main(CompareConfig, run, default_config="compare.yaml"))
