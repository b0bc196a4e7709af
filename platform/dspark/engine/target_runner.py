"""A target whose keys and values lie in pages: one forward pass over a flat batch.

Legend: B batch tokens, N rows whose logits are wanted, V vocabulary, m captured layers, d hidden size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from dspark.attention import cpu, paged
from dspark.attention.flat_batch import FlatBatch, Piece, flatten
from dspark.attention.kv_cache import LayerShape, PagedKVCache
from dspark.attention.page_pool import PageTable
from dspark.engine.fused_layers import fuse_layers
from dspark.engine.hidden_states import HiddenStateCapture
from dspark.engine.target import (
    TargetOutput,
    context_limit,
    probe_difference,
    probe_ids,
    use_own_attention,
    without_padding,
)

PAGED_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)  # of the library's cache; a dummy keeps nothing


class NotPageable(ValueError):
    """A target that pages do not serve; `reason` begins with its class. The model is as it was before."""

    def __init__(self, model: Any, reason: str) -> None:
        self.reason = f"target class {type(model).__name__} {reason}"
        super().__init__(
            f"{self.reason}; pages serve causal LMs whose layers all go through the library's attention interface, "
            "with full or sliding-window attention"
        )


class TargetRunner:
    """Any Hugging Face causal LM that computes its attention through the library's attention interface.

    The model is switched to paged attention for good, and on a CPU to our own kernels unless use_kernels is false.
    Whether it then computes the same as before is measured at the start, on a short text in two pieces: an
    architecture that keeps state elsewhere (linear attention, convolutions) is refused by its class.
    Raises: NotPageable.
    """

    has_pages = True

    def __init__(
        self,
        model: Any,
        *,
        vocabulary_size: int,
        layer_ids: Sequence[int] = (),
        num_pages: int,
        page_size: int,
        use_kernels: bool = True,
    ) -> None:
        self.model = model
        self.device, self.dtype = model.device, model.dtype
        self.vocabulary_size = vocabulary_size
        self.page_size, self.num_pages = page_size, num_pages
        self.layer_ids = tuple(layer_ids)
        expected, shapes = _observe(model)
        self.kv_cache = PagedKVCache(shapes, num_slots=num_pages * page_size, dtype=self.dtype, device=self.device)
        self.uses_kernels = use_kernels and cpu.is_served(self.kv_cache)
        model.set_attn_implementation(paged.NAME)
        if self.uses_kernels:
            fuse_layers(model)
        self._check(expected)
        self._capture = HiddenStateCapture(model, self.layer_ids) if self.layer_ids else None

    @property
    def max_context_tokens(self) -> int | None:
        """Positions the target was made for; None when it does not say."""
        return context_limit(self.model)

    @torch.inference_mode()
    def run(self, batch: FlatBatch) -> TargetOutput:
        """Read the batch's tokens. Their keys and values are stored; the tables are the caller's to move on."""
        if self._capture is None:
            return TargetOutput(without_padding(self._forward(batch), self.vocabulary_size), None)
        with self._capture:  # for this pass only: another runner may share the model
            logits = self._forward(batch)
            return TargetOutput(without_padding(logits, self.vocabulary_size), self._capture.hidden()[0])

    @torch.inference_mode()
    def _forward(self, batch: FlatBatch) -> Tensor:
        plan = paged.plan_of(batch) if self.uses_kernels else None
        logits: Tensor = _paged_pass(
            self.model,
            batch.input_ids,
            batch.positions,
            paged.PagedStep(batch, self.kv_cache, plan),
            logits_to_keep=batch.logit_rows,
        )
        return logits

    def flatten(self, pieces: Sequence[Piece]) -> FlatBatch:
        """The pieces as a batch on the target's device."""
        return flatten(pieces, self.device)

    def _check(self, expected: Tensor) -> None:
        """Raises: NotPageable when paged attention changes what the model computes."""
        try:
            difference = probe_difference(self._probe(), expected, self.dtype)
        except Exception as error:
            use_own_attention(self.model)
            raise NotPageable(self.model, f"does not run on paged attention ({error})") from error
        if difference is not None:
            use_own_attention(self.model)
            raise NotPageable(self.model, f"computes something else on paged attention ({difference})")

    def _probe(self) -> Tensor:
        """Logits of the probe's last token, read in two pieces through pages that are no neighbours."""
        ids = probe_ids(self.model)[0].tolist()
        num_needed = -(-len(ids) // self.page_size)
        table = PageTable(list(range(min(num_needed, self.num_pages)))[::-1], self.page_size)
        half = len(ids) // 2
        for part in (ids[:half], ids[half:]):
            logits = self._forward(self.flatten([Piece(table, part, num_logits=1)]))
            table.num_tokens += len(part)
        return logits[0].float()


def kv_bytes_per_token(model: Any) -> int:
    """Bytes of KV memory that a token takes in all layers. Raises: NotPageable as `TargetRunner` does."""
    own = [shape for shape in _observe(model)[1] if shape.shared_with is None]
    return sum(shape.num_kv_heads * (shape.key_dim + shape.value_dim) for shape in own) * model.dtype.itemsize


@torch.inference_mode()
def _observe(model: Any) -> tuple[Tensor, list[LayerShape]]:
    """Logits of the probe's last token as the model computes them by itself, and what its layers attend to per token.

    The shapes are those that attention is called with: what the library's own cache keeps may be less (the latents of
    DeepSeek's keys and values). Raises: NotPageable.
    """
    use_own_attention(model)
    if not model._can_set_attn_implementation():
        raise NotPageable(model, "does not use the library's attention interface")
    ids = probe_ids(model)
    output = model(input_ids=ids, use_cache=True)
    windows = _windows(model, getattr(output, "cache", None))
    calls = paged.AttentionCalls()
    paged.register()
    own = model.config._attn_implementation
    model.set_attn_implementation(paged.NAME)
    try:
        _paged_pass(model, ids[0], torch.arange(ids.shape[1], device=ids.device), calls, logits_to_keep=1)
    except Exception as error:
        raise NotPageable(model, f"does not run on paged attention ({error})") from error
    finally:
        model.set_attn_implementation(own)
    for layer, window in windows.items():
        if layer in calls.windows and calls.windows[layer] != window:
            raise NotPageable(
                model, f"attends in layer {layer} with window {calls.windows[layer]}, but its cache keeps {window}"
            )
    return output.logits[0, -1].float(), calls.shapes()


def _windows(model: Any, cache: Any) -> dict[int, int | None]:
    """The window of each layer as the library's own cache keeps it, where a layer keeps something.

    Raises: NotPageable when a layer keeps something else than keys and values of every token in it.
    """
    if cache is None:
        raise NotPageable(model, "keeps its state outside of the library's cache")
    for number, layer in enumerate(cache.layers):
        if type(layer) not in PAGED_LAYERS:
            raise NotPageable(model, f"keeps a {type(layer).__name__} in layer {number}")
    kept = {number: layer for number, layer in enumerate(cache.layers) if not isinstance(layer, DummyLayer)}
    return {number: getattr(layer, "sliding_window", None) for number, layer in kept.items()}


def _paged_pass(model: Any, input_ids: Tensor, positions: Tensor, step: Any, *, logits_to_keep: Any) -> Tensor:
    """Logits [N, V] of a flat batch. input_ids, positions: [B]."""
    output = model(
        input_ids=input_ids.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        use_cache=False,
        logits_to_keep=logits_to_keep,
        paged_step=step,
    )
    logits: Tensor = output.logits[0]
    return logits
