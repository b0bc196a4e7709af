"""What one more request would cost a replica, and how many it can carry: what routing and autoscaling go by.

Legend: n requests in the batch, s(n) seconds of an engine step, tau tokens that a request gets per step, m the most
requests in a batch, w those that wait.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dspark.engine.engine import Engine
from dspark.speculation.cost_curve import CostCurve

CAPACITY = "capacity"  # name of the figure that an autoscaling policy goes by: requests at once
NEWEST_WEIGHT = 0.5  # of the newest look in the running means
DIGITS = 3  # figures told are rounded: those that hardly changed need not be sent around again

StepSeconds = Callable[[int], float]


def marginal_token_s(
    step_s: StepSeconds, *, num_running: int, num_waiting: int, max_running: int, tokens_per_step: float
) -> float:
    """Seconds that a token of one more request costs: its own, and what it adds to those of the n beside it.

    (s(n + 1) + n (s(n + 1) - s(n))) / tau, times (1 + w / m) where it has to wait for its turn.
    """
    is_full = num_running >= max_running
    waiting = num_waiting + is_full
    now, then = num_running, min(num_running + 1, max_running)
    own = step_s(then) + now * (step_s(then) - step_s(now) if now else 0.0)
    return own / tokens_per_step * (1 + waiting / max_running)


def most_requests(
    step_s: StepSeconds, *, max_running: int, tokens_per_step: float, min_tokens_per_s: float | None
) -> int:
    """Requests at once of which each still gets `min_tokens_per_s`: the largest n with tau / s(n) at least that; 1 at
    least, and what fits into a batch at most. s must not fall."""
    if min_tokens_per_s is None:
        return max_running
    low, high = 1, max_running
    while low < high:
        middle = (low + high + 1) // 2
        if tokens_per_step >= min_tokens_per_s * step_s(middle):
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True)
class Measured:
    """Of recent steps that decoded: seconds of one, requests and tokens in it, and tokens that a request got."""

    step_s: float
    num_requests: float
    batch_tokens: float
    tokens_per_step: float


class ReplicaLoad:
    """Reads an engine's counters; what is known of other batch sizes is the curve's, scaled to what was measured.

    Without a curve a step is taken to cost as much for each request as the measured ones did.
    """

    def __init__(self, engine: Engine, curve: CostCurve | None = None) -> None:
        self._engine, self._curve = engine, curve
        self._seen = self._counters()
        self._mean: Measured | None = None

    def routing_stats(self, num_calls: int) -> dict[str, float]:
        """`token_s` of one more request now, with so many calls open. {} until something was measured."""
        mean, engine = self._look(), self._engine
        if mean is None:
            return {}
        cost = marginal_token_s(
            self._step_seconds(mean),
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            max_running=engine.config.max_running_requests,
            tokens_per_step=mean.tokens_per_step,
        )
        return {"token_s": _rounded(cost), "num_calls": float(num_calls)}

    def capacity(self, min_tokens_per_s: float | None) -> float:
        """Requests that the engine can carry at once: as many as memory holds, and as get their tokens per second."""
        mean, engine = self._look(), self._engine
        most = engine.config.max_running_requests
        num_used = engine.num_pages - engine.num_free_pages
        if engine.num_running and num_used:
            most = max(1, min(most, int(engine.num_pages / (num_used / engine.num_running))))
        if mean is None:
            return float(most)
        return float(
            most_requests(
                self._step_seconds(mean),
                max_running=most,
                tokens_per_step=mean.tokens_per_step,
                min_tokens_per_s=min_tokens_per_s,
            )
        )

    def _look(self) -> Measured | None:
        """The running means, with what happened since the last look taken in."""
        now = self._counters()
        steps, seconds, decodes, tokens, batch = (new - old for new, old in zip(now, self._seen, strict=True))
        if steps > 0 and decodes > 0:
            self._seen = now
            newest = Measured(seconds / steps, decodes / steps, batch / steps, max(1.0, tokens / decodes))
            self._mean = newest if self._mean is None else _between(self._mean, newest)
        return self._mean

    def _counters(self) -> tuple[float, float, float, float, float]:
        stats = self._engine.stats
        return (stats.steps, stats.step_s, stats.decodes, stats.output_tokens, stats.batch_tokens)

    def _step_seconds(self, mean: Measured) -> StepSeconds:
        per_request = mean.batch_tokens / max(1.0, mean.num_requests)
        curve = self._curve
        if curve is None:
            return lambda num_requests: mean.step_s * num_requests / max(1.0, mean.num_requests)
        scale = mean.step_s / curve.smooth_verify_seconds(mean.batch_tokens)
        return lambda num_requests: scale * curve.smooth_verify_seconds(num_requests * per_request)


def _between(old: Measured, new: Measured) -> Measured:
    pairs = zip(vars(old).values(), vars(new).values(), strict=True)
    return Measured(*(before + NEWEST_WEIGHT * (after - before) for before, after in pairs))


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
