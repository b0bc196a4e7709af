"""How far confidences have lately been off, slot by slot: the newest rounds, scaled as they are now.

Legend: W rounds of the window, G slots of a block, k = 0..G-1 a slot. Survival at k: slots 0..k all stand.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark.speculation.calibration import SlotScales, calibrated_survival
from dspark.speculation.calibration_error import NUM_BINS, Floats, bins_of, expected_calibration_error


@dataclass(frozen=True)
class SlotError:
    """Of one slot. ece: of the predicted survival over num_rounds rounds that judged it; floor: what a perfect
    predictor would show at that number; predicted, stood: means."""

    num_rounds: int
    ece: float
    floor: float
    predicted: float
    stood: float


class ConfidenceWindow:
    """The newest W rounds of one way of decoding, with their raw logits. One row costs microseconds."""

    def __init__(self, block_size: int, num_rounds: int) -> None:
        self.num_seen = 0
        self._logits = np.zeros((num_rounds, block_size), np.float32)
        self._accepted = np.zeros(num_rounds, np.int16)
        self._judged = np.zeros(num_rounds, np.int16)

    def add(self, logits: Sequence[float], num_accepted: int, num_judged: int) -> None:
        """A round. logits: of its verified slots, as the head gave them; one that is not finite says nothing."""
        if not all(map(math.isfinite, logits)):
            return
        place = self.num_seen % len(self._accepted)
        self._logits[place, : len(logits)] = logits
        self._accepted[place], self._judged[place] = num_accepted, num_judged
        self.num_seen += 1

    def errors(self, scales: SlotScales | None) -> list[SlotError]:
        """Of each slot that was judged, from the first on. scales: None takes logits as they are."""
        size = min(self.num_seen, len(self._accepted))
        predicted = calibrated_survival(self._logits[:size], scales).numpy()
        found = []
        for k in range(predicted.shape[1]):
            here = self._judged[:size] > k
            if not here.any():
                break
            found.append(slot_error(predicted[here, k], self._accepted[:size][here] > k))
        return found


def slot_error(predicted: Floats, stood: NDArray[np.bool_], num_bins: int = NUM_BINS) -> SlotError:
    """predicted: [N] in 0..1; stood: [N]; N at least 1."""
    return SlotError(
        num_rounds=len(stood),
        ece=expected_calibration_error(predicted, stood, num_bins),
        floor=expected_floor(predicted, num_bins),
        predicted=float(predicted.mean()),
        stood=float(stood.mean()),
    )


def expected_floor(predicted: Floats, num_bins: int = NUM_BINS) -> float:
    """`ece_floor`, which draws, by formula: sum over bins of sqrt(2/pi * sum p(1-p)) / N, the mean of |a normal|."""
    spread = np.bincount(bins_of(predicted, num_bins), predicted * (1 - predicted))
    return float(np.sqrt(2 / math.pi * spread).sum() / len(predicted))
