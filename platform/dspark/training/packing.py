"""Blocks of many sequences, packed densely by token-level indices.

Legend: A blocks of all sequences, a blocks of one, G block size, L tokens of one, T context tokens that are seen, p
anchor position, W sliding window.

    positions of a sequence    0 1 2 3 4 5 6 7 8 9      anchors 4 and 7, W = 3: block 0 sees rows [0, 2), block 1 [2, 4)
    rows of the packed context     0 1   2 3            what no block sees is left out
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dspark.drafters.base import PackedBatch


class AnchoredSequence(NamedTuple):
    """input_ids [L] int64, hidden [L, m*d], anchors [a] int64 ascending."""

    input_ids: Tensor
    hidden: Tensor
    anchors: Tensor


def pack_blocks(
    sequences: Sequence[AnchoredSequence], *, block_size: int, sliding_window: int | None = None
) -> PackedBatch:
    """All blocks of the sequences in one batch; its cost grows with the anchors and what they see, not with L.

    Sequences without an anchor leave no trace. Raises: ValueError when none has one.
    """
    parts, num_rows = [], 0
    for sequence in sequences:
        if sequence.anchors.numel():
            parts.append(_pack_one(sequence, num_rows, block_size, sliding_window))
            num_rows += parts[-1].context_positions.numel()
    if not parts:
        raise ValueError(f"none of {len(sequences)} sequences has an anchor; leave such micro-batches out")
    columns = zip(*(vars(part).values() for part in parts), strict=True)
    return PackedBatch(*(torch.cat(column) for column in columns))


def _pack_one(sequence: AnchoredSequence, first_row: int, block_size: int, sliding_window: int | None) -> PackedBatch:
    anchors = sequence.anchors
    positions = seen_positions(anchors, sliding_window)
    lowest = torch.zeros_like(anchors) if sliding_window is None else (anchors - sliding_window + 1).clamp_min(0)
    slots = anchors.unsqueeze(1) + torch.arange(block_size)
    return PackedBatch(
        anchors=anchors,
        previous_ids=sequence.input_ids[slots.clamp_max(sequence.input_ids.numel() - 1)],
        target_hidden=sequence.hidden[: len(positions)] if sliding_window is None else sequence.hidden[positions],
        context_positions=positions,
        context_ids=sequence.input_ids[positions],
        context_starts=first_row + torch.searchsorted(positions, lowest),
        context_stops=first_row + torch.searchsorted(positions, anchors),
    )


def seen_positions(anchors: Tensor, sliding_window: int | None) -> Tensor:
    """Ascending positions that some block of a sequence uses: [t] int64, at least one. anchors: [a], ascending.

    Position p - 1 always, since the block's input may hold its feature; p itself only where nothing comes before.
    """
    if sliding_window is None:
        return torch.arange(max(1, int(anchors[-1])))
    behind = torch.arange(1, max(2, sliding_window))
    return (anchors.unsqueeze(1) - behind).clamp_min(0).unique()
