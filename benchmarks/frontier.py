"""A user's speed against tokens per second in all: two ways of decoding over all loads, and what one gains.

    python benchmarks/frontier.py --prompts prompts/heldout.jsonl --output runs/frontier
        --ours runs/demo/drafter --rival runs/demo/drafter_mtp [--rival-length 1] [--copying]
        [--concurrency 1 2 4 8 16 32 64] [--per-place 2] [--repeats 3] [--tokens 128] [--dtype bfloat16]

Both answer the same requests in turn, so many at once that each answer makes room for the next. All users' tokens per
second are those that were counted while every place was taken. A user's speed is the mean over answers of tokens per
second from asking to the last token; times the number of users it would be more than all got, since who is slow holds a
place for longer. The last answers end with fewer beside them: --per-place makes them a smaller part. Points between
loads are interpolated. At each load of the rival: our user's speed where all users' is the same, and ours of all where
a user's is the same, over the rival's; intervals by bootstrap over requests, each of another prompt as long as there
are more. A run's figures are kept as they come; the same command goes on behind them. Source: DSpark, Figure 7.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from dspark.config import build_config
from dspark.evaluation.load_config import ContestConfig
from dspark.evaluation.load_run import LoadRun
from resumed_runs import folder_of, resumed_runs

OURS, RIVAL = "ours", "rival"
NUM_RESAMPLED = 1000

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Point:
    """One way of decoding at one load, R requests, means over the repeats.

    speeds: [R], tokens per second of each answer from asking to its last token. tokens, seconds: [R], of the same.
    tokens_per_s: of all, counted while every place was taken.
    """

    speeds: Numbers
    tokens: Numbers
    seconds: Numbers
    tokens_per_s: float

    def user(self, weights: Numbers | None = None) -> float:
        """A user's tokens per second. weights: [R], how often each request counts; None = once."""
        return float(np.average(self.speeds, weights=weights))

    def all(self, weights: Numbers | None = None) -> float:
        """All users' tokens per second, with requests counted so often.

        Full places give tokens in the ratio of all answers' tokens to all answers' seconds: drawing other answers moves
        what was counted in that ratio.
        """
        if weights is None:
            return self.tokens_per_s
        drawn = weights @ self.tokens / (weights @ self.seconds)
        return float(self.tokens_per_s * drawn / (self.tokens.sum() / self.seconds.sum()))


Ratios = list[tuple[float | None, float | None]]  # by load
Points = Mapping[tuple[str, int], Point]  # by entrant and load; the same requests for both at a load


def main() -> None:
    options = parsed()
    config = contest_config(options)
    output = folder_of(config, options.output)
    points = measured(config, output)
    rows = compared(points, config.concurrency)
    print(
        f"{'at once':>8}{'user, rival':>13}{'all, rival':>12}{'user x':>8}{'interval':>16}{'all x':>8}{'interval':>16}"
    )
    for row in rows:
        cells = "".join(f"{_ratio(row[name]):>24}" for name in ("user", "all"))
        print(f"{row['at once']:>8}{row['user, rival']:>13.1f}{row['all, rival']:>12.1f}{cells}")
    draw(points, config.concurrency, output / "frontier.png", options)
    print(json.dumps({"rows": rows, "picture": str(output / "frontier.png")}))


def measured(config: ContestConfig, folder: Path) -> Points:
    """A point per entrant and load."""
    rows = resumed_runs(config, folder, of_answers)
    return {
        (name, load): point_of([row for row in rows if row["key"][1] == load and row["key"][3] == name])
        for name in config.entrants
        for load in config.concurrency
    }


def of_answers(run: LoadRun) -> dict[str, Any]:
    """What is kept of a run."""
    assert all(answer.failure is None for answer in run.answers), "a request failed"
    return {
        "tokens": [answer.num_tokens for answer in run.answers],
        "seconds": [answer.arrived_s[-1] - answer.sent_s for answer in run.answers],
        "tokens_per_s": run.full_load_tokens_per_s,
    }


def point_of(rows: Sequence[Mapping[str, Any]]) -> Point:
    """Of the repeats of a run."""
    tokens, seconds = (np.array([row[name] for row in rows], dtype=np.float64) for name in ("tokens", "seconds"))
    all_tokens_per_s = float(np.mean([row["tokens_per_s"] for row in rows]))
    return Point((tokens / seconds).mean(axis=0), tokens.mean(axis=0), seconds.mean(axis=0), all_tokens_per_s)


