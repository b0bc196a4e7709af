"""Drafting that another process does: the engine's side of it.

Features are kept here in the pages of their tokens and sent as they are committed, with the requests for proposals of
the same step; what is long, a prompt or a context to be rebuilt, goes ahead and is not waited for. Whatever does not
come in time is no proposal: the request decodes plainly in that step.

    link          up        asked in every step, for as long as the deadline
                  down      not asked, until a pause is over that doubles with each failure
    context       behind    sent ahead in the background, so far without drafting
                  level     what the last step committed goes with the request for a proposal
                  resting   refused for want of room, tried again after a while

Legend: R requests, n tokens, m captured layers, d hidden size.
"""

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from itertools import count

import torch
from torch import Tensor

from dspark.attention.page_pool import PageTable
from dspark.drafters import AnyDrafterConfig
from dspark.engine.draft_messages import (
    MAX_TOKENS_BESIDE,
    DraftAnswer,
    DraftAsk,
    DraftLink,
    DraftMessage,
    DraftReply,
    DraftUnavailable,
    to_array,
)
from dspark.engine.draft_runner import DraftRequest
from dspark.engine.feature_store import FeatureStore
from dspark.engine.remote_draft_state import (
    ClosedHandles,
    Pause,
    RemoteDraftConfig,
    RemoteDraftStats,
    RemoteMemory,
    Sent,
)
from dspark.errors import one_line
from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.proposal import Proposal

MAX_TOKENS_AHEAD = 2048  # on their way at once, of contexts that are behind: what their copies may take
AHEAD_TIMEOUT_S = 5.0  # for what is sent ahead, which no step waits for
REST_S = 1.0  # of a context that was refused
FAILURES = (DraftUnavailable, TimeoutError, CancelledError)

log = logging.getLogger("dspark.engine")


