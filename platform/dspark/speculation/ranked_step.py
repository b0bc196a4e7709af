"""A step before anything is decided: its slots in the order of admission, and what Algorithm 1 admits of them.

Legend: R requests, K slots of a block, n slots up for decision, B tokens of a step; see `prefix_scheduler`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.quick_scheduler import FixedLengths, other_seconds

ROUNDING = 1e-6
"""Survival may rise by so much from slot to slot before it counts as no cumulative product."""


@dataclass(frozen=True)
class RankedStep:
    """A step before anything is decided, and the slots up for decision in the order of admission.

    tokens: B with the fixed lengths alone, prefill_tokens of them others'; tau: what that yields. context_tokens: as in
    `allocate`. lengths: [R] fixed lengths, 0 where open. slots: [n] float64 survival times weight, falling and above 0;
    requests: [n] whose they are.
    """

    tokens: int
    prefill_tokens: int
    context_tokens: int | None
    tau: float
    lengths: NDArray[np.int64]
    slots: NDArray[np.float64]
    requests: NDArray[np.int64]


def rank_slots(
    survival: Sequence[Sequence[float]],
    fixed: FixedLengths | None,
    prefill_tokens: int,
    weights: Sequence[float] | None = None,
    *,
    context_tokens: int | None = None,
) -> RankedStep:
    """Raises: ValueError for a row that is no cumulative product, or a fixed length its row does not have."""
    num_requests = len(survival)
    widths = np.fromiter(map(len, survival), np.int64, num_requests)
    factors = np.ones(num_requests) if weights is None else np.array(weights, dtype=np.float64)
    table = _survival_table(survival, widths) * factors[:, None]
    is_open, lengths = _fixed_lengths(fixed, widths)
    flat = np.where(is_open[:, None], table, 0.0).T.ravel()  # slot by slot: a stable sort keeps ties in that order
    order = np.argsort(-flat, kind="stable")[: np.count_nonzero(flat)]
    fixed_slots = table[np.arange(table.shape[1]) < lengths[:, None]]
    return RankedStep(
        tokens=num_requests + int(lengths.sum()) + prefill_tokens,
        prefill_tokens=prefill_tokens,
        context_tokens=context_tokens,
        tau=float(factors.sum() + fixed_slots.sum()),
        lengths=lengths,
        slots=flat[order],
        requests=order % num_requests,
    )


def smooth_seconds(step: RankedStep, curve: CostCurve) -> NDArray[np.float64]:
    """Seconds of verifying 0..n slots beside what is fixed, as if there were no buckets: [n + 1]."""
    return curve.smooth_verify_array(step.tokens + np.arange(len(step.slots) + 1)) + others_s(step, curve)


def others_s(step: RankedStep, curve: CostCurve) -> float:
    """Seconds that the requests beside the first and all contexts add, less those of the step's other tokens."""
    return other_seconds(curve, len(step.lengths), step.tokens, step.prefill_tokens, step.context_tokens)


def num_admitted(
    slots: NDArray[np.float64], step: RankedStep, curve: CostCurve, step_s: NDArray[np.float64], *, floor: int = 0
) -> int:
    """How many of these ranked slots are verified: to the first that does not raise Theta, then to the bucket's edge.

    step_s: seconds of the step with 0, 1, ... of them, drafting included.
    """
    floor = min(max(floor, 0), len(slots))
    tau = np.cumsum(np.concatenate(([step.tau], slots)))
    theta = tau / step_s[: len(tau)]
    no_gain = np.flatnonzero(theta[floor + 1 :] <= theta[floor:-1])
    stop = floor + int(no_gain[0]) if no_gain.size else len(slots)
    edge = int(curve.padded_tokens(step.tokens + stop))
    return min(edge - step.tokens, len(slots))


def _survival_table(survival: Sequence[Sequence[float]], widths: NDArray[np.int64]) -> NDArray[np.float64]:
    """Rows padded with zeros: [R, K] float64, made exactly non-increasing."""
    table = np.zeros((len(survival), int(widths.max())))
    is_slot = np.arange(table.shape[1]) < widths[:, None]
    table[is_slot] = np.fromiter(chain.from_iterable(survival), np.float64, int(widths.sum()))
    falling = np.minimum.accumulate(table, axis=1)
    is_sound = ((table <= falling + ROUNDING) & (falling >= 0.0) & (table <= 1.0)).all(axis=1)
    if not is_sound.all():
        request = int(is_sound.argmin())
        raise ValueError(
            f"survival of request {request} is {list(survival[request])}; it must lie in 0..1 and never rise from "
            "slot to slot: pass the cumulative product of the confidences"
        )
    return falling


def _fixed_lengths(
    fixed: FixedLengths | None, widths: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Which requests are open to decision, [R], and the lengths of the others, [R], 0 for the open ones."""
    if fixed is None:
        return np.ones(len(widths), dtype=np.bool_), np.zeros(len(widths), dtype=np.int64)
    if len(fixed) != len(widths):
        raise ValueError(f"{len(fixed)} fixed lengths for {len(widths)} requests; give a length or None for each")
    lengths = np.array([0 if length is None else length for length in fixed], dtype=np.int64)
    impossible = (lengths < 0) | (lengths > widths)
    if impossible.any():
        request = int(impossible.argmax())
        raise ValueError(
            f"request {request} has the fixed length {lengths[request]} but survival for {widths[request]} slots; "
            "draft as many slots as are to be verified"
        )
    return np.array([length is None for length in fixed], dtype=np.bool_), lengths
