"""What runs in one engine step: prefill chunks, decodes and verifications are the same thing with other lengths.

Legend: R pieces (one per request), B tokens in all, n tokens of a piece.

    piece            token_ids                     start                    logits wanted
    prefill chunk    part of the prompt            tokens stored so far     the last row, at the prompt's end
    decode           [anchor]                      tokens stored so far     its row
    verify           [anchor, x_1 … x_l]           tokens stored so far     all rows
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from dspark.attention.page_pool import PageTable


@dataclass(frozen=True)
class Piece:
    """The tokens of one request in a step. num_logits: how many of the last rows are wanted.

    offset: tokens of the same request before these that the step stores as well, in another piece.
    """

    table: PageTable
    token_ids: Sequence[int]
    num_logits: int
    offset: int = 0

    @property
    def start(self) -> int:
        return self.table.num_tokens + self.offset

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class FlatBatch:
    """R pieces one behind the other, never padded.

    input_ids, positions, slot_mapping: [B] int64; logit_rows: rows of B whose logits are wanted, ascending;
    cu_seqlens_q, cu_logits: R+1 boundaries of the pieces' tokens and of their logits.
    """

    pieces: tuple[Piece, ...]
    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    logit_rows: Tensor
    cu_seqlens_q: tuple[int, ...]
    cu_logits: tuple[int, ...]
    masks: dict[tuple[int, int | None, torch.device], Tensor | None] = field(default_factory=dict)
    """By piece, window and device; made once per step."""

    @property
    def num_tokens(self) -> int:
        return self.cu_seqlens_q[-1]


def flatten(pieces: Sequence[Piece], device: torch.device | str) -> FlatBatch:
    """The batch of these pieces; each starts at its table's num_tokens."""
    assert pieces, "a step needs at least one piece"
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    rows: list[int] = []
    for piece in pieces:
        ids += piece.token_ids
        positions += range(piece.start, piece.stop)
        slots += piece.table.slots(piece.start, piece.stop)
        rows += range(len(ids) - piece.num_logits, len(ids))
    return FlatBatch(
        pieces=tuple(pieces),
        input_ids=torch.tensor(ids, device=device),
        positions=torch.tensor(positions, device=device),
        slot_mapping=torch.tensor(slots, device=device),
        logit_rows=torch.tensor(rows, dtype=torch.long, device=device),
        cu_seqlens_q=(0, *accumulate(len(piece.token_ids) for piece in pieces)),
        cu_logits=(0, *accumulate(piece.num_logits for piece in pieces)),
    )
