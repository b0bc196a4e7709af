"""What computes the attention of a step: an entry per kind of device, all equal to `paged.attend_pieces`.

entry         device   where it serves                                            can be captured in a CUDA graph
cpu           CPU      our kernel is built                                        -
flash         CUDA     flash-attn 2 is installed, half precision, its page size   yes
flex          CUDA     one device, page size a power of two from 16               yes
torch         any      everywhere: the reference, piece by piece                  no

Layers that share their keys with an earlier one are served by all of them, attention sinks by cpu and torch alone.

Legend: B rows (batch tokens), H query heads, K key/value heads, S slots, D head width.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from dspark.attention.flat_batch import FlatBatch
from dspark.attention.page_pool import PageTable


class StepPlan(Protocol):
    """What all layers of a forward pass share: whose rows see which pages."""

    def attend(
        self,
        queries: Tensor,
        new: tuple[Tensor, Tensor],
        held: tuple[Tensor, Tensor],
        *,
        scaling: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Store the rows' keys and values, then attend: [B, H, D_v].

        queries: [B, H, D]; new: keys and values of the rows, [B, K, D] each; held: a layer's memory, [K, S, D] each;
        sinks: [H], the score of a further key per head, whose value is zero.
        """
        ...


class FixedPlan(StepPlan, Protocol):
    """A plan whose tensors stay where they are, for batches of up to so many rows and requests."""

    def holds(self, spans: Sequence[tuple[int, int]]) -> bool:
        """Whether a step of these spans fits."""
        ...

    def fill(self, tables: Sequence[PageTable], spans: Sequence[tuple[int, int]], slot_mapping: Tensor) -> None:
        """Make it the plan of these spans. slot_mapping: [B], rows that are padding included."""
        ...


class Planner(Protocol):
    """Makes the plan of any spans. is_causal: rows see their request up to themselves, else all of it up to stop."""

    def __call__(
        self,
        tables: Sequence[PageTable],
        spans: Sequence[tuple[int, int]],
        slot_mapping: Tensor,
        *,
        is_causal: bool = True,
    ) -> StepPlan: ...


class AttentionEntry(Protocol):
    """Makes the plan of each step."""

    name: str

    def plan(self, batch: FlatBatch) -> StepPlan | None:
        """None lets PyTorch compute, piece by piece."""
        ...


class CapturableEntry(AttentionEntry, Protocol):
    """One whose work can be captured once and replayed."""

    def fixed_plan(self, *, num_tokens: int, num_requests: int, max_pages: int) -> FixedPlan:
        """max_pages: of one request."""
        ...
