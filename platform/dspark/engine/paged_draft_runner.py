"""DSpark and DFlash for many requests at once.

Layers that see all context keep it in paged memory under the target's page tables; layers with a sliding window keep
the newest tokens in a ring of the request's own, whose size does not depend on the context's.

Legend: R requests, G block size, H query heads, K key/value heads, D head width, V' draft vocabulary, d hidden size,
m captured layers, n context tokens to append.

    position     0 … p-1                   p … p+G-1
    drafter KV   context: from features    the block's own, written over in every round
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from dspark.attention import cpu
from dspark.attention.choice import cuda_planner
from dspark.attention.entry import Planner, StepPlan
from dspark.attention.kv_cache import LayerShape, PagedKVCache
from dspark.attention.page_pool import PageTable
from dspark.attention.paged import attend
from dspark.attention.window_ring import WindowRing
from dspark.drafters.dflash import DFlashDrafter
from dspark.drafters.drafting import check_length
from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.layers import Attend
from dspark.engine.draft_memory import DraftMemory
from dspark.engine.draft_runner import DraftRequest
from dspark.engine.draws import Draws
from dspark.engine.fused_drafter import FusedDrafter, is_served
from dspark.engine.fused_layers import BlockAttention, fuse_draft_layers
from dspark.speculation.proposal import Proposal

MOST_ROWS = 4096  # features that one call stores beside drafting: it keeps room for them from then on

Write = Callable[[int, Tensor, Tensor], None]  # layer, keys and values [K, n, D] of the tokens it was made for


class PagedDraftRunner:
    """All requests' blocks in one pass of the backbone; then the sequential head, slot by slot, over all of them."""

    def __init__(self, drafter: DSparkDrafter | DFlashDrafter, *, num_pages: int, page_size: int) -> None:
        config = drafter.config
        weight = drafter.backbone.fc.weight
        self.kind: str = config.architecture
        self.block_size = config.block_size
        self.target_layer_ids = config.target_layer_ids
        self.has_confidence = config.enable_confidence_head
        self._drafter = drafter
        self._backbone = drafter.backbone
        self._scaling = config.attention_scaling
        self._device = weight.device
        shape = LayerShape(config.num_key_value_heads, config.head_dim, config.head_dim)
        windows = [config.window_of(layer) for layer in range(config.num_hidden_layers)]
        self._is_sliding = [window is not None for window in windows]
        # A layer's place among those that keep their context where it does.
        self._place = [self._is_sliding[:layer].count(sliding) for layer, sliding in enumerate(self._is_sliding)]
        self._ring_shapes = [shape] * self._is_sliding.count(True)
        self._window = config.sliding_window or 0
        self.max_context_tokens: int | None = config.max_position_embeddings
        # Rings are not in pages: what the first slot sees of them, the window's context tokens, is given anew.
        self.num_reread: int | None = self._window - 1 if any(self._is_sliding) else 1
        self.num_ids_behind = 0
        self.kv_cache = PagedKVCache(
            [shape] * self._is_sliding.count(False),
            num_slots=num_pages * page_size,
            dtype=weight.dtype,
            device=weight.device,
        )
        self._page_size = page_size
        self._planner: Planner | None = None
        if not all(self._is_sliding) and cpu.is_served(self.kv_cache):
            self._planner = cpu.AttentionPlan
            fuse_draft_layers(self._backbone.layers)
        self._fused = FusedDrafter(drafter, self.kv_cache) if is_served(drafter, self.kv_cache) else None

    def use_attention(self, name: str) -> None:
        """Run layers that see all context on what the target runs on, where that serves them."""
        planner = None if all(self._is_sliding) else cuda_planner(name, self.kv_cache, self._page_size)
        if planner is not None:
            self._planner, self._fused = planner, None

    @property
    def _ring_slots(self) -> int:
        """What slot 0 sees, window - 1 context tokens, and the block."""
        return self._window - 1 + self.block_size

    @property
    def bytes_per_request(self) -> int:
        """Of memory outside of pages: the ring's."""
        per_slot = sum(shape.num_kv_heads * (shape.key_dim + shape.value_dim) for shape in self._ring_shapes)
        return per_slot * self._ring_slots * self._backbone.fc.weight.element_size()

    def new_memory(self, table: PageTable, stored_ids: Sequence[int] = ()) -> DraftMemory:
        memory = DraftMemory(table, num_tokens=len(stored_ids))
        if self._ring_shapes:
            dtype = self._backbone.fc.weight.dtype
            memory.ring = WindowRing(self._ring_shapes, num_slots=self._ring_slots, dtype=dtype, device=self._device)
        return memory

    def num_stored(self, memory: DraftMemory) -> int:
        return memory.num_tokens

    @torch.inference_mode()
    def store(self, memory: DraftMemory) -> None:
        if memory.pending.num_rows:
            self._store([memory])

    def extend(self, memory: DraftMemory, committed_ids: Sequence[int], hidden: Tensor | None) -> None:
        """Keep the features; they are stored when the request is drafted for, all requests' in one pass."""
        if hidden is None or not hidden.shape[0]:
            return
        memory.pending.append(hidden)
        if memory.pending.are_many:
            self._store([memory])

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        if not requests:
            return []
        for request in requests:
            check_length(request.max_tokens, self.block_size)
        num_slots = max(request.max_tokens for request in requests)
        if self._fused is not None and num_slots:
            return self._propose_fused(self._fused, requests, num_slots)
        self._store([request.memory for request in requests if request.memory.pending.num_rows])
        if not num_slots:
            return [Proposal.nothing(self._device) for _ in requests]
        return self._draw(requests, self._block_states(requests)[:, :num_slots])

    def _propose_fused(self, fused: FusedDrafter, requests: Sequence[DraftRequest], num_slots: int) -> list[Proposal]:
        """The same in one call."""
        memories: list[DraftMemory] = [request.memory for request in requests]
        if sum(memory.pending.num_rows for memory in memories) > MOST_ROWS:
            self._store([memory for memory in memories if memory.pending.num_rows])
        starts = [memory.num_tokens + memory.pending.num_rows for memory in memories]
        plan = self._plan(memories, starts, [start + self.block_size for start in starts])
        assert isinstance(plan, cpu.AttentionPlan)
        return (
            fused.propose(requests, plan)
            if fused.draws(requests)
            else self._draw(requests, fused.states(requests, plan, num_slots))
        )

    def _store(self, memories: Sequence[DraftMemory]) -> None:
        """Turn pending features into keys and values of the context, in one pass."""
        if not memories:
            return
        starts = [self._take_pending(memory) for memory in memories]
        pending = torch.cat([part for memory in memories for part in memory.pending.parts])
        features = self._backbone.context_features(pending)
        stops = [start + memory.pending.num_rows for start, memory in zip(starts, memories, strict=True)]
        positions = [p for start, stop in zip(starts, stops, strict=True) for p in range(start, stop)]
        keys_values = self._backbone.context_keys_values(features, torch.tensor(positions, device=self._device))
        write = self._writer(memories, starts, stops)
        for layer, (keys, values) in enumerate(keys_values):
            write(layer, keys.transpose(0, 1), values.transpose(0, 1))
        lasts = accumulate(stop - start for start, stop in zip(starts, stops, strict=True))
        for memory, stop, last in zip(memories, stops, lasts, strict=True):
            memory.note_stored(stop, features[last - 1])

    def _take_pending(self, memory: DraftMemory) -> int:
        """Position of the first pending token; where all layers slide those that left every window are dropped."""
        start = memory.num_tokens
        if all(self._is_sliding) and memory.pending.num_rows > self._ring_slots:
            num_gone = memory.pending.num_rows - self._ring_slots
            memory.pending.drop_oldest(num_gone)
            start += num_gone
        return start

    def _writer(self, memories: Sequence[DraftMemory], starts: Sequence[int], stops: Sequence[int]) -> Write:
        """Stores what the memories' tokens at positions start … stop-1, one memory behind the other, are in a layer."""
        spans = list(zip(memories, starts, stops, strict=True))
        slot_mapping = torch.empty(0)
        if not all(self._is_sliding):
            slots = [slot for memory, start, stop in spans for slot in memory.table.slots(start, stop)]
            slot_mapping = torch.tensor(slots, device=self._device)
        lengths = [stop - start for _, start, stop in spans]

        def write(layer: int, keys: Tensor, values: Tensor) -> None:
            place = self._place[layer]
            if not self._is_sliding[layer]:
                self.kv_cache.write(place, slot_mapping, keys, values)
                return
            for (memory, _, stop), own_keys, own_values in zip(
                spans, keys.split(lengths, dim=1), values.split(lengths, dim=1), strict=True
            ):
                assert memory.ring is not None
                newest = min(own_keys.shape[1], self._ring_slots)
                memory.ring.write(place, stop - newest, own_keys[:, -newest:], own_values[:, -newest:])

        return write

    def _block_states(self, requests: Sequence[DraftRequest]) -> Tensor:
        """[R, G, d]: hidden states of every slot of every block."""
        memories: list[DraftMemory] = [request.memory for request in requests]
        newest = [memory.newest_feature for memory in memories]
        assert all(feature is not None for feature in newest), "a request is drafted for before its context is stored"
        ends = [memory.num_tokens + self.block_size for memory in memories]
        starts = [memory.num_tokens for memory in memories]
        write = self._writer(memories, starts, ends)
        masks = [self._window_mask(memory) for memory in memories]
        plan = self._plan(memories, starts, ends)

        def attention_of(layer: int) -> Attend:
            place = self._place[layer]
            if plan is not None and not self._is_sliding[layer]:
                return BlockAttention(plan, self.kv_cache.keys[place], self.kv_cache.values[place], self._scaling)

            def run(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
                write(layer, *(x.flatten(0, 1).transpose(0, 1) for x in (keys, values)))  # [K, R*G, D]
                mixed = []
                for row, memory, mask in zip(queries, memories, masks, strict=True):
                    seen = self._read(layer, memory)
                    mask = mask if self._is_sliding[layer] else None
                    mixed.append(attend(row.transpose(0, 1), *seen, mask, scaling=self._scaling).transpose(0, 1))
                return torch.stack(mixed)

            return run

        return self._backbone.draft_states_flat(
            torch.tensor([request.anchor_id for request in requests], device=self._device),
            torch.tensor(starts, device=self._device),
            torch.stack([feature for feature in newest if feature is not None]),
            attention_of,
        )

    def _plan(self, memories: Sequence[DraftMemory], starts: list[int], ends: list[int]) -> StepPlan | None:
        """Each block sees its request's context and all of itself; None attends to one after the other."""
        if self._planner is None:
            return None
        spans = list(zip(starts, ends, strict=True))
        tables = [memory.table for memory in memories]
        slots = [slot for table, span in zip(tables, spans, strict=True) for slot in table.slots(*span)]
        return self._planner(tables, spans, torch.tensor(slots, device=self._device), is_causal=False)

    def _read(self, layer: int, memory: DraftMemory) -> tuple[Tensor, Tensor]:
        """Keys and values of a request's context and block in a layer: [K, n, D] each."""
        stop = memory.num_tokens + self.block_size
        if not self._is_sliding[layer]:
            return self.kv_cache.read(self._place[layer], memory.table, 0, stop)
        assert memory.ring is not None
        return memory.ring.read(self._place[layer], stop)

    def _draw(self, requests: Sequence[DraftRequest], h: Tensor) -> list[Proposal]:
        """Left to right, all requests at once. h: [R, l, d]."""
        base = self._backbone.base_logits(h)  # [R, l, V']
        draws = Draws(requests, self._backbone.d2t, vocab_size=self._drafter.config.vocab_size)
        previous = torch.tensor([request.anchor_id for request in requests], device=self._device)
        embedded_rows, head_state = [], None
        markov_head = self._drafter.markov_head if isinstance(self._drafter, DSparkDrafter) else None
        for slot in range(h.shape[1]):
            logits = base[:, slot]
            if markov_head is not None:
                embedded = markov_head.embed(previous)
                embedded_rows.append(embedded)
                vector, head_state = markov_head.step(h[:, slot], embedded, head_state)
                logits = logits + markov_head.bias(vector)[:, : logits.shape[1]].float()
            draws.draw(logits)
            previous = draws.token_ids[-1]
        return draws.proposals(self._confidence(h, embedded_rows))

    def _confidence(self, h: Tensor, embedded_rows: list[Tensor]) -> Tensor | None:
        """[R, l] float32 logits, or None without a head."""
        if not isinstance(self._drafter, DSparkDrafter) or self._drafter.confidence_head is None:
            return None
        return self._drafter.confidence_head(h, torch.stack(embedded_rows, dim=1) if embedded_rows else None)

    def _window_mask(self, memory: DraftMemory) -> Tensor | None:
        """[G, n]: 0 or -inf; a window narrows the context slot by slot and never the block. None without one."""
        if memory.ring is None:
            return None
        stop = memory.num_tokens + self.block_size
        positions = memory.ring.positions(stop)
        slots = torch.arange(memory.num_tokens, stop, device=self._device).unsqueeze(1)
        hidden = (positions < memory.num_tokens) & (slots - positions >= self._window)
        dtype = self._backbone.fc.weight.dtype
        return torch.zeros(hidden.shape, dtype=dtype, device=self._device).masked_fill(hidden, -torch.inf)
