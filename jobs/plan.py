"""Plan before anything runs: what speculation brings by load, what the cache holds, how long training takes."""

import sys
from pathlib import Path
from typing import Any, Self

import pydantic
from pydantic import Field

import runner
from dspark.config import Config, load_config
from dspark.data.target_cache import bytes_of
from dspark.engine.drafter_folder import COST_CURVE
from dspark.evaluation.forecast import (
    SPECULATE,
    LoadForecast,
    choose_curve,
    evaluated_survival,
    forecast,
    format_forecast,
    survival_of_tau,
)
from dspark.provenance import git_revision, read_json, write_json
from dspark.speculation.cost_curve import CostCurve
from dspark.storage import absolute, locate
from dspark.targets import TargetConfig, load_target_config
from dspark.tracking import TrackingConfig
from dspark.training.config import TrainConfig

PLAN = "plan.json"


class CacheSize(Config):
    """Of the target cache."""

    prompts: int = Field(ge=1)
    """Conversations to answer."""
    prompt_tokens: float = Field(gt=0)
    """Tokens of a prompt, in the mean: they are stored, too."""
    answer_tokens: float = Field(gt=0)
    """Tokens of an answer, in the mean."""
    num_layers: int = Field(5, ge=1)
    """Captured layers."""


class PlanConfig(Config):
    """What is known and what is asked; every part can be left out, and is then not planned."""

    output: str
    """Gets plan.json."""
    curve: str | None = None
    """A `cost_curve.json`, or the drafter's folder that holds one; of another machine's as well."""
    hardware: dict[str, str | int] = {}
    """Values of the fingerprint by which one of several curves in the file is chosen, such as num_threads."""
    evaluation: str | None = None
    """Folder made by jobs/evaluate.py, whose survival by position is taken."""
    mode: str | None = None
    """Way of decoding in that evaluation; None takes its first."""
    survival: list[float] | None = None
    """By position, in place of an evaluation: the share of rounds in which it and all before it stand."""
    tau: float | None = None
    """Accepted length, in place of both: every position is then taken to stand equally often after those before it."""
    block_size: int = Field(7, ge=1)
    """Draft tokens of a block, where tau is given."""
    concurrency: list[int] = Field([1, 2, 4, 8, 16, 32, 64, 128, 256], min_length=1)
    """Requests at once."""
    min_gain: float = Field(0.01, ge=0)
    """As `engine.min_gain`: less is not worth drafting for."""
    target: TargetConfig | None = None
    """Whose states the cache holds; only its config is read."""
    cache: CacheSize | None = None
    """None plans no cache."""
    train: str | None = None
    """Config file of jobs/train.py to plan; None plans no training."""
    trained: str | None = None
    """Folder of a training that was done on such hardware with such a drafter; its pace is taken."""
    anchors_per_s: float | None = Field(None, gt=0)
    """That pace, where it is known otherwise."""
    tracking: TrackingConfig = TrackingConfig()

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        given = [name for name in ("evaluation", "survival", "tau") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} both say how far drafts hold; give one of them")
        if self.curve is not None and not given:
            raise ValueError("a curve alone tells no gain; give evaluation, survival or tau")
        if given and self.curve is None:
            raise ValueError(f"{given[0]} alone tells no gain; give curve, made by jobs/profile_engine.py")
        if self.cache is not None and self.target is None:
            raise ValueError("the cache's size hangs on the target's; give target")
        row = self.survival or []
        if any(not 0 <= value <= 1 for value in row) or sorted(row, reverse=True) != row:
            raise ValueError(f"survival {row} must lie in 0..1 and not rise: it is of a position and all before it")
        if min(self.concurrency) < 1:
            raise ValueError(f"concurrency {self.concurrency} must be 1 or more")
        return self


def run(config: PlanConfig, *, fresh: bool = False, dry_run: bool = False) -> dict[str, Any]:
    """Work the plan out; nothing is loaded, measured or trained, so that `fresh` changes nothing."""
    plan = _gain(config) | _cache(config) | _training(config)
    result = {"stage": "plan", "output": config.output} | plan
    if dry_run:
        return result | {"dry_run": True}
    path = Path(config.output).resolve() / PLAN
    write_json(path, result | {"config": config.model_dump(mode="json"), "git_revision": git_revision()})
    with runner.track(config, "plan") as tracked:
        for row in plan.get("loads", []):
            tracked.log_metrics({name: row[name] for name in ("speedup", "verify_length")}, step=row["requests"])
        tracked.log_artifact(path)
    return result


