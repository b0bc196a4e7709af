"""Measure what a step of target and drafter costs on this machine, for the scheduler to decide by."""

import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import runner
from dspark.engine.drafter_folder import COST_CURVE
from dspark.engine.step_samples import Samples
from dspark.evaluation.profiling import ProfileConfig, measure, measured_survival, open_timer, verify_budgets
from dspark.provenance import fingerprint, git_revision, read_json, write_json
from dspark.speculation.cost_curve import CostCurve
from dspark.storage import Location, locate
from dspark.targets import TargetConfig

PROFILE = "profile.json"
SHOWN_REQUESTS = range(1, 33)  # in the figure and in profile.json
LISTED_REQUESTS = (1, 2, 4, 8, 16, 32)  # in the table

log = logging.getLogger("dspark.profile")


def run(config: ProfileConfig, *, fresh: bool = False, dry_run: bool = False) -> dict[str, Any]:
    """Measure the cost curve unless it is there; returns it in milliseconds."""
    target = config.target_config()
    request = config.request(target)
    output = Path(config.output).resolve()
    curve_path = (locate(str(config.drafter)) if config.has_drafter else output) / COST_CURVE
    _print_plan(config, target, curve_path)
    if dry_run:
        return {"stage": "profile_engine", "output": config.output, "curve": str(curve_path), "dry_run": True}
    if not fresh and _is_measured(output / PROFILE, curve_path, request):
        log.info("%s holds the curve of this machine already", curve_path)
        profile = read_json(output / PROFILE)
        profile |= _budgets(config, CostCurve.from_dict(profile["curve"]))  # an evaluation may have come since
        write_json(output / PROFILE, profile)
        return profile["result"] | _result_lengths(profile) | {"skipped": True}
    with runner.track(config, "profile_engine", target=target.name) as tracked:
        started = time.monotonic()
        samples = measure(open_timer(config, target), config)
        curve = samples.curve(request["fingerprint"])
        curve.save(curve_path)
        profile = _profile(config, samples, curve)
        result = _result(config, profile, curve_path, time.monotonic() - started)
        write_json(output / PROFILE, profile | {"request": request, "result": result, "git_revision": git_revision()})
        print(format_table(profile), flush=True)
        for row in profile["steps"]:
            if row["requests"] == 1:
                tracked.log_metrics({"verify_ms": row["ms"]}, step=row["batch_tokens"])
        for row in profile["drafting"]:
            tracked.log_metrics({"draft_ms": row["ms"]}, step=row["requests"])
        tracked.log_metrics(runner.figures(result), step=0)
        tracked.log_artifact(output / PROFILE)
    return result


def format_table(profile: dict[str, Any]) -> str:
    """The measured times, and what the scheduler makes of them."""
    lines = [f"{'batch tokens':>12} {'requests':>9} {'ms':>9} {'quartiles':>19} {'curve ms':>9}"]
    lines += [
        f"{row['batch_tokens']:>12} {row['requests']:>9} {row['ms']:>9.2f} {_spread(row):>19} {row['curve_ms']:>9.2f}"
        for row in profile["steps"]
    ]
    lines.append(f"each request of a step beside the first: {profile['request_ms']:.3f} ms")
    lines.append(f"each 1,000 tokens more of context: {profile['context_ms']:.3f} ms")
    if profile["drafting"]:
        lines += ["", f"{'drafting for':>12} {'':>9} {'ms':>9} {'quartiles':>19} {'curve ms':>9}"]
        lines += [
            f"{row['requests']:>12} {'':>9} {row['ms']:>9.2f} {_spread(row):>19} {row['curve_ms']:>9.2f}"
            for row in profile["drafting"]
        ]
    if profile["budgets"]:
        lines += ["", f"{'at once':>12} {'drafted':>9} {'verified':>9} {'batch tokens':>19} {'speed-up':>9}"]
        lines += [
            f"{row['requests']:>12} {row['drafted']:>9} {row['verify_length']:>9.2f} {row['batch_tokens']:>19} "
            f"{row['speedup']:>9.2f}"
            for row in profile["budgets"]
            if row["requests"] in LISTED_REQUESTS
        ]
        lines.append(f"(verified: draft tokens per request, expected from the survival in {profile['evaluation']})")
    return "\n".join(lines)


