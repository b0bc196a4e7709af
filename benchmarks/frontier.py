"""A user's speed against tokens per second in all: two ways of decoding over all loads, and what one gains.

    python benchmarks/frontier.py --prompts prompts/heldout.jsonl --output runs/frontier
        --ours runs/demo/drafter --rival runs/demo/drafter_mtp [--rival-length 1] [--copying]
        [--concurrency 1 2 4 8 16 32 64] [--repeats 3] [--tokens 128] [--dtype bfloat16]

Both answer the same requests in turn. At each load a user's speed is the mean over requests of tokens per second from
asking to the last token; all users' together is that times their number. Points between loads are interpolated. At each
load of the rival: our user's speed where all users' is the same, and ours of all where a user's is the same, over the
rival's; intervals by bootstrap over prompts. A run's figures are kept as they come; the same command goes on behind
them. Source: DSpark, Figure 7.
"""

import argparse
import json
from collections.abc import Sequence
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

Speeds = dict[tuple[str, int], NDArray[np.float64]]  # (entrant, load) -> a speed per request, the same order for both


def main() -> None:
    options = parsed()
    config = contest_config(options)
    output = folder_of(config, options.output)
    speeds = measured(config, output)
    rows = compared(speeds, config.concurrency)
    print(
        f"{'at once':>8}{'user, rival':>13}{'all, rival':>12}{'user x':>8}{'interval':>16}{'all x':>8}{'interval':>16}"
    )
    for row in rows:
        cells = "".join(f"{_ratio(row[name]):>24}" for name in ("user", "all"))
        print(f"{row['at once']:>8}{row['user, rival']:>13.1f}{row['all, rival']:>12.1f}{cells}")
    draw(speeds, config.concurrency, output / "frontier.png", options)
    print(json.dumps({"rows": rows, "picture": str(output / "frontier.png")}))


def measured(config: ContestConfig, folder: Path) -> Speeds:
    """Of every request its mean speed over the repeats."""

    def of_answers(run: LoadRun) -> dict[str, Any]:
        assert all(answer.failure is None for answer in run.answers), "a request failed"
        return {"speeds": [answer.num_tokens / (answer.arrived_s[-1] - answer.sent_s) for answer in run.answers]}

    rows = resumed_runs(config, folder, of_answers)
    return {
        (name, load): np.mean(
            [row["speeds"] for row in rows if row["key"][1] == load and row["key"][3] == name], axis=0
        )
        for name in config.entrants
        for load in config.concurrency
    }


def compared(speeds: Speeds, loads: Sequence[int]) -> list[dict[str, Any]]:
    """A row per load of the rival; None where ours has no point to compare with."""
    rng = np.random.default_rng(0)
    whole = _ratios({key: values.mean() for key, values in speeds.items()}, loads)
    drawn = []
    for _ in range(NUM_RESAMPLED):
        chosen = {load: rng.integers(len(speeds[OURS, load]), size=len(speeds[OURS, load])) for load in loads}
        drawn.append(_ratios({(name, load): v[chosen[load]].mean() for (name, load), v in speeds.items()}, loads))
    rows = []
    for i, load in enumerate(loads):
        user = float(speeds[RIVAL, load].mean())
        row: dict[str, Any] = {"at once": load, "user, rival": user, "all, rival": user * load}
        for place, name in enumerate(("user", "all")):
            found = [ratio for sample in drawn if (ratio := sample[i][place]) is not None]
            interval = np.quantile(found, [0.025, 0.975]).tolist() if len(found) > NUM_RESAMPLED // 2 else None
            row[name] = {"ratio": whole[i][place], "interval": interval}
        rows.append(row)
    return rows


def _ratios(users: dict[tuple[str, int], float], loads: Sequence[int]) -> list[tuple[float | None, float | None]]:
    """(our user's speed at the same speed of all, ours of all at the same speed of a user) over the rival's."""
    own_user = np.array([users[OURS, load] for load in loads])
    own_all = own_user * np.array(loads)
    ratios = []
    for load in loads:
        user, everybody = users[RIVAL, load], users[RIVAL, load] * load
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


def draw(speeds: Speeds, loads: Sequence[int], path: Path, options: argparse.Namespace) -> None:
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.subplots()
    labels = {OURS: f"scheduled{' with copying' if options.copying else ''}", RIVAL: f"static {options.rival_length}"}
    for name, colour in ((OURS, "#2563a8"), (RIVAL, "#c2571a")):
        user = np.array([speeds[name, load].mean() for load in loads])
        axes.plot(user, user * np.array(loads), "o-", color=colour, label=labels[name])
        for load, x in zip(loads, user, strict=True):
            axes.annotate(str(load), (x, x * load), textcoords="offset points", xytext=(4, 4), fontsize=7)
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
        "requests_per_place": 1,
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
    parser.add_argument("--min-requests", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
