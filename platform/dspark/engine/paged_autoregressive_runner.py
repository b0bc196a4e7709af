"""EAGLE-3 and MTP for many requests at once, their context in paged memory under the target's page tables.

Legend: R requests, N rows of a pass, G block size, H query heads, K key/value heads, D head width, d hidden size,
m captured layers.

    row i         0 … s-1      s … p-1                          p … p+G-2
                  stored       new: the target's features,      chain: draft tokens, written over in every round
                               each with the token behind it    (one module; several pass over s … p-1 again)

The features of the newest committed token, at p, are not there yet: it is read as the token behind row p-1. A row is
stored for good when all tokens it reads are committed, those of the deepest module too: s = p, or p - (modules - 1).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from dspark.attention import cpu
from dspark.attention.choice import cuda_planner
from dspark.attention.entry import Planner, StepPlan
from dspark.attention.kv_cache import LayerShape, PagedKVCache
from dspark.attention.page_pool import PageTable
from dspark.attention.paged import attend, causal_mask
from dspark.drafters.autoregressive import Attend, AutoregressiveDrafter
from dspark.drafters.drafting import check_length
from dspark.engine.draft_runner import DraftRequest
from dspark.engine.draws import Draws
from dspark.engine.fused_chain import FusedChain
from dspark.engine.pending_features import PendingFeatures
from dspark.speculation.proposal import Proposal

MOST_ROWS = 4096  # of contexts that one call passes over beside drafting: it keeps room for them from then on
MAX_REPEATED_ROWS = 16  # rows that every round passes over again, where fewer tokens are drafted than there are modules


@dataclass
class AutoregressiveMemory:
    """A request's context: its ids, num_stored rows in the pages, and the features of the rows behind them.

    newest_state: [d], the drafter's own state at row num_stored - 1, from which a chain goes on.
    """

    table: PageTable
    token_ids: list[int] = field(default_factory=list)
    num_stored: int = 0
    pending: PendingFeatures = field(default_factory=PendingFeatures)
    newest_state: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """p: rows whose features and next token are there."""
        return min(self.num_stored + self.pending.num_rows, len(self.token_ids) - 1)

    @property
    def new_parts(self) -> list[Tensor]:
        """Features of the rows that are not stored, in pieces."""
        num_new = self.num_rows - self.num_stored
        parts = self.pending.parts
        return parts if num_new == self.pending.num_rows else [torch.cat(parts)[:num_new]]


@dataclass(frozen=True)
class Rows:
    """Rows of several requests, one after another: each has those at positions start … stop - 1."""

    tables: list[PageTable]
    spans: list[tuple[int, int]]

    @property
    def boundaries(self) -> list[int]:
        """Where each request's rows start among all, and the end."""
        return [0, *accumulate(stop - start for start, stop in self.spans)]

    @property
    def positions(self) -> list[int]:
        return [position for start, stop in self.spans for position in range(start, stop)]

    @property
    def slots(self) -> list[int]:
        """Where their keys and values lie."""
        return [slot for table, span in zip(self.tables, self.spans, strict=True) for slot in table.slots(*span)]


