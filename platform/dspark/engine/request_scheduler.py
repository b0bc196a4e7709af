"""Admission and preemption: which requests run, by priority and in the order in which they came."""

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import replace

from dspark.engine.request import GenerationRequest
from dspark.engine.request_memory import RequestMemory
from dspark.engine.running import RunningRequest
from dspark.engine.stats import EngineStats
from dspark.engine.step import Work, read_prompt

CONTINUED_FIRST = 2**62  # places; more than requests will ever come


class RequestScheduler:
    """Keeps who waits and who runs.

    A request is admitted when there are pages for what it has to read, not for all it may ever write. Where they run
    out the least urgent one gives its own back and waits at its old place, to read its text again and go on.
    """

    def __init__(self, memory: RequestMemory, *, max_running: int, stats: EngineStats) -> None:
        self.memory = memory
        self.waiting: list[RunningRequest] = []  # the most urgent first
        self.running: dict[str, RunningRequest] = {}
        self._max_running = max_running
        self._stats = stats
        self._num_added = 0

    @property
    def by_urgency(self) -> list[RunningRequest]:
        """Who runs, the most urgent first."""
        return sorted(self.running.values(), key=_urgency)

    def check_new(self, request: GenerationRequest) -> None:
        """Raises: ValueError when the request can never run here, or its id is taken."""
        self.memory.check_fits(request)
        name = request.request_id
        if name in self.running or any(one.request.request_id == name for one in self.waiting):
            raise ValueError(f"request id {name!r} is in use; give each request its own")

    def add(self, running: RunningRequest) -> None:
        """Queue a request; one that has output already goes before those that never ran."""
        running.order = self._num_added - (CONTINUED_FIRST if running.request.output_ids else 0)
        self._num_added += 1
        insort(self.waiting, running, key=_urgency)

    def make_room(self) -> None:
        """Pages for the next step of all who run, the most urgent first, at the cost of the least urgent."""
        order, place = self.by_urgency, 0
        while place < len(order):
            if self.memory.grow(order[place], order):
                place += 1
            else:
                self._preempt(order.pop())  # which may be the one that has no room

    def admit(self) -> None:
        """Let waiting requests run while there is room, strictly in their order: none is overtaken, none starved.

        One that begins like a text which is just being read comes in when it can share that.
        """
        while self.waiting and len(self.running) < self._max_running:
            first = self.waiting[0]
            if self.memory.should_wait(first) or not self.memory.open(first, self.by_urgency):
                return
            running = self.waiting.pop(0)
            self.running[running.request.request_id] = running

    def prepare(self, *, num_new: int) -> None:
        """What the next step needs and this one's outcome does not decide: requests that came in the meantime are
        admitted, and those that run get pages for what this step may add, as far as there are blank ones.

        num_new: tokens that a step adds to a request at most.
        """
        for running in self.by_urgency:
            self.memory.lend(running, num_new)
        self.admit()
        if self.waiting:
            self.memory.find(self.waiting[0])  # which makes its pages' digests, before there is a place for it

    def split(
        self, num_tokens: int, reserved: Callable[[Sequence[RunningRequest]], int]
    ) -> tuple[list[Work], list[RunningRequest]]:
        """Chunks to read beside the decodes, the most urgent first, and the requests that decode.

        num_tokens: of the whole step. reserved: how many of them to keep for those that decode; a page's worth is read
        in any case.
        """
        order = self.by_urgency
        decoding = [running for running in order if running.is_prefilled]
        if len(decoding) == len(order):
            return [], decoding
        room = max(self.memory.page_size, num_tokens - reserved(decoding))
        reading: list[Work] = []
        for running in order:
            if running.is_prefilled or room <= 0:
                continue
            reading.append(read_prompt(running, room))
            room -= len(reading[-1].piece.token_ids)
        return reading, decoding

    def release(self, request_id: str, *, is_aborted: bool = False) -> RunningRequest | None:
        """End a request and give its pages back at once. None if there is none of that id, or it never ran."""
        running = self.running.pop(request_id, None)
        if running is not None:
            self.memory.close(running, is_aborted=is_aborted)
            return running
        left = [one for one in self.waiting if one.request.request_id == request_id]
        self.waiting = [one for one in self.waiting if one.request.request_id != request_id]
        return left[0] if left and left[0].is_resumed else None

    def as_continued(self) -> list[GenerationRequest]:
        """Who runs and who waits, in their order, as requests that begin with the output they have."""
        everybody = sorted([*self.running.values(), *self.waiting], key=_urgency)
        return [replace(one.request, output_ids=tuple(one.output_ids)) for one in everybody]

    def check(self) -> None:
        """Nothing is lost or held twice; who waits holds nothing."""
        self.memory.check(list(self.running.values()))
        assert not any(one.table.pages for one in self.waiting), "a waiting request holds pages"

    def _preempt(self, running: RunningRequest) -> None:
        """Back to its place in the queue: what it has drawn and its random state stay, its pages do not."""
        del self.running[running.request.request_id]
        self.memory.close(running)
        running.num_preemptions += 1
        self._stats.preemptions += 1
        insort(self.waiting, running, key=_urgency)


def _urgency(running: RunningRequest) -> tuple[int, int]:
    return running.urgency