def _profile(config: ProfileConfig, samples: Samples, curve: CostCurve) -> dict[str, Any]:
    """What `profile.json` says, times in milliseconds; `evaluation.plots.cost_curve_plot` draws it."""
    steps = [
        {"batch_tokens": shape.num_tokens, "requests": shape.num_requests}
        | _times(seconds, curve.step_seconds(shape.num_tokens, num_requests=shape.num_requests))
        for shape, seconds in samples.verify.items()
    ]
    drafting = [
        {"requests": number} | _times(seconds, curve.draft_seconds(number)) for number, seconds in samples.draft.items()
    ]
    return {
        "steps": steps,
        "drafting": drafting,
        "request_ms": 1000.0 * curve.request_s,
        "context_ms": 1000.0 * curve.context_s,
        "curve": curve.to_dict(),
        "config": config.model_dump(mode="json"),
    } | _budgets(config, curve)


def _budgets(config: ProfileConfig, curve: CostCurve) -> dict[str, Any]:
    """The verify lengths that the curve and the drafter's survival lead to; none while there is no evaluation."""
    survival = measured_survival(config.evaluation) if config.evaluation is not None and curve.draft_requests else []
    if config.evaluation is not None and not survival:
        log.info("no survival in %s yet: the verify lengths it leads to are not shown", config.evaluation)
    return {
        "evaluation": config.evaluation,
        "survival": survival,
        "budgets": verify_budgets(curve, survival, SHOWN_REQUESTS) if survival else [],
    }


def _result(config: ProfileConfig, profile: dict[str, Any], curve_path: Location, seconds: float) -> dict[str, Any]:
    num_tokens = sum(row["batch_tokens"] for row in profile["steps"]) * (config.repeats + 1)
    return {
        "stage": "profile_engine",
        "output": config.output,
        "curve": str(curve_path),
        "fingerprint": profile["curve"]["fingerprint"],
        "verify_ms": {str(r["batch_tokens"]): round(r["curve_ms"], 3) for r in profile["steps"] if r["requests"] == 1},
        "draft_ms": {str(row["requests"]): round(row["curve_ms"], 3) for row in profile["drafting"]},
        "request_ms": round(profile["request_ms"], 4),
        "context_ms": round(profile["context_ms"], 4),
        "seconds": round(seconds, 1),
        "tokens_per_s": round(num_tokens / seconds, 1),
    } | _result_lengths(profile)


def _result_lengths(profile: dict[str, Any]) -> dict[str, Any]:
    rows = [row for row in profile["budgets"] if row["requests"] in LISTED_REQUESTS]
    return {"verify_length": {str(row["requests"]): round(row["verify_length"], 3) for row in rows}}


def _is_measured(profile_path: Path, curve_path: Location, request: dict[str, Any]) -> bool:
    """Whether the last profile was made for the same request and its curve is where it belongs."""
    if not profile_path.is_file() or not curve_path.is_file():
        return False
    profile = read_json(profile_path)
    is_same = fingerprint(profile["request"]) == fingerprint(request)
    return is_same and profile["curve"] in read_json(curve_path)


def _times(seconds: Sequence[float], curve_s: float) -> dict[str, float]:
    """Median and quartiles of what was measured, and what the curve says, in milliseconds."""
    low, middle, high = (1000.0 * np.quantile(seconds, [0.25, 0.5, 0.75])).tolist()
    return {"ms": middle, "low_ms": low, "high_ms": high, "curve_ms": 1000.0 * curve_s}


def _spread(row: dict[str, float]) -> str:
    return f"{row['low_ms']:.2f} .. {row['high_ms']:.2f}"


def _print_plan(config: ProfileConfig, target: TargetConfig, curve_path: Location) -> None:
    num_points = len(config.shapes) + (len(config.draft_requests) if config.has_drafter else 0)
    num_tokens = sum(shape.num_tokens for shape in config.shapes) * (config.repeats + 1)
    print(
        f"profile of {target.name} ({target.dtype}, {config.threads} threads): {num_points} points, "
        f"{config.repeats + 1} sweeps, {num_tokens:,} tokens; the curve goes to {curve_path}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(runner.main(ProfileConfig, run, default_config="profile_engine.yaml"))
