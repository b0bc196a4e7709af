"""Calibrate a drafter's confidences: decode held-out prompts, or take what a server recorded; fit on half of it."""

import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import evaluate
import runner
from dspark.drafters.checkpoint import from_deepspec
from dspark.engine.drafter_folder import CALIBRATION
from dspark.errors import DsparkError
from dspark.evaluation.confidence import (
    calibration_report,
    fit_scales,
    format_calibration,
    mode_of,
    split_halves,
)
from dspark.evaluation.config import CalibrateConfig
from dspark.evaluation.traffic_fit import TRAFFIC_REPORT, TrafficFit
from dspark.provenance import fingerprint, git_revision, read_json, write_json
from dspark.speculation.calibration import MODES, Calibration, SlotScales
from dspark.speculation.calibration_fit import MIN_ROUNDS
from dspark.storage import locate
from dspark.tracking import Run
from dspark.traffic.drift import LEVELS
from dspark.transfer import local_file

REPORT = "calibration_report.json"
FLAGS = {"from_traffic": "FOLDER"}

log = logging.getLogger("dspark.calibrate")

Halves = tuple[set[str], set[str]]


def run(config: CalibrateConfig, *, fresh: bool = False, dry_run: bool = False) -> dict[str, Any]:
    """Decode what is not decoded yet, fit, write the drafter's scales; returns the errors before and after."""
    if config.from_traffic is not None:
        return calibrate_from_traffic(config, fresh=fresh, dry_run=dry_run)
    measurement = config.measurement
    plan = evaluate.make_plan(measurement, fresh=fresh and not dry_run, outputs=(REPORT,))
    block_size = _block_size(plan.subject.drafter)
    halves = split_halves(plan.prompts, seed=config.seed)
    _check_domains(config, plan)
    evaluate.print_plan("calibration", measurement, plan)
    print(f"  {len(halves[0]):,} prompts to fit on, {len(halves[1]):,} to test on, none of them the same", flush=True)
    if dry_run:
        return {"stage": "calibrate", "output": config.output, "dry_run": True, "to_do": len(plan.to_do)} | plan.counts
    request = _request_of(config, plan)
    earlier = _earlier_report(config, plan, request)
    if not plan.to_do and earlier is not None:
        log.info("the drafter is calibrated, see %s", Path(config.output) / REPORT)
        return _result(config, plan, earlier) | {"skipped": True}
    with runner.track(config, "calibrate", drafter=plan.subject.drafter) as tracked:
        started = time.monotonic()
        tracked.log_datasets([evaluate.dataset_of(measurement, plan, "calibration")])
        measured = evaluate.measure(measurement, plan)
        speed = evaluate.speed_of(measured, time.monotonic() - started)
        report = _report(config, plan, plan.done + measured, halves, block_size)
        report |= {"request": request, "speed": speed}
        path = Path(config.output).resolve() / REPORT
        calibration = _calibration(config, plan, report)
        write_json(path, report)
        calibration.save(locate(plan.subject.drafter) / CALIBRATION)
        print(format_calibration(report), flush=True)
        _track(tracked, report)
        for artifact in (path, local_file(locate(plan.subject.drafter) / CALIBRATION)):
            tracked.log_artifact(artifact)
        _mark(tracked, config, plan.subject.drafter_sha256, report)
    return _result(config, plan, report)


def _block_size(drafter: str) -> int:
    """Raises: ValueError for a drafter that has no confidences to calibrate."""
    shape = from_deepspec(read_json(locate(drafter) / "config.json"))
    if not shape.enable_confidence_head:
        raise ValueError(
            f"drafter {drafter} has no confidence head, so there is nothing to calibrate; train one with "
            "drafter.architecture=dspark and drafter.confidence_head=true"
        )
    return shape.block_size


def _check_domains(config: CalibrateConfig, plan: evaluate.Plan) -> None:
    known = {name for prompt in plan.prompts for name in (prompt.domain, prompt.domain.split("/")[0])}
    unknown = [name for name in config.fit_domains or [] if name not in known]
    if unknown:
        raise ValueError(f"fit_domains holds {unknown[0]!r}, but the prompts' domains are {', '.join(sorted(known))}")