class PagedAutoregressiveRunner:
    """A pass over all requests' new rows, then one per further draft token over a row, or a few rows, of each."""

    has_confidence = False

    def __init__(self, drafter: AutoregressiveDrafter, *, num_pages: int, page_size: int) -> None:
        config, weight = drafter.config, drafter.backbone.lm_head.weight
        self.kind = config.architecture
        self.block_size = config.block_size
        self.target_layer_ids = config.target_layer_ids
        self.max_context_tokens: int | None = config.max_position_embeddings
        self.num_reread: int | None = 1
        self.num_ids_behind = config.num_modules  # a row reads the token behind it, in each further module one more
        self._backbone = drafter.backbone
        self._num_modules = config.num_modules
        self._vocab_size = config.vocab_size
        self._device, self._dtype = weight.device, weight.dtype
        self.kv_cache = PagedKVCache(
            [LayerShape(*drafter.backbone.kv_shape)] * config.num_modules,
            num_slots=num_pages * page_size,
            dtype=weight.dtype,
            device=weight.device,
        )
        self._page_size = page_size
        self._planner: Planner | None = cpu.AttentionPlan if cpu.is_served(self.kv_cache) else None
        self._fused = FusedChain.of(drafter, self.kv_cache)

    def use_attention(self, name: str) -> None:
        """Run on what the target runs on, where that serves its memory."""
        planner = cuda_planner(name, self.kv_cache, self._page_size)
        if planner is not None:
            self._planner, self._fused = planner, None

    @property
    def bytes_per_request(self) -> int:
        """Of memory outside of pages."""
        return 0

    def new_memory(self, table: PageTable, stored_ids: Sequence[int] = ()) -> AutoregressiveMemory:
        return AutoregressiveMemory(table, list(stored_ids), num_stored=len(stored_ids))

    def num_stored(self, memory: AutoregressiveMemory) -> int:
        return memory.num_stored

    @torch.inference_mode()
    def extend(self, memory: AutoregressiveMemory, committed_ids: Sequence[int], hidden: Tensor | None) -> None:
        """Keep ids and features; rows are stored when the request is drafted for, all requests' in one pass."""
        memory.token_ids += committed_ids
        if hidden is not None and hidden.shape[0]:
            memory.pending.append(hidden)
        if memory.pending.are_many:
            self.store(memory)

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        if not requests:
            return []
        for request in requests:
            check_length(request.max_tokens, self.block_size)
        memories: list[AutoregressiveMemory] = [request.memory for request in requests]
        if not any(request.max_tokens for request in requests):
            for memory in memories:
                self.store(memory)
            return [Proposal.nothing(self._device) for _ in requests]
        if self._fused is not None and self._fused.draws(requests):
            return self._propose_fused(self._fused, requests)
        draws = Draws(requests, self._backbone.d2t, vocab_size=self._vocab_size)
        passes = self._chain(memories, draws) if self._num_modules == 1 else self._modules(memories, draws)
        for _, states in zip(range(draws.num_slots), passes, strict=False):
            draws.draw(self._backbone.base_logits(self._backbone.head_inputs(states)))
        for memory in memories:
            if memory.pending.num_rows > MAX_REPEATED_ROWS:
                self.store(memory)
        return draws.proposals()

    def _propose_fused(self, fused: FusedChain, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """The same in one call."""
        memories: list[AutoregressiveMemory] = [request.memory for request in requests]
        if sum(memory.num_rows - memory.num_stored for memory in memories) > MOST_ROWS:
            for memory in memories:
                self.store(memory)
        ends = [m.num_rows + max(0, r.max_tokens - 1) for m, r in zip(memories, requests, strict=True)]
        spans = [(memory.num_stored, end) for memory, end in zip(memories, ends, strict=True)]
        rows = Rows([memory.table for memory in memories], spans)
        plan = cpu.AttentionPlan(rows.tables, spans, torch.tensor(rows.slots, dtype=torch.long))
        ids = [memory.token_ids[memory.num_stored + 1 : memory.num_rows + 1] for memory in memories]
        parts = [memory.new_parts for memory in memories]
        held = [memory.newest_state for memory in memories]
        proposals, newest = fused.propose(requests, plan, parts, ids, held)
        for memory, state in zip(memories, newest.unbind(), strict=True):
            self._settle(memory, None)
            memory.newest_state = state
        return proposals

    def _chain(self, memories: Sequence[AutoregressiveMemory], draws: Draws) -> Iterator[Tensor]:
        """States [R, d] to draw each slot from: the context's last row, then a row per draft token."""
        new = [memory for memory in memories if memory.num_rows > memory.num_stored]
        if new:
            rows = self._new_rows(new)
            states = self._first_pass(new, rows)
            for memory, own in zip(new, _by_request(states, rows), strict=True):
                self._settle(memory, own)
        newest = [memory.newest_state for memory in memories if memory.newest_state is not None]
        assert len(newest) == len(memories), "a request is drafted for before its context holds a token"
        states, position = torch.stack(newest), [memory.num_stored for memory in memories]
        while True:
            yield states
            rows = Rows([memory.table for memory in memories], [(p, p + 1) for p in position])
            states = self._advance(0, rows, draws.token_ids[-1], states)
            position = [p + 1 for p in position]

    def _modules(self, memories: Sequence[AutoregressiveMemory], draws: Draws) -> Iterator[Tensor]:
        """States [R, d] to draw each slot from: the last row after each module, over tokens one further on."""
        rows = self._new_rows(memories)
        last = torch.tensor([end - 1 for end in rows.boundaries[1:]], device=self._device)
        states = self._first_pass(memories, rows)
        yield states[last]
        for module in range(1, self._num_modules):
            drafted = torch.stack(draws.token_ids, dim=1)
            ids = []
            for memory, (start, stop), own in zip(memories, rows.spans, drafted, strict=True):
                committed = torch.tensor(memory.token_ids[start + 1 : stop + 1], device=self._device)
                ids.append(torch.cat([committed, own])[start - stop :])
            states = self._advance(module, rows, torch.cat(ids), states)
            if module == self._num_modules - 1:
                for memory in memories:
                    self._settle(memory, None)
            yield states[last]

    @torch.inference_mode()
    def store(self, memory: AutoregressiveMemory) -> None:
        """Store what is settled of a request that is not drafted for."""
        settled = self._num_settled(memory)
        if settled <= memory.num_stored:
            return
        rows = Rows([memory.table], [(memory.num_stored, settled)])
        states = self._first_pass([memory], rows)
        for module in range(1, self._num_modules):
            ids = memory.token_ids[memory.num_stored + 1 + module : settled + 1 + module]
            states = self._advance(module, rows, torch.tensor(ids, device=self._device), states)
        self._settle(memory, states)

    def _new_rows(self, memories: Sequence[AutoregressiveMemory]) -> Rows:
        return Rows([m.table for m in memories], [(m.num_stored, m.num_rows) for m in memories])

    def _num_settled(self, memory: AutoregressiveMemory) -> int:
        """Rows that no later token can change."""
        return max(memory.num_stored, min(memory.num_rows, len(memory.token_ids) - self._num_modules))

    def _settle(self, memory: AutoregressiveMemory, states: Tensor | None) -> None:
        """Forget the features of settled rows. states: [n, d] of the rows from num_stored on, where a chain starts."""
        settled = self._num_settled(memory)
        count = settled - memory.num_stored
        if states is not None and count:
            memory.newest_state = states[count - 1]
        memory.pending.drop_oldest(count)
        memory.num_stored = settled

    def _first_pass(self, memories: Sequence[AutoregressiveMemory], rows: Rows) -> Tensor:
        """States of the rows after the first module: [N, d]."""
        features, ids = [], []
        for memory, (start, stop) in zip(memories, rows.spans, strict=True):
            features.append(torch.cat(memory.pending.parts)[: stop - start])
            ids += memory.token_ids[start + 1 : stop + 1]
        states = self._backbone.context_states(torch.cat(features))
        return self._advance(0, rows, torch.tensor(ids, device=self._device), states)

    def _advance(self, module: int, rows: Rows, token_ids: Tensor, states: Tensor) -> Tensor:
        """States of the rows after a module, its keys and values being stored: [N, d]. token_ids: [N]."""
        positions = torch.tensor(rows.positions, device=self._device)
        attention = self._attention(module, rows)
        return self._backbone.advance(module, token_ids[None], states[None], positions[None], attention)[0]

    def _attention(self, module: int, rows: Rows) -> Attend:
        """Store the rows' keys and values, then let each row see its request's up to itself."""
        slot_mapping = torch.tensor(rows.slots, device=self._device)
        if self._planner is not None:
            return self._planned(module, self._planner(rows.tables, rows.spans, slot_mapping))
        pieces = list(zip(rows.tables, rows.spans, pairwise(rows.boundaries), strict=True))

        def run(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
            self.kv_cache.write(module, slot_mapping, keys[0], values[0])
            mixed = []
            for table, (start, stop), (first, last) in pieces:
                mask = None
                if stop - start > 1:
                    mask = causal_mask(start, stop, 0, sliding_window=None, dtype=self._dtype, device=self._device)
                seen = self.kv_cache.read(module, table, 0, stop)
                mixed.append(attend(queries[0, :, first:last], *seen, mask, scaling=scaling))
            return torch.cat(mixed, dim=1).transpose(0, 1).unsqueeze(0)

        return run

    def _planned(self, module: int, plan: StepPlan) -> Attend:
        """The same in one call."""
        held = self.kv_cache.keys[module], self.kv_cache.values[module]

        def run(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
            new = keys[0].transpose(0, 1), values[0].transpose(0, 1)
            return plan.attend(queries[0].transpose(0, 1), new, held, scaling=scaling).unsqueeze(0)

        return run


def _by_request(states: Tensor, rows: Rows) -> list[Tensor]:
    return [states[first:last] for first, last in pairwise(rows.boundaries)]
