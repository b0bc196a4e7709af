"""How many draft tokens of each request a step verifies.

Legend: R requests, K slots of a block, a survival = cumulative product of confidences, n slots up for decision.
A step over B = R + sum(lengths) + prefill tokens yields tau = R + sum of a over the verified slots in expectation:
every request costs its anchor and yields the target's own token, whether drafted or not.

Source: DSpark §3.2.2, Alg. 1; ALGORITHMS "scheduling". Theta = tau / (T_verify(B) + T_draft), where T_verify has what
each of R requests costs beside its tokens (`CostCurve.request_s`, `context_s`), and has not what the step's other
tokens cost: they are read whatever is decided, and yield later. A step of seconds would make any token seem cheap.
"""

from collections.abc import Sequence

import numpy as np

from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.quick_scheduler import FixedLengths, quick_allocate
from dspark.speculation.ranked_step import num_admitted, others_s, rank_slots, smooth_seconds


class PrefixScheduler:
    """Algorithm 1 of the paper with an early stop, which is what keeps sampled output exact.

    Verification is lossless when slot k of a request is admitted on what was known before its token x_k was drawn.
    Its survival a_k is known then: confidence k sees draft tokens before k only. Slots are admitted in falling order
    of a, a tie going to the lower slot, so a request's slot k always comes after its slots before k and before those
    that depend on x_k. Every rule below looks at no slot that ranks behind the one it decides on: the stop compares
    two neighbours in the ranking, the bucket's edge follows from where the stop fell, and floor and capacity are
    numbers known beforehand. The draft tokens might as well be drawn one by one as their slots are admitted, over all
    requests together, so the output of the whole batch is that of independent targets (Appendix A).
    Looking for the best stop in the whole ranking would not be: whether x_k is verified would then depend on x_k.
    """

    def allocate(
        self,
        survival: Sequence[Sequence[float]],
        curve: CostCurve,
        *,
        prefill_tokens: int = 0,
        context_tokens: int | None = None,
        draft_s: float = 0.0,
        capacity: int | None = None,
        floor: int = 0,
        fixed: FixedLengths | None = None,
        weights: Sequence[float] | None = None,
    ) -> list[int]:
        """Draft tokens to verify per request, raising tau / (T_verify(B) + draft_s) while each next one does.

        survival: one row per request, non-increasing; an empty row is a request that was not drafted, it still costs
        one token. Row entry k may depend on draft tokens before k, never on token k itself (its own draft probability
        is no confidence). The stop follows the curve without its buckets, then the batch is filled to its bucket.
        prefill_tokens: other tokens of the step. context_tokens: what the requests have in KV memory, all together;
        None takes what the curve was measured at. draft_s: seconds drafting took or will take.
        capacity, floor: bounds on the sum of lengths, known before the block was drafted; floor slots are admitted by
        rank without asking the curve (the capacity of the lagged form), capacity is never exceeded by a decision.
        fixed: a length that is not up for decision, or None, per request. It counts in B, tau, capacity and floor.
        weights: what a token of each request counts in tau and in the ranking, known beforehand; None: 1 for all.
        Raises: ValueError for a row that is no cumulative product, or a fixed length its row does not have.
        """
        if not survival:
            return []
        decided = quick_allocate(
            survival,
            curve,
            prefill_tokens=prefill_tokens,
            context_tokens=context_tokens,
            draft_s=draft_s,
            capacity=capacity,
            floor=floor,
            fixed=fixed,
            weights=weights,
        )
        if decided is not None:
            return decided
        step = rank_slots(survival, fixed, prefill_tokens, weights, context_tokens=context_tokens)
        num_fixed = int(step.lengths.sum())
        slots = step.slots if capacity is None else step.slots[: max(0, capacity - num_fixed)]
        step_s = smooth_seconds(step, curve) + draft_s
        number = num_admitted(slots, step, curve, step_s, floor=floor - num_fixed)
        admitted = np.bincount(step.requests[:number], minlength=len(survival))
        lengths: list[int] = (step.lengths + admitted).tolist()
        return lengths


def best_total(
    survival: Sequence[Sequence[float]],
    curve: CostCurve,
    *,
    prefill_tokens: int = 0,
    context_tokens: int | None = None,
    draft_s: float = 0.0,
) -> int:
    """Draft tokens of a step, all requests' together, that maximise tau / (T_verify(B) + draft_s): the lower of equals.

    Looks at the whole ranking and at the curve's buckets, so survival must be that of a step which is over.
    The arguments are those of `allocate`, for which the result is floor and capacity at once (the lagged form).
    """
    if not survival:
        return 0
    step = rank_slots(survival, None, prefill_tokens, context_tokens=context_tokens)
    padded = [curve.padded_tokens(step.tokens + num_slots) for num_slots in range(len(step.slots) + 1)]
    seconds = curve.smooth_verify_array(np.array(padded)) + others_s(step, curve) + draft_s
    tau = np.cumsum(np.concatenate(([step.tau], step.slots)))
    return int(np.argmax(tau / seconds))
