"""What a training loop asks for its samples, whether their states lie on disk or come from target workers.

Two implementations: `TargetCache` (offline) and `OnlineSamples`.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor

from dspark.data.sample_counts import SampleCounts
from dspark.data.target_cache import CachedSample, SampleEntry


class SampleSource(Protocol):
    """Samples by number, 0…len-1. `entries[i]` has a sample's id, split, domain and number of tokens."""

    @property
    def entries(self) -> Sequence[SampleEntry]: ...

    @property
    def request(self) -> dict[str, Any]:
        """What the samples were made from: answers_fingerprint, target, chat, target_layer_ids, …"""

    @property
    def description(self) -> str:
        """What it is and where, for messages."""

    @property
    def origin(self) -> dict[str, Any]:
        """answers, answers_kept and rejected by reason, as far as they are known: the first is the sum of the rest."""

    @property
    def target_config(self) -> dict[str, Any]:
        """The TargetConfig whose states these are, as plain values."""

    @property
    def steps_ahead(self) -> int:
        """How many steps beyond the present one it wants to be told of."""

    def __len__(self) -> int: ...

    def indices(self, split: str) -> list[int]:
        """Numbers of the samples of a split."""

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """input_ids [L] int64 and loss_mask [L] uint8 of a sample, without its states."""

    def expect(self, groups: Iterable[Sequence[int]]) -> None:
        """Announce samples that will be loaded, each group together, in this order; once for each `load`."""

    def load(self, index: int) -> CachedSample:
        """A sample with its states; waits for them."""

    def take_counts(self) -> SampleCounts:
        """What was given since the last call."""
