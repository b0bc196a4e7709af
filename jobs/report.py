"""Write the report of a set of the paper's experiments from whatever of it is there: figures, claims, README table."""

import logging
import os
import platform
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import evaluate
import runner
from compare import CONTEST
from dspark.drafters.checkpoint import from_deepspec
from dspark.errors import Mismatch, MissingInput
from dspark.evaluation.confidence import mode_of, split_halves
from dspark.evaluation.config import EvaluateConfig
from dspark.evaluation.contest import whole_groups
from dspark.evaluation.findings import Findings, Kind
from dspark.evaluation.paper_config import PaperConfig
from dspark.evaluation.paper_report import REPORT, SUMMARY, TABLE, write_report
from dspark.provenance import git_revision, read_json

ROUND_TIMES = "round_times.json"

log = logging.getLogger("dspark.report")


def run(config: PaperConfig, *, fresh: bool = False, dry_run: bool = False) -> dict[str, Any]:
    """Write the report anew, as it always is; returns the verdicts."""
    findings = collect(config)
    measured = sum(len(by_drafter) for by_drafter in findings.rows.values())
    print(f"report: {measured} drafters measured, {len(findings.rows)} seeds, {len(findings.contest)} runs under load")
    if dry_run:
        return {"stage": "report", "output": config.output, "dry_run": True, "evaluated": measured}
    output = Path(config.output).resolve()
    summary = write_report(output, findings, config.published, describe(config, findings))
    width = max(len(claim["name"]) for claim in summary["claims"])
    for claim in summary["claims"]:
        print(f"{claim['name']:<{width}}  {claim['verdict']:<9}  {claim['reason']}")
    print(f"report: {output / REPORT}   summary: {output / SUMMARY}   table: {output / TABLE}", flush=True)
    verdicts = {claim["name"]: claim["verdict"] for claim in summary["claims"]}
    return {
        "stage": "report",
        "output": config.output,
        "verdicts": summary["verdicts"],
        "claims": verdicts,
        "not_measured": summary["not_measured"],
    }


def collect(config: PaperConfig) -> Findings:
    """What of the set is there; a piece that is cut short counts as far as it came."""
    kinds: dict[str, Kind] = {}
    rows: dict[int, dict[str, list[dict[str, Any]]]] = {}
    for name in config.drafters:
        for seed in config.seeds_of(name):
            shape = Path(config.drafter_folder(name, seed)) / "config.json"
            found = [] if not shape.is_file() else done_rows(config.evaluate_config(name, seed))
            if found:
                kinds[name] = Kind.of(from_deepspec(read_json(shape)))
                rows.setdefault(seed, {})[name] = found
    fit, test, calibration = _calibration(config)
    return Findings(
        kinds=kinds,
        rows=rows,
        calibration=calibration,
        fit_ids=fit,
        test_ids=test,
        contest=_contest(config),
        budget=[] if config.budget is None else done_rows(config.budget_config()),
        round_times=_json(config, ROUND_TIMES).get("times"),
        lossless=None if config.lossless is None else _json(config, f"lossless/{evaluate.METRICS}"),
    )


def done_rows(config: EvaluateConfig) -> list[dict[str, Any]]:
    """Good rows of the sampled mode, of the first one where none is sampled; [] where nothing is there."""
    try:
        plan = evaluate.make_plan(config, fresh=False)
    except (MissingInput, Mismatch) as lacking:
        log.info("%s: %s", config.output, lacking)
        return []
    if plan.to_do and plan.done:
        log.warning("%s: %d of %d results are there", config.output, len(plan.done), len(plan.items))
    mode = next((mode.name for mode in config.modes if mode.temperature > 0), config.modes[0].name)
    return [row for row in plan.done if row["mode"] == mode and row["error"] is None]


def describe(config: PaperConfig, findings: Findings) -> dict[str, str]:
    """What a reader has to know of the run, by name."""
    evaluation = config.evaluate_config(next(iter(config.drafters)), config.seeds[0])
    sampled = next((mode for mode in evaluation.modes if mode.temperature > 0), evaluation.modes[0])
    prompts = {row["id"]: len(row["turns"]) for by in findings.rows.values() for rows in by.values() for row in rows}
    asked = "the paper's benchmarks" if config.uses_benchmarks else "the project's own held-out prompts"
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "set": f"{config.size}, {len(config.seeds)} seed{'s' * (len(config.seeds) > 1)}",
        "target": config.target.name.rpartition(":")[2],
        "hardware": f"{_processor()}, {os.cpu_count()} cores" + _gpu(),
        "prompts": f"{len(prompts)} of {asked}, {sum(prompts.values())} turns",
        "decoding": f"temperature {sampled.temperature:g}, up to {evaluation.max_new_tokens} tokens a turn",
        "revision": str(git_revision())[:12],
    }


def _calibration(config: PaperConfig) -> tuple[frozenset[str], frozenset[str], list[dict[str, Any]]]:
    if config.calibrate is None:
        return frozenset(), frozenset(), []
    calibration = config.calibrate_config()
    try:
        plan = evaluate.make_plan(calibration.measurement, fresh=False)
    except (MissingInput, Mismatch) as lacking:
        log.info("%s: %s", calibration.output, lacking)
        return frozenset(), frozenset(), []
    fit, test = split_halves(plan.prompts, seed=calibration.seed)
    rows = [row for row in plan.done if mode_of(row) == "sampled" and row["error"] is None]
    return frozenset(fit), frozenset(test), rows


def _contest(config: PaperConfig) -> list[dict[str, Any]]:
    """Runs of settings in which every entrant was run: of a contest that was stopped early, what can be compared."""
    runs = _json(config, CONTEST).get("runs", [])
    return [] if config.contest is None else whole_groups(runs, config.contest_config())


def _json(config: PaperConfig, name: str) -> dict[str, Any]:
    path = Path(config.output) / name
    content: dict[str, Any] = read_json(path) if path.is_file() else {}
    return content


def _processor() -> str:
    """The processor's own name where the system tells it."""
    return next(_model_names(), platform.machine())


def _model_names() -> Iterator[str]:
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.is_file() else ():
        if line.startswith("model name"):
            yield line.partition(":")[2].strip()


def _gpu() -> str:
    import torch  # heavy, and needed for its name alone

    return f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""


if __name__ == "__main__":
    sys.exit(runner.main(PaperConfig, run, default_config="../paper/paper_quick.yaml"))
