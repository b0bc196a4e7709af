"""A target as the engine sees it: one step over a flat batch, whatever keeps its keys and values.

Legend: B batch tokens, N rows whose logits are wanted, V vocabulary, m captured layers, d hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from dspark.attention import paged
from dspark.attention.flat_batch import FlatBatch, Piece
from dspark.numerics import argmax

PROBE_TOKENS = 24
PROBE_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.25, torch.float16: 0.1}  # share of the logits' spread
CONTEXT_NAMES = ("max_position_embeddings", "max_seq_len")  # the latter is MPT's


@dataclass(frozen=True)
class TargetOutput:
    """scores: [N, V] logits as the target computes them, in its type, padding ids at -inf.

    hidden: [B, m*d], or None when nothing is captured.
    """

    scores: Tensor
    hidden: Tensor | None

    @cached_property
    def logits(self) -> Tensor:
        """[N, V] float32, for sampling; greedy choices need no such copy."""
        return self.scores.float()

    def choices(self) -> list[int]:
        """The most likely token of each row, the lowest id of equals: [N]."""
        ids: list[int] = argmax(self.scores).tolist()
        return ids


class Target(Protocol):
    """A model that serves. has_pages: whether its keys and values lie in a request's pages, where others find them."""

    model: Any
    device: torch.device
    dtype: torch.dtype
    vocabulary_size: int
    page_size: int
    num_pages: int
    layer_ids: tuple[int, ...]
    has_pages: bool

    @property
    def max_context_tokens(self) -> int | None:
        """Positions the target was made for; None when it does not say."""
        ...

    def flatten(self, pieces: Sequence[Piece]) -> FlatBatch:
        """The pieces as a batch on the target's device."""
        ...

    def run(self, batch: FlatBatch) -> TargetOutput:
        """Read the batch's tokens. Their keys and values are stored; the tables are the caller's to move on."""
        ...


def context_limit(model: Any) -> int | None:
    """Positions a model was made for, as far as all of them have one encoding; None when it does not say.

    LongRoPE turns all positions of a pass as its longest request wants them: past the length where it switches,
    requests would change each other's outputs, and their own memory.
    """
    config = model.config.get_text_config(decoder=True)
    limits = [limit for name in CONTEXT_NAMES if (limit := getattr(config, name, None)) is not None]
    rope = getattr(config, "rope_parameters", None) or {}
    for one in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if one.get("rope_type") == "longrope":
            limits.append(one["original_max_position_embeddings"])
    return min(limits, default=None)


def num_output_ids(model: Any, vocabulary_size: int) -> int:
    """Ids that can be output: the tokenizer's, as far as the model has a logit for them."""
    head = model.get_output_embeddings()
    return vocabulary_size if head is None else min(vocabulary_size, head.weight.shape[0])


def without_padding(logits: Tensor, vocabulary_size: int) -> Tensor:
    """Rows of the embedding behind the tokenizer's ids are padding and never output. logits: [N, V], changed."""
    if logits.shape[1] > vocabulary_size:
        logits[:, vocabulary_size:] = -torch.inf
    return logits


def probe_ids(model: Any) -> Tensor:
    """A short text to compare on: [1, PROBE_TOKENS]."""
    rows = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    return torch.randint(rows, (1, PROBE_TOKENS), generator=generator).to(model.device)


def probe_difference(found: Tensor, expected: Tensor, dtype: torch.dtype) -> str | None:
    """By how much logits of the probe are off, in words; None when they agree. Both [V] float32; dtype: the model's."""
    spread = float(expected.max() - expected.min())
    difference = float((found - expected).abs().max())
    if difference <= PROBE_TOLERANCE.get(dtype, 0.25) * max(spread, 1e-6):
        return None
    return f"logits differ by {difference:.3g} of {spread:.3g}"


def use_own_attention(model: Any) -> None:
    """Undo the switch to paged attention of a model that serves, or has served, in pages."""
    if model.config._attn_implementation == paged.NAME:
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
