"""Run the whole loop: from prompts to a served, speculating model; then the summary table and the report."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import ask
import benchmark
import cache
import calibrate
import evaluate
import generate
import profile_engine
import runner
import train
from dspark.config import Config, load_config
from dspark.data.answers import GenerateConfig
from dspark.data.capture import CacheConfig
from dspark.errors import Mismatch, MissingInput
from dspark.evaluation.config import CalibrateConfig, EvaluateConfig
from dspark.evaluation.load_config import BenchmarkConfig
from dspark.evaluation.profiling import ProfileConfig
from dspark.evaluation.questions import AskConfig
from dspark.evaluation.report import write_report
from dspark.provenance import read_json, write_json
from dspark.serving.deployment_file import DeploymentFile
from dspark.storage import absolute
from dspark.tracking import TrackingConfig
from dspark.training.config import TrainConfig
from dspark.training.progress import read_history

log = logging.getLogger("dspark.pipeline")

Stage = Literal["generate", "cache", "train", "evaluate", "calibrate", "profile_engine", "benchmark", "ask"]
STAGES: dict[str, tuple[type[Config], Any]] = {
    "generate": (GenerateConfig, generate.run),
    "cache": (CacheConfig, cache.run),
    "train": (TrainConfig, train.run),
    "evaluate": (EvaluateConfig, evaluate.run),
    "calibrate": (CalibrateConfig, calibrate.run),
    "profile_engine": (ProfileConfig, profile_engine.run),
    "benchmark": (BenchmarkConfig, benchmark.run),
    "ask": (AskConfig, ask.run),
}

# Which stage reads, under which key, the folder that which stage writes.
JOINTS = (
    ("cache", "answers", "generate"),
    ("train", "cache", "cache"),
    ("evaluate", "drafter", "train"),
    ("calibrate", "drafter", "train"),
    ("profile_engine", "drafter", "train"),
    ("profile_engine", "evaluation", "evaluate"),
    ("benchmark", "drafter", "train"),
)


class PipelineConfig(Config):
    """The whole loop. Each stage is skipped when its output is complete and was made for the same request.

    generate … ask: config files of the stages, relative to the working directory. output: gets summary.json and
    report.html. fresh_from: start over from this stage on. compare: other evaluations to show beside this one in the
    report, by name, when they are there. tracking: of the run that holds the stages' runs; None goes by generate's.
    """

    output: str
    generate: str
    cache: str
    train: str
    evaluate: str
    calibrate: str
    profile_engine: str
    benchmark: str
    ask: str
    fresh_from: Stage | None = None
    compare: dict[str, str] = {}
    tracking: TrackingConfig | None = None


def run(config: PipelineConfig, *, fresh: bool = False, dry_run: bool = False) -> dict[str, Any]:
    """Run the stages in order; returns the summary."""
    configs: dict[str, Any] = {name: load_config(STAGES[name][0], getattr(config, name)) for name in STAGES}
    check_joints(configs)
    if dry_run:
        return {"stage": "pipeline", "dry_run": True, "stages": _stages(config, configs, fresh=fresh, dry_run=True)}
    with runner.track_all(_tracking(config, configs), "pipeline") as tracked:
        results = _stages(config, configs, fresh=fresh, dry_run=False)
        summary = _close(config, configs, results)
        tracked.log_metrics(dict(_figures(summary)), step=0)
        for name in ("summary.json", "report.html"):
            tracked.log_artifact(Path(config.output) / name)
    return {"stage": "pipeline"} | summary


def _stages(
    config: PipelineConfig, configs: dict[str, Any], *, fresh: bool, dry_run: bool
) -> dict[str, dict[str, Any]]:
    """Results of the stages, in their order."""
    results: dict[str, dict[str, Any]] = {}
    for number, (name, (_, run_stage)) in enumerate(STAGES.items(), 1):
        fresh = fresh or name == config.fresh_from
        log.info("stage %s, %d of %d", name, number, len(STAGES))
        try:
            results[name] = run_stage(configs[name], fresh=fresh, dry_run=dry_run)
        except MissingInput as missing:
            if not dry_run:
                raise
            log.info("stage %s cannot be planned yet: %s", name, missing)
            continue
        log.info("stage %s %s", name, "was complete" if results[name].get("skipped") else "done")
    return results


def _tracking(config: PipelineConfig, configs: dict[str, Any]) -> TrackingConfig:
    """Where the run is recorded that the stages' runs are children of: beside the first of them."""
    if config.tracking is not None:
        return config.tracking
    first: TrackingConfig = configs["generate"].tracking
    return first.with_changes(run_name="pipeline")


