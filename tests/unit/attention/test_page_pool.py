"""Pages are never lost or held twice, and a request's are neighbours where there is room."""

import random

import pytest

from dspark.attention.page_pool import PagePool, PagePoolExhausted, PageTable


def test_pages_are_never_lost_or_held_twice_in_any_order_of_calls() -> None:
    generator = random.Random(0)
    pool, held = PagePool(37), []
    for _ in range(2000):
        if held and generator.random() < 0.5:
            pool.free(held.pop(generator.randrange(len(held))))
        elif (wanted := generator.randint(1, 9)) <= pool.num_free:
            held.append(pool.allocate(wanted))
        pool.check(held)
        assert pool.num_free == 37 - sum(map(len, held))
    for pages in held:
        pool.free(pages)
    assert pool.num_free == 37


def test_neighbours_are_given_where_there_are_enough_of_them() -> None:
    pool = PagePool(8)
    first, second, _third = pool.allocate(2), pool.allocate(2), pool.allocate(2)
    pool.free(second)
    assert pool.allocate(1) == [2]
    pool.free(first)
    assert pool.allocate(2) == [0, 1]


def test_scattered_pages_are_given_when_no_run_is_long_enough() -> None:
    pool = PagePool(5)
    held = [pool.allocate(1) for _ in range(5)]
    for place in (0, 2, 4):
        pool.free(held[place])
    assert pool.allocate(3) == [0, 2, 4]


def test_an_exhausted_pool_says_what_is_missing_and_takes_nothing() -> None:
    pool = PagePool(4)
    pool.allocate(3)
    with pytest.raises(PagePoolExhausted, match="2 pages needed, 1 of 4 free"):
        pool.allocate(2)
    assert pool.num_free == 1


def test_a_page_freed_twice_is_noticed() -> None:
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.free(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(pages)


def test_a_lost_page_is_noticed() -> None:
    pool = PagePool(4)
    pool.allocate(2)
    with pytest.raises(AssertionError, match="lost"):
        pool.check([])


@pytest.mark.parametrize("pages", [[3, 4, 5], [5, 0, 2]])
def test_slots_are_page_by_page(pages: list[int]) -> None:
    table = PageTable(pages, page_size=4)
    every = [page * 4 + offset for page in pages for offset in range(4)]
    for start in range(12):
        for stop in range(start, 13):
            assert table.slots(start, stop) == every[start:stop]
            run = table.run(start, stop)
            assert run is None or list(range(*run)) == every[start:stop]
    assert (table.run(0, 1) is None) == (pages == [5, 0, 2])


def test_a_table_cannot_be_read_behind_its_end_nor_truncated_to_more() -> None:
    table = PageTable([0, 1], page_size=2)
    with pytest.raises(AssertionError, match="behind the request's 2 pages"):
        table.slots(0, 5)
    table.num_tokens = 3
    table.truncate(1)
    with pytest.raises(AssertionError, match="cannot truncate"):
        table.truncate(2)