class RemoteDraftRunner:
    """Answers the engine as a local runner does. curve: set once it is known; the deadline follows from it.

    name: of this engine, one for its whole life; identity: of drafter and target, see `DraftMessage`.
    """

    num_reread: int | None = 0  # all that a shared page's tokens left behind is in the store
    num_ids_behind = 0

    def __init__(
        self,
        drafter: AnyDrafterConfig,
        link: DraftLink,
        store: FeatureStore,
        *,
        name: str,
        identity: str,
        device: torch.device,
        config: RemoteDraftConfig,
        stats: RemoteDraftStats | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.kind: str = drafter.architecture
        self.block_size = drafter.block_size
        self.target_layer_ids = drafter.target_layer_ids
        self.has_confidence = drafter.enable_confidence_head
        self.max_context_tokens: int | None = drafter.max_position_embeddings
        self.curve: CostCurve | None = None
        self.stats = stats or RemoteDraftStats()
        self._link, self._store, self._config, self._clock = link, store, config, clock
        self._name, self._identity, self._device = name, identity, device
        self._nothing = Proposal.nothing(device)
        self._pause = Pause(clock)
        self._ahead: deque[Sent] = deque()  # that nobody waits for
        self._closed = ClosedHandles()
        self._goodbye: Future[DraftAnswer] | None = None  # to a message that says nothing but what is closed
        self._saying = threading.RLock()  # a memory may be dropped in the midst of it
        self._sequence = count(1)
        self._num_handles = self._num_open = 0
        self._ahead.append(self._post([], [], AHEAD_TIMEOUT_S))  # so that the way is open before a step waits for it

    def deadline_s(self, num_requests: int) -> float:
        """Seconds that a step waits for so many proposals."""
        if self._config.deadline_s is not None:
            return self._config.deadline_s
        if self.curve is None:
            return self._config.deadline_without_curve_s
        return 3 * self.curve.draft_seconds(num_requests) + self._config.slack_s

    def new_memory(self, table: PageTable, stored_ids: Sequence[int] = ()) -> RemoteMemory:
        memory = RemoteMemory(self._num_handles, table, list(stored_ids), len(stored_ids))
        self._num_handles += 1
        self._num_open += 1
        # Whoever drops a memory, for whatever reason, ends its context at the draft replica.
        weakref.finalize(memory, self._forget, memory.handle).atexit = False
        return memory

    def num_stored(self, memory: RemoteMemory) -> int:
        return memory.num_features

    def store(self, memory: RemoteMemory) -> None:
        """Nothing is put off."""

    def extend(self, memory: RemoteMemory, committed_ids: Sequence[int], hidden: Tensor | None) -> None:
        memory.token_ids += committed_ids
        if hidden is None or not hidden.shape[0]:
            return
        self._store.write(memory.table, memory.num_features, hidden)
        memory.num_features += hidden.shape[0]
        if memory.num_behind > MAX_TOKENS_BESIDE:
            self._collect()
            if self._pause.is_over:
                self._send_ahead([memory])

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        if not requests:
            return []
        self._collect()
        replies: dict[int, DraftReply] = {}
        if self._pause.is_over:
            replies = self._ask([request for request in requests if self._is_level(request.memory)])
        if self._pause.is_over:
            self._send_ahead([request.memory for request in requests])
        sent = [reply.proposal if (reply := replies.get(r.memory.handle)) is not None else None for r in requests]
        self.stats.undrafted += sum(proposal is None for proposal in sent)
        return [self._nothing if proposal is None else proposal.proposal(self._device) for proposal in sent]

    def _is_level(self, memory: RemoteMemory) -> bool:
        return not memory.is_ahead and memory.num_behind <= MAX_TOKENS_BESIDE and self._clock() >= memory.rests_until

    def _ask(self, requests: Sequence[DraftRequest]) -> dict[int, DraftReply]:
        """Replies by handle; none where the deadline passed."""
        if not requests:
            return {}
        timeout_s = self.deadline_s(len(requests))
        started = time.perf_counter()
        parts = [(request.memory, request.memory.num_features) for request in requests]
        sent = self._post(parts, [self._asked(request) for request in requests], timeout_s)
        try:
            replies = self._accept(sent, timeout_s)
        except FAILURES as error:
            sent.answer.cancel()
            self._lose(error)
            return {}
        finally:
            self.stats.wait_s += time.perf_counter() - started
        for request in requests:
            self._take_note(request.memory, replies.get(request.memory.handle))
        return replies

    def _send_ahead(self, memories: Sequence[RemoteMemory]) -> None:
        """Start contexts on their way that are too long to come with a request for a proposal."""
        room = MAX_TOKENS_AHEAD - sum(one.num_tokens for one in list(self._ahead))
        parts = []
        for memory in memories:
            if memory.is_ahead or memory.num_behind <= MAX_TOKENS_BESIDE or self._clock() < memory.rests_until:
                continue
            num_tokens = min(memory.num_behind, room)
            if num_tokens <= 0:
                break
            room -= num_tokens
            memory.is_ahead = True
            parts.append((memory, memory.num_there + num_tokens))
        if parts:
            self._ahead.append(self._post(parts, [], AHEAD_TIMEOUT_S))

    def _collect(self) -> None:
        """Take note of what became of that."""
        for sent in [one for one in list(self._ahead) if one.answer.done()]:
            if sent not in self._ahead:
                continue  # a memory that was dropped here had it taken note of
            self._ahead.remove(sent)
            memories = [memory for ref in sent.memories if (memory := ref()) is not None]
            for memory in memories:
                memory.is_ahead = False
            try:
                replies = self._accept(sent)
            except FAILURES as error:
                # It may have come all the same.
                self._closed.add(sent.handles - {memory.handle for memory in memories})
                self._lose(error)
                continue
            for memory in memories:
                self._take_note(memory, replies.get(memory.handle))

    def _accept(self, sent: Sent, timeout_s: float | None = None) -> dict[int, DraftReply]:
        """Replies by handle. Raises: one of FAILURES without an answer, or when nothing is drafted for this engine."""
        answer = sent.answer.result(timeout_s)
        if answer.refusal is not None:
            self._closed.drop(sent.closed)  # it keeps nothing of this engine
            raise DraftUnavailable(answer.refusal)
        if not self.stats.is_up:
            log.info("the draft replica answers again")
        self.stats.is_up = True
        self._pause.end()
        on_their_way = {handle for one in list(self._ahead) if not one.answer.done() for handle in one.handles}
        self._closed.drop(set(sent.closed) - on_their_way)  # what comes late would open them again
        return {reply.handle: reply for reply in answer.replies}

    def _take_note(self, memory: RemoteMemory, reply: DraftReply | None) -> None:
        if reply is None:
            return
        if reply.is_refused:
            self.stats.refused += 1
            memory.rests_until = self._clock() + REST_S
        elif reply.num_context < memory.num_there:
            self.stats.rebuilt += 1
        memory.num_there = min(reply.num_context, memory.num_features)

    def _lose(self, error: Exception) -> None:
        if self.stats.is_up:
            reason = one_line(error) or f"no answer in time ({type(error).__name__})"
            log.warning("decoding plainly, the draft replica is asked again later: %s", reason)
        self.stats.is_up = False
        self.stats.failures += 1
        self._pause.begin()
        # The answer keeps it, and it would keep the frames that asked, and in them requests that have ended.
        error.__traceback__ = None

    def _post(self, parts: Sequence[tuple[RemoteMemory, int]], asks: Sequence[DraftAsk], timeout_s: float) -> Sent:
        """Send what the draft replica lacks of each context up to a position, and everything that was closed."""
        rows = [self._store.read(memory.table, memory.num_there, stop) for memory, stop in parts]
        features = torch.cat(rows) if rows else torch.empty(0, 0, dtype=self._store.dtype)
        self.stats.messages += 1
        message = DraftMessage(
            sender=self._name,
            sequence=next(self._sequence),
            identity=self._identity,
            parts=tuple(memory.part(stop) for memory, stop in parts),
            asks=tuple(asks),
            closed=self._closed.said(),
            features=to_array(features),
            dtype=str(features.dtype).removeprefix("torch."),
            timeout_s=timeout_s,
        )
        memories = [weakref.ref(memory) for memory, _ in parts]
        handles = frozenset(memory.handle for memory, _ in parts)
        return Sent(self._link.post(message), message.closed, memories, handles, num_tokens=features.shape[0])

    def _asked(self, request: DraftRequest) -> DraftAsk:
        uniforms = None
        if request.temperature > 0 and request.noise_key is None:
            generator = request.generator
            device = self._device if generator is None else generator.device
            uniforms = tuple(torch.rand(request.max_tokens, generator=generator, device=device).tolist())
        return DraftAsk(
            handle=request.memory.handle,
            num_context=request.memory.num_features,
            anchor_id=request.anchor_id,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            noise_key=request.noise_key,
            position=request.position,
            uniforms=uniforms,
            top_k=self._config.top_k,
        )

    def _forget(self, handle: int) -> None:
        self._num_open -= 1
        self._closed.add([handle])
        self._collect()
        self._say_goodbye()

    def _say_goodbye(self, _: "Future[DraftAnswer] | None" = None) -> None:
        """Say what is closed when no step may come that would take it along. From any thread.

        Nobody waits for this one, whether the link is down or not, and what is still on its way and overtaken by it
        opens nothing there. There is one at a time: when it is back, another one says what was closed meanwhile.
        """
        with self._saying:
            is_on_its_way = self._goodbye is not None and not self._goodbye.done()
            if self._num_open or is_on_its_way or not self._closed.has_news:
                return
            sent = self._post([], [], AHEAD_TIMEOUT_S)
            self._ahead.append(sent)
            self._goodbye = sent.answer
        sent.answer.add_done_callback(self._say_goodbye)
