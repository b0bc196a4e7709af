"""The target's side of a step: one forward pass over a flat batch, its KV memory and its captured features.

Legend: B batch tokens, N rows whose logits are wanted, V vocabulary, m captured layers, d hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dspark.attention import cpu, paged
from dspark.attention.flat_batch import FlatBatch, Piece, flatten
from dspark.attention.kv_cache import LayerShape, PagedKVCache
from dspark.attention.page_pool import PageTable
from dspark.engine.fused_layers import fuse_layers
from dspark.engine.hidden_states import HiddenStateCapture
from dspark.numerics import argmax

PROBE_TOKENS = 24
PROBE_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.25, torch.float16: 0.1}  # share of the logits' spread


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


class TargetRunner:
    """Any Hugging Face causal LM that computes its attention through the library's attention interface.

    The model is switched to paged attention for good, and on a CPU to our own kernels unless use_kernels is false.
    Whether it then computes the same as before is measured at the start, on a short text in two pieces: an
    architecture that keeps state elsewhere (linear attention, convolutions, shared keys) is refused by its class, with
    the difference.
    """

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
        paged.register()
        if model.config._attn_implementation == paged.NAME:  # it has served another runner
            model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
        expected, shapes = _observe(model)
        self.kv_cache = PagedKVCache(shapes, num_slots=num_pages * page_size, dtype=self.dtype, device=self.device)
        model.set_attn_implementation(paged.NAME)
        self.uses_kernels = use_kernels and cpu.is_served(self.kv_cache)
        if self.uses_kernels:
            fuse_layers(model)
        self._check(expected)
        self._capture = HiddenStateCapture(model, self.layer_ids) if self.layer_ids else None

    @property
    def max_context_tokens(self) -> int | None:
        """Positions the target was made for; None when it does not say."""
        return getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)

    @torch.inference_mode()
    def run(self, batch: FlatBatch) -> TargetOutput:
        """Read the batch's tokens. Their keys and values are stored; the tables are the caller's to move on."""
        if self._capture is None:
            return TargetOutput(self._masked(self._forward(batch)), None)
        with self._capture:  # for this pass only: another runner may share the model
            logits = self._forward(batch)
            return TargetOutput(self._masked(logits), self._capture.hidden()[0])

    def _masked(self, logits: Tensor) -> Tensor:
        """Rows of the embedding behind the tokenizer's ids are padding and never output."""
        if logits.shape[1] > self.vocabulary_size:
            logits[:, self.vocabulary_size :] = -torch.inf
        return logits

    @torch.inference_mode()
    def _forward(self, batch: FlatBatch) -> Tensor:
        output = self.model(
            input_ids=batch.input_ids.unsqueeze(0),
            position_ids=batch.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=batch.logit_rows,
            paged_step=paged.PagedStep(batch, self.kv_cache, paged.plan_of(batch) if self.uses_kernels else None),
        )
        logits: Tensor = output.logits[0]
        return logits

    def flatten(self, pieces: Sequence[Piece]) -> FlatBatch:
        """The pieces as a batch on the target's device."""
        return flatten(pieces, self.device)

    def _check(self, expected: Tensor) -> None:
        """Raises: ValueError when paged attention changes what the model computes."""
        name = type(self.model).__name__
        try:
            found = self._probe()
        except Exception as error:
            raise ValueError(
                f"target class {name} does not run on paged attention ({error}); use a causal LM whose layers all go "
                "through the library's attention interface"
            ) from error
        spread = float(expected.max() - expected.min())
        difference = float((found - expected).abs().max())
        if not difference <= PROBE_TOLERANCE.get(self.dtype, 0.25) * max(spread, 1e-6):
            raise ValueError(
                f"target class {name} computes something else on paged attention (logits differ by {difference:.3g} "
                f"of {spread:.3g}); use a causal LM whose layers all go through the library's attention interface"
            )

    def _probe(self) -> Tensor:
        """Logits of the probe's last token, read in two pieces through pages that are no neighbours."""
        ids = _probe_ids(self.model)[0].tolist()
        num_needed = -(-len(ids) // self.page_size)
        table = PageTable(list(range(min(num_needed, self.num_pages)))[::-1], self.page_size)
        half = len(ids) // 2
        for part in (ids[:half], ids[half:]):
            logits = self._forward(self.flatten([Piece(table, part, num_logits=1)]))
            table.num_tokens += len(part)
        return logits[0].float()


def kv_bytes_per_token(model: Any) -> int:
    """Bytes of KV memory that a token takes in all layers. Raises: ValueError as `TargetRunner` does."""
    shapes = _observe(model)[1]
    return sum(shape.num_kv_heads * (shape.key_dim + shape.value_dim) for shape in shapes) * model.dtype.itemsize


@torch.inference_mode()
def _observe(model: Any) -> tuple[Tensor, list[LayerShape]]:
    """Logits of the probe's last token as the model computes them by itself, and what its layers store per token.

    Raises: ValueError when a layer stores something else than keys and values of every token.
    """
    if model.config._attn_implementation == paged.NAME:  # it serves, or has served, another runner
        model.set_attn_implementation("sdpa")
    output = model(input_ids=_probe_ids(model), use_cache=True)
    layers = output.cache.layers
    shapes = []
    for number, layer in enumerate(layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not isinstance(keys, Tensor) or not isinstance(values, Tensor) or keys.dim() != 4:
            raise ValueError(
                f"target class {type(model).__name__}: layer {number} keeps a {type(layer).__name__}, which pages "
                "cannot hold; use a causal LM with full or sliding-window attention in every layer"
            )
        shapes.append(LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.device))
    return output.logits[0, -1].float(), shapes


def _probe_ids(model: Any) -> Tensor:
    rows = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    return torch.randint(rows, (1, PROBE_TOKENS), generator=generator).to(model.device)
