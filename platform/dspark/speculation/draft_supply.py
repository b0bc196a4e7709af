"""What drafters that several replicas share can do, told by what their calls lately took.

Legend: n blocks of a call, s(n) seconds of one.
"""

from collections.abc import Sequence

import numpy as np

from dspark.speculation.cost_curve import CostCurve, isotonic
from dspark.speculation.fleet import DraftSupply
from dspark.speculation.fleet_options import drafting_cost

NUM_SIZES = 16  # 1, 2, 3-4, 5-8, …: sizes of calls that are kept apart
LEAST_CALLS = 50  # that make a figure: the first ones warm up
DECAY = 0.95  # of what was seen of a size, per call of that size: the newest twenty decide
FADE = 0.995  # of what was seen of a size, per call of any: what was long ago does not last
LEAST_WEIGHT = 0.5  # calls, of late, below which a size counts as not seen
MOST_SURPRISING = 3.0  # a call counts as so many times the mean at most: what held it up will not last
GUESS = 0.25  # of what a block costs within the largest call seen, for each one beyond: low enough to be tried


class CallSeconds:
    """Seconds of a drafter's calls by their size, of late.

    A call for one block costs nearly as much as one for several. So blocks per second of the calls that there were are
    no measure: of small calls they would allow small calls only, for good. Sizes that were not seen are taken to cost
    as the prior says in proportion, else a part of what they would cost in calls of the size seen: they are tried, and
    then they are known. prior: one drafter as a cost curve has it. One thread notes, others may ask.
    """

    def __init__(self, prior: DraftSupply | None = None) -> None:
        self.num_calls = 0
        self._prior = prior
        self._seen = np.zeros((NUM_SIZES, 3))  # of each size calls, their blocks and their seconds

    def note(self, num_blocks: int, seconds: float) -> None:
        """A call for so many blocks took so long."""
        self.num_calls += 1
        self._seen *= FADE
        row = self._seen[min((num_blocks - 1).bit_length(), NUM_SIZES - 1)]
        if row[0] >= LEAST_WEIGHT:
            seconds = min(seconds, MOST_SURPRISING * row[2] / row[0])
        row *= DECAY
        row += (1.0, num_blocks, seconds)

    def supply(self) -> DraftSupply | None:
        """One drafter, its calls by their seconds; the prior, or None without one, before enough is known."""
        if self.num_calls < LEAST_CALLS:
            return self._prior
        calls, blocks, seconds = self._seen.copy().T
        is_seen = calls >= LEAST_WEIGHT
        sizes = (blocks[is_seen] / calls[is_seen]).round().astype(np.int64).tolist()
        costs = list(isotonic((seconds[is_seen] / calls[is_seen]).tolist()))
        first, last = self._beyond(sizes[0], costs[0], sizes[-1], costs[-1])
        if not last:
            slope = 0.0 if len(sizes) == 1 else (costs[-1] - costs[-2]) / (sizes[-1] - sizes[-2])
            in_proportion = costs[-1] / sizes[-1]
            slope = min(max(slope, GUESS * in_proportion), in_proportion)
            last = {2 * sizes[-1]: costs[-1] + slope * sizes[-1]}
        table = first | dict(zip(sizes, costs, strict=True)) | last
        return DraftSupply(1.0, tuple(table), tuple(table.values()))

    def _beyond(
        self, smallest: int, smallest_s: float, largest: int, largest_s: float
    ) -> tuple[dict[int, float], dict[int, float]]:
        """Seconds of the prior's sizes below and above those seen, in proportion to what was seen at the edge."""
        if self._prior is None:
            return {}, {}

        def scaled(sizes: list[int], edge: int, edge_s: float) -> dict[int, float]:
            assert self._prior is not None
            known = drafting_cost(np.array([edge, *sizes]), self._prior.requests, self._prior.cost)
            return dict(zip(sizes, (edge_s * known[1:] / known[0]).tolist(), strict=True))

        sizes = self._prior.requests
        below, above = [n for n in sizes if n < smallest], [n for n in sizes if n > largest]
        return scaled(below, smallest, smallest_s), scaled(above, largest, largest_s)


def drafter_of(curve: CostCurve | None) -> DraftSupply | None:
    """One drafter as the curve has it; None where it says nothing of drafting."""
    if curve is None or not curve.draft_requests:
        return None
    return DraftSupply(1.0, curve.draft_requests, curve.draft_s)


def joined(supplies: Sequence[DraftSupply], *, max_load: float = 1.0) -> DraftSupply | None:
    """What drafters do together for callers that are dealt to them in turn; None where there are none.

    A call for n blocks takes cost(n) / per_s of a drafter's second, in whatever unit: in the mean over the drafters
    that is what it takes, and there are as many seconds as drafters. max_load: share of their time that is given out.
    """
    able = [supply for supply in supplies if supply.per_s > 0]
    if not able:
        return None
    per_s = sum(supply.per_s for supply in able)
    sizes = sorted({1, 2}.union(*(supply.requests for supply in able)))
    seconds = [drafting_cost(np.array(sizes), supply.requests, supply.cost) / supply.per_s for supply in able]
    cost = per_s / len(able) * np.mean(seconds, axis=0)
    return DraftSupply(max_load * per_s, tuple(sizes), tuple(cost.tolist()))
