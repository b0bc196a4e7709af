"""What requests keep while they run: pages of KV memory for target and drafter, and what the drafter knows of them.

pages of a table     shared      found in the prefix cache; others may hold them too
                     own         what the request writes up to the end of its next step
                     spare       neighbours behind, as far as blank pages go; whoever needs them gets them
"""

from collections.abc import Sequence

from dspark.attention.page_pool import PagePool, PageTable
from dspark.engine.draft_runner import DraftRunner
from dspark.engine.prefix_cache import PrefixCache
from dspark.engine.request import GenerationRequest
from dspark.engine.running import RunningRequest
from dspark.engine.stats import EngineStats

PAGES_AT_ONCE = 8  # that a request grows by where there is room, so that its pages are neighbours


class RequestMemory:
    """Opens a request's memory, lets it grow, shares what it holds, and closes it.

    num_ahead: tokens behind the anchor that a step may write (a drafted block, a copy). A drafter that has to be given
    all features (`num_reread` None) leaves the prefix cache nothing to skip: it is off then.
    """

    def __init__(
        self,
        pool: PagePool,
        drafts: DraftRunner | None,
        *,
        page_size: int,
        num_ahead: int,
        prefix_cache: bool,
        stats: EngineStats,
    ) -> None:
        self.pool = pool
        self._drafts = drafts
        self.page_size = page_size
        self._num_ahead = num_ahead
        self._stats = stats
        self._prefix_cache = None
        if prefix_cache and (drafts is None or drafts.num_reread is not None):
            num_ids_behind = 0 if drafts is None else drafts.num_ids_behind
            self._prefix_cache = PrefixCache(pool, page_size=page_size, num_ids_behind=num_ids_behind)

    def check_fits(self, request: GenerationRequest) -> None:
        """Raises: ValueError when the request could not run even alone."""
        needed = self._most_pages(request)
        if needed > self.pool.num_pages:
            raise ValueError(
                f"the request needs {needed} pages of KV memory for {len(request.prompt_ids)} prompt tokens and "
                f"max_tokens {request.max_tokens}, but there are {self.pool.num_pages}; shorten it or raise kv_tokens"
            )

    def num_free(self, running: Sequence[RunningRequest]) -> int:
        """Pages that these, all that run, do not need."""
        return self.pool.num_free + sum(map(self._num_spare, running))

    def open(self, running: RunningRequest, others: Sequence[RunningRequest]) -> bool:
        """Give a request that waits the pages for all it has to read; False, with nothing changed, without room.

        others: who runs, the most urgent first. A page is left for each that will grow, or one would be preempted soon.
        """
        shared = self.find(running)
        num_new = self._needed_pages(running) - len(shared)
        num_growing = sum(self._needed_pages(other) < self._most_pages(other.request) for other in others)
        if self.num_free(others) - self.pool.count_cached(shared) < num_new + num_growing:
            return False
        self.pool.share(shared)
        self._reclaim(num_new, others)
        most = self._most_pages(running.request) - len(shared)
        pages = shared + self.pool.allocate(num_new, most=most, after=shared[-1] if shared else None)
        running.table = PageTable(pages, self.page_size)
        running.table.num_tokens = len(shared) * self.page_size
        if self._prefix_cache is not None:
            self._prefix_cache.announce(running, running.digests[len(shared) :])
            if not running.is_resumed:
                running.num_cached = running.table.num_tokens
                self._stats.prefix_cache_queries += len(running.request.prompt_ids)
                self._stats.prefix_cache_hits += running.num_cached
        del running.digests[len(shared) :]
        if self._drafts is not None and self._is_draftable(running):
            running.memory = self._drafts.new_memory(running.table, running.ids(0, running.table.num_tokens))
        self._stop_drafting_beyond(running)
        return True

    def should_wait(self, running: RunningRequest) -> bool:
        """Whether at least half of what a request has to read is being read for others, and found when that is done."""
        if self._prefix_cache is None:
            return False
        num_found = len(self.find(running))
        readers = self._prefix_cache.readers(running.digests[num_found:])
        is_worth_it = 2 * len(readers) * self.page_size >= running.num_context - num_found * self.page_size
        if not readers or not is_worth_it:
            return False
        for reader in readers:
            reader.is_awaited = True
        return True

    def lend(self, running: RunningRequest, num_new: int) -> None:
        """Blank pages behind the request's own, if there are any, for so many tokens more than its next step needs."""
        pages = running.table.pages
        wanted = self._pages(running.num_context + 1 + self._num_ahead + num_new)
        missing = min(wanted, self._most_pages(running.request)) - len(pages)
        if missing > 0:
            running.table.extend(self.pool.allocate(0, most=missing, after=pages[-1]))

    def grow(self, running: RunningRequest, others: Sequence[RunningRequest]) -> bool:
        """See to the pages of the request's next step; False when there are none. others: as in `open`."""
        self._stop_drafting_beyond(running)
        pages = running.table.pages
        missing = self._needed_pages(running) - len(pages)
        if missing <= 0:
            return True
        self._reclaim(missing, [other for other in others if other is not running])
        if missing > self.pool.num_free:
            return False
        left = self._most_pages(running.request) - len(pages)
        wanted = min(max(missing, PAGES_AT_ONCE), left, self.pool.num_free)
        running.table.extend(self.pool.allocate(wanted, most=left, after=pages[-1]))
        return True

    def publish(self, running: RunningRequest) -> None:
        """Let the whole pages be found that target and drafter have stored; the drafter stores at once what is waited
        for, when all of it is read."""
        if self._prefix_cache is not None and (self._drafts is None or running.is_draftable):
            stored = self._num_committed(running)
            if self._drafts is not None:
                if running.is_awaited and running.is_prefilled:
                    self._drafts.store(running.memory)
                    running.is_awaited = False
                stored = min(stored, self._drafts.num_stored(running.memory))
            self._prefix_cache.publish(running, stored)

    def close(self, running: RunningRequest, *, is_aborted: bool = False) -> None:
        """Take everything back. What the drafter put off is stored first where that lets another page be found."""
        if self._prefix_cache is not None:
            is_worth_it = self._num_committed(running) // self.page_size > len(running.digests)
            if is_worth_it and not is_aborted and self._drafts is not None and running.is_draftable:
                self._drafts.store(running.memory)
            self.publish(running)
            self._prefix_cache.withdraw(running)
        self.pool.free(running.table.pages)
        running.table = PageTable([], self.page_size)
        running.digests, running.memory, running.is_awaited = [], None, False

    def check(self, running: Sequence[RunningRequest]) -> None:
        """No page is lost, and each is held by as many as count for it."""
        self.pool.check(one.table.pages for one in running)

    def find(self, running: RunningRequest) -> list[int]:
        """Cached pages of the text's beginning. The last tokens are read in any case: for the logits of the last one,
        and for what the drafter keeps of the newest ones outside of its pages."""
        if self._prefix_cache is None:
            return []
        num_reread = 1
        if self._drafts is not None and self._is_draftable(running):
            num_reread = max(1, self._drafts.num_reread or 1)
        if not running.digests:  # what waits does not change, so they are made once
            ids = running.ids(0, running.num_known)
            running.digests = self._prefix_cache.digests(ids, running.num_context - num_reread)
        return self._prefix_cache.find(running.digests)

    def _is_draftable(self, running: RunningRequest) -> bool:
        """Whether a block behind the request's context still lies within the drafter's."""
        if self._drafts is None or not running.is_draftable:
            return False
        most = self._drafts.max_context_tokens
        return most is None or running.num_context + self._drafts.block_size <= most

    def _stop_drafting_beyond(self, running: RunningRequest) -> None:
        """Go on without speculation where the context has outgrown the drafter's."""
        if self._drafts is not None and running.is_draftable and not self._is_draftable(running):
            running.is_draftable, running.memory = False, None
            self._stats.requests_beyond_drafter += 1

    def _num_committed(self, running: RunningRequest) -> int:
        """Tokens of the text in the target's KV memory; a stop within a block leaves others behind them."""
        return min(running.table.num_tokens, running.num_known)

    def _most_pages(self, request: GenerationRequest) -> int:
        return self._pages(len(request.prompt_ids) + request.max_tokens + self._num_ahead)

    def _needed_pages(self, running: RunningRequest) -> int:
        """For all that is to be read, and the step behind it."""
        return self._pages(running.num_context + 1 + self._num_ahead)

    def _num_spare(self, running: RunningRequest) -> int:
        return max(0, len(running.table.pages) - self._needed_pages(running))

    def _reclaim(self, num_pages: int, others: Sequence[RunningRequest]) -> None:
        """Take spare pages back, the least urgent request's first, until so many are free."""
        for other in reversed(others):
            taken = min(self._num_spare(other), num_pages - self.pool.num_free)
            if taken > 0:
                self.pool.free(other.table.shorten(len(other.table.pages) - taken))

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)
