"""Who holds which page of KV memory, and which text is still found in one. What it means is the caches' business.

blank     free; nobody looks for what is in it
cached    free; its text is still found and may be shared; given out when no blank one is left, the longest unused
          first
held      by a request, or by several that share it: `references` counts them
"""

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice, pairwise

from dspark.errors import DsparkError

MOST_LOOKED_AT = 4096  # blank pages, for neighbours: beyond it a search costs more than reading pages that are none


class PagePoolExhausted(DsparkError):
    """More pages were asked for than are free."""


class PagePool:
    """Hands out page ids. A request's pages are neighbours where there is room: such memory is read without a copy."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}; a page pool needs at least 1")
        self.num_pages = num_pages
        self._blank = list(range(num_pages))  # ascending
        self._cached: OrderedDict[int, None] = OrderedDict()  # the longest unused first
        self._references = [0] * num_pages
        self._text_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Pages no request holds, the cached ones among them."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def allocate(self, num_pages: int, *, most: int = 0, after: int | None = None) -> list[int]:
        """Ids in the order they hold a request's tokens: so many, and up to `most` as far as blank pages go.

        after: the page behind which they had best lie. Raises: PagePoolExhausted, with nothing taken.
        """
        if num_pages > self.num_free:
            raise PagePoolExhausted(
                f"page pool exhausted: {num_pages} pages needed, {self.num_free} of {self.num_pages} free; "
                "wait for a request to end or raise kv_tokens"
            )
        while len(self._blank) < num_pages:
            self._forget()
        most = max(num_pages, min(most, len(self._blank)))
        start, length = self._run_behind(after, most)
        if length < num_pages:
            start, length = self._first_run(most), most
        pages = self._blank[start : start + length]
        del self._blank[start : start + length]
        for page in pages:
            self._references[page] = 1
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """One request gives its pages back. A page that nobody holds is a fault of ours."""
        for page in reversed(pages):  # the end of a text is given out before its beginning, without which it is lost
            assert self._references[page] > 0, f"page {page} was freed twice"
            self._references[page] -= 1
            if self._references[page]:
                continue
            if page in self._text_of:
                self._cached[page] = None
            else:
                insort(self._blank, page)

    def publish(self, page: int, text: bytes) -> None:
        """Let a held page be found by its text, unless another page is: then this one stays its request's own.

        text: a digest of all tokens up to the page's end. What the page holds must not change from now on.
        """
        assert self._references[page], f"page {page} is published, but nobody holds it"
        if text not in self._page_of:
            assert page not in self._text_of, f"page {page} is published twice"
            self._page_of[text], self._text_of[page] = page, text

    def find(self, text: bytes) -> int | None:
        """The page that holds this text, held or cached."""
        return self._page_of.get(text)

    def share(self, pages: Sequence[int]) -> None:
        """One request more holds these pages; each has been found."""
        for page in pages:
            assert page in self._text_of, f"page {page} is shared, but was not published"
            self._cached.pop(page, None)
            self._references[page] += 1

    def count_cached(self, pages: Sequence[int]) -> int:
        """How many of these nobody holds."""
        return sum(page in self._cached for page in pages)

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Every page is blank, cached, or held by as many as count for it. Run when idle and in tests."""
        references = Counter(page for pages in held for page in pages)
        assert [references[page] for page in range(self.num_pages)] == self._references, "pages were lost or held twice"
        unheld = [page for page in range(self.num_pages) if not references[page]]
        assert sorted([*self._blank, *self._cached]) == unheld, "pages were lost or are free twice"
        assert self._blank == sorted(self._blank), "blank pages are out of order"
        assert self._page_of == {text: page for page, text in self._text_of.items()}, "texts and pages do not agree"
        assert self._cached.keys() <= self._text_of.keys(), "a cached page is not found by any text"
        assert not self._text_of.keys() & set(self._blank), "a blank page is found by a text"

    def _forget(self) -> None:
        """Make the cached page that was unused for longest a blank one."""
        page, _ = self._cached.popitem(last=False)
        del self._page_of[self._text_of.pop(page)]
        insort(self._blank, page)

    def _run_behind(self, after: int | None, most: int) -> tuple[int, int]:
        """Where the neighbours behind this page start among the blank ones, and how many they are, up to `most`."""
        if after is None:
            return 0, 0
        start, length = bisect_left(self._blank, after + 1), 0
        while length < min(most, len(self._blank) - start) and self._blank[start + length] == after + 1 + length:
            length += 1
        return start, length

    def _first_run(self, num_pages: int) -> int:
        """Where the first run of neighbours starts among the blank ones; 0 when there is none near the beginning."""
        run = 0
        for place, page in enumerate(islice(self._blank, MOST_LOOKED_AT)):
            run = run + 1 if place and page == self._blank[place - 1] + 1 else 1
            if run == num_pages:
                return place - num_pages + 1
        return 0


class PageTable:
    """The pages of one request, the same for the target's and the drafter's KV memory.

    num_tokens: tokens whose keys and values stand, in both. What lies behind them was rejected and is written over.
    """

    def __init__(self, pages: Sequence[int], page_size: int) -> None:
        self.pages: list[int] = []
        self.page_size = page_size
        self.num_tokens = 0
        self._breaks: list[int] = []  # places whose page is no neighbour of the one before
        self.extend(pages)

    @property
    def capacity_tokens(self) -> int:
        return len(self.pages) * self.page_size

    def extend(self, pages: Sequence[int]) -> None:
        """Append pages."""
        for page in pages:
            if self.pages and page != self.pages[-1] + 1:
                self._breaks.append(len(self.pages))
            self.pages.append(page)

    def shorten(self, num_pages: int) -> list[int]:
        """Give up the pages behind the first `num_pages`, which hold nothing."""
        assert num_pages * self.page_size >= self.num_tokens, f"{num_pages} pages do not hold {self.num_tokens} tokens"
        given_up = self.pages[num_pages:]
        del self.pages[num_pages:]
        del self._breaks[bisect_left(self._breaks, num_pages) :]
        return given_up

    def slots(self, start: int, stop: int) -> list[int]:
        """Where the tokens at positions start … stop-1 lie."""
        return [slot for first, last in self.runs(start, stop) for slot in range(first, last)]

    def runs(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The slots of these positions as ranges, in order: one where the pages are neighbours."""
        assert stop <= self.capacity_tokens, f"position {stop - 1} lies behind the request's {len(self.pages)} pages"
        if start >= stop:
            return []
        size = self.page_size
        if not self._breaks:
            return [(self.pages[0] * size + start, self.pages[0] * size + stop)]
        first, last = start // size, (stop - 1) // size
        inner = self._breaks[bisect_left(self._breaks, first + 1) : bisect_left(self._breaks, last + 1)]
        runs = []
        for place, following in pairwise([first, *inner, last + 1]):
            shift = (self.pages[place] - place) * size
            runs.append((shift + max(start, place * size), shift + min(stop, following * size)))
        return runs

    def truncate(self, num_tokens: int) -> None:
        """Forget everything from position num_tokens on."""
        assert num_tokens <= self.num_tokens, f"cannot truncate {self.num_tokens} tokens to {num_tokens}"
        self.num_tokens = num_tokens
