"""Answers of a target to many prompts at once: rows join and leave the batch as they come and go."""

import hashlib
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from dspark.data.slot_cache import SlotCache, supports_slots, use_single_query_attention
from dspark.engine.request import FinishReason, commit
from dspark.engine.sampling import SamplingParams
from dspark.engine.supports import ShortlistSampler
from dspark.errors import one_line

READ_TOKENS = 1024  # prompt tokens, padding included, read in one forward pass


@dataclass(frozen=True)
class DecodeRequest:
    """A prompt to continue. Equal (prompt_ids, seed) draw equal random numbers, in whatever batch.

    messages: what prompt_ids were rendered from, for a server that renders them anew.
    """

    key: str
    prompt_ids: list[int]
    max_tokens: int
    seed: int
    messages: Sequence[Mapping[str, str]] = ()


@dataclass(frozen=True)
class Completion:
    """The continuation of request `key`; without a finish reason, `error` says why there is none."""

    key: str
    output_ids: list[int]
    finish_reason: FinishReason | None
    error: str | None = None


class Decoder(Protocol):
    """Takes requests, and at each step makes some progress on them."""

    def submit(self, request: DecodeRequest, *, first: bool = False) -> None:
        """Queue a request, `first` ahead of those that wait."""
        ...

    def step(self) -> list[Completion]:
        """Advance; the requests that ended in this step."""
        ...

    @property
    def is_idle(self) -> bool: ...


@dataclass(frozen=True)
class DecodeRules:
    """What holds for all requests. Token ids at or above `vocabulary_size` are never emitted."""

    sampling: SamplingParams
    stop_ids: Collection[int]
    vocabulary_size: int


def make_decoder(model: PreTrainedModel, rules: DecodeRules, *, num_slots: int, max_kv_tokens: int) -> Decoder:
    """A batched decoder where the model's layers allow it, else one that takes row after row."""
    if supports_slots(model.config.get_text_config(decoder=True)):
        return BatchDecoder(model, rules, num_slots=num_slots, max_kv_tokens=max_kv_tokens)
    return SequentialDecoder(model, rules)


