"""A target that pages cannot hold: each request has a cache of the library's own, and a forward pass to itself.

The slow, obvious way to serve. A request's pages only count what it may store.

Legend: B batch tokens, N rows whose logits are wanted, V vocabulary, m captured layers, d hidden size.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from dspark.attention.flat_batch import FlatBatch, Piece, flatten
from dspark.attention.page_pool import PageTable
from dspark.engine.hidden_states import HiddenStateCapture
from dspark.engine.target import (
    TargetOutput,
    context_limit,
    num_output_ids,
    probe_difference,
    probe_ids,
    use_own_attention,
    without_padding,
)

NUM_ROLLED_BACK = 5  # tokens of the probe that are read and taken back


@dataclass
class _Stored:
    """One request's cache and the tokens in it, those that were rejected among them."""

    cache: Any
    num_tokens: int = 0


class DenseTargetRunner:
    """Any Hugging Face causal LM whose cache can give up its newest tokens; the contract is `TargetRunner`'s.

    A cache lives as long as the page table it belongs to, so that preemption drops it. Whether rolling back leaves no
    trace is measured at the start. Raises: ValueError for a target whose state cannot be rolled back, by its class.
    """

    has_pages = False

    def __init__(
        self, model: Any, *, vocabulary_size: int, layer_ids: Sequence[int] = (), num_pages: int, page_size: int
    ) -> None:
        self.model = model
        self.device, self.dtype = model.device, model.dtype
        self.vocabulary_size = num_output_ids(model, vocabulary_size)
        self.page_size, self.num_pages = page_size, num_pages
        self.layer_ids = tuple(layer_ids)
        self._stored: WeakKeyDictionary[PageTable, _Stored] = WeakKeyDictionary()
        self._capture = HiddenStateCapture(model, self.layer_ids) if self.layer_ids else None
        self._computes_few_logits = "logits_to_keep" in signature(model.forward).parameters
        use_own_attention(model)
        self._check()

    @property
    def max_context_tokens(self) -> int | None:
        """Positions the target was made for; None when it does not say."""
        return context_limit(self.model)

    @property
    def num_caches(self) -> int:
        """Requests that have one now."""
        return len(self._stored)

    def flatten(self, pieces: Sequence[Piece]) -> FlatBatch:
        """The pieces as a batch on the target's device."""
        return flatten(pieces, self.device)

    @torch.inference_mode()
    def run(self, batch: FlatBatch) -> TargetOutput:
        """Read the batch's tokens, one request after the other; the tables are the caller's to move on."""
        scores, hidden = [], []
        for piece in batch.pieces:
            with self._capture or nullcontext():
                scores.append(self._read(piece))
                if self._capture is not None:
                    hidden.append(self._capture.hidden()[0])
        rows = without_padding(torch.cat(scores), self.vocabulary_size)
        return TargetOutput(rows, torch.cat(hidden) if hidden else None)

    def _read(self, piece: Piece) -> Tensor:
        """Logits of the piece's last rows, [num_logits, V], what was rejected before it being taken back."""
        stored = self._stored.get(piece.table)
        if stored is None:
            stored = self._stored[piece.table] = _Stored(_new_cache(self.model))
        assert piece.start <= stored.num_tokens, f"{stored.num_tokens} tokens are stored, not {piece.start}"
        if stored.num_tokens:
            stored.cache.crop(piece.start - stored.num_tokens)
        ids = torch.tensor([list(piece.token_ids)], device=self.device)
        few = {"logits_to_keep": max(1, piece.num_logits)} if self._computes_few_logits else {}
        logits: Tensor = self.model(input_ids=ids, cache=stored.cache, use_cache=True, **few).logits[0]
        stored.num_tokens = piece.stop
        return logits[logits.shape[0] - piece.num_logits :]

    @torch.inference_mode()
    def _check(self) -> None:
        """Raises: ValueError when what was read and taken back leaves a trace, or cannot be taken back."""
        ids = probe_ids(self.model)
        expected = self.model(input_ids=ids, use_cache=False).logits[0, -1].float()
        try:
            reason = probe_difference(self._probe(ids[0].tolist()), expected, self.dtype)
        except Exception as error:
            raise ValueError(self._refusal(str(error))) from error
        if reason is not None:
            raise ValueError(self._refusal(reason))

    def _probe(self, ids: list[int]) -> Tensor:
        """Logits of the probe's last token, read in two pieces with other tokens between, which are taken back."""
        half = len(ids) // 2
        table = PageTable(range(len(ids)), 1)
        self._read(Piece(table, ids[:half], 1))
        table.num_tokens = half
        cache = self._stored[table].cache
        if not cache.is_croppable:
            kinds = sorted({type(layer).__name__ for layer in cache.layers if not layer.is_croppable})
            raise ValueError(f"it keeps a {', '.join(kinds)}")
        self._read(Piece(table, ids[:NUM_ROLLED_BACK], 1))
        return self._read(Piece(table, ids[half:], 1))[0].float()

    def _refusal(self, reason: str) -> str:
        return (
            f"target class {type(self.model).__name__} keeps a state that gives up no token once it is read "
            f"({reason}), which speculation needs; use a causal LM with attention in every layer"
        )


def dense_bytes_per_token(model: Any) -> int:
    """Bytes of KV memory that a token takes in all layers, those of a window counted as if they kept everything."""
    use_own_attention(model)
    cache = _new_cache(model)
    with torch.inference_mode():
        model(input_ids=probe_ids(model), cache=cache, use_cache=True)
    parts = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    held = [part for part in parts if isinstance(part, Tensor) and part.dim() == 4]
    return sum(part.shape[1] * part.shape[3] for part in held) * model.dtype.itemsize


def _new_cache(model: Any) -> Any:
    """An empty cache as the model would make for itself, which keeps what leaves a window until it is cropped."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    cache.activate_past_recording()
    return cache