def _figures(summary: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for mode, by_domain in summary["accepted_length"].items():
        if by_domain["overall"] is not None:
            yield f"{mode}/overall/accepted_length", by_domain["overall"]
    for name, stage in summary["stages"].items():
        yield f"{name}/seconds", stage["seconds"]


def _close(config: PipelineConfig, configs: dict[str, Any], results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Write summary and report, print the table; the summary."""
    summary = summarize(configs["generate"].target.name, results)
    output = Path(config.output)
    write_json(output / "summary.json", summary)
    write_report(
        output / "report.html",
        summary=summary,
        history=read_history(configs["train"].output),
        evaluations=dict(_evaluations(config, configs)),
        calibration=read_json(Path(configs["calibrate"].output) / calibrate.REPORT),
        profile=read_json(Path(configs["profile_engine"].output) / profile_engine.PROFILE),
        load=read_json(Path(configs["benchmark"].output) / benchmark.BENCHMARK),
        answers=results["ask"]["answers"],
    )
    print(format_summary(summary))
    print(f"\nreport: {output / 'report.html'}   summary: {output / 'summary.json'}", flush=True)
    return summary


def check_joints(configs: dict[str, Any]) -> None:
    """Raises: Mismatch when a stage does not read what the stage before it writes."""
    for reader, key, writer in JOINTS:
        reads, writes = getattr(configs[reader], key), configs[writer].output
        if reads is None or absolute(reads) != absolute(writes):
            raise Mismatch(
                f"{reader}.{key} is {reads} but {writer}.output is {writes}; the stages must share one folder"
            )
    deployment = load_config(DeploymentFile, configs["ask"].deployment)
    for application in deployment.applications:
        served, trained = application.args.drafter, configs["train"].output
        if served is None or Path(served).resolve() != Path(trained).resolve():
            raise Mismatch(
                f"{configs['ask'].deployment} serves drafter {served} but train.output is {trained}; set args.drafter"
            )


def summarize(target: str, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What `summary.json` holds."""
    trained, served = results["train"], results["ask"]
    return {
        "target": target,
        "drafter_parameters": trained["parameters"],
        "answers": results["generate"]["ok"],
        "tokens": results["cache"]["tokens"],
        "anchors": trained["anchors"],
        "accepted_length": results["evaluate"]["accepted_length"],
        "identical_to_generate": results["evaluate"]["generate_comparison"],
        "expected_accepted_length_heldout": trained["validation"].get("expected_accepted_length"),
        "calibration_error": results["calibrate"]["mean_ece"],
        "load": results["benchmark"]["load"],
        "served": {key: served[key] for key in ("accepted_length_served", "tokens_per_s")},
        "stages": {name: {key: result[key] for key in ("seconds", "tokens_per_s")} for name, result in results.items()},
    }


def format_summary(summary: dict[str, Any]) -> str:
    """The closing table."""
    return "\n".join(
        [
            "",
            f"target              {summary['target']}",
            f"drafter             {summary['drafter_parameters']:,} trained parameters",
            f"answers             {summary['answers']:,}",
            f"cached tokens       {summary['tokens']:,}",
            f"anchors             {summary['anchors']:,}",
            *_length_lines(summary["accepted_length"]),
            *_calibration_lines(summary["calibration_error"]),
            *_load_lines(summary["load"]),
            *_stage_lines(summary["stages"]),
        ]
    )


def _evaluations(config: PipelineConfig, configs: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Metrics of this run's drafter and of those to compare it with, as far as they are there."""
    folders = {configs["train"].drafter.architecture: configs["evaluate"].output} | config.compare
    for name, folder in folders.items():
        if (Path(folder) / evaluate.METRICS).is_file():
            yield name, read_json(Path(folder) / evaluate.METRICS)


def _length_lines(lengths: dict[str, dict[str, float | None]]) -> Iterator[str]:
    yield f"\n{'accepted length':<20}" + "".join(f"{mode:>12}" for mode in lengths)
    for domain in next(iter(lengths.values())):
        yield f"  {domain:<18}" + "".join(_cell(by_domain[domain]) for by_domain in lengths.values())


def _calibration_lines(errors: dict[str, dict[str, float | None]]) -> Iterator[str]:
    yield f"\n{'calibration error':<20}" + "".join(f"{name:>12}" for name in ("before", "after", "floor"))
    for mode, error in errors.items():
        shares = (error[name] for name in ("before", "after", "floor"))
        yield f"  {mode:<18}" + "".join(_cell(share, "{:.1%}") for share in shares)


def _load_lines(load: dict[str, dict[str, dict[str, float]]]) -> Iterator[str]:
    """verified: the verify budget, draft tokens a step of one request."""
    columns = {"plain": "plain", "speculative": "speculative", "ratio": "ratio", "verified": "verify_length"}
    yield f"\n{'tokens/s':<20}" + "".join(f"{name:>12}" for name in columns)
    for mode, by_concurrency in load.items():
        for concurrency, figures in by_concurrency.items():
            label = f"{mode}, {concurrency} at once"
            yield f"  {label:<18}" + "".join(_cell(figures[key]) for key in columns.values())


def _stage_lines(stages: dict[str, dict[str, float]]) -> Iterator[str]:
    yield f"\n{'stage':<20}{'seconds':>12}{'tokens/s':>12}"
    for name, stage in stages.items():
        yield f"  {name:<18}{stage['seconds']:>12.1f}{stage['tokens_per_s']:>12.1f}"


def _cell(value: float | None, form: str = "{:.2f}") -> str:
    return f"{'-' if value is None else form.format(value):>12}"


if __name__ == "__main__":
    sys.exit(runner.main(PipelineConfig, run, default_config="pipeline.yaml"))
