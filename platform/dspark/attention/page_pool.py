"""Who holds which page of KV memory. A page is an id; what it means is the caches' business."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from dspark.errors import DsparkError


class PagePoolExhausted(DsparkError):
    """More pages were asked for than are free."""


class PagePool:
    """Hands out page ids. A request's pages are neighbours where there is room: such memory is read without a copy."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}; a page pool needs at least 1")
        self.num_pages = num_pages
        self._free = list(range(num_pages))  # ascending

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_pages: int) -> list[int]:
        """Ids in the order they hold a request's tokens. Raises: PagePoolExhausted, with nothing taken."""
        if num_pages > len(self._free):
            raise PagePoolExhausted(
                f"page pool exhausted: {num_pages} pages needed, {len(self._free)} of {self.num_pages} free; "
                "wait for a request to end or raise kv_tokens"
            )
        start = self._first_run(num_pages)
        pages = self._free[start : start + num_pages]
        del self._free[start : start + num_pages]
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back. A page that is free already is a fault of ours."""
        for page in sorted(pages):
            place = bisect_left(self._free, page)
            assert place == len(self._free) or self._free[place] != page, f"page {page} was freed twice"
            self._free.insert(place, page)

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Every page is free or held by exactly one request. Run when idle and in tests."""
        everything = sorted([*self._free, *(page for pages in held for page in pages)])
        assert everything == list(range(self.num_pages)), "pages were lost or are held twice"

    def _first_run(self, num_pages: int) -> int:
        """Where the first run of neighbours starts in the free list; 0 when there is none."""
        run = 0
        for place, page in enumerate(self._free):
            run = run + 1 if place and page == self._free[place - 1] + 1 else 1
            if run == num_pages:
                return place - num_pages + 1
        return 0


class PageTable:
    """The pages of one request, shared by the target's and the drafter's KV memory.

    num_tokens: tokens whose keys and values stand, in both. What lies behind them was rejected and is written over.
    """

    def __init__(self, pages: Sequence[int], page_size: int) -> None:
        self.pages = list(pages)
        self.page_size = page_size
        self.num_tokens = 0
        first = self.pages[0]
        self._is_run = self.pages == list(range(first, first + len(self.pages)))

    @property
    def capacity_tokens(self) -> int:
        return len(self.pages) * self.page_size

    def slots(self, start: int, stop: int) -> list[int]:
        """Where the tokens at positions start … stop-1 lie."""
        assert stop <= self.capacity_tokens, f"position {stop - 1} lies behind the request's {len(self.pages)} pages"
        if self._is_run:
            base = self.pages[0] * self.page_size
            return list(range(base + start, base + stop))
        size = self.page_size
        return [self.pages[p // size] * size + p % size for p in range(start, stop)]

    def run(self, start: int, stop: int) -> tuple[int, int] | None:
        """The slots of these positions as one range, or None when they are not neighbours."""
        if not self._is_run:
            return None
        base = self.pages[0] * self.page_size
        return base + start, base + stop

    def truncate(self, num_tokens: int) -> None:
        """Forget everything from position num_tokens on."""
        assert num_tokens <= self.num_tokens, f"cannot truncate {self.num_tokens} tokens to {num_tokens}"
        self.num_tokens = num_tokens
