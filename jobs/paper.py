"""Reproduce the paper's experiments on one target: train, measure and time in pieces that resume, then the report."""

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import adopt
import cache
import calibrate
import compare
import evaluate
import generate
import profile_engine
import report
import runner
import train
from dspark.config import load_config
from dspark.engine.drafter_folder import drafter_sha256
from dspark.errors import DsparkError
from dspark.evaluation import round_time
from dspark.evaluation.contest import key_of, run_keys
from dspark.evaluation.findings import MAIN
from dspark.evaluation.paper_config import PaperConfig
from dspark.evaluation.paper_report import FIGURES, REPORT, SUMMARY, TABLE
from dspark.evaluation.profiling import fingerprint_of
from dspark.evaluation.projection import (
    contest_tokens,
    evaluation_tokens,
    generated_tokens,
    projected_seconds,
    training_slots,
)
from dspark.provenance import fingerprint, read_json, write_json
from dspark.training.config import TrainConfig

PIECES = "pieces.jsonl"

log = logging.getLogger("dspark.paper")


@dataclass(frozen=True)
class Piece:
    """One stage of another job. units: what its time grows with, None where that cannot be told beforehand."""

    name: str
    kind: str
    units: float | None
    output: str
    do: Callable[..., dict[str, Any]]


def run(config: PaperConfig, *, fresh: bool = False, dry_run: bool = False) -> dict[str, Any]:
    """Do what is not done yet, piece by piece, then write the report; returns the verdicts.

    fresh: of pieces below `output`; answers and caches that lie elsewhere belong to others and are kept.
    """
    pieces = list(plan_pieces(config))
    output = Path(config.output).resolve()
    if fresh and not dry_run:
        (output / PIECES).unlink(missing_ok=True)
    records, cut_short = read_records(output / PIECES)
    if dry_run:
        return _print_plan(config, pieces, records)
    num_done = 0
    for number, piece in enumerate(pieces):
        left = projected_seconds(pieces[number:], records, config.rates)
        log.info("piece %d of %d: %s; %s to go in all", number + 1, len(pieces), piece.name, in_words(left))
        started = time.monotonic()
        if piece.name not in {record["name"] for record in records}:
            _append(output / PIECES, {"name": piece.name, "is_begun": True})
        result = _do(piece, fresh=fresh and is_below(piece.output, output))
        seconds = round(time.monotonic() - started, 1)
        units = None if piece.name in cut_short else piece.units  # the rest of a piece tells nothing of its pace
        record = {"name": piece.name, "kind": piece.kind, "units": units, "seconds": seconds}
        if result.get("skipped"):
            if piece.name in {earlier["name"] for earlier in records}:
                continue
            record |= {"units": None, "seconds": 0.0}  # done by somebody else: tells nothing of the time it takes
        else:
            num_done += 1
        records.append(record)
        _append(output / PIECES, record)
    runner.stop_ray()
    if not num_done and (output / SUMMARY).is_file():
        return report.run(config) | {"stage": "paper", "pieces": len(pieces), "done": 0, "skipped": True}
    with runner.track(config, "paper", set=config.size) as tracked:
        result = report.run(config)
        verdicts = {f"claims_{name.replace(' ', '_')}": float(n) for name, n in result["verdicts"].items()}
        tracked.log_metrics(verdicts, step=0)
        for path in (output / REPORT, output / SUMMARY, output / TABLE, *sorted((output / FIGURES).glob("*.png"))):
            tracked.log_artifact(path)
    seconds = sum(record["seconds"] for record in records)
    return result | {"stage": "paper", "pieces": len(pieces), "done": num_done, "seconds": round(seconds, 1)}


def plan_pieces(config: PaperConfig) -> Iterator[Piece]:
    """In an order in which each finds what it needs; the main drafter's own measurements come before other seeds."""
    if config.generate is not None:
        answers = config.generate_config()
        tokens = generated_tokens(answers)
        yield Piece("generate", "generate", tokens, answers.output, partial(generate.run, answers))
        for name in config.caches:
            states = config.cache_config(name)
            yield Piece(f"cache {name}", "cache", tokens, states.output, partial(cache.run, states))
    for place, seed in enumerate(config.seeds):
        for name in config.drafters:
            if seed in config.seeds_of(name):
                yield from _drafter_pieces(config, name, seed)
        if place == 0:
            yield from _main_pieces(config)


def train_config(config: PaperConfig, name: str, seed: int) -> TrainConfig:
    """What all have in common, then what is the drafter's own."""
    drafter = config.drafters[name]
    states = config.cache_config(str(drafter.cache)).output
    place = [f"cache={states}", f"output={config.drafter_folder(name, seed)}", f"seed={seed}"]
    tracking = config.tracking_override(f"{name}, seed {seed}")
    return load_config(TrainConfig, drafter.config, [*config.training, *drafter.changes, *place, tracking])


def _drafter_pieces(config: PaperConfig, name: str, seed: int) -> Iterator[Piece]:
    folder = config.drafter_folder(name, seed)
    if config.drafters[name].adopted:
        yield Piece(f"adopt {name}", "adopt", 1, folder, partial(adopt.run, config.adopt_config(name)))
    else:
        training = train_config(config, name, seed)
        slots = training_slots(training.drafter, training.steps * training.sequences_per_step, training)
        yield Piece(f"train {name}, seed {seed}", "train", slots, folder, partial(train.run, training))
    measuring = config.evaluate_config(name, seed)
    tokens = evaluation_tokens(measuring)
    yield Piece(f"evaluate {name}, seed {seed}", "evaluate", tokens, measuring.output, partial(evaluate.run, measuring))


