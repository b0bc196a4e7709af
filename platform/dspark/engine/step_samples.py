"""Timed steps, and the cost curve they make.

A step over B tokens of R requests is taken to last T(B) + (R - 1) * request_s: the tokens share one pass of the model,
but each request attends to a context of its own. What more context costs is the slope between short and long ones.
"""

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from dspark.engine.step_timer import USUAL_TOKENS, BatchShape, StepTimer
from dspark.speculation.cost_curve import CostCurve

log = logging.getLogger("dspark.profile")


@dataclass(frozen=True)
class LongSamples:
    """Seconds of a batch, one a sweep, with so many tokens of context of each request in place of the usual ones."""

    shape: BatchShape
    context_tokens: int
    seconds: list[float]


@dataclass(frozen=True)
class Samples:
    """Measured seconds, one a sweep: by batch, and of drafting by the number of requests.

    context_tokens: of each request. long: None where there was no room for a longer context.
    """

    verify: dict[BatchShape, list[float]]
    draft: dict[int, list[float]]
    context_tokens: int = 0
    long: LongSamples | None = None

    def curve(self, fingerprint: Mapping[str, Any]) -> CostCurve:
        """The curve over batches of one request, and what each further request costs."""
        single = {shape.num_tokens: seconds for shape, seconds in self.verify.items() if shape.num_requests == 1}
        request_s = fit_request_s(self.verify)
        return CostCurve.measured(
            single,
            self.draft,
            fingerprint=fingerprint,
            request_s=request_s,
            context_s=self.context_s(),
            context_tokens=self.context_tokens,
        )

    def context_s(self) -> float:
        """Seconds of 1,000 tokens more of context, not below 0: the median over sweeps of each one's slope."""
        if self.long is None:
            return 0.0
        pairs = zip(self.long.seconds, self.verify[self.long.shape], strict=True)
        rise_s = median(with_long - usual for with_long, usual in pairs)
        more = self.long.shape.num_requests * (self.long.context_tokens - self.context_tokens)
        return max(0.0, 1000.0 * rise_s / more)


def fit_request_s(verify: Mapping[BatchShape, Sequence[float]]) -> float:
    """Seconds of each request beside a batch's first, not below 0.

    In each sweep the slope, by least squares of relative errors, of what batches of R requests take more than one
    request with as many tokens, over R - 1; then the median over sweeps.
    """
    single = {shape.num_tokens: seconds for shape, seconds in verify.items() if shape.num_requests == 1}
    shared = [(shape.num_requests - 1, verify[shape], single[shape.num_tokens]) for shape in verify]
    shared = [entry for entry in shared if entry[0] > 0]
    if not shared:
        return 0.0
    weights = [more / median(alone) ** 2 for more, _, alone in shared]
    scale = sum(weight * more for weight, (more, _, _) in zip(weights, shared, strict=True))
    num_sweeps = min(len(seconds) for _, seconds, _ in shared)
    slopes = [
        sum(w * (seconds[sweep] - alone[sweep]) for w, (_, seconds, alone) in zip(weights, shared, strict=True)) / scale
        for sweep in range(num_sweeps)
    ]
    return max(0.0, median(slopes))


def usual_shape(shapes: Sequence[BatchShape], most_requests: int) -> BatchShape:
    """Of the batches of the most requests that are allowed, that with about as many tokens as are usually verified."""
    number = max(shape.num_requests for shape in shapes if shape.num_requests <= most_requests)
    alike = [shape for shape in shapes if shape.num_requests == number]
    return min(alike, key=lambda shape: abs(shape.num_tokens - number * USUAL_TOKENS))


def take_samples(
    timer: StepTimer, shapes: Sequence[BatchShape], draft_requests: Sequence[int], *, repeats: int, seed: int = 0
) -> Samples:
    """Every point `repeats` times, in sweeps over all of them, each in another order; one sweep before is not counted.

    So whatever else the machine does for a while meets all points alike. draft_requests: empty without a drafter.
    """
    samples = Samples(
        {shape: [] for shape in shapes},
        {number: [] for number in sorted(draft_requests)},
        timer.context_tokens,
        LongSamples(usual_shape(shapes, timer.num_long), timer.long_context_tokens, []) if timer.num_long else None,
    )
    points = [(seconds, partial(timer.verify_s, shape)) for shape, seconds in samples.verify.items()]
    points += [(seconds, partial(timer.draft_s, number)) for number, seconds in samples.draft.items()]
    if samples.long is not None:
        points.append((samples.long.seconds, partial(timer.verify_s, samples.long.shape, is_long=True)))
    order = random.Random(seed)
    for sweep in range(repeats + 1):
        for seconds, time_one in order.sample(points, len(points)):
            measured = time_one()
            if sweep:
                seconds.append(measured)
        log.info("sweep %d of %d over %d points", sweep + 1, repeats + 1, len(points))
    return samples
