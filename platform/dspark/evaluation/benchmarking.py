"""Plain and speculative runs in pairs: which prompts they share, what a pair says, and what all pairs say together."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from dspark.data.prompts import Prompt, PromptSet
from dspark.evaluation.config import EvaluationMode
from dspark.evaluation.load import EngineLoad, Load, Side
from dspark.evaluation.load_config import BenchmarkConfig, LoadConfig
from dspark.evaluation.load_run import LoadRun
from dspark.provenance import fingerprint

Key = tuple[str, int, int]

SIDES: tuple[Side, Side] = ("plain", "speculative")
WARMUP_REQUESTS = 2

Row = Mapping[str, Any]


class PairBenchmark:
    """An engine in this process, plain and speculative. A row is a pair of runs. notes: what a user should know."""

    def __init__(self, config: BenchmarkConfig) -> None:
        self._config = config
        self.notes: list[str] = []

    @property
    def subject(self) -> str:
        return str(self._config.drafter)

    def keys(self) -> list[Key]:
        return pair_keys(self._config)

    def key_of(self, row: Row) -> Key:
        return key_of(row)

    @property
    def plan(self) -> str:
        number = self._config.num_requests
        return ", ".join(f"{number(c)} requests {c} at a time" for c in self._config.concurrency)

    @property
    def most_tokens(self) -> int:
        """Output tokens of all runs, at most."""
        config = self._config
        per_pair = sum(config.num_requests(concurrency) for concurrency in config.concurrency)
        return 2 * per_pair * len(config.modes) * config.pairs * config.max_tokens

    def measure(self, prompts: Sequence[Prompt], keys: Sequence[Key]) -> Iterator[dict[str, Any]]:
        load = EngineLoad(self._config, prompts)
        self.notes += load.notes
        yield from measure_pairs(load, self._config, keys)

    def runs(self, row: Row) -> list[Row]:
        """The figures of each run in a row."""
        return [row[side] for side in SIDES]

    def said(self, row: Row) -> str:
        """A row in a few words."""
        return f"{row['mode']}, {row['concurrency']} at once, pair {row['pair'] + 1}: {row['ratio']:.2f}"

    def summarize(self, rows: Sequence[Row]) -> dict[str, dict[str, dict[str, Any]]]:
        return summarize_pairs(rows)

    def headline(self, summary: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
        """{mode: {concurrency: {figure: value}}}: what the job's last line and the run's metrics say."""
        return {
            mode: {
                concurrency: {
                    "plain": figures["plain"]["tokens_per_s"],
                    "speculative": figures["speculative"]["tokens_per_s"],
                    "ratio": figures["ratio"]["median"],
                    "verify_length": figures["speculative"]["verify_length"],
                    "accepted_length": figures["speculative"]["accepted_length"],
                }
                for concurrency, figures in by_concurrency.items()
            }
            for mode, by_concurrency in summary.items()
        }

    def table(self, summary: Mapping[str, Any]) -> str:
        return format_pairs(summary)


def choose_prompts(prompts: PromptSet, config: LoadConfig) -> list[Prompt]:
    """Held-out prompts of the domains asked for, one of each in turn, in an order that the seed decides.

    Any number of them from the start holds all domains equally. Raises: ValueError when there are none.
    """
    groups: dict[str, list[Prompt]] = {}
    for prompt in sorted(prompts.prompts, key=lambda prompt: fingerprint([config.seed, prompt.id])):
        if prompt.split == "heldout":
            groups.setdefault(prompt.domain.split("/")[0], []).append(prompt)
    missing = [domain for domain in config.domains if domain not in groups]
    if missing or not groups:
        raise ValueError(
            f"no held-out prompts{f' of {missing}' if missing else ''}; there are some of {sorted(groups)}: change "
            "domains, or set prompts[].split to heldout"
        )
    chosen = [groups[domain] for domain in config.domains or sorted(groups)]
    return [prompt for one_of_each in zip_longest(*chosen) for prompt in one_of_each if prompt is not None]


def pair_keys(config: BenchmarkConfig) -> list[Key]:
    """(mode, concurrency, number) of every pair, in the order of measuring: every setting once, then again."""
    return [
        (mode.name, concurrency, number)
        for number in range(config.pairs)
        for mode in config.modes
        for concurrency in config.concurrency
    ]


def key_of(row: Row) -> Key:
    """The key that the row of a pair answers."""
    return row["mode"], row["concurrency"], row["pair"]


def measure_pairs(load: Load, config: BenchmarkConfig, keys: Sequence[Key]) -> Iterator[dict[str, Any]]:
    """A row per pair as it is measured. The side that goes first changes from pair to pair."""
    modes = {mode.name: mode for mode in config.modes}
    warm_up(load, config)
    for name, concurrency, number in keys:
        mode, order = modes[name], SIDES if number % 2 == 0 else SIDES[::-1]
        runs = {
            side: load.run(
                side,
                mode,
                concurrency=concurrency,
                num_requests=config.num_requests(concurrency),
                max_tokens=config.max_tokens,
            )
            for side in order
        }
        pair = {"mode": name, "concurrency": concurrency, "pair": number, "order": list(order)}
        yield pair | compare(runs["plain"], runs["speculative"], mode)


def warm_up(load: Load, config: BenchmarkConfig) -> None:
    """Runs that are not counted: memory is touched, kernels are chosen, estimates have something to go by."""
    for side in SIDES:
        load.run(
            side,
            config.modes[0],
            concurrency=WARMUP_REQUESTS,
            num_requests=WARMUP_REQUESTS,
            max_tokens=min(config.warmup_tokens, config.max_tokens),
        )


def compare(plain: LoadRun, speculative: LoadRun, mode: EvaluationMode) -> dict[str, Any]:
    """Both sides' figures and the ratio of their throughputs.

    identical: requests with the same output on both sides; None where it is sampled, or its ids are not told.
    """
    full = (plain.full_load_tokens_per_s, speculative.full_load_tokens_per_s)
    is_told = mode.temperature == 0 and all(answer.output_ids for answer in plain.answers)
    pairs = zip(plain.answers, speculative.answers, strict=True)
    return {
        "plain": plain.figures(),
        "speculative": speculative.figures(),
        "ratio": speculative.tokens_per_s / plain.tokens_per_s,
        "full_load_ratio": None if full[0] is None or full[1] is None else full[1] / full[0],
        "identical": sum(a.output_ids == b.output_ids for a, b in pairs) if is_told else None,
    }


def summarize_pairs(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, Any]]]:
    """{mode: {concurrency: figures}}: medians over pairs, and of the ratio of throughputs the spread too."""
    summary: dict[str, dict[str, dict[str, Any]]] = {}
    for mode, concurrency in dict.fromkeys((row["mode"], row["concurrency"]) for row in rows):
        group = [row for row in rows if (row["mode"], row["concurrency"]) == (mode, concurrency)]
        identical = [row["identical"] for row in group if row["identical"] is not None]
        figures: dict[str, Any] = {side: _medians([row[side] for row in group]) for side in SIDES}
        figures |= {
            "pairs": len(group),
            "ratio": spread([row["ratio"] for row in group]),
            "full_load_ratio": spread([row["full_load_ratio"] for row in group]),
            "identical": sum(identical) if identical else None,
            "compared": sum(row["plain"]["requests"] for row in group) if identical else None,
        }
        summary.setdefault(mode, {})[str(concurrency)] = figures
    return summary


def format_pairs(summary: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """The summary as a table; times are of the median request."""
    names = ("mode", "at once", "pairs", "plain t/s", "spec t/s", "ratio", "spread", "tau", "verified")
    shown = "{:<10} {:>7} {:>5} {:>9} {:>9} {:>6} {:>12} {:>5} {:>8} {:>7} {:>6} {:>15} {:>13} {:>9}"
    lines = [shown.format(*names, "drafted", "copied", "first token ms", "ms/token", "identical")]
    for mode, by_concurrency in summary.items():
        for concurrency, f in by_concurrency.items():
            plain, speculative, ratio = f["plain"], f["speculative"], f["ratio"]
            lines.append(
                shown.format(
                    *(mode, concurrency, f["pairs"]),
                    *(_number(side["tokens_per_s"], 1) for side in (plain, speculative)),
                    *(_number(ratio["median"]), f"{_number(ratio['low'])} .. {_number(ratio['high'])}"),
                    *(_number(speculative[key]) for key in ("accepted_length", "verify_length")),
                    *(_number(speculative[key]) for key in ("drafted_share", "copied_share")),
                    *(_both(plain, speculative, key) for key in ("first_token_ms", "token_ms")),
                    "-" if f["identical"] is None else f"{f['identical']}/{f['compared']}",
                )
            )
    lines.append("ratio: median over pairs of speculative over plain throughput, and its range; times: plain, spec")
    lines.append("drafted, copied: shares of the decodes, by the drafter and by lookup; the others were plain")
    return "\n".join(lines)


def _medians(runs: Sequence[Row]) -> dict[str, Any]:
    """Medians of every figure that is a number, percentiles included."""
    medians: dict[str, Any] = {}
    for key in runs[0].keys() - {"finished", "failed"}:
        values = [run[key] for run in runs if run[key] is not None]
        if values and isinstance(values[0], dict):
            medians[key] = _medians(values)
        else:
            medians[key] = float(np.median(values)) if values else None
    return medians


def spread(values: Sequence[float | None]) -> dict[str, Any]:
    """Median, lowest and highest of the values that are known, and these."""
    known = [value for value in values if value is not None]
    if not known:
        return {"median": None, "low": None, "high": None, "values": []}
    return {"median": float(np.median(known)), "low": min(known), "high": max(known), "values": known}


def _both(plain: Row, speculative: Row, key: str) -> str:
    values = (side[key]["p50"] if side[key] else None for side in (plain, speculative))
    return " ".join(_number(value, 1) for value in values)


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