def derive_seed(seed: int, key: str, turn: int) -> int:
    """A 63-bit seed of one turn of one row."""
    digest = hashlib.sha256(f"{seed}\0{key}\0{turn}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@dataclass
class _Row:
    request: DecodeRequest
    uniforms: Tensor  # [max_tokens] float64, one number per token to draw
    output_ids: list[int] = field(default_factory=list)

    @property
    def reserved_tokens(self) -> int:
        return len(self.request.prompt_ids) + self.request.max_tokens

    def advance(self, token_id: int, stop_ids: Collection[int]) -> Completion | None:
        """Append a token; the completion if it is the last."""
        request = self.request
        result = commit(
            [token_id], num_generated=len(self.output_ids), stop_ids=stop_ids, max_tokens=request.max_tokens
        )
        self.output_ids.extend(result.kept)
        if result.finish_reason is None:
            return None
        return Completion(request.key, self.output_ids, result.finish_reason)


def _new_row(request: DecodeRequest) -> _Row:
    generator = torch.Generator().manual_seed(request.seed)
    return _Row(request, torch.rand(request.max_tokens, generator=generator, dtype=torch.float64))


class BatchDecoder:
    """Decodes up to `num_slots` rows together and reads a waiting prompt into each slot that falls free.

    num_slots * longest row stays within `max_kv_tokens` (a single row may exceed it), which bounds the memory.
    """

    def __init__(self, model: PreTrainedModel, rules: DecodeRules, *, num_slots: int, max_kv_tokens: int) -> None:
        use_single_query_attention(model)
        self.model = model
        self.rules = rules
        self.num_slots = num_slots
        self.max_kv_tokens = max_kv_tokens
        num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
        self.slots = SlotCache(num_layers, max_slots=num_slots, max_tokens=max_kv_tokens)
        self.sampler = ShortlistSampler(rules.sampling)
        self.waiting: deque[DecodeRequest] = deque()
        self.rows: list[_Row] = []

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.rows)

    def submit(self, request: DecodeRequest, *, first: bool = False) -> None:
        if first:
            self.waiting.appendleft(request)
        else:
            self.waiting.append(request)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        completions = self._read(self._next_group())
        if self.rows:
            completions += self._decode()
        return completions

    def _next_group(self) -> list[DecodeRequest]:
        """Waiting requests that fit into the free slots, the memory and one forward pass."""
        group: list[DecodeRequest] = []
        longest_prompt, longest_row = 0, max((row.reserved_tokens for row in self.rows), default=0)
        while self.waiting and len(self.rows) + len(group) < self.num_slots:
            request = self.waiting[0]
            longest_prompt = max(longest_prompt, len(request.prompt_ids))
            longest_row = max(longest_row, len(request.prompt_ids) + request.max_tokens)
            num_rows = len(self.rows) + len(group) + 1
            if num_rows > 1 and num_rows * longest_row > self.max_kv_tokens:
                break
            if group and longest_prompt * (len(group) + 1) > READ_TOKENS:
                break
            group.append(self.waiting.popleft())
        return group

    def _read(self, group: list[DecodeRequest]) -> list[Completion]:
        """Read prompts into slots and draw their first tokens. One that raises ends with an error, alone."""
        if not group:
            return []
        rows = [_new_row(request) for request in group]
        lengths = [len(request.prompt_ids) for request in group]
        self.slots.begin_read(lengths)
        try:
            logits = self._forward_prompts(group, lengths)
        except Exception as error:
            self.slots.end_read(keep=False)
            if len(group) == 1:
                return [Completion(group[0].key, [], None, f"{type(error).__name__}: {one_line(error)}")]
            return [completion for request in group for completion in self._read([request])]
        self.slots.end_read(keep=True)
        first = len(self.rows)
        self.rows.extend(rows)
        return self._advance(logits, first)

    def _forward_prompts(self, group: list[DecodeRequest], lengths: list[int]) -> Tensor:
        """Logits after each prompt, [rows, V]. Padding is on the right, where causal attention never looks."""
        device = self.model.device
        input_ids = torch.zeros(len(group), max(lengths), dtype=torch.int64)
        for row, request in enumerate(group):
            input_ids[row, : lengths[row]] = torch.tensor(request.prompt_ids)
        last_positions = torch.tensor(lengths, device=device)[:, None] - 1
        output = self.model(
            input_ids=input_ids.to(device),
            position_ids=torch.arange(max(lengths), device=device)[None],
            cache=self.slots,
            use_cache=True,
            logits_to_keep=last_positions,
        )
        return output.logits[:, 0]

    def _decode(self) -> list[Completion]:
        device = self.model.device
        positions = self.slots.begin_decode(device)
        output = self.model(
            input_ids=torch.tensor([row.output_ids[-1:] for row in self.rows], device=device),
            position_ids=positions[:, None],
            attention_mask=self.slots.mask(dtype=self.model.dtype),
            cache=self.slots,
            use_cache=True,
            logits_to_keep=1,
        )
        return self._advance(output.logits[:, 0], 0)

    def _advance(self, logits: Tensor, first: int) -> list[Completion]:
        """Draw a token for each row from `first` on, and let the rows that end leave their slots."""
        rows = self.rows[first:]
        token_ids = _draw(self.sampler, self.rules, logits, rows)
        completions: list[Completion] = []
        ended: list[int] = []
        for index, (row, token_id) in enumerate(zip(rows, token_ids, strict=True), start=first):
            completion = row.advance(token_id, self.rules.stop_ids)
            if completion is not None:
                completions.append(completion)
                ended.append(index)
        for index in reversed(ended):  # from the end, so that a row moved into a freed slot has been looked at
            self.slots.drop(index)
            self.rows[index] = self.rows[-1]
            self.rows.pop()
        return completions


class SequentialDecoder:
    """Row after row with the model's own cache: for layers with a state that slots cannot hold, and as a check."""

    def __init__(self, model: PreTrainedModel, rules: DecodeRules) -> None:
        self.model = model
        self.rules = rules
        self.sampler = ShortlistSampler(rules.sampling)
        self.waiting: deque[DecodeRequest] = deque()

    @property
    def is_idle(self) -> bool:
        return not self.waiting

    def submit(self, request: DecodeRequest, *, first: bool = False) -> None:
        if first:
            self.waiting.appendleft(request)
        else:
            self.waiting.append(request)

    def step(self) -> list[Completion]:
        request = self.waiting.popleft()
        try:
            return [self._complete(request)]
        except Exception as error:
            return [Completion(request.key, [], None, f"{type(error).__name__}: {one_line(error)}")]

    @torch.inference_mode()
    def _complete(self, request: DecodeRequest) -> Completion:
        row = _new_row(request)
        kv_cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        input_ids = torch.tensor([request.prompt_ids], device=self.model.device)
        while True:
            output = self.model(input_ids=input_ids, cache=kv_cache, use_cache=True, logits_to_keep=1)
            (token_id,) = _draw(self.sampler, self.rules, output.logits[:, -1], [row])
            completion = row.advance(token_id, self.rules.stop_ids)
            if completion is not None:
                return completion
            input_ids = torch.tensor([[token_id]], device=self.model.device)


def _draw(sampler: ShortlistSampler, rules: DecodeRules, logits: Tensor, rows: list[_Row]) -> list[int]:
    uniforms = torch.stack([row.uniforms[len(row.output_ids)] for row in rows]).to(logits.device)
    token_ids: list[int] = sampler.draw(logits[:, : rules.vocabulary_size], uniforms).tolist()
    return token_ids