def _request_of(config: CalibrateConfig, plan: evaluate.Plan) -> str:
    """Fingerprint of all that decides the scales: the rounds, who is fitted on, over which bins, and how."""
    rounds = sorted((item.request, item.prompt.id, fingerprint(item.prompt.messages)) for item in plan.items)
    return fingerprint([rounds, config.seed, config.num_bins, config.fit_domains, config.shift])


def _earlier_report(config: CalibrateConfig, plan: evaluate.Plan, request: str) -> dict[str, Any] | None:
    """The report of an earlier run of the same request whose scales are still the drafter's."""
    path = Path(config.output) / REPORT
    if not path.is_file():
        return None
    report: dict[str, Any] = read_json(path)
    try:
        stored = Calibration.load(locate(plan.subject.drafter) / CALIBRATION)
    except ValueError as broken:
        log.warning("%s", broken)
        return None
    return report if report["request"] == request == stored.fitted_on.get("request") else None


def _report(
    config: CalibrateConfig, plan: evaluate.Plan, rows: list[dict[str, Any]], halves: Halves, block_size: int
) -> dict[str, Any]:
    """Figures by mode. Raises: DsparkError when a mode has no round to fit on or to test on."""
    rows = sorted(rows, key=lambda row: (row["mode"], row["id"]))  # not by who finished first
    by_mode = {mode: [row for row in rows if mode_of(row) == mode] for mode in MODES}
    asked = [mode for mode in MODES if any(one.name == mode for one in config.modes)]
    return {
        "modes": {mode: _mode_report(config, mode, by_mode[mode], halves, block_size) for mode in asked},
        "num_bins": config.num_bins,
        "prompts": {"fit": len(halves[0]), "test": len(halves[1])},
        "fit_domains": config.fit_domains,
        "target": plan.subject.identity | {"dtype": plan.subject.target.dtype},
        "drafter": {"folder": config.drafter, "sha256": plan.subject.drafter_sha256},
        "tokens": sum(len(turn["output_ids"]) for row in rows for turn in row["turns"]),
        "counts": plan.counts,
        "config": config.model_dump(mode="json"),
        "git_revision": git_revision(),
    }


def _mode_report(
    config: CalibrateConfig, mode: str, rows: list[dict[str, Any]], halves: Halves, block_size: int
) -> dict[str, Any]:
    good = [row for row in rows if row["error"] is None]
    failed = dict(Counter(row["error"] for row in rows if row["error"] is not None))
    fit_ids, test_ids = halves
    options: dict[str, Any] = {"num_bins": config.num_bins, "fit_domains": config.fit_domains}
    scales = fit_scales(good, fit_ids, block_size=block_size, with_shift=config.shift, **options)
    report = calibration_report(good, scales, fit_ids=fit_ids, test_ids=test_ids, seed=config.seed, **options)
    for side, count in report["rounds"].items():
        if not count:
            reason = next(iter(failed), "none of its prompts gave one")
            raise DsparkError(f"no round to {side} on in mode {mode!r}: {reason}; give more prompts")
    if report["rounds"]["fit"] < MIN_ROUNDS:
        found = report["rounds"]["fit"]
        stay = "it goes by the scales of sampled" if mode == "seeded" else "confidences stay as they are"
        log.warning("mode %s: %d rounds to fit on, %d needed; %s", mode, found, MIN_ROUNDS, stay)
    return report | {"failed": failed}


