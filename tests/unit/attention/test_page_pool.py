"""Pages are never lost, a text is found where it stands, and a request's pages are neighbours where there is room."""

import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.attention.page_pool import PagePool, PagePoolExhausted, PageTable

NUM_PAGES = 9


@dataclass
class Twin:
    """What each page holds, by looking at everything: text in it, holders, and when it was last given back."""

    text: dict[int, str] = field(default_factory=dict)
    published: dict[int, str] = field(default_factory=dict)
    holders: dict[int, int] = field(default_factory=lambda: dict.fromkeys(range(NUM_PAGES), 0))
    given_back: list[int] = field(default_factory=list)  # published pages nobody holds, the longest unused first

    @property
    def blank(self) -> set[int]:
        return {page for page, count in self.holders.items() if not count and page not in self.published}

    def take(self, pages: list[int], num_needed: int) -> None:
        """The pages are blank ones, and of the cached ones just as many as were missing, the longest unused first."""
        num_missing = max(0, num_needed - len(self.blank))
        forgotten = self.given_back[:num_missing]
        assert set(pages) <= self.blank | set(forgotten)
        assert set(forgotten) <= set(pages)
        for page in forgotten:
            del self.published[page]
        self.given_back = self.given_back[num_missing:]
        for page in pages:
            self.holders[page] += 1

    def give_back(self, pages: list[int]) -> None:
        for page in reversed(pages):
            self.holders[page] -= 1
            if not self.holders[page] and page in self.published:
                self.given_back.append(page)


@dataclass
class Request:
    """A text, a letter per page, and the pages that hold it."""

    text: str
    pages: list[int]


def open_request(pool: PagePool, twin: Twin, text: str, most: int) -> Request | None:
    """As the engine does: share what is found of the text, write the rest, publish all."""
    shared: list[int] = []
    for stop in range(1, len(text) + 1):
        page = pool.find(text[:stop].encode())
        if page is None:
            break
        shared.append(page)
    assert [twin.text[page] for page in shared] == [text[: place + 1] for place in range(len(shared))]
    num_new = len(text) - len(shared)
    if num_new > pool.num_free - pool.count_cached(shared):
        return None
    pool.share(shared)
    for page in shared:
        twin.holders[page] += 1
        if page in twin.given_back:
            twin.given_back.remove(page)
    pages = pool.allocate(num_new, most=most, after=shared[-1] if shared else None)
    assert len(pages) >= num_new
    twin.take(pages, num_new)
    for place, page in enumerate(pages[:num_new], start=len(shared)):
        twin.text[page] = text[: place + 1]
        if twin.text[page] not in twin.published.values():
            twin.published[page] = twin.text[page]
        pool.publish(page, text[: place + 1].encode())
    return Request(text, shared + pages)


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(
        st.one_of(st.text(alphabet="ab", min_size=1, max_size=5), st.integers(0, 100)), min_size=1, max_size=40
    ),
    most=st.integers(0, 4),
)
def test_pages_hold_what_they_are_found_by_as_a_slow_twin_says(steps: list[str | int], most: int) -> None:
    pool, twin, held = PagePool(NUM_PAGES), Twin(), list[Request]()
    for step in steps:
        if isinstance(step, str):
            opened = open_request(pool, twin, step, most)
            held += [opened] if opened is not None else []
        elif held:
            closed = held.pop(step % len(held))
            pool.free(closed.pages)
            twin.give_back(closed.pages)
        pool.check(request.pages for request in held)
        assert {text.encode(): page for page, text in twin.published.items()} == pool._page_of
        assert pool.num_free == sum(not count for count in twin.holders.values())
        assert pool.num_cached == len(twin.given_back)
        for request in held:
            letters = zip(request.pages, range(1, len(request.text) + 1), strict=False)
            assert all(twin.text[page] == request.text[:stop] for page, stop in letters)


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


def test_the_pages_behind_a_table_are_given_where_they_are_blank() -> None:
    pool = PagePool(8)
    first = pool.allocate(2)
    assert pool.allocate(2, after=first[-1]) == [2, 3]
    pool.free([2, 3])
    pool.allocate(1)  # page 2
    assert pool.allocate(2, after=first[-1]) == [3, 4]


def test_scattered_pages_are_given_when_no_run_is_long_enough() -> None:
    pool = PagePool(5)
    held = [pool.allocate(1) for _ in range(5)]
    for place in (0, 2, 4):
        pool.free(held[place])
    assert pool.allocate(3) == [0, 2, 4]


def test_more_than_what_is_needed_is_given_only_from_blank_pages() -> None:
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.publish(pages[0], b"a")
    pool.publish(pages[1], b"ab")
    pool.free(pages)
    assert pool.allocate(1, most=4) == [2, 3]
    assert pool.find(b"ab") == pages[1]
    assert pool.allocate(1, most=4) == [pages[1]]  # the end of the text before its beginning
    assert (pool.find(b"a"), pool.find(b"ab")) == (pages[0], None)


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


def test_a_reference_that_nobody_holds_is_noticed() -> None:
    pool = PagePool(4)
    pages = pool.allocate(1)
    pool.publish(pages[0], b"a")
    pool.share(pages)
    pool.check([pages, pages])
    with pytest.raises(AssertionError, match="lost"):
        pool.check([pages])


def test_a_text_that_leads_to_a_blank_page_is_noticed() -> None:
    pool = PagePool(4)
    pages = pool.allocate(1)
    pool.publish(pages[0], b"a")
    pool.free(pages)
    del pool._cached[pages[0]]
    pool._blank.insert(0, pages[0])
    with pytest.raises(AssertionError, match="a blank page is found"):
        pool.check([])


@pytest.mark.parametrize("pages", [[3, 4, 5], [5, 0, 2], [2, 3, 7]])
def test_slots_are_page_by_page(pages: list[int]) -> None:
    table = PageTable(pages[:1], page_size=4)
    table.extend(pages[1:])
    every = [page * 4 + offset for page in pages for offset in range(4)]
    for start in range(12):
        for stop in range(start, 13):
            assert table.slots(start, stop) == every[start:stop]
            runs = table.runs(start, stop)
            assert all(first < last for first, last in runs)
            assert all(one[1] != other[0] for one, other in pairwise(runs))
    assert len(table.runs(0, 12)) == {3: 1, 5: 3, 2: 2}[pages[0]]
    assert len(table.runs(1, 3)) == 1


def test_a_table_gives_up_its_last_pages() -> None:
    table = PageTable([2, 3, 7, 8, 0], page_size=2)
    table.num_tokens = 5
    assert table.shorten(4) == [0]
    assert table.shorten(3) == [8]
    assert table.runs(0, 6) == [(4, 8), (14, 16)]
    table.extend([8, 9])
    assert table.runs(0, 10) == [(4, 8), (14, 20)]
    with pytest.raises(AssertionError, match="2 pages do not hold 5 tokens"):
        table.shorten(2)


def test_a_table_cannot_be_read_behind_its_end_nor_truncated_to_more() -> None:
    table = PageTable([0, 1], page_size=2)
    with pytest.raises(AssertionError, match="behind the request's 2 pages"):
        table.slots(0, 5)
    table.num_tokens = 3
    table.truncate(1)
    with pytest.raises(AssertionError, match="cannot truncate"):
        table.truncate(2)
