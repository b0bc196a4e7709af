"""Attention memory for batched decoding: one slot per row, written in place, rows of any length side by side.

Legend: N active rows, T tokens of an update, S slot length, H query heads, G key/value heads, D head size.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION_NAME = "dspark_single_query"
TOKEN_STEP = 64  # slot lengths are multiples of this

_UNSUPPORTED_ARGUMENTS = ("softcap", "position_bias", "s_aux")


class SlotCache(Cache):
    """Keys and values of rows decoded together: the active rows are slots 0..N-1, row i holding `lengths[i]` tokens.

    Beyond a row's length a slot holds old, finite numbers, which the caller masks out. Slots are as long as the
    longest row and no longer: attention reads whole slots, since a product over part of each would copy them first.
    max_slots, max_tokens: memory is made for so many rows, of so many tokens together, unless the rows need more.
    """

    def __init__(self, num_layers: int, *, max_slots: int, max_tokens: int) -> None:
        self.max_slots = max_slots
        self.max_tokens = max_tokens
        self.lengths: list[int] = []
        self.num_slots = 0
        self.slot_tokens = 0
        self.positions = torch.zeros(0, dtype=torch.int64)  # of the token being decoded, per active row
        self.first_new_row: int | None = None  # set while new rows are being read in
        self._new_lengths: list[int] = []
        self._slot_layers = [_SlotLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self._slot_layers))

    def begin_read(self, lengths: list[int]) -> None:
        """The next update appends rows with prompts of these lengths, padded on the right."""
        self._fit(len(self.lengths) + len(lengths), max(*self.lengths, *lengths, 0))
        self.first_new_row = len(self.lengths)
        self._new_lengths = lengths

    def end_read(self, *, keep: bool) -> None:
        """Make the rows read in active, or forget them."""
        self.first_new_row = None
        if keep:
            self.lengths.extend(self._new_lengths)

    def begin_decode(self, device: torch.device) -> Tensor:
        """The next update adds one token to every active row. Returns its positions, [N] int64."""
        self._fit(len(self.lengths), max(self.lengths) + 1)
        self.positions = torch.tensor(self.lengths, device=device)
        self.lengths = [length + 1 for length in self.lengths]
        return self.positions

    def mask(self, *, dtype: torch.dtype) -> Tensor:
        """0 where a row holds a token, -inf beyond: [N, 1, 1, S], added to attention scores."""
        columns = torch.arange(self.slot_tokens, device=self.positions.device)
        is_empty = columns > self.positions[:, None]
        zeros = torch.zeros(is_empty.shape, dtype=dtype, device=is_empty.device)
        return zeros.masked_fill_(is_empty, -torch.inf)[:, None, None]

    def drop(self, row: int) -> None:
        """Free a row; the last active row moves into its slot."""
        last = len(self.lengths) - 1
        if row != last:
            for layer in self._slot_layers:
                layer.move(last, row, self.lengths[last])
            self.lengths[row] = self.lengths[last]
        self.lengths.pop()

    def _fit(self, num_rows: int, num_tokens: int) -> None:
        """Room for so many rows of so many tokens, given back where the rows have become much shorter."""
        wanted = -(-num_tokens // TOKEN_STEP) * TOKEN_STEP
        is_too_small = num_rows > self.num_slots or wanted > self.slot_tokens
        is_too_long = wanted + 2 * TOKEN_STEP <= self.slot_tokens
        if is_too_small or is_too_long:
            self.slot_tokens = wanted
            self.num_slots = max(num_rows, min(self.max_slots, self.max_tokens // wanted))
            for layer in self._slot_layers:
                layer.resize()


class _SlotLayer(CacheLayerMixin):
    """One layer's keys and values, [num_slots, G, slot_tokens, D]."""

    keys: Tensor
    values: Tensor

    def __init__(self, slots: SlotCache) -> None:
        super().__init__()
        self.slots = slots

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = self._zeros(key_states)
        self.values = self._zeros(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        first = self.slots.first_new_row
        if first is not None:
            num_rows, _, num_tokens, _ = key_states.shape
            self.keys[first : first + num_rows, :, :num_tokens] = key_states
            self.values[first : first + num_rows, :, :num_tokens] = value_states
            return key_states, value_states
        positions = self.slots.positions.to(key_states.device)
        rows = torch.arange(len(positions), device=positions.device)
        self.keys[rows, :, positions] = key_states[:, :, 0]
        self.values[rows, :, positions] = value_states[:, :, 0]
        return self.keys[: len(positions)], self.values[: len(positions)]

    def resize(self) -> None:
        if self.is_initialized:
            self.keys, self.values = self._resized(self.keys), self._resized(self.values)

    def move(self, source: int, destination: int, num_tokens: int) -> None:
        for held in (self.keys, self.values):
            held[destination, :, :num_tokens] = held[source, :, :num_tokens]

    def get_seq_length(self) -> int:
        return 0  # positions are always given; reading in starts at 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1

    def _zeros(self, like: Tensor) -> Tensor:
        """Zeros, not garbage: a masked position has weight 0, and 0 times NaN is NaN."""
        shape = (self.slots.num_slots, like.shape[1], self.slots.slot_tokens, like.shape[3])
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def _resized(self, held: Tensor) -> Tensor:
        resized = self._zeros(held)
        rows, tokens = len(self.slots.lengths), max(self.slots.lengths, default=0)
        resized[:rows, :, :tokens] = held[:rows, :, :tokens]
        return resized


def supports_slots(config: PreTrainedConfig) -> bool:
    """Whether every layer is plain full attention, so that a row is its keys and values and nothing else."""
    layers = DynamicCache(config=config).layers
    return hasattr(config, "num_key_value_heads") and bool(layers) and all(type(it) is DynamicLayer for it in layers)


def single_query_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one query token per row, [N, 1, H, D], as two batched products over the key/value heads.

    On a CPU this takes under half the time of the fused kernel, which packs keys and values anew at each call. Prompts
    and anything special go to the fused kernel. query: [N, H, T, D]; key, value: [N, G, S, D].
    """
    is_special = any(kwargs.get(name) is not None for name in _UNSUPPORTED_ARGUMENTS)
    if attention_mask is None or query.shape[2] != 1 or is_special:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    rows, heads, _, head_dim = query.shape
    groups = key.shape[1]
    scale = head_dim**-0.5 if scaling is None else scaling
    query = (query * scale).view(rows * groups, heads // groups, head_dim)
    # Keys times queries is faster than the reverse here. Softmax and mask want the scores row by row in memory: on the
    # transposed view they take five times as long.
    scores = torch.bmm(key.flatten(0, 1), query.transpose(1, 2).contiguous()).transpose(1, 2)
    scores = scores.to(torch.float32, memory_format=torch.contiguous_format).view(rows, groups, heads // groups, -1)
    weights = torch.softmax(scores.add_(attention_mask), -1).to(value.dtype)
    mixed = torch.bmm(weights.flatten(0, 1), value.flatten(0, 1))
    return mixed.view(rows, 1, heads, value.shape[-1]), None


def use_single_query_attention(model: Any) -> None:
    """Let a model that runs with the fused kernel on a CPU decode with `single_query_attention` instead."""
    if model.device.type != "cpu" or model.config._attn_implementation != "sdpa":
        return
    AttentionInterface.register(ATTENTION_NAME, single_query_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)  # without it the mask would arrive as None
    model.set_attn_implementation(ATTENTION_NAME)
