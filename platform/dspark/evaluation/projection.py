"""How long the pieces of a set will take: units of work over units a second, from what earlier pieces took."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from dspark.data.answers import GenerateConfig
from dspark.data.prompts import read_prompts
from dspark.drafters.initialize import DrafterShape
from dspark.evaluation.config import EvaluateConfig
from dspark.evaluation.load_config import ContestConfig
from dspark.evaluation.planning import select_prompts
from dspark.evaluation.tasks import BENCHMARKS

STARTUP = "startup_s"  # among the rates: seconds that a piece takes beside its units


class Work(Protocol):
    """A piece of work. units: what its time grows with, None where that cannot be told beforehand."""

    @property
    def kind(self) -> str: ...
    @property
    def units(self) -> float | None: ...


class Budget(Protocol):
    """Of a training run."""

    @property
    def anchors_per_sequence(self) -> int: ...


def projected_seconds(
    pieces: Sequence[Work], records: Sequence[Mapping[str, Any]], rates: Mapping[str, float]
) -> float | None:
    """Seconds of all pieces; None where one's cannot be told.

    records: {"kind", "units", "seconds"} of pieces that are done, which count more than `rates`, units a second by
    kind.
    """
    total = 0.0
    for piece in pieces:
        per_unit = _seconds_per_unit(piece.kind, records, rates)
        if piece.units is None or per_unit is None:
            return None
        total += piece.units * per_unit + rates.get(STARTUP, 0.0)
    return total


def generated_tokens(config: GenerateConfig) -> int | None:
    """Tokens at most. None for prompts of the hub, which are not fetched for a projection."""
    if any(source.hub is not None for source in config.prompts):
        return None
    found = read_prompts(config.prompts, seed=config.seed, heldout_fraction=config.heldout_fraction, limit=config.limit)
    return sum(prompt.num_turns for prompt in found.prompts) * config.sampling.max_new_tokens


def training_slots(shape: DrafterShape, num_sequences: int, budget: Budget) -> float:
    """Drafted slots trained on, times what each passes through: the layers, and the head like two of them."""
    layers = shape.num_layers if shape.architecture in ("dspark", "dflash") else 1
    return float(num_sequences * budget.anchors_per_sequence * shape.block_size * (layers + 2))


def evaluation_tokens(config: EvaluateConfig) -> float:
    """Tokens at most, in all modes; of benchmarks that are not fetched yet as many prompts as the paper takes."""
    if config.benchmarks:
        numbers = [BENCHMARKS[name].num_prompts for name in config.benchmarks]
        prompts = sum(min(number, config.prompts_per_domain or number) for number in numbers)
    else:
        found = read_prompts(config.sources, seed=config.seed, heldout_fraction=config.heldout_fraction)
        prompts = sum(prompt.num_turns for prompt in select_prompts(found, config)[0])
    return float(prompts * config.max_new_tokens * len(config.modes))


def contest_tokens(config: ContestConfig) -> float:
    """Tokens at most over all runs."""
    a_repeat = sum(config.num_requests(concurrency) for concurrency in config.concurrency)
    return float(a_repeat * config.repeats * len(config.modes) * len(config.entrants) * config.max_tokens)


def _seconds_per_unit(kind: str, records: Sequence[Mapping[str, Any]], rates: Mapping[str, float]) -> float | None:
    of_kind = [record for record in records if record["kind"] == kind and record["units"]]
    if of_kind:
        startup = rates.get(STARTUP, 0.0)
        seconds = sum(max(record["seconds"] - startup, 0.0) for record in of_kind)
        return float(seconds / sum(record["units"] for record in of_kind))
    return 1 / rates[kind] if kind in rates else None
