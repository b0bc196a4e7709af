"""Running servers side by side: the same requests to each in turn, at the same loads, again and again."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dspark.data.prompts import Prompt
from dspark.evaluation.benchmarking import WARMUP_REQUESTS, spread
from dspark.evaluation.http_load import HttpLoad, LoadPoint
from dspark.evaluation.load_config import BenchmarkConfig

Row = Mapping[str, Any]
Key = tuple[str, str, int]

NOT_NUMBERS = ("finished", "failed")
SHOWN = ("endpoint", "t/s", "ratio", "spread", "t/s/user", "p10", "first token ms", "p99", "ms/token", "p99", "tau")


def load_points(config: BenchmarkConfig) -> dict[str, LoadPoint]:
    """By name, in the order of measuring."""
    points = [LoadPoint(concurrency=number) for number in config.concurrency]
    points += [LoadPoint(request_rate=rate) for rate in config.request_rates]
    return {point.name: point for point in points}


class EndpointBenchmark:
    """The endpoints of a config. A row holds a run of each at one load; they stand next to each other in time."""

    def __init__(self, config: BenchmarkConfig) -> None:
        self._config = config
        self._points = load_points(config)
        self.notes: list[str] = []

    @property
    def subject(self) -> str:
        return ", ".join(f"{name} at {endpoint.base_url}" for name, endpoint in self._config.endpoints.items())

    def keys(self) -> list[Key]:
        """(mode, load, repeat) of every row, in the order of measuring: every setting once, then again."""
        config = self._config
        modes = [mode.name for mode in config.modes]
        return [(mode, point, repeat) for repeat in range(config.pairs) for mode in modes for point in self._points]

    def key_of(self, row: Row) -> Key:
        return row["mode"], row["load"], row["pair"]

    def num_requests(self, point: str) -> int:
        """Of one run at this load."""
        concurrency, rate = self._points[point].concurrency, self._points[point].request_rate
        if concurrency is not None:
            return self._config.num_requests(concurrency)
        assert rate is not None
        return self._config.num_arrivals(rate)

    @property
    def plan(self) -> str:
        return ", ".join(f"{self.num_requests(point)} requests {point}" for point in self._points)

    @property
    def most_tokens(self) -> int:
        """Output tokens of all runs, at most."""
        per_repeat = sum(self.num_requests(point) for point in self._points) * len(self._config.endpoints)
        return per_repeat * len(self._config.modes) * self._config.pairs * self._config.max_tokens

    def measure(self, prompts: Sequence[Prompt], keys: Sequence[Key]) -> Iterator[dict[str, Any]]:
        """A row per key as it is measured. Raises: DsparkError when a server is not there, or fails when it is warmed
        up; what fails later is counted.
        """
        config = self._config
        loads = {name: HttpLoad(one, prompts, seed=config.seed) for name, one in config.endpoints.items()}
        modes = {mode.name: mode for mode in config.modes}
        for load in loads.values():
            load.run(
                config.modes[0],
                LoadPoint(concurrency=WARMUP_REQUESTS),
                num_requests=WARMUP_REQUESTS,
                max_tokens=min(config.warmup_tokens, config.max_tokens),
                must_succeed=True,
            )
        for mode, point, repeat in keys:
            order = list(loads) if repeat % 2 == 0 else list(loads)[::-1]
            runs = {
                name: loads[name]
                .run(
                    modes[mode],
                    self._points[point],
                    num_requests=self.num_requests(point),
                    max_tokens=config.max_tokens,
                    arrival_seed=config.seed + repeat,
                )
                .figures()
                for name in order
            }
            row = {"mode": mode, "load": point, "pair": repeat, "order": order}
            first, *others = config.endpoints
            yield row | {"runs": runs, "ratio": {name: _ratio(runs[name], runs[first]) for name in others}}

    def runs(self, row: Row) -> list[Row]:
        """The figures of each run in a row."""
        return list(row["runs"].values())

    def said(self, row: Row) -> str:
        """A row in a few words."""
        speeds = ", ".join(f"{name} {figures['tokens_per_s']:.1f} t/s" for name, figures in row["runs"].items())
        return f"{row['mode']}, {row['load']}, repeat {row['pair'] + 1}: {speeds}"

    def summarize(self, rows: Sequence[Row]) -> dict[str, dict[str, dict[str, Any]]]:
        """{mode: {load: {endpoint: figures}}}: medians over repeats, of throughputs and of their ratios to the first
        endpoint's in the same repeat the spread too; requests that failed, by reason, of all repeats.
        """
        summary: dict[str, dict[str, dict[str, Any]]] = {}
        first = next(iter(self._config.endpoints))
        for mode, point in dict.fromkeys((row["mode"], row["load"]) for row in rows):
            group = [row for row in rows if (row["mode"], row["load"]) == (mode, point)]
            for name in self._config.endpoints:
                runs = [row["runs"][name] for row in group]
                figures = _medians(runs) | {
                    "repeats": len(runs),
                    "tokens_per_s": spread([run["tokens_per_s"] for run in runs]),
                    "ratio": spread([row["ratio"].get(name) for row in group]) if name != first else None,
                    "requests": sum(run["requests"] for run in runs),
                    "failed": _summed([run["failed"] for run in runs]),
                }
                summary.setdefault(mode, {}).setdefault(point, {})[name] = figures
        return summary

    def headline(self, summary: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
        """{mode: {load: {figure: value}}}: what the job's last line and the run's metrics say."""
        return {
            mode: {point: _headline(by_endpoint) for point, by_endpoint in by_point.items()}
            for mode, by_point in summary.items()
        }

    def table(self, summary: Mapping[str, Any]) -> str:
        width = max(len(name) for name in [SHOWN[0], *self._config.endpoints])
        shown = f"  {{:<{width}}} {{:>8}} {{:>6}} {{:>12}} {{:>9}} {{:>7}} {{:>15}} {{:>8}} {{:>9}} {{:>8}} {{:>5}}"
        lines = []
        for mode, by_point in summary.items():
            for point, by_endpoint in by_point.items():
                lines += [f"{mode}, {point}", shown.format(*SHOWN)]
                lines += [_line(shown, name, figures) for name, figures in by_endpoint.items()]
        lines.append(
            "medians over repeats; ratio: to the first endpoint's tokens/s; t/s/user: median request and slowest"
        )
        lines.append("tenth, waiting included; first token, ms/token: median request and p99")
        return "\n".join(lines)


def _ratio(run: Row, against: Row) -> float | None:
    return run["tokens_per_s"] / against["tokens_per_s"] if against["tokens_per_s"] else None


def _medians(runs: Sequence[Row]) -> dict[str, Any]:
    """Medians of every figure that is a number or a group of numbers, where it is known."""
    medians: dict[str, Any] = {}
    for key in [key for key in runs[0] if key not in NOT_NUMBERS]:
        known = [run[key] for run in runs if run[key] is not None]
        if known and isinstance(known[0], Mapping):
            medians[key] = {name: float(np.median([values[name] for values in known])) for name in known[0]}
        else:
            medians[key] = float(np.median(known)) if known else None
    return medians


def _summed(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    reasons = dict.fromkeys(reason for count in counts for reason in count)
    return {reason: sum(count.get(reason, 0) for count in counts) for reason in reasons}


def _headline(by_endpoint: Mapping[str, Row]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, figures in by_endpoint.items():
        values[name] = figures["tokens_per_s"]["median"]
        if figures["ratio"] is not None:
            values[f"{name}_ratio"] = figures["ratio"]["median"]
        for key in ("first_token_ms", "token_ms", "user_tokens_per_s"):
            values[f"{name}_{key}"] = figures[key]["p50"] if figures[key] else None
        values |= {f"{name}_{key}": figures[key] for key in ("accepted_length", "verify_length")}
        values[f"{name}_failed"] = sum(figures["failed"].values())
    return values


def _line(shown: str, name: str, figures: Row) -> str:
    speed, ratio = figures["tokens_per_s"], figures["ratio"] or {"median": None, "low": None, "high": None}
    line = shown.format(
        *(name, _number(speed["median"], 1), _number(ratio["median"])),
        "-" if ratio["low"] is None else f"{ratio['low']:.2f}..{ratio['high']:.2f}",
        *(_part(figures, "user_tokens_per_s", part) for part in ("p50", "p10")),
        *(_part(figures, "first_token_ms", part) for part in ("p50", "p99")),
        *(_part(figures, "token_ms", part) for part in ("p50", "p99")),
        _number(figures["accepted_length"]),
    )
    failed = figures["failed"]
    if not failed:
        return line
    reasons = "; ".join(f"{count} {reason}" for reason, count in failed.items())
    return f"{line}\n    {sum(failed.values())} of {figures['requests']} requests failed: {reasons}"


def _part(figures: Row, key: str, part: str) -> str:
    return _number(figures[key][part] if figures[key] else None, 1)


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
