"""The scheduler against the best fixed verify length, and against plain decoding, at every load.

    python benchmarks/never_slower.py --drafter runs/demo/drafter --prompts prompts/heldout.jsonl --output runs/load
        [--lengths 1 2 3] [--concurrency 1 2 4 8 16 32 64] [--per-place 2] [--repeats 8] [--tokens 128]
        [--dtype bfloat16]

All ways of decoding answer the same requests in turn, in the other order the next time; tokens per second are those
that were counted while every place was taken. --lengths: all that the drafter has, unless told. At each load the best
length is chosen on half of the repeats and compared on the others, so that it is not chosen for its luck. A run's
figures are kept as they come; the same command goes on behind them. The picture shows tokens per second and the draft
tokens that are verified per request. Exit code 1 where the scheduler has less than 0.98 of either, or verifies more per
request at a higher load than at a lower one, by more than its runs tell apart.
"""

import argparse
import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from dspark.config import build_config
from dspark.drafters.checkpoint import from_deepspec
from dspark.evaluation.load_config import ContestConfig
from dspark.provenance import read_json
from resumed_runs import folder_of, resumed_runs

LEAST = 0.98
LEAST_RISE = 0.1  # draft tokens per request: half the requests of one load are others than those of the next
STANDARD_ERRORS = 3.0  # there are some twenty pairs of loads, each of which may rise by chance
PLAIN, SCHEDULED = "plain", "scheduled"
MIN_REQUESTS = 8  # at low loads too: what one prompt lets accept is not what another does
SPEED, BUDGET = "full_load_tokens_per_s", "verify_length"


def main() -> int:
    options = parsed()
    config = contest_config(options)
    output = folder_of(config, options.output)
    rows = resumed_runs(config, output, lambda run: {name: run.figures()[name] for name in (SPEED, BUDGET)})
    table, risen = compared(rows, config), rises(rows, config)
    print(f"fixed lengths: {' '.join(map(str, options.lengths))} of 1 to {options.block_size}")
    print_table(table)
    for rise in risen:
        print("verified: {by:+.2f} from {lower} to {higher} at once, resolution {resolution:.2f}".format(**rise))
    draw(rows, config, output / "never_slower.png")
    picture = str(output / "never_slower.png")
    print(json.dumps({"rows": table, "rises": risen, "lengths": options.lengths, "picture": picture}))
    return int(bool(risen) or any(min(row["of best"], row["of plain"]) < LEAST for row in table))


def contest_config(options: argparse.Namespace) -> ContestConfig:
    entrants: dict[str, Any] = {PLAIN: {}}
    entrants |= {f"length {n}": {"drafter": options.drafter, "verify_length": n} for n in options.lengths}
    entrants[SCHEDULED] = {"drafter": options.drafter}
    most = max(options.concurrency)
    content = {
        "target": {"name": options.target, "dtype": options.dtype},
        "prompts": [{"path": options.prompts, "split": "heldout"}],
        "modes": [{"name": "greedy", "temperature": 0.0}],
        "entrants": entrants,
        "repeats": options.repeats,
        "concurrency": options.concurrency,
        "max_tokens": options.tokens,
        "requests_per_place": options.per_place,
        "min_requests": MIN_REQUESTS,
        "engine": {"kv_tokens": max(24_576, 384 * most), "max_running_requests": most},
        "threads": options.threads,
    }
    return build_config(ContestConfig, content, source="the command line")


