"""The scheduler against the best fixed verify length, and against plain decoding, at every load.

    python benchmarks/never_slower.py --drafter runs/demo/drafter --prompts prompts/heldout.jsonl --output runs/load
        [--lengths 1 2 3 5] [--concurrency 1 2 4 8 16 32 64] [--repeats 8] [--tokens 128] [--dtype bfloat16]

All ways of decoding answer the same requests in turn, in the other order the next time. At each load the best length is
chosen on half of the repeats and compared on the others, so that it is not chosen for its luck. A run's figures are
kept as they come; the same command goes on behind them. The picture shows tokens per second and the draft tokens that
are verified per request. Exit code 1 where the scheduler has less than 0.98 of either.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from dspark.config import build_config
from dspark.evaluation.load_config import ContestConfig
from resumed_runs import folder_of, resumed_runs

LEAST = 0.98
PLAIN, SCHEDULED = "plain", "scheduled"
FIGURES = ("tokens_per_s", "verify_length")


def main() -> int:
    options = parsed()
    config = contest_config(options)
    output = folder_of(config, options.output)
    rows = resumed_runs(config, output, lambda run: {name: run.figures()[name] for name in FIGURES})
    table = compared(rows, config)
    print_table(table)
    draw(rows, config, output / "never_slower.png")
    print(json.dumps({"rows": table, "picture": str(output / "never_slower.png")}))
    return int(any(min(row["of best"], row["of plain"]) < LEAST for row in table))


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
        "requests_per_place": 1,
        "min_requests": 6,
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
                    np.mean([value(rows, concurrency, n, SCHEDULED, "verify_length") for n in range(config.repeats)])
                ),
            }
        )
    return table


def value(
    rows: list[dict[str, Any]], concurrency: int, repeat: int, entrant: str, figure: str = "tokens_per_s"
) -> float:
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
        for axes, figures in ((left, "tokens_per_s"), (right, "verify_length")):
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
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 2, 3, 5])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if options.repeats < 4:
        parser.error(f"--repeats is {options.repeats}; a length is chosen on two and compared on two at least")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
