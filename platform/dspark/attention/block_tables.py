"""Whose rows see which pages, as the index arrays that kernels of GPUs read.

Legend: R pieces, B rows (batch tokens), N tiles, T rows of a tile, W pages of the longest request.

A tile is up to T rows of one piece. Attention over tiles pads each to T rows and no piece to the longest.

    pieces of 3 and 5 rows, T = 4     tile 0: rows 0 1 2 -     tile 1: rows 3 4 5 6     tile 2: row 7 - - -
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from dspark.attention.page_pool import PageTable

Spans = Sequence[tuple[int, int]]
Ints = npt.NDArray[np.int32]

NOTHING = -1  # the position of a row that is padding: it sees no key


@dataclass(frozen=True)
class Tiles:
    """rows: [N, T] the batch row in each place, 0 where there is none; positions: [N, T] up to where it sees, NOTHING
    where there is none; places: [B] the place n * T + t of each row; page_table: [N, W] pages that a tile's rows see,
    in the order of the text, num_pages: [N] how many. pages, logical: [P] all pages of the step and which of its
    request's pages each is: the same for all that share it, since they share the text before it.
    """

    rows: Ints
    positions: Ints
    places: Ints
    page_table: Ints
    num_pages: Ints
    pages: Ints
    logical: Ints


def tiles_of(tables: Sequence[PageTable], spans: Spans, *, tile_rows: int, is_causal: bool = True) -> Tiles:
    """spans: the positions start … stop-1 of each piece. Rows see their request up to themselves, or up to stop."""
    page_size = tables[0].page_size
    rows: list[list[int]] = []
    positions: list[list[int]] = []
    places: list[int] = []
    tiles: list[list[int]] = []
    first_row = 0
    for table, (start, stop) in zip(tables, spans, strict=True):
        for begin in range(start, stop, tile_rows):
            end = min(begin + tile_rows, stop)
            padding = tile_rows - (end - begin)
            seen = range(begin, end) if is_causal else [stop - 1] * (end - begin)
            places += range(len(tiles) * tile_rows, len(tiles) * tile_rows + end - begin)
            rows.append([*range(first_row + begin - start, first_row + end - start), *[0] * padding])
            positions.append([*seen, *[NOTHING] * padding])
            tiles.append(table.pages[: -(-(end if is_causal else stop) // page_size)])
        first_row += stop - start
    pages, logical = _pages_of(tables, spans)
    return Tiles(
        rows=np.array(rows, dtype=np.int32),
        positions=np.array(positions, dtype=np.int32),
        places=np.array(places, dtype=np.int32),
        page_table=page_rows(tiles),
        num_pages=np.array([len(own) for own in tiles], dtype=np.int32),
        pages=pages,
        logical=logical,
    )


def num_tiles(spans: Spans, tile_rows: int) -> int:
    return sum(-(-(stop - start) // tile_rows) for start, stop in spans)


def page_rows(pages: Sequence[Sequence[int]]) -> Ints:
    """Lists of pages as rows of one array, filled up with page 0: [len, W]."""
    filled = np.zeros((len(pages), max(len(own) for own in pages)), dtype=np.int32)
    for row, own in zip(filled, pages, strict=True):
        row[: len(own)] = own
    return filled


def boundaries(lengths: Sequence[int]) -> Ints:
    """[len + 1] int32: 0, and the sums up to each."""
    return np.array([0, *accumulate(lengths)], dtype=np.int32)


def visible_pages(tables: Sequence[PageTable], spans: Spans) -> list[list[int]]:
    """Pages of each piece up to its stop."""
    return [table.pages[: -(-stop // table.page_size)] for table, (_, stop) in zip(tables, spans, strict=True)]


def _pages_of(tables: Sequence[PageTable], spans: Spans) -> tuple[Ints, Ints]:
    own = visible_pages(tables, spans)
    pages = np.array([page for one in own for page in one], dtype=np.int32)
    logical = np.array([place for one in own for place in range(len(one))], dtype=np.int32)
    return pages, logical
