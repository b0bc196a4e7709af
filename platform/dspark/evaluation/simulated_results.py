"""What comes of a simulated fleet: tokens per second in all and per user, budgets, and whether minima were kept.

Legend: N replicas, R places, W windows of a second, G tiers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class FleetResult:
    """Of the counted time. tokens, decodes, verified, drafted, user_s: [N]; speed: [N, W, G], tokens per second of a
    tier's user in a window, NaN where there was none.

    verified: draft tokens; decodes: of a request in a step; user_s: seconds that requests were there, summed.
    """

    policy: str
    seconds: float
    tiers: tuple[int, ...]
    tokens: Floats
    decodes: Floats
    verified: Floats
    drafted: Floats
    user_s: Floats
    speed: Floats

    @property
    def tokens_per_s(self) -> float:
        return float(self.tokens.sum() / self.seconds)

    def kept(self, minimum: Mapping[int, float]) -> float:
        """Share of the windows of all replicas in which every tier's users had, in the mean, their minimum."""
        owed = [self.speed[..., g] >= minimum[tier] for g, tier in enumerate(self.tiers) if tier in minimum]
        there = [~np.isnan(self.speed[..., g]) for g, tier in enumerate(self.tiers) if tier in minimum]
        missed = np.any([is_there & ~is_kept for is_there, is_kept in zip(there, owed, strict=True)], axis=0)
        return 1.0 - float(missed[np.any(there, axis=0)].mean())

    def figures(self) -> dict[str, Any]:
        """JSON-ready."""
        decodes = max(float(self.decodes.sum()), 1.0)
        return {
            "policy": self.policy,
            "tokens_per_s": self.tokens_per_s,
            "user_tokens_per_s": float(self.tokens.sum() / max(self.user_s.sum(), 1e-9)),
            "verify_length": float(self.verified.sum()) / decodes,
            "drafted_share": float(self.drafted.sum()) / decodes,
            "round_tokens": float(self.tokens.sum()) / decodes,
            "replica_tokens_per_s": (self.tokens / self.seconds).tolist(),
            "replica_verify_length": (self.verified / np.maximum(self.decodes, 1.0)).tolist(),
        }


class Windows:
    """Adds steps up. tier: [N, R], of each place."""

    def __init__(self, tier: Indices, *, start_s: float, end_s: float, tiers: Sequence[int]) -> None:
        num, self._tier = len(tier), tier
        self._start_s, self._seconds, self._tiers = start_s, end_s - start_s, tuple(tiers)
        self._sums = np.zeros((5, num))
        shape = (num, max(1, int(self._seconds)), len(tiers))
        self._window_tokens, self._window_user_s = np.zeros(shape), np.zeros(shape)

    def add(
        self,
        rows: Indices,
        ends: Floats,
        step_s: Floats,
        tokens: Indices,
        decoding: NDArray[np.bool_],
        lengths: Indices,
        drafted: NDArray[np.bool_],
    ) -> None:
        """Count a step each of some replicas, in the window it ends in, without those outside of the counted time."""
        window = np.floor(ends - self._start_s).astype(np.int64)
        is_counted = (ends >= self._start_s) & (ends < self._start_s + self._seconds)
        rows, window, step_s = rows[is_counted], window[is_counted], step_s[is_counted]
        tokens, decoding = tokens[is_counted], decoding[is_counted]
        parts = (tokens, decoding, lengths[is_counted], drafted[is_counted], decoding * step_s[:, None])
        for sums, part in zip(self._sums, parts, strict=True):
            sums[rows] += part.sum(axis=1)
        is_whole = window < self._window_tokens.shape[1]
        rows, window = rows[is_whole], window[is_whole]
        for g, tier in enumerate(self._tiers):
            own = decoding[is_whole] & (self._tier[rows] == tier)
            self._window_tokens[rows, window, g] += (tokens[is_whole] * own).sum(axis=1)
            self._window_user_s[rows, window, g] += (own * step_s[is_whole][:, None]).sum(axis=1)

    def result(self, policy: str) -> FleetResult:
        """All of it."""
        speed = np.full(self._window_tokens.shape, np.nan)
        np.divide(self._window_tokens, self._window_user_s, out=speed, where=self._window_user_s > 0)
        tokens, decodes, verified, drafted, user_s = self._sums
        return FleetResult(policy, self._seconds, self._tiers, tokens, decodes, verified, drafted, user_s, speed)
