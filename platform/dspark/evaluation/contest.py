"""Ways of decoding side by side: the same requests to each in turn, on one copy of the target, again and again."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dspark.data.prompts import Prompt
from dspark.engine.drafter_folder import WITHOUT_FOLDER, drafter_target
from dspark.engine.engine import Engine
from dspark.engine.loading import LoadedEngine, load_engine
from dspark.errors import MissingInput
from dspark.evaluation.benchmarking import spread
from dspark.evaluation.config import EvaluationMode
from dspark.evaluation.load import EngineRequests, chat_of, closed_loop
from dspark.evaluation.load_config import ContestConfig, Entrant
from dspark.evaluation.load_run import LoadRun
from dspark.provenance import fingerprint, require_same
from dspark.targets import TargetConfig

Key = tuple[str, int, int, str]
Row = Mapping[str, Any]

WARMUP_REQUESTS = 2


def contest_target(config: ContestConfig) -> TargetConfig:
    """The target of all entrants. Raises: MissingInput for the first drafter with a folder that is not complete."""
    if config.target is not None:
        return config.target
    return drafter_target(next(e.drafter for e in config.entrants.values() if e.drafter not in WITHOUT_FOLDER))


def run_keys(config: ContestConfig) -> list[Key]:
    """(mode, concurrency, repeat, entrant) of every run, in the order of measuring.

    Runs that are compared stand next to each other; what slows the machine for a while meets first and last alike.
    """
    names = list(config.entrants)
    return [
        (mode.name, concurrency, repeat, name)
        for repeat in range(config.repeats)
        for mode in config.modes
        for concurrency in config.concurrency
        for name in (names if repeat % 2 == 0 else names[::-1])
    ]


def whole_groups(rows: Sequence[dict[str, Any]], config: ContestConfig) -> list[dict[str, Any]]:
    """Rows of settings whose entrants were all measured: one that was cut short is measured again as a whole."""
    done = {key_of(row) for row in rows}
    keys = run_keys(config)
    cut = {key[:3] for key in keys if key not in done}
    wanted = {key for key in keys if key[:3] not in cut}
    return [row for row in rows if key_of(row) in wanted]


def key_of(row: Row) -> Key:
    """The key that a row answers."""
    return row["mode"], row["concurrency"], row["repeat"], row["entrant"]


class Contest:
    """An engine for each entrant, of which one steps at a time. notes: what a user should know, a line each."""

    def __init__(self, config: ContestConfig, prompts: Sequence[Prompt]) -> None:
        """Raises: MissingInput for a drafter that is not there, or has no cost curve where it is to be scheduled;
        Mismatch when a drafter belongs to another target or chat; ValueError as `EngineRequests` does.
        """
        self._config = config
        self.notes: list[str] = []
        target = contest_target(config)
        loaded: dict[str, LoadedEngine] = {}
        for name, entrant in config.entrants.items():
            shared = next(iter(loaded.values()), None)
            loaded[name] = _load_entrant(name, entrant, target, config, shared)
            self.notes += [f"{name}: {note}" for note in loaded[name].notes]
        first = next(iter(loaded.values()))
        drafters = {name: one for name, one in loaded.items() if one.provenance is not None}
        chats = {name: chat_of(one, source=str(config.entrants[name].drafter)) for name, one in drafters.items()}
        name, chat = next(iter(chats.items()), ("", chat_of(first, source="")))
        remedy = "compare drafters that were trained on answers to the same chat"
        for other, its_chat in chats.items():
            require_same(f"entrants {other} and {name}", its_chat.model_dump(), chat.model_dump(), remedy=remedy)
        self._engines: dict[str, Engine] = {name: one.engine for name, one in loaded.items()}
        num_ahead = max(engine.most_ahead for engine in self._engines.values())
        self._requests = EngineRequests(first, prompts, chat, config, num_ahead=num_ahead)
        self.notes += self._requests.notes

    def warm_up(self) -> None:
        """Runs that are not counted: memory is touched, kernels are chosen, estimates have something to go by."""
        number = min(WARMUP_REQUESTS, self._config.engine.max_running_requests)
        tokens = min(self._config.warmup_tokens, self._config.max_tokens)
        for engine in self._engines.values():
            closed_loop(
                engine, self._requests.first(number, self._config.modes[0], max_tokens=tokens), concurrency=number
            )

    def run(self, entrant: str, mode: EvaluationMode, concurrency: int) -> LoadRun:
        """All requests of a setting."""
        number, tokens = self._config.num_requests(concurrency), self._config.max_tokens
        requests = self._requests.first(number, mode, max_tokens=tokens)
        return closed_loop(self._engines[entrant], requests, concurrency=concurrency)


def measure(contest: Contest, config: ContestConfig, keys: Sequence[Key]) -> Iterator[dict[str, Any]]:
    """A row per run as it is measured. outputs: a fingerprint of each answer, to see whether they are the same."""
    modes = {mode.name: mode for mode in config.modes}
    contest.warm_up()
    for mode, concurrency, repeat, entrant in keys:
        run = contest.run(entrant, modes[mode], concurrency)
        key = {"mode": mode, "concurrency": concurrency, "repeat": repeat, "entrant": entrant}
        yield key | run.figures() | {"outputs": [fingerprint(answer.output_ids) for answer in run.answers]}


def summarize_contest(rows: Sequence[Row], config: ContestConfig) -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """{mode: {concurrency: {entrant: figures}}}: medians over repeats, and the spread of throughputs and their ratios.

    ratio: of throughputs to the first entrant's in the same repeat. identical: answers equal to the first entrant's;
    None where they are sampled.
    """
    by_key = {key_of(row): row for row in rows}
    first = next(iter(config.entrants))
    greedy = {mode.name for mode in config.modes if mode.temperature == 0}
    summary: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
    for mode, concurrency, _, entrant in dict.fromkeys((*key_of(row)[:2], 0, row["entrant"]) for row in rows):
        repeats = [n for n in range(config.repeats) if (mode, concurrency, n, entrant) in by_key]
        own = [by_key[mode, concurrency, n, entrant] for n in repeats]
        pairs = [
            (by_key[mode, concurrency, n, first], row)
            for n, row in zip(repeats, own, strict=True)
            if (mode, concurrency, n, first) in by_key
        ]
        same = [a == b for against, row in pairs for a, b in zip(against["outputs"], row["outputs"], strict=True)]
        summary.setdefault(mode, {}).setdefault(str(concurrency), {})[entrant] = {
            "repeats": len(own),
            "tokens_per_s": spread([row["tokens_per_s"] for row in own]),
            "ratio": spread([row["tokens_per_s"] / against["tokens_per_s"] for against, row in pairs]),
            "accepted_length": _median([row["accepted_length"] for row in own]),
            "verify_length": _median([row["verify_length"] for row in own]),
            "token_ms": _median([row["token_ms"]["p50"] if row["token_ms"] else None for row in own]),
            "identical": sum(same) if mode in greedy else None,
            "compared": len(same) if mode in greedy else None,
        }
    return summary


def format_contest(summary: Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]) -> str:
    """The summary as a table: a line per entrant and mode, a group of columns per concurrency."""
    lines = []
    for mode, by_concurrency in summary.items():
        counts = list(by_concurrency)
        entrants = list(dict.fromkeys(name for by_entrant in by_concurrency.values() for name in by_entrant))
        width = max(len(name) for name in [mode, *entrants])
        lines.append(f"{mode:<{width}}" + "".join(f"{f'{count} at once':>28}" for count in counts))
        lines.append(" " * width + f"{'t/s':>8}{'ratio':>6}{'spread':>14}" * len(counts))
        for name in entrants:
            cells = (by_concurrency[count].get(name) for count in counts)
            lines.append(f"{name:<{width}}" + "".join(_cell(figures) for figures in cells))
    return "\n".join(lines)


def _load_entrant(
    name: str, entrant: Entrant, target: TargetConfig, config: ContestConfig, shared: LoadedEngine | None
) -> LoadedEngine:
    engine = config.engine.with_changes(verify_length=entrant.verify_length, lookup=entrant.lookup)
    loaded = load_engine(target, entrant.drafter, config=engine, num_threads=config.threads, shared=shared)
    if entrant.drafter is not None and entrant.verify_length is None and loaded.engine.config.verify_length is not None:
        raise MissingInput(
            f"entrant {name} is to be scheduled, but {entrant.drafter} has no cost curve for this machine and "
            f"{config.threads} threads; make it with jobs/profile_engine.py, or give verify_length"
        )
    return loaded


def _cell(figures: Mapping[str, Any] | None) -> str:
    if figures is None:
        return f"{'-':>28}"
    speed, ratio = figures["tokens_per_s"], figures["ratio"]
    if ratio["median"] is None:
        return f"{speed['median']:>8.1f}{'-':>20}"
    spread = f"{ratio['low']:.2f}..{ratio['high']:.2f}"
    return f"{speed['median']:>8.1f}{ratio['median']:>6.2f}{spread:>14}"


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None
