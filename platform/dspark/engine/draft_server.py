"""Drafts for several engines: their contexts in pages of its own, their requests in one pass of the drafter.

Legend: n tokens, m captured layers, d hidden size.

    part of a context      taken in            known by its length from then on, whatever comes twice is passed over
                           waiting             longer than a step's; handed on piece by piece between two batches
                           handed on           the drafter's runner has it
    ask for a proposal     drafted             its context is all handed on, and exactly as long as the asker says
                           answered again      the same message came once more: the same proposal

Nothing here is needed for good: whoever misses something is told how much is there and sends the rest again.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from dspark.attention.page_pool import PagePool, PagePoolExhausted, PageTable
from dspark.config import Config
from dspark.engine.draft_messages import (
    MAX_TOKENS_BESIDE,
    ContextPart,
    DraftAnswer,
    DraftAsk,
    DraftMessage,
    DraftReply,
    SentProposal,
    asked_handles,
    split_features,
)
from dspark.engine.draft_runner import DraftRequest, DraftRunner
from dspark.speculation.draft_supply import CallSeconds
from dspark.speculation.fleet import DraftSupply

MOST_CLOSED = 8192  # handles that are remembered: what comes late must not open them again
PIECE_TOKENS = 256  # of a waiting context, handed on between two batches: what a batch waits for at most

log = logging.getLogger("dspark.engine")

Key = tuple[str, int]  # sender and handle


class DraftServerConfig(Config):
    """What a draft replica keeps for the engines it drafts for."""

    page_size: int = Field(16, ge=1)
    """Tokens per page of the drafter's KV memory."""
    kv_tokens: int = Field(65_536, ge=1)
    """Tokens of the drafter's KV memory, for the contexts of all engines together."""
    max_contexts: int = Field(512, ge=1)
    """Requests whose contexts are kept at once; each takes memory beside its pages where layers have a window."""
    idle_s: float = Field(10.0, gt=0)
    """Seconds without a message about it after which a context may be given up for another one that needs the room."""

    @property
    def num_pages(self) -> int:
        return -(-self.kv_tokens // self.page_size)


@dataclass
class DraftServerStats:
    """Cumulative. batches: passes of the drafter; drafted: proposals; evicted: contexts given up for others."""

    batches: int = 0
    drafted: int = 0
    drafted_tokens: int = 0
    context_tokens: int = 0
    refused: int = 0
    evicted: int = 0
    draft_s: float = 0.0


@dataclass
class _Context:
    """One request's. num_ids, num_features: taken in; waiting: of those, what the runner was not given yet."""

    table: PageTable
    memory: Any
    touched: float
    num_ids: int = 0
    num_features: int = 0
    waiting: deque[tuple[list[int], Tensor]] = field(default_factory=deque)
    answered: tuple[int, SentProposal] | None = None

    @property
    def num_waiting(self) -> int:
        return sum(features.shape[0] for _, features in self.waiting)


class DraftServer:
    """Not thread-safe: one thread serves. identity: of drafter and target; whoever names another is refused.

    calls: what its passes took. prior: what they take by the drafter's cost curve.
    """

    def __init__(
        self,
        runner: DraftRunner,
        *,
        identity: str,
        config: DraftServerConfig,
        device: torch.device | None = None,
        prior: DraftSupply | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """runner: with room for config.num_pages pages of config.page_size tokens, on `device`; None is the CPU."""
        self.stats = DraftServerStats()
        self.calls = CallSeconds(prior)
        self.pool = PagePool(config.num_pages)
        self._runner, self._identity, self._config, self._clock = runner, identity, config, clock
        self._device = device or torch.device("cpu")
        self._contexts: dict[Key, _Context] = {}
        self._closed: dict[Key, None] = {}  # the newest last; an engine never uses a handle twice

    @property
    def num_contexts(self) -> int:
        return len(self._contexts)

    @torch.inference_mode()
    def serve(self, messages: Sequence[DraftMessage]) -> list[DraftAnswer]:
        """An answer per message; what all of them ask for is drafted in one pass."""
        refusals = [self._refusal(message) for message in messages]
        is_refused: set[Key] = set()
        for message, refusal in zip(messages, refusals, strict=True):
            if refusal is None:
                is_refused |= self._take_in(message)
        heard = [message for message, refusal in zip(messages, refusals, strict=True) if refusal is None]
        self._draft(heard)
        return [
            DraftAnswer((), refusal) if refusal else self._answer(message, is_refused)
            for message, refusal in zip(messages, refusals, strict=True)
        ]

    @torch.inference_mode()
    def hand_on(self) -> bool:
        """Give the runner one piece of a context that waits; False when none does."""
        for context in self._contexts.values():
            if context.waiting:
                self._hand_on_first(context)
                self._runner.store(context.memory)
                return True
        return False

    def check(self) -> None:
        """No page is lost or held twice."""
        self.pool.check(context.table.pages for context in self._contexts.values())

    def _refusal(self, message: DraftMessage) -> str | None:
        if message.identity == self._identity:
            return None
        return (
            f"the draft replica's drafter and target ({self._identity}) are not this engine's ({message.identity}); "
            "give both the same target and drafter folder"
        )

    def _take_in(self, message: DraftMessage) -> set[Key]:
        """Closed contexts go, parts are added to theirs; the contexts that there is no room for."""
        for handle in message.closed:
            self._close((message.sender, handle))
            self._closed[message.sender, handle] = None
        for key in list(self._closed)[: max(0, len(self._closed) - MOST_CLOSED)]:
            del self._closed[key]
        is_refused = set()
        for part, features in zip(message.parts, split_features(message, self._device), strict=True):
            key = (message.sender, part.handle)
            try:
                self._extend(key, part, features)
            except PagePoolExhausted as error:
                log.debug("no room for a context of %s: %s", message.sender, error.message)
                self.stats.refused += 1
                self._close(key)  # what it holds is of no use without the rest
                is_refused.add(key)
        for ask in message.asks:
            if (context := self._contexts.get((message.sender, ask.handle))) is not None:
                context.touched = self._clock()
        return is_refused

    def _extend(self, key: Key, part: ContextPart, features: Tensor) -> None:
        """Raises: PagePoolExhausted without room for all of it, with the context as it was."""
        if key in self._closed:
            return  # a message that was overtaken by the one that closed it
        context = self._contexts.get(key)
        if part.start > (0 if context is None else context.num_features):
            return  # what lies before is missing: the answer says so
        context = self._open(key) if context is None else context
        context.touched = self._clock()
        stop = part.start + part.num_features
        self._reserve(context, max(stop, context.num_features) + self._runner.block_size)
        ids = part.token_ids[max(0, context.num_ids - part.start) :]
        new = features[max(0, context.num_features - part.start) :]
        if ids or new.shape[0]:
            context.waiting.append((list(ids), new))
        context.num_ids += len(ids)
        context.num_features += new.shape[0]
        self.stats.context_tokens += new.shape[0]

    def _open(self, key: Key) -> _Context:
        if len(self._contexts) >= self._config.max_contexts and not self._evict():
            raise PagePoolExhausted(
                f"{len(self._contexts)} contexts are kept and none is idle; raise max_contexts, or add a draft replica"
            )
        table = PageTable([], self._config.page_size)
        context = self._contexts[key] = _Context(table, self._runner.new_memory(table), self._clock())
        return context

    def _reserve(self, context: _Context, num_tokens: int) -> None:
        missing = -(-num_tokens // self._config.page_size) - len(context.table.pages)
        if missing <= 0:
            return
        while missing > self.pool.num_free and self._evict():
            pass
        after = context.table.pages[-1] if context.table.pages else None
        context.table.extend(self.pool.allocate(missing, after=after))

    def _evict(self) -> bool:
        """Give up the context nobody spoke of for longest; False when all were lately."""
        longest = min(self._contexts, key=lambda key: self._contexts[key].touched, default=None)
        if longest is None or self._clock() - self._contexts[longest].touched <= self._config.idle_s:
            return False
        self._close(longest)
        self.stats.evicted += 1
        return True

    def _close(self, key: Key) -> None:
        context = self._contexts.pop(key, None)
        if context is not None:
            self.pool.free(context.table.pages)

    def _draft(self, messages: Sequence[DraftMessage]) -> None:
        """One pass over all that can be drafted; each context keeps its proposal and the message's number."""
        chosen: dict[Key, tuple[int, DraftAsk]] = {}
        for message in messages:
            for ask in message.asks:
                context = self._contexts.get((message.sender, ask.handle))
                if context is not None and self._is_ready(context, ask, message.sequence):
                    chosen[message.sender, ask.handle] = (message.sequence, ask)
        if not chosen:
            return
        started = time.perf_counter()
        requests = [_draft_request(ask, self._contexts[key].memory) for key, (_, ask) in chosen.items()]
        proposals = [SentProposal.of(proposal) for proposal in self._runner.propose(requests)]
        for (key, (sequence, ask)), proposal in zip(chosen.items(), proposals, strict=True):
            self._contexts[key].answered = (sequence, proposal)
            self.stats.drafted_tokens += ask.max_tokens
        self.stats.batches += 1
        self.stats.drafted += len(chosen)
        draft_s = time.perf_counter() - started
        self.stats.draft_s += draft_s
        self.calls.note(len(chosen), draft_s)

    def _is_ready(self, context: _Context, ask: DraftAsk, sequence: int) -> bool:
        """Whether to draft: not what was answered before, nor behind another context than the asker means."""
        if context.answered is not None and context.answered[0] >= sequence:
            return False
        if context.num_features != ask.num_context or ask.max_tokens > self._runner.block_size:
            return False
        while context.waiting and context.num_waiting <= MAX_TOKENS_BESIDE:
            self._hand_on_first(context)
        return not context.waiting

    def _hand_on_first(self, context: _Context) -> None:
        ids, features = context.waiting.popleft()
        if features.shape[0] > PIECE_TOKENS:
            context.waiting.appendleft((ids[PIECE_TOKENS:], features[PIECE_TOKENS:]))
            ids, features = ids[:PIECE_TOKENS], features[:PIECE_TOKENS]
        self._runner.extend(context.memory, ids, features)

    def _answer(self, message: DraftMessage, is_refused: set[Key]) -> DraftAnswer:
        replies = []
        for handle in asked_handles(message):
            context = self._contexts.get((message.sender, handle))
            known = 0 if context is None else context.num_features
            answered = None if context is None else context.answered
            proposal = answered[1] if answered is not None and answered[0] == message.sequence else None
            replies.append(DraftReply(handle, known, (message.sender, handle) in is_refused, proposal))
        return DraftAnswer(tuple(replies))


def _draft_request(ask: DraftAsk, memory: Any) -> DraftRequest:
    return DraftRequest(
        memory=memory,
        anchor_id=ask.anchor_id,
        max_tokens=ask.max_tokens,
        temperature=ask.temperature,
        generator=None,
        noise_key=ask.noise_key,
        position=ask.position,
        uniforms=ask.uniforms,
        top_k=ask.top_k,
    )