def compared(points: Points, loads: Sequence[int]) -> list[dict[str, Any]]:
    """A row per load of the rival; None where ours has no point to compare with."""
    rng = np.random.default_rng(0)
    whole = _ratios({key: (point.user(), point.all()) for key, point in points.items()}, loads)
    drawn: list[Ratios] = []
    while len(drawn) < NUM_RESAMPLED:
        weights = rng.poisson(1.0, max(len(point.speeds) for point in points.values())).astype(np.float64)
        parts = {key: weights[: len(point.speeds)] for key, point in points.items()}
        if all(part.any() for part in parts.values()):
            sample = {key: (point.user(parts[key]), point.all(parts[key])) for key, point in points.items()}
            drawn.append(_ratios(sample, loads))
    rows = []
    for i, load in enumerate(loads):
        rival = points[RIVAL, load]
        row: dict[str, Any] = {"at once": load, "user, rival": rival.user(), "all, rival": rival.all()}
        for place, name in enumerate(("user", "all")):
            found = [ratio for sample in drawn if (ratio := sample[i][place]) is not None]
            interval = np.quantile(found, [0.025, 0.975]).tolist() if len(found) > NUM_RESAMPLED // 2 else None
            row[name] = {"ratio": whole[i][place], "interval": interval}
        rows.append(row)
    return rows


def _ratios(speeds: Mapping[tuple[str, int], tuple[float, float]], loads: Sequence[int]) -> Ratios:
    """(our user's speed at the same speed of all, ours of all at the same speed of a user) over the rival's.

    speeds: of a user and of all.
    """
    own_user, own_all = np.array([speeds[OURS, load] for load in loads]).T
    ratios: Ratios = []
    for load in loads:
        user, everybody = speeds[RIVAL, load]
        ratios.append((_at(everybody, own_all, own_user, user), _at(user, own_user, own_all, everybody)))
    return ratios


def _at(x: float, xs: NDArray[np.float64], ys: NDArray[np.float64], over: float) -> float | None:
    """y at x, interpolated, over another; None outside of the points. Beyond an end that is better still: that end."""
    order = np.argsort(xs)
    xs, ys = xs[order], ys[order]
    if x < xs[0] and ys[0] >= over:
        return float(ys[0] / over)  # both are higher there
    return float(np.interp(x, xs, ys) / over) if xs[0] <= x <= xs[-1] else None


def _ratio(found: dict[str, Any]) -> str:
    if found["ratio"] is None:
        return "-"
    low, high = found["interval"] or (float("nan"), float("nan"))
    return f"{found['ratio']:.2f} ({low:.2f} to {high:.2f})"


def draw(points: Points, loads: Sequence[int], path: Path, options: argparse.Namespace) -> None:
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.subplots()
    labels = {OURS: f"scheduled{' with copying' if options.copying else ''}", RIVAL: f"static {options.rival_length}"}
    for name, colour in ((OURS, "#2563a8"), (RIVAL, "#c2571a")):
        places = [(points[name, load].user(), points[name, load].all()) for load in loads]
        axes.plot(*zip(*places, strict=True), "o-", color=colour, label=labels[name])
        for load, place in zip(loads, places, strict=True):
            axes.annotate(str(load), place, textcoords="offset points", xytext=(4, 4), fontsize=7)
    axes.set_xlabel("tokens/s of a user")
    axes.set_ylabel("tokens/s of all")
    axes.grid(color="#e3e6ea")
    axes.legend()
    figure.savefig(path, dpi=130)


def contest_config(options: argparse.Namespace) -> ContestConfig:
    most = max(options.concurrency)
    content = {
        "target": {"name": options.target, "dtype": options.dtype},
        "prompts": [{"path": options.prompts, "split": "heldout"}],
        "modes": [{"name": "greedy", "temperature": 0.0}],
        "entrants": {
            OURS: {"drafter": options.ours} | ({"lookup": {}} if options.copying else {}),
            RIVAL: {"drafter": options.rival, "verify_length": options.rival_length},
        },
        "repeats": options.repeats,
        "concurrency": options.concurrency,
        "max_tokens": options.tokens,
        "requests_per_place": options.per_place,
        "min_requests": options.min_requests,
        "engine": {"kv_tokens": max(24_576, 384 * most), "max_running_requests": most},
        "threads": options.threads,
    }
    return build_config(ContestConfig, content, source="the command line")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--output", required=True, help="a folder")
    parser.add_argument("--ours", required=True, help="a drafter's folder with a cost curve")
    parser.add_argument("--rival", required=True, help="a drafter's folder")
    parser.add_argument("--rival-length", type=int, default=1)
    parser.add_argument("--copying", action="store_true", help="ours copies what the text repeats")
    parser.add_argument("--target", default="bundled:smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--per-place", type=int, default=2, help="requests of a run, times those at once")
    parser.add_argument("--min-requests", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if options.per_place < 2:
        parser.error(
            f"--per-place is {options.per_place}; from 2 on there is somebody to take a place that falls empty"
        )
    return options


if __name__ == "__main__":
    main()
