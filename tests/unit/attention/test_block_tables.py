"""Tiles and page tables against what is read off the page tables one token at a time."""

import pytest

from dspark.attention.block_tables import NOTHING, boundaries, num_tiles, page_rows, tiles_of
from dspark.attention.page_pool import PageTable

TABLES = [PageTable([7, 2], 4), PageTable([2, 5, 0], 4)]
SPANS = [(4, 7), (6, 11)]  # pieces of 3 and of 5 rows


def test_tiles_take_the_rows_of_one_piece_each():
    tiles = tiles_of(TABLES, SPANS, tile_rows=4)
    assert tiles.rows.tolist() == [[0, 1, 2, 0], [3, 4, 5, 6], [7, 0, 0, 0]]
    assert tiles.positions.tolist() == [[4, 5, 6, NOTHING], [6, 7, 8, 9], [10, NOTHING, NOTHING, NOTHING]]
    assert tiles.places.tolist() == [0, 1, 2, 4, 5, 6, 7, 8]
    assert num_tiles(SPANS, 4) == 3


def test_a_tile_lists_the_pages_up_to_its_own_last_row():
    tiles = tiles_of(TABLES, SPANS, tile_rows=2)
    listed = [row[:n].tolist() for row, n in zip(tiles.page_table, tiles.num_pages, strict=True)]
    assert listed == [[7, 2], [7, 2], [2, 5], [2, 5, 0], [2, 5, 0]]


def test_rows_of_a_block_see_all_of_it():
    tiles = tiles_of(TABLES, SPANS, tile_rows=2, is_causal=False)
    assert tiles.positions.tolist() == [[6, 6], [6, NOTHING], [10, 10], [10, 10], [10, NOTHING]]
    assert tiles.num_pages.tolist() == [2, 2, 3, 3, 3]


def test_a_page_says_which_of_its_request_s_pages_it_is():
    tiles = tiles_of(TABLES[1:], SPANS[1:], tile_rows=16)
    assert dict(zip(tiles.pages.tolist(), tiles.logical.tolist(), strict=True)) == {2: 0, 5: 1, 0: 2}


@pytest.mark.parametrize("tile_rows", [1, 3, 16])
def test_every_row_stands_in_its_place(tile_rows):
    tiles = tiles_of(TABLES, SPANS, tile_rows=tile_rows)
    rows, positions = tiles.rows.flatten(), tiles.positions.flatten()
    assert rows[tiles.places].tolist() == list(range(8))
    assert positions[tiles.places].tolist() == [4, 5, 6, 6, 7, 8, 9, 10]
    assert (positions != NOTHING).sum() == 8


def test_lists_of_pages_are_filled_up_and_boundaries_are_sums():
    assert page_rows([[3], [4, 5]]).tolist() == [[3, 0], [4, 5]]
    assert boundaries([3, 0, 5]).tolist() == [0, 3, 3, 8]
