"""Target steps and drafting on requests with a context, timed as often as one likes: nothing is ever committed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.attention.flat_batch import Piece
from dspark.attention.page_pool import PagePool, PageTable
from dspark.engine.draft_runner import DraftRequest, DraftRunner
from dspark.engine.target import Target
from dspark.engine.target_runner import TargetRunner

NEW_TOKENS = 2  # features that a round of usual length leaves for the drafter to store
READ_TOKENS = 512  # of the context, in one pass
USUAL_TOKENS = 4  # of a request in a step: the anchor and what is verified
LONG_REQUESTS = 4
"""So many requests have long contexts too: the attention of a single one is too little work for all cores."""
LEAST_RISE = 2.0  # of contexts: between two that are nearly alike there is nothing but noise


@dataclass(frozen=True)
class BatchShape:
    """A batch to time, as the tokens of each request in it."""

    lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def num_requests(self) -> int:
        return len(self.lengths)


def batch_shapes(batch_tokens: Sequence[int], *, tokens_per_request: int, max_requests: int) -> list[BatchShape]:
    """Each number of tokens as one request, as requests of `tokens_per_request` and as requests of one token."""
    shapes = []
    for num_tokens in sorted(batch_tokens):
        numbers = {1, min(num_tokens // tokens_per_request, max_requests)}
        if num_tokens <= max_requests:
            numbers.add(num_tokens)
        for num_requests in sorted(numbers - {0}):
            tokens, rest = divmod(num_tokens, num_requests)
            shapes.append(BatchShape((tokens + 1,) * rest + (tokens,) * (num_requests - rest)))
    return shapes


class StepTimer:
    """tables: of one request each, with room for the context and for what is to be timed behind it, see `page_tables`.

    All requests have the same context, each in pages of its own. long_context_tokens: of the first requests where that
    is asked for, `num_long` of them: those of the first LONG_REQUESTS whose tables have room. None where it is not at
    least twice the usual one, or the target keeps contexts in no pages, from which they could not be taken back.
    """

    def __init__(
        self,
        target: Target,
        drafts: DraftRunner | None,
        tables: Sequence[PageTable],
        *,
        context_tokens: int,
        seed: int,
        long_context_tokens: int = 0,
    ) -> None:
        self.context_tokens = context_tokens
        self.long_context_tokens = long_context_tokens
        self._target, self._drafts, self._tables = target, drafts, list(tables)
        self.num_long = self._num_long()
        generator = torch.Generator().manual_seed(seed)
        longest = max(table.capacity_tokens for table in tables)
        ids = torch.randint(target.vocabulary_size, (longest,), generator=generator)
        self._ids: list[int] = ids.tolist()
        read = max(context_tokens, long_context_tokens) if self.num_long else context_tokens
        self._features = self._read_context(self._tables[0], read)[:context_tokens]
        self._share_context(self._tables[1 : self.num_long], read)
        self._share_context(self._tables[max(1, self.num_long) :], context_tokens)
        self._set_contexts(context_tokens)
        self._memories = self._draft_memories(context_tokens)

    @torch.inference_mode()
    def verify_s(self, shape: BatchShape, *, is_long: bool = False) -> float:
        """Seconds of one target step, its greedy choices included. is_long: with long contexts."""
        assert not is_long or shape.num_requests <= self.num_long, "more requests than have long contexts"
        if is_long:
            self._set_contexts(self.long_context_tokens)
        pieces = [
            Piece(table, self._ids[:length], num_logits=length)
            for table, length in zip(self._tables, shape.lengths, strict=False)
        ]
        started = self._now()
        self._target.run(self._target.flatten(pieces)).choices()
        seconds = self._now() - started
        self._set_contexts(self.context_tokens)
        return seconds

    @torch.inference_mode()
    def draft_s(self, num_requests: int) -> float:
        """Seconds of drafting a whole block for so many requests, the features of their last round being stored.

        Each time their contexts grow by what is stored.
        """
        assert self._drafts is not None, "there is no drafter to time"
        memories = self._memories[:num_requests]
        for memory in memories:
            self._drafts.extend(memory, self._ids[:NEW_TOKENS], self._features[:NEW_TOKENS])
        requests = [DraftRequest(memory, self._ids[0], self._drafts.block_size, 0.0, None) for memory in memories]
        started = self._now()
        for proposal in self._drafts.propose(requests):
            proposal.token_ids.tolist()
        return self._now() - started

    @torch.inference_mode()
    def _read_context(self, table: PageTable, num_tokens: int) -> Tensor:
        """Read a request's context; its features, [n, m*d], or nothing without a drafter to want them."""
        features = []
        for start in range(0, num_tokens, READ_TOKENS):
            chunk = self._ids[start : min(start + READ_TOKENS, num_tokens)]
            output = self._target.run(self._target.flatten([Piece(table, chunk, num_logits=1)]))
            table.num_tokens += len(chunk)
            if output.hidden is not None:
                features.append(output.hidden)
        return torch.cat(features) if features else torch.empty(0)

    @torch.inference_mode()
    def _share_context(self, others: Sequence[PageTable], num_tokens: int) -> None:
        """Copy the first request's keys and values to others: reading them anew would give the same."""
        first = self._tables[0]
        if not isinstance(self._target, TargetRunner):  # they lie in no pages
            for table in others:
                self._read_context(table, num_tokens)
            return
        kv_cache = self._target.kv_cache
        for table in others:
            slots = torch.tensor(table.slots(0, num_tokens), device=self._target.device)
            for layer in range(len(kv_cache.keys)):
                keys, values = kv_cache.read(layer, first, 0, num_tokens)
                kv_cache.write(layer, slots, keys.clone(), values.clone())
            table.num_tokens = num_tokens

    @torch.inference_mode()
    def _draft_memories(self, num_tokens: int) -> list[Any]:
        """The drafter's side of the context."""
        if self._drafts is None:
            return []
        memories = [self._drafts.new_memory(table) for table in self._tables]
        for memory in memories:
            self._drafts.extend(memory, self._ids[:num_tokens], self._features)
        return memories

    def _num_long(self) -> int:
        if not isinstance(self._target, TargetRunner) or self.long_context_tokens < LEAST_RISE * self.context_tokens:
            return 0
        needed = self.long_context_tokens + USUAL_TOKENS
        first = [table.capacity_tokens >= needed for table in self._tables[:LONG_REQUESTS]]
        return (*first, False).index(False) if self.long_context_tokens else 0

    def _set_contexts(self, num_tokens: int) -> None:
        """Of those that may have a long one."""
        for table in self._tables[: max(1, self.num_long)]:
            table.num_tokens = num_tokens

    def _now(self) -> float:
        if self._target.device.type == "cuda":
            torch.cuda.synchronize(self._target.device)
        return time.perf_counter()


def page_tables(num_tokens: Sequence[int], page_size: int) -> list[PageTable]:
    """Pages for requests of so many tokens each, from a pool that holds just them."""
    num_pages = [-(-tokens // page_size) for tokens in num_tokens]
    pool = PagePool(sum(num_pages))
    return [PageTable(pool.allocate(pages), page_size) for pages in num_pages]