def _main_pieces(config: PaperConfig) -> Iterator[Piece]:
    """What only one trained set of drafters is needed for."""
    if config.round_time is not None:
        number = len(config.round_time.kinds) * len(config.round_time.block_sizes) * config.round_time.repeats
        yield Piece("round times", "round_time", number, config.output, partial(time_rounds, config))
    if config.calibrate is not None:
        calibration = config.calibrate_config()
        tokens = evaluation_tokens(calibration.measurement)
        yield Piece("calibrate", "evaluate", tokens, calibration.output, partial(calibrate.run, calibration))
    if config.profile_engine is not None:
        profile = config.profile_config()
        yield Piece("profile", "profile", profile.repeats, profile.output, partial(_alone, profile_engine.run, profile))
    if config.contest is not None:
        tokens = contest_tokens(config.contest)
        yield Piece("contest", "contest", tokens, config.output, partial(run_contest, config))
    for name, one in (("budget", config.budget), ("lossless", config.lossless)):
        if one is not None:
            measuring = config.budget_config() if name == "budget" else config.lossless_config()
            tokens = evaluation_tokens(measuring)
            yield Piece(name, "evaluate", tokens, measuring.output, partial(evaluate.run, measuring))


def run_contest(config: PaperConfig, *, fresh: bool = False) -> dict[str, Any]:
    """Runs under load that are not there yet."""
    contest = config.contest_config()
    path = Path(config.output).resolve() / compare.CONTEST
    prompts = compare.contest_prompts(contest)
    request = compare.contest_request(contest, prompts)
    rows = [] if fresh else compare.earlier_runs(path, request, contest)
    to_do = [key for key in run_keys(contest) if key not in {key_of(row) for row in rows}]
    if not to_do:
        return {"skipped": True}
    runner.stop_ray()  # its workers would share the cores with what is timed
    return {"runs": len(rows) + len(compare.measure_runs(contest, prompts, to_do, path, request, rows))}


def time_rounds(config: PaperConfig, *, fresh: bool = False) -> dict[str, Any]:
    """Times of rounds, unless those of these drafters on this machine are there."""
    assert config.round_time is not None
    seed = config.seeds[0]
    folders = {
        kind: str(Path(config.drafter_folder(kind, seed)).resolve())
        for kind in config.round_time.kinds
        if kind in config.drafters
    }
    request = {
        "config": config.round_time.model_dump(mode="json"),
        "drafters": {kind: drafter_sha256(folder) for kind, folder in folders.items()},
        "hardware": fingerprint_of(config.target, config.round_time.threads),
    }
    path = Path(config.output).resolve() / report.ROUND_TIMES
    if not fresh and path.is_file() and fingerprint(read_json(path)["request"]) == fingerprint(request):
        return {"skipped": True}
    runner.stop_ray()
    times = round_time.measure(config.round_time, config.target, folders, path.parent / "round_time")
    write_json(path, {"request": request, "times": times})
    return {"variants": len(times["variants"])}


def read_records(path: Path) -> tuple[list[dict[str, Any]], set[str]]:
    """What pieces took that were ended, in this start and earlier ones, and the names of those that were only begun."""
    rows = evaluate.read_rows(path)
    ended = [row for row in rows if not row.get("is_begun")]
    return ended, {row["name"] for row in rows} - {row["name"] for row in ended}


def is_below(folder: str, parent: Path) -> bool:
    return Path(folder).resolve().is_relative_to(parent)


def in_words(seconds: float | None) -> str:
    if seconds is None:
        return "unknown time"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"


def _do(piece: Piece, *, fresh: bool) -> dict[str, Any]:
    """Raises: DsparkError and ValueError of the piece, which is named."""
    try:
        return piece.do(fresh=fresh)
    except (DsparkError, ValueError) as error:
        error.add_note(f"in piece {piece.name!r}; the same command goes on from there")
        log.error("piece %s failed; the same command goes on from there", piece.name)
        raise


def _alone(do: Callable[..., dict[str, Any]], config: Any, *, fresh: bool) -> dict[str, Any]:
    """Something that is timed, without the processes of what came before."""
    runner.stop_ray()
    return do(config, fresh=fresh)


def _append(path: Path, record: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as stream:
        stream.write(json.dumps({**record, "date": datetime.now(UTC).isoformat(timespec="seconds")}) + "\n")


def _print_plan(config: PaperConfig, pieces: Sequence[Piece], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The pieces with their projected times. Those that are done are named by their records."""
    done = {record["name"] for record in records}
    print(f"{len(pieces)} pieces on {config.target.name}, seeds {list(config.seeds)}; the main drafter is {MAIN!r}")
    for piece in pieces:
        state = "done" if piece.name in done else in_words(projected_seconds([piece], records, config.rates))
        units = "" if piece.units is None else f"{piece.units:,.0f}"
        print(f"  {piece.name:<36} {units:>18}  {state}")
    left = projected_seconds([piece for piece in pieces if piece.name not in done], records, config.rates)
    print(f"  to go: {in_words(left)}", flush=True)
    seconds = None if left is None else round(left)
    return {"stage": "paper", "output": config.output, "dry_run": True, "pieces": len(pieces), "projected_s": seconds}


if __name__ == "__main__":
    sys.exit(runner.main(PaperConfig, run, default_config="../paper/paper_quick.yaml"))