def _gain(config: PlanConfig) -> dict[str, Any]:
    if config.curve is None:
        return {}
    curve, survival = _curve(config), _survival(config)
    rows = forecast(curve, survival, config.concurrency, min_gain=config.min_gain)
    machine = ", ".join(f"{name} {value}" for name, value in curve.fingerprint.items())
    print(f"speculation on {machine}")
    print(f"  survival by position: {', '.join(f'{value:.3f}' for value in survival)}")
    if not curve.draft_requests:
        print("  the curve tells no drafting time: it counts as none")
    print(format_forecast(rows, config.min_gain), flush=True)
    pays = [row.requests for row in rows if row.advice == SPECULATE]
    return {
        "fingerprint": curve.fingerprint,
        "survival": survival,
        "loads": [_rounded(row) for row in rows],
        "pays_at": pays,
        "largest_speedup": round(max(row.speedup for row in rows), 4),
    }


def _curve(config: PlanConfig) -> CostCurve:
    place = locate(absolute(str(config.curve)))
    return choose_curve(place if place.name.endswith(".json") else place / COST_CURVE, config.hardware)


def _survival(config: PlanConfig) -> list[float]:
    if config.evaluation is not None:
        return evaluated_survival(locate(absolute(config.evaluation)), config.mode)
    if config.survival is not None:
        return config.survival
    assert config.tau is not None
    return survival_of_tau(config.tau, config.block_size)


def _rounded(row: LoadForecast) -> dict[str, Any]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in row.to_dict().items()}


def _cache(config: PlanConfig) -> dict[str, Any]:
    if config.cache is None or config.target is None:
        return {}
    size, wanted = load_target_config(config.target).hidden_size, config.cache
    shape = {"hidden_size": size, "num_layers": wanted.num_layers}
    tokens = round(wanted.prompts * (wanted.prompt_tokens + wanted.answer_tokens))
    supervised = round(wanted.prompts * wanted.answer_tokens)
    total = bytes_of(tokens, supervised, **shape)
    per_token = bytes_of(1, 1, **shape)
    print(
        f"target cache of {wanted.prompts:,} prompts: {tokens:,} tokens, {per_token:,} bytes an answer's token "
        f"({wanted.num_layers} layers of {size}), {total / 1e9:.2f} GB in all; online training stores none of it",
        flush=True,
    )
    return {"cache": {"tokens": tokens, "bytes_per_answer_token": per_token, "bytes": total}}


def _training(config: PlanConfig) -> dict[str, Any]:
    if config.train is None:
        return {}
    training = load_config(TrainConfig, config.train)
    anchors = training.steps * training.sequences_per_step * training.anchors_per_sequence
    pace, source = _pace(config)
    found = {"steps": training.steps, "max_anchors": anchors, "anchors_per_s": pace, "seconds_at_most": None}
    if pace is None:
        print(f"training: {anchors:,} anchors at most; how long that takes is not known ({source})", flush=True)
        return {"training": found}
    seconds = anchors / pace
    print(
        f"training: {anchors:,} anchors at most, at {pace:,.0f}/s ({source}) {runner.duration(seconds)} at most",
        flush=True,
    )
    return {"training": found | {"seconds_at_most": round(seconds, 1)}}


def _pace(config: PlanConfig) -> tuple[float | None, str]:
    """Anchors per second, and where that is from, or why it is not known."""
    if config.anchors_per_s is not None:
        return config.anchors_per_s, "as given"
    if config.trained is None:
        return None, "give trained, the folder of an earlier training, or anchors_per_s"
    path = locate(absolute(config.trained)) / "result.json"
    if not path.is_file():
        return None, f"no finished training at {config.trained}"
    result = read_json(path)
    return result["anchors"] / result["seconds"], f"the pace of {config.trained}"


if __name__ == "__main__":
    sys.exit(runner.main(PlanConfig, run, default_config="plan.yaml"))
