"""What speculation would bring by load, before anything is served: from a cost curve and how far drafts hold.

Legend: R requests at once, k = 0..G-1 a slot of a block, tau accepted length (the bonus token counted).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from operator import mul
from typing import Any

from dspark.errors import MissingInput
from dspark.provenance import read_json
from dspark.speculation.cost_curve import PROFILE_REMEDY, CostCurve
from dspark.speculation.drafting_choice import choose_drafting
from dspark.storage import Location

SPECULATE, PLAIN = "speculate", "do not speculate"


@dataclass(frozen=True)
class LoadForecast:
    """R requests that decode at once. verify_length: draft tokens verified per request, 0 where none pays; drafted: of
    the R; tau: tokens per request and step. static_length: the fixed length that would be best of all, static_speedup
    what it would bring, below 1 where any is too long. is_extrapolated: the batch is larger than any that was measured.
    """

    requests: int
    drafted: int
    verify_length: float
    tau: float
    plain_tokens_per_s: float
    tokens_per_s: float
    speedup: float
    user_tokens_per_s: float
    static_length: int
    static_speedup: float
    is_extrapolated: bool
    advice: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def survival_of_tau(tau: float, block_size: int) -> list[float]:
    """Survival by slot with one conditional acceptance a everywhere: sum of a^0 … a^G = tau, a by bisection.

    Raises: ValueError for a tau that no block of that size has.
    """
    if not 1 <= tau <= block_size + 1:
        raise ValueError(f"tau {tau} is not of a block of {block_size}: it lies between 1 and {block_size + 1}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        total = sum(accumulate([middle] * block_size, mul, initial=1.0))
        low, high = (middle, high) if total < tau else (low, middle)
    return list(accumulate([low] * block_size, mul))


def forecast(
    curve: CostCurve, survival: Sequence[float], concurrency: Sequence[int], *, min_gain: float
) -> list[LoadForecast]:
    """For each number of requests at once, what the scheduler would do with them and what comes of it.

    survival: by slot, non-increasing, the same for all: the gain of telling requests apart is not in it.
    min_gain: share by which drafting has to raise tokens per second, as in the engine.
    """
    return [_at(curve, list(survival), number, min_gain) for number in concurrency]


def _at(curve: CostCurve, survival: list[float], number: int, min_gain: float) -> LoadForecast:
    drafted, lengths = choose_drafting([survival] * number, curve, min_gain=min_gain)
    draft_s = curve.draft_seconds(sum(drafted))
    tokens = number + sum(sum(survival[:length]) for length in lengths)
    batch = number + sum(lengths)
    plain = number / _step_s(curve, number, number)
    speed = tokens / (_step_s(curve, number, batch) + draft_s)
    if speed < (1 + min_gain) * plain:
        drafted, lengths, tokens, batch, speed = [], [], float(number), number, plain
    static = max(range(1, len(survival) + 1), key=lambda k: _static(curve, survival, number, k), default=0)
    return LoadForecast(
        requests=number,
        drafted=sum(drafted),
        verify_length=sum(lengths) / number,
        tau=tokens / number,
        plain_tokens_per_s=plain,
        tokens_per_s=speed,
        speedup=speed / plain,
        user_tokens_per_s=speed / number,
        static_length=static,
        static_speedup=_static(curve, survival, number, static) / plain,
        is_extrapolated=batch > curve.batch_tokens[-1],
        advice=SPECULATE if sum(lengths) else PLAIN,
    )


def _step_s(curve: CostCurve, number: int, batch: int) -> float:
    return curve.step_seconds(batch, num_requests=number)


def _static(curve: CostCurve, survival: Sequence[float], number: int, length: int) -> float:
    """Tokens per second where every request has `length` draft tokens verified in every step."""
    draft_s = curve.draft_seconds(number) if length else 0.0
    tokens = number * (1 + sum(survival[:length]))
    return tokens / (_step_s(curve, number, number * (1 + length)) + draft_s)


def evaluated_survival(folder: Location, mode: str | None) -> list[float]:
    """Survival by position over all prompts of an evaluation, in one of its modes; None takes the first.

    Raises: MissingInput without an evaluation; ValueError for a mode that it has not.
    """
    path = folder / "metrics.json"
    if not path.is_file():
        raise MissingInput(f"no evaluation at {folder}; make one with jobs/evaluate.py, or give survival or tau")
    modes: dict[str, Any] = read_json(path)["modes"]
    chosen = next(iter(modes)) if mode is None else mode
    if chosen not in modes:
        raise ValueError(f"mode {chosen!r} is not in {path}; it has {', '.join(modes)}")
    survival = modes[chosen]["overall"]["survival"]
    end = survival.index(None) if None in survival else len(survival)
    return list(survival[:end])


def choose_curve(path: Location, hardware: Mapping[str, Any]) -> CostCurve:
    """The curve of a file whose fingerprint has these values; the only one where none are given.

    Raises: MissingInput for a missing file or none that fits; ValueError where several do.
    """
    if not path.is_file():
        raise MissingInput(f"no cost curve at {path}; {PROFILE_REMEDY}")
    curves = [CostCurve.from_dict(entry) for entry in read_json(path)]
    fitting = [c for c in curves if all(c.fingerprint.get(name) == value for name, value in hardware.items())]
    if len(fitting) == 1:
        return fitting[0]
    known = "; ".join(", ".join(f"{name} {value}" for name, value in c.fingerprint.items()) for c in curves)
    if not fitting:
        raise MissingInput(f"no cost curve at {path} has hardware {dict(hardware)}; there is {known}")
    raise ValueError(f"{len(fitting)} cost curves at {path}; name one by hardware, such as num_threads, of: {known}")


def format_forecast(rows: Sequence[LoadForecast], min_gain: float) -> str:
    """A line per load."""
    names = ("at once", "plain t/s", "spec. t/s", "speed-up", "t/s a user", "drafted", "verified", "tau", "best fixed")
    lines = [" ".join(f"{name:>10}" for name in names) + "  advice"]
    for row in rows:
        cells = [f"{row.requests}", f"{row.plain_tokens_per_s:,.0f}", f"{row.tokens_per_s:,.0f}", f"{row.speedup:.2f}"]
        cells += [f"{row.user_tokens_per_s:.1f}", f"{row.drafted}", f"{row.verify_length:.2f}", f"{row.tau:.2f}"]
        cells.append(f"{row.static_length}: {row.static_speedup:.2f}")
        mark = " *" if row.is_extrapolated else ""
        lines.append(" ".join(f"{cell:>10}" for cell in cells) + f"  {row.advice}{mark}")
    lines.append(
        f"verified: draft tokens per request and step; best fixed: a length for all and what it brings; {PLAIN} where "
        f"less than {100 * min_gain:g} % is to be gained" + ("; * beyond what was measured" if _any(rows) else "")
    )
    return "\n".join(lines)


def _any(rows: Sequence[LoadForecast]) -> bool:
    return any(row.is_extrapolated for row in rows)
