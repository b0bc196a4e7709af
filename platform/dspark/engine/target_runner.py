"""A target whose keys and values lie in pages: one forward pass over a flat batch.

Legend: B batch tokens, N rows whose logits are wanted, V vocabulary, m captured layers, d hidden size.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from dspark.attention import paged
from dspark.attention.choice import Choice, TorchEntry, choose_entries, named_entry
from dspark.attention.entry import AttentionEntry, StepPlan
from dspark.attention.flat_batch import FlatBatch, Piece, flatten
from dspark.attention.kv_cache import LayerShape, PagedKVCache
from dspark.attention.page_pool import PageTable
from dspark.engine.fused_layers import fuse_layers
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
from dspark.engine.token_buckets import TokenBuckets

log = logging.getLogger("dspark.engine")

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

    The model is switched to paged attention for good, and to the fastest entry that serves its device unless
    use_kernels is false or attention names one. Whether it then computes the same as before is measured at the start,
    on a short text in two pieces: an entry that fails gives way to the next with a warning, and an architecture that
    keeps state elsewhere (linear attention, convolutions) is refused by its class, with the difference.
    has_scratch_page: one page of memory more than num_pages, for rows that are padding, see `TokenBuckets`.
    Raises: NotPageable; ValueError when the named entry does not serve.
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
        attention: str | None = None,
        has_scratch_page: bool = False,
    ) -> None:
        self.model = model
        self.device, self.dtype = model.device, model.dtype
        self.vocabulary_size = num_output_ids(model, vocabulary_size)
        self.page_size, self.num_pages = page_size, num_pages
        self.layer_ids = tuple(layer_ids)
        expected, shapes = _observe(model)
        num_slots = (num_pages + has_scratch_page) * page_size
        self.scratch_slot = num_pages * page_size if has_scratch_page else None
        self.kv_cache = PagedKVCache(shapes, num_slots=num_slots, dtype=self.dtype, device=self.device)
        self._attention = self._choose_attention(expected, self._entries(attention, use_kernels=use_kernels))
        self._capture = HiddenStateCapture(model, self.layer_ids) if self.layer_ids else None
        self._buckets: TokenBuckets | None = None

    @property
    def attention(self) -> AttentionEntry:
        """What computes its attention."""
        return self._attention

    @property
    def uses_kernels(self) -> bool:
        """Whether that is our own on a CPU, with whole layers on them where their class is known."""
        return self._attention.name == "cpu"

    @property
    def max_context_tokens(self) -> int | None:
        """Positions the target was made for; None when it does not say."""
        return context_limit(self.model)

    @torch.inference_mode()
    def run(self, batch: FlatBatch) -> TargetOutput:
        """Read the batch's tokens. Their keys and values are stored; the tables are the caller's to move on.

        The scores may be written over by the next run.
        """
        if self._buckets is not None and self._buckets.holds(batch):
            logits, hidden = self._buckets.run(batch)
        else:
            step = paged.PagedStep(batch, self.kv_cache, self._attention.plan(batch))
            logits, hidden = self._compute(batch.input_ids, batch.positions, step, logits_to_keep=batch.logit_rows)
        return TargetOutput(without_padding(logits, self.vocabulary_size), hidden)

    @property
    def num_bucket_runs(self) -> int:
        """Steps that ran in buckets."""
        return 0 if self._buckets is None else self._buckets.num_runs

    def use_buckets(self, buckets: TokenBuckets) -> None:
        """Run the steps that they hold through them from now on."""
        self._buckets = buckets

    @torch.inference_mode()
    def compute_padded(self, input_ids: Tensor, positions: Tensor, plan: StepPlan) -> tuple[Tensor, Tensor | None]:
        """Logits [B, V] and features [B, m*d] of every row, with nothing that a graph could not capture."""
        step = paged.PagedStep(None, self.kv_cache, plan)
        # A mask that is ready is taken as it is; without one the library reads positions back to the host.
        mask = torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=self.device)
        return self._compute(input_ids, positions, step, logits_to_keep=0, attention_mask=mask)

    def _compute(
        self, input_ids: Tensor, positions: Tensor, step: paged.PagedStep, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        with self._capture or nullcontext():  # for this pass only: another runner may share the model
            logits = _paged_pass(self.model, input_ids, positions, step, **options)
            return logits, None if self._capture is None else self._capture.hidden()[0]

    def flatten(self, pieces: Sequence[Piece]) -> FlatBatch:
        """The pieces as a batch on the target's device."""
        return flatten(pieces, self.device)

    def _entries(self, name: str | None, *, use_kernels: bool) -> Choice:
        """What to try. Raises: ValueError when the named one does not serve."""
        if name is not None:
            return Choice([named_entry(name, self.kv_cache, self.page_size)], {})
        if not use_kernels:
            return Choice([TorchEntry()], {})
        return choose_entries(self.kv_cache, self.page_size)

    def _choose_attention(self, expected: Tensor, choice: Choice) -> AttentionEntry:
        """The first entry that computes what the model does. Raises: NotPageable when none does."""
        self.model.set_attn_implementation(paged.NAME)
        failed: dict[str, str] = {}
        refusal: NotPageable | None = None
        for entry in choice.entries:
            if entry.name == "cpu":
                fuse_layers(self.model)
            refusal = self._refusal(expected, entry)
            if refusal is None:
                self._say(entry, choice.left_out, failed)
                return entry
            failed[entry.name] = refusal.reason
        use_own_attention(self.model)
        assert refusal is not None, "there is always an entry"
        raise refusal

    def _say(self, entry: AttentionEntry, left_out: Mapping[str, str], failed: Mapping[str, str]) -> None:
        reasons = "".join(f"; not {name}: {reason}" for name, reason in {**left_out, **failed}.items())
        level = logging.INFO if left_out or self.device.type == "cuda" else logging.DEBUG
        log.log(logging.WARNING if failed else level, "attention: %s%s", entry.name, reasons)

    def _refusal(self, expected: Tensor, entry: AttentionEntry) -> NotPageable | None:
        """Why the model does not run on paged attention as the entry computes it; None where it does."""
        try:
            difference = probe_difference(self._probe(entry), expected, self.dtype)
        except Exception as error:
            refusal = NotPageable(self.model, f"does not run on paged attention ({error})")
            refusal.__cause__ = error
            return refusal
        if difference is None:
            return None
        return NotPageable(self.model, f"computes something else on paged attention ({difference})")

    @torch.inference_mode()
    def _probe(self, entry: AttentionEntry) -> Tensor:
        """Logits of the probe's last token, read in two pieces through pages that are no neighbours."""
        ids = probe_ids(self.model)[0].tolist()
        num_needed = -(-len(ids) // self.page_size)
        table = PageTable(list(range(min(num_needed, self.num_pages)))[::-1], self.page_size)
        half = len(ids) // 2
        for part in (ids[:half], ids[half:]):
            batch = self.flatten([Piece(table, part, num_logits=1)])
            step = paged.PagedStep(batch, self.kv_cache, entry.plan(batch))
            logits = _paged_pass(self.model, batch.input_ids, batch.positions, step, logits_to_keep=batch.logit_rows)
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


def _paged_pass(model: Any, input_ids: Tensor, positions: Tensor, step: Any, **options: Any) -> Tensor:
    """Logits [N, V] of a flat batch. input_ids, positions: [B]; options: of the model's call."""
    output = model(
        input_ids=input_ids.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        use_cache=False,
        paged_step=step,
        **options,
    )
    logits: Tensor = output.logits[0]
    return logits