def _calibration(config: CalibrateConfig, plan: evaluate.Plan, report: dict[str, Any]) -> Calibration:
    modes = report["modes"]
    fitted_on = {
        "request": report["request"],
        "prompts": report["prompts"]["fit"],
        "rounds": {mode: content["rounds"]["fit"] for mode, content in modes.items()},
        LEVELS: {mode: _conditional(content["positions"]) for mode, content in modes.items()},
        "domains": config.fit_domains or sorted({prompt.domain for prompt in plan.prompts}),
        "mean_ece_on_other_prompts": {mode: content["mean_ece"] for mode, content in modes.items()},
        **{key: report[key] for key in ("num_bins", "target", "config", "git_revision")},
    }
    scales = {
        mode: SlotScales(tuple(content["temperatures"]), tuple(content["shifts"]))
        for mode, content in modes.items()
        # What was not fitted would stand before the scales of sampled decoding, which seeded decoding falls back to.
        if mode != "seeded" or content["rounds"]["fit"] >= MIN_ROUNDS
    }
    return Calibration(scales, plan.subject.drafter_sha256, fitted_on)


def _conditional(positions: list[dict[str, Any]]) -> list[float]:
    """Conditional acceptance by position, as far as MIN_ROUNDS rounds were judged: what drift is measured against."""
    survival = [entry["survival"] for entry in positions if entry["n"] >= MIN_ROUNDS]
    pairs = zip([1.0, *survival], survival, strict=False)
    return [after / before if before else 0.0 for before, after in pairs]


def _track(tracked: Run, report: dict[str, Any]) -> None:
    """Means at step 0, the figures of a position at its number."""
    for mode, content in report["modes"].items():
        tracked.log_metrics(dict(_means(mode, content)), step=0)
        for entry in content["positions"]:
            figures = {name: entry[name] for name in ("temperature", "shift", "ece_before", "ece_after", "ece_floor")}
            known = {f"{mode}/position_{name}": value for name, value in figures.items() if value is not None}
            tracked.log_metrics(known, step=entry["position"])


def _mark(tracked: Run, config: CalibrateConfig, sha256: str, report: dict[str, Any]) -> None:
    errors = {f"ece.{mode}": content["mean_ece"]["after"] for mode, content in report["modes"].items()}
    runner.mark_drafter(tracked, config.tracking, sha256, "calibrated", errors)


def _means(mode: str, content: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in content["mean_ece"].items():
        if value is not None:
            yield f"{mode}/mean_ece_{name}", value
    for side, count in content["rounds"].items():
        yield f"{mode}/rounds_{side}", float(count)


def _result(config: CalibrateConfig, plan: evaluate.Plan, report: dict[str, Any]) -> dict[str, Any]:
    modes = report["modes"]
    return {
        "stage": "calibrate",
        "output": config.output,
        "calibration": str(locate(config.drafter) / CALIBRATION),
        **plan.counts,
        "halves": report["prompts"],
        "rounds": {mode: content["rounds"] for mode, content in modes.items()},
        "failed": {mode: sum(content["failed"].values()) for mode, content in modes.items()},
        "temperatures": {mode: content["temperatures"] for mode, content in modes.items()},
        "shifts": {mode: content["shifts"] for mode, content in modes.items()},
        "mean_ece": {mode: content["mean_ece"] for mode, content in modes.items()},
        "tokens": report["tokens"],
        **report["speed"],
    }


def calibrate_from_traffic(config: CalibrateConfig, *, fresh: bool, dry_run: bool) -> dict[str, Any]:
    """Fit on what a server recorded of this very drafter; returns the errors before and after."""
    fit = TrafficFit.open(config, block_size=_block_size(config.drafter))
    print(fit.plan(), flush=True)
    if dry_run:
        return fit.counts | {"dry_run": True}
    fit.require_rounds()
    path = Path(config.output).resolve() / TRAFFIC_REPORT
    earlier = None if fresh else fit.earlier_result(path)
    if earlier is not None:
        log.info("the drafter is calibrated on these rounds, see %s", path)
        return earlier | {"skipped": True}
    with runner.track(config, "calibrate", drafter=config.drafter) as tracked:
        report = fit.run()
        write_json(path, report)
        print(format_calibration(report), flush=True)
        _track(tracked, report)
        tracked.log_datasets([fit.dataset()])
        tracked.log_artifact(path)
        _mark(tracked, config, fit.sha256, report)
    result: dict[str, Any] = report["result"]
    return result


if __name__ == "__main__":
    sys.exit(runner.main(CalibrateConfig, run, default_config="calibrate.yaml", flags=FLAGS))
