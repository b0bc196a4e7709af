"""Small survival tables and cost curves, and slow twins of the prefix scheduler."""

import heapq
import itertools
import math
import random
from collections.abc import Sequence

from dspark.speculation.cost_curve import CostCurve

Rows = list[list[float]]


def allocate_slowly(
    survival: Rows,
    curve: CostCurve,
    *,
    prefill_tokens: int = 0,
    draft_s: float = 0.0,
    capacity: float = math.inf,
    floor: int = 0,
    fixed: Sequence[int | None] | None = None,
    weights: Sequence[float] | None = None,
) -> list[int]:
    """Algorithm 1 a slot at a time; reads a slot's survival only once the slots before it are admitted."""
    fixed = [None] * len(survival) if fixed is None else fixed
    weights = [1.0] * len(survival) if weights is None else weights
    lengths = [length or 0 for length in fixed]
    tokens = len(survival) + sum(lengths) + prefill_tokens
    tau = sum(w * (1 + sum(row[:length])) for w, row, length in zip(weights, survival, lengths, strict=True))
    draft_s -= sunk_seconds(curve, tokens, prefill_tokens)
    heads = [(-weights[r] * row[0], 0, r) for r, row in enumerate(survival) if fixed[r] is None and row and row[0] > 0]
    heapq.heapify(heads)
    edge = None
    while heads and sum(lengths) < capacity:
        minus_a, slot, r = heads[0]
        now = tau / (curve.smooth_verify_seconds(tokens) + draft_s)
        then = (tau - minus_a) / (curve.smooth_verify_seconds(tokens + 1) + draft_s)
        if edge is None and sum(lengths) >= floor and then <= now:
            edge = curve.padded_tokens(tokens)
        if edge is not None and tokens >= edge:
            break
        heapq.heappop(heads)
        lengths[r], tokens, tau = lengths[r] + 1, tokens + 1, tau - minus_a
        if slot + 1 < len(survival[r]) and survival[r][slot + 1] > 0:
            heapq.heappush(heads, (-weights[r] * survival[r][slot + 1], slot + 1, r))
    return lengths


def smooth_rate(
    lengths: Sequence[int], survival: Rows, curve: CostCurve, *, prefill_tokens: int = 0, draft_s: float = 0.0
) -> float:
    tau = len(survival) + sum(sum(row[:length]) for row, length in zip(survival, lengths, strict=True))
    sunk_s = sunk_seconds(curve, len(survival) + prefill_tokens, prefill_tokens)
    return tau / (curve.smooth_verify_seconds(len(survival) + sum(lengths) + prefill_tokens) - sunk_s + draft_s)


def sunk_seconds(curve: CostCurve, num_tokens: int, prefill_tokens: int) -> float:
    """What a step's other tokens cost whatever is decided."""
    return curve.smooth_verify_seconds(num_tokens) - curve.smooth_verify_seconds(num_tokens - prefill_tokens)


def full_search(survival: Rows, curve: CostCurve, **options: float) -> list[int]:
    """The best of all lengths by the realised survival: the retrospective search that Appendix A warns of."""
    every = itertools.product(*(range(len(row) + 1) for row in survival))
    return list(max(every, key=lambda lengths: smooth_rate(lengths, survival, curve, **options)))


def random_rows(rng: random.Random, num_requests: int, num_slots: int, *, ragged: bool = True) -> Rows:
    """Survival of confidences in sixteenths: exact in floating point, and full of ties."""
    rows = []
    for _ in range(num_requests):
        width = rng.randint(0, num_slots) if ragged else num_slots
        confidences = [rng.choice([0, 4, 8, 12, 14, 15, 16, 16]) / 16 for _ in range(width)]
        rows.append(list(itertools.accumulate(confidences, lambda a, c: a * c)))
    return rows


def random_curve(rng: random.Random, num_sizes: int, *, convex: bool = False, buckets: Sequence[int] = ()) -> CostCurve:
    rises = [rng.choice([0, 1, 2, 4, 8, 16]) / 32 for _ in range(num_sizes - 1)]
    rises = sorted(rises) if convex else rises
    seconds = itertools.accumulate([rng.randint(1, 64) / 32, *rises])
    draft_s = [rng.randint(1, 16) / 64 for _ in range(2)]
    return CostCurve(
        tuple(range(1, num_sizes + 1)), tuple(seconds), (1, 8), tuple(sorted(draft_s)), buckets=tuple(buckets)
    )