def compared(rows: list[dict[str, Any]], config: ContestConfig) -> list[dict[str, Any]]:
    """A row per load. Ratios are medians over the repeats compared on; their spread is that of single repeats.

    Of every four repeats, two of which run in the other order, the best is chosen on the first two.
    """
    order = np.arange(config.repeats)
    chosen_on, compared_on = order[order % 4 < 2], order[order % 4 >= 2]
    table = []
    for concurrency in config.concurrency:
        speeds = {
            name: np.array([value(rows, concurrency, repeat, name) for repeat in range(config.repeats)])
            for name in config.entrants
        }
        fixed = [name for name in config.entrants if name != SCHEDULED]
        best = max(fixed, key=lambda name: float(np.median(speeds[name][chosen_on])))
        own = speeds[SCHEDULED][compared_on]
        ratios = own / speeds[best][compared_on]
        table.append(
            {
                "at once": concurrency,
                "best": best,
                "of best": float(np.median(ratios)),
                "spread": f"{ratios.min():.2f} to {ratios.max():.2f}",
                "of plain": float(np.median(own / speeds[PLAIN][compared_on])),
                "verified per request": float(
                    np.mean([value(rows, concurrency, n, SCHEDULED, BUDGET) for n in range(config.repeats)])
                ),
            }
        )
    return table


def rises(rows: list[dict[str, Any]], config: ContestConfig) -> list[dict[str, Any]]:
    """Pairs of loads of which the higher one verifies more per request: by how many draft tokens, beyond `resolution`.

    Of the differences in single repeats, which stand side by side, the mean and its standard error.
    """
    loads = sorted(config.concurrency)
    budgets = {n: np.array([value(rows, n, r, SCHEDULED, BUDGET) for r in range(config.repeats)]) for n in loads}
    found = []
    for lower, higher in combinations(loads, 2):
        difference = budgets[higher] - budgets[lower]
        error = float(difference.std(ddof=1)) / config.repeats**0.5
        by, resolution = float(difference.mean()), max(LEAST_RISE, STANDARD_ERRORS * error)
        if by > resolution:
            found.append({"lower": lower, "higher": higher, "by": by, "resolution": resolution})
    return found


def value(rows: list[dict[str, Any]], concurrency: int, repeat: int, entrant: str, figure: str = SPEED) -> float:
    return next(float(row[figure]) for row in rows if tuple(row["key"])[1:] == (concurrency, repeat, entrant))


def print_table(table: list[dict[str, Any]]) -> None:
    print("".join(f"{name:>22}" for name in table[0]))
    for row in table:
        cells = (f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row.values())
        print("".join(f"{cell:>22}" for cell in cells))


def draw(rows: list[dict[str, Any]], config: ContestConfig, path: Path) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    loads = list(config.concurrency)
    for name in config.entrants:
        style: dict[str, Any] = {"linewidth": 2.5, "color": "black"} if name == SCHEDULED else {"linewidth": 1.2}
        for axes, figures in ((left, SPEED), (right, BUDGET)):
            points = [np.median([value(rows, load, n, name, figures) for n in range(config.repeats)]) for load in loads]
            axes.plot(loads, points, "o-", markersize=3, label=name, **style)
    for axes, title in ((left, "tokens/s"), (right, "draft tokens verified per request and step")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(loads, [str(load) for load in loads])
        axes.set_xlabel("requests at once")
        axes.set_title(title, fontsize=10)
        axes.grid(color="#e3e6ea")
    left.legend(fontsize=8)
    figure.savefig(path, dpi=130)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--output", required=True, help="a folder")
    parser.add_argument("--target", default="bundled:smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--lengths", type=int, nargs="+", help="to be fixed; default: all")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--per-place", type=int, default=2, help="requests of a run, times those at once")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if options.repeats < 4:
        parser.error(f"--repeats is {options.repeats}; a length is chosen on two and compared on two at least")
    if options.per_place < 2:
        parser.error(f"--per-place is {options.per_place}; it takes 2 for a place that falls empty to be taken")
    options.block_size = from_deepspec(read_json(Path(options.drafter) / "config.json")).block_size
    options.lengths = options.lengths or list(range(1, options.block_size + 1))
    if max(options.lengths) > options.block_size:
        parser.error(f"--lengths go up to {max(options.lengths)}; the drafter's block has {options.block_size}")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
