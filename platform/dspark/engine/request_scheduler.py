"""Admission: which requests run, in the order in which they came."""

from collections import deque
from collections.abc import Callable

from dspark.attention.page_pool import PagePool, PageTable
from dspark.engine.request import GenerationRequest
from dspark.engine.running import RunningRequest


class RequestScheduler:
    """Keeps who waits and who runs. A request is given all pages it can ever need, so nothing that runs is stopped.

    num_ahead: tokens beyond prompt and output that a step may write (a drafted block).
    """

    def __init__(self, pool: PagePool, *, page_size: int, max_running: int, num_ahead: int) -> None:
        self.pool = pool
        self.waiting: deque[GenerationRequest] = deque()
        self.running: dict[str, RunningRequest] = {}
        self._page_size = page_size
        self._max_running = max_running
        self._num_ahead = num_ahead

    def pages_needed(self, request: GenerationRequest) -> int:
        num_tokens = len(request.prompt_ids) + request.max_tokens + self._num_ahead
        return -(-num_tokens // self._page_size)

    def add(self, request: GenerationRequest) -> None:
        """Raises: ValueError when the request can never run here, or its id is taken."""
        needed = self.pages_needed(request)
        if needed > self.pool.num_pages:
            raise ValueError(
                f"the request needs {needed} pages of KV memory for {len(request.prompt_ids)} prompt tokens and "
                f"max_tokens {request.max_tokens}, but there are {self.pool.num_pages}; shorten it or raise kv_tokens"
            )
        if request.request_id in self.running or any(w.request_id == request.request_id for w in self.waiting):
            raise ValueError(f"request id {request.request_id!r} is in use; give each request its own")
        self.waiting.append(request)

    def admit(self, start: Callable[[GenerationRequest, PageTable], RunningRequest]) -> None:
        """Let waiting requests run while there is room, strictly first come, first served: none is starved."""
        while self.waiting and len(self.running) < self._max_running:
            needed = self.pages_needed(self.waiting[0])
            if needed > self.pool.num_free:
                return
            request = self.waiting.popleft()
            table = PageTable(self.pool.allocate(needed), self._page_size)
            self.running[request.request_id] = start(request, table)

    def release(self, request_id: str) -> RunningRequest | None:
        """End a running request and give its pages back; a waiting one is dropped. None if it did not run."""
        running = self.running.pop(request_id, None)
        if running is None:
            self.waiting = deque(w for w in self.waiting if w.request_id != request_id)
            return None
        self.pool.free(running.table.pages)
        return running

    def check(self) -> None:
        """No page is lost or held twice."""
        self.pool.check(running.table.pages for running in self.running.values())
