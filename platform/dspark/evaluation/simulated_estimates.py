"""What simulated replicas expect of their requests' next draft tokens: the twin of `engine/estimates.py`, as arrays.

Legend: N replicas, R places for requests of each, K slots of a block; n replicas of a step.
"""

import numpy as np
from numpy.typing import NDArray

from dspark.engine.estimates import DECAY, DRIFT_DECAY, DRIFT_ROUNDS, FIRST_GUESS, PRIOR_ROUNDS, REQUEST_ROUNDS

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Estimates:
    """Evidence of every place's request, of all requests of a replica, and how far confidences were off there."""

    def __init__(self, num_replicas: int, num_places: int, num_slots: int) -> None:
        shape = (num_replicas, num_places, num_slots)
        self._reached, self._accepted = np.zeros(shape), np.zeros(shape)
        self._all_reached, self._all_accepted = (np.zeros((num_replicas, num_slots)) for _ in range(2))
        self._drift_expected, self._drift_accepted = (np.zeros((num_replicas, num_slots)) for _ in range(2))

    def reset(self, places: tuple[Indices, Indices]) -> None:
        """New requests: nothing is known but what all others showed."""
        self._reached[places] = 0.0
        self._accepted[places] = 0.0

    def survival(self, rows: Indices) -> Floats:
        """Expected survival: [n, R, K]."""
        reached, accepted = self._reached[rows], self._accepted[rows]
        prior = self._prior(rows)[:, None, :]
        return np.asarray(np.cumprod((accepted + REQUEST_ROUNDS * prior) / (reached + REQUEST_ROUNDS), axis=2))

    def observe(self, rows: Indices, survival: Floats, is_drafted: Flags) -> None:
        """Take in what confidences say of proposals. survival: [n, R, K]; is_drafted: [n, R, K], a prefix of slots."""
        before = _before(survival)
        decayed = np.where(is_drafted, DECAY, 1.0)
        self._reached[rows] = decayed * self._reached[rows] + np.where(is_drafted, before, 0.0)
        self._accepted[rows] = decayed * self._accepted[rows] + np.where(is_drafted, survival, 0.0)
        self._all_reached[rows] += np.where(is_drafted, before, 0.0).sum(axis=1)
        self._all_accepted[rows] += np.where(is_drafted, survival, 0.0).sum(axis=1)

    def corrected(self, rows: Indices, survival: Floats) -> Floats:
        """Survival of confidences that were lately too high or too low by as much: [n, R, K]."""
        expected, accepted = self._drift_expected[rows], self._drift_accepted[rows]
        is_known = expected > 0
        last = np.maximum.accumulate(np.where(is_known, np.arange(survival.shape[2]), 0), axis=1)
        factor = np.take_along_axis((accepted + DRIFT_ROUNDS) / (expected + DRIFT_ROUNDS), last, axis=1)
        conditional = np.divide(survival, _before(survival), out=np.zeros_like(survival), where=survival > 0)
        return np.asarray(np.cumprod(np.minimum(1.0, conditional * factor[:, None, :]), axis=2))

    def learn(self, rows: Indices, survival: Floats, lengths: Indices, accepted: Indices) -> None:
        """Take verdicts in. survival: [n, R, K], uncorrected; lengths, accepted: [n, R], of draft tokens."""
        slots = np.arange(survival.shape[2])
        is_judged = (slots < lengths[..., None]) & (slots <= accepted[..., None])
        stands = is_judged & (slots < accepted[..., None])
        conditional = np.divide(survival, _before(survival), out=np.zeros_like(survival), where=survival > 0)
        kept = DRIFT_DECAY ** is_judged.sum(axis=1)
        self._drift_expected[rows] = kept * self._drift_expected[rows] + np.where(is_judged, conditional, 0.0).sum(
            axis=1
        )
        self._drift_accepted[rows] = kept * self._drift_accepted[rows] + stands.sum(axis=1)

    def _prior(self, rows: Indices) -> Floats:
        """Conditional acceptance over all requests of a replica, [n, K]; a slot hardly seen is like the one before."""
        guess = np.full(len(rows), FIRST_GUESS)
        prior = np.empty((len(rows), self._all_reached.shape[1]))
        for k in range(prior.shape[1]):
            reached, accepted = self._all_reached[rows, k], self._all_accepted[rows, k]
            guess = (accepted + PRIOR_ROUNDS * guess) / (reached + PRIOR_ROUNDS)
            prior[:, k] = guess
        return prior


def _before(survival: Floats) -> Floats:
    """Survival of the slot before each, 1 before the first."""
    return np.concatenate((np.ones_like(survival[..., :1]), survival[..., :-1]), axis=-1)
