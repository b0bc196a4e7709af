"""Run the whole loop: generate, cache, train, evaluate; then the summary table and the report."""

import logging
import sys
from pathlib import Path
from typing import Any, Literal

import cache
import evaluate
import generate
import runner
import train
from dspark.config import Config, load_config
from dspark.data.answers import GenerateConfig
from dspark.data.capture import CacheConfig
from dspark.errors import Mismatch, MissingInput
from dspark.evaluation.config import EvaluateConfig
from dspark.evaluation.report import write_report
from dspark.provenance import read_json, write_json
from dspark.training.config import TrainConfig
from dspark.training.progress import read_history

log = logging.getLogger("dspark.pipeline")

Stage = Literal["generate", "cache", "train", "evaluate"]
STAGES: dict[str, tuple[type[Config], Any]] = {
    "generate": (GenerateConfig, generate.run),
    "cache": (CacheConfig, cache.run),
    "train": (TrainConfig, train.run),
    "evaluate": (EvaluateConfig, evaluate.run),
}


class PipelineConfig(Config):
    """The whole loop. Each stage is skipped when its output is complete and was made for the same request.

    generate, cache, train, evaluate: config files of the stages, relative to the working directory. output: gets
    summary.json and report.html. fresh_from: start over from this stage on. compare: other evaluations to show
    beside this one in the report, by name, when they are there.
    """

    output: str
    generate: str
    cache: str
    train: str
    evaluate: str
    fresh_from: Stage | None = None
    compare: dict[str, str] = {}


def run(config: PipelineConfig, *, fresh: bool = False, dry_run: bool = False) -> dict[str, Any]:
    """Run the stages in order; returns the summary."""
    configs: dict[str, Any] = {name: load_config(STAGES[name][0], getattr(config, name)) for name in STAGES}
    check_joints(configs)
    results: dict[str, dict[str, Any]] = {}
    for name, (_, run_stage) in STAGES.items():
        fresh = fresh or name == config.fresh_from
        log.info("stage %s", name)
        try:
            results[name] = run_stage(configs[name], fresh=fresh, dry_run=dry_run)
        except MissingInput as missing:
            if not dry_run:
                raise
            log.info("stage %s cannot be planned yet: %s", name, missing)
            continue
        log.info("stage %s %s", name, "was complete" if results[name].get("skipped") else "done")
    if dry_run:
        return {"stage": "pipeline", "dry_run": True, "stages": results}
    summary = summarize(configs["generate"].target.name, results)
    output = Path(config.output)
    write_json(output / "summary.json", summary)
    evaluations = {
        name: read_json(Path(folder) / evaluate.METRICS)
        for name, folder in (
            {configs["train"].drafter.architecture: configs["evaluate"].output} | config.compare
        ).items()
        if (Path(folder) / evaluate.METRICS).is_file()
    }
    history = read_history(configs["train"].output)
    write_report(output / "report.html", summary=summary, history=history, evaluations=evaluations)
    print(format_summary(summary))
    print(f"\nreport: {output / 'report.html'}   summary: {output / 'summary.json'}", flush=True)
    return {"stage": "pipeline"} | summary


def check_joints(configs: dict[str, Any]) -> None:
    """Raises: Mismatch when a stage does not read what the stage before it writes."""
    for reader, key, writer in (
        ("cache", "answers", "generate"),
        ("train", "cache", "cache"),
        ("evaluate", "drafter", "train"),
    ):
        reads, writes = getattr(configs[reader], key), configs[writer].output
        if Path(reads).resolve() != Path(writes).resolve():
            raise Mismatch(
                f"{reader}.{key} is {reads} but {writer}.output is {writes}; the stages must share one folder"
            )


def summarize(target: str, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What `summary.json` holds."""
    trained = results["train"]
    return {
        "target": target,
        "drafter_parameters": trained["parameters"],
        "answers": results["generate"]["ok"],
        "tokens": results["cache"]["tokens"],
        "anchors": trained["anchors"],
        "accepted_length": results["evaluate"]["accepted_length"],
        "speedup": results["evaluate"]["speedup"],
        "identical_to_generate": results["evaluate"]["generate_comparison"],
        "expected_accepted_length_heldout": trained["validation"].get("expected_accepted_length"),
        "stages": {name: {key: result[key] for key in ("seconds", "tokens_per_s")} for name, result in results.items()},
    }


def format_summary(summary: dict[str, Any]) -> str:
    """The closing table."""
    lines = [
        "",
        f"target              {summary['target']}",
        f"drafter             {summary['drafter_parameters']:,} trained parameters",
        f"answers             {summary['answers']:,}",
        f"cached tokens       {summary['tokens']:,}",
        f"anchors             {summary['anchors']:,}",
        "",
        f"{'accepted length':<20}" + "".join(f"{mode:>10}" for mode in summary["accepted_length"]),
    ]
    domains = list(next(iter(summary["accepted_length"].values())))
    for domain in domains:
        lengths = (by_domain[domain] for by_domain in summary["accepted_length"].values())
        values = "".join(f"{'-' if length is None else f'{length:.2f}':>10}" for length in lengths)
        lines.append(f"  {domain:<18}{values}")
    lines += ["", f"{'stage':<20}{'seconds':>10}{'tokens/s':>10}"]
    for name, stage in summary["stages"].items():
        lines.append(f"  {name:<18}{stage['seconds']:>10.1f}{stage['tokens_per_s']:>10.1f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(runner.main(PipelineConfig, run, default_config="pipeline.yaml"))
