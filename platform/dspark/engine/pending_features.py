"""Features of tokens that the drafter has not stored yet: those of a request that is not drafted for gather here."""

import torch
from torch import Tensor

MOST_VIEWS = 8
MOST_HELD_BYTES = 32 << 20  # of a step's features, for the sake of a few rows
MOST_BYTES = 4 << 20


class PendingFeatures:
    """Rows [n, m*d], the oldest first.

    They come as views of a whole step's, and hold its memory for all other requests' tokens: every few are made a part
    of the request's own.
    """

    def __init__(self) -> None:
        self.num_rows = 0
        self._num_bytes = 0
        self._own: list[Tensor] = []
        self._views: list[Tensor] = []

    @property
    def are_many(self) -> bool:
        """Whether they take so much memory that they are better stored."""
        return self._num_bytes > MOST_BYTES

    @property
    def parts(self) -> list[Tensor]:
        """All rows, in pieces."""
        return [*self._own, *self._views]

    def append(self, features: Tensor) -> None:
        """Take the next rows in."""
        if features.untyped_storage().nbytes() > MOST_HELD_BYTES:
            features = features.clone()
        self.num_rows += features.shape[0]
        self._num_bytes += features.nbytes
        self._views.append(features)
        if len(self._views) == MOST_VIEWS:
            self._own.append(torch.cat(self._views))
            self._views = []

    def drop_oldest(self, num_rows: int) -> None:
        """Forget so many rows."""
        rest = torch.cat(self.parts)[num_rows:].clone() if num_rows < self.num_rows else None
        self._views = []
        self._own = [] if rest is None else [rest]
        self.num_rows = sum(part.shape[0] for part in self._own)
        self._num_bytes = sum(part.nbytes for part in self._own)
