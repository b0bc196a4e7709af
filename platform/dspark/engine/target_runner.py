"""The target's side of a step: one forward pass over a flat batch, its KV memory and its captured features.

Legend: B batch tokens, N rows whose logits are wanted, V vocabulary, m captured layers, d hidden size.
"""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dspark.attention import paged
from dspark.attention.choice import TorchEntry, choose_entries, named_entry
from dspark.attention.entry import AttentionEntry, StepPlan
from dspark.attention.flat_batch import FlatBatch, Piece, flatten
from dspark.attention.kv_cache import LayerShape, PagedKVCache
from dspark.attention.page_pool import PageTable
from dspark.engine.fused_layers import fuse_layers
from dspark.engine.hidden_states import HiddenStateCapture
from dspark.engine.token_buckets import TokenBuckets
from dspark.numerics import argmax

log = logging.getLogger("dspark.engine")

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

    The model is switched to paged attention for good, and to the fastest entry that serves its device unless
    use_kernels is false or attention names one. Whether it then computes the same as before is measured at the start,
    on a short text in two pieces: an entry that fails gives way to the next with a warning, and an architecture that
    keeps state elsewhere (linear attention, convolutions, shared keys) is refused by its class, with the difference.
    has_scratch_page: one page of memory more than num_pages, for rows that are padding, see `TokenBuckets`.
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
        attention: str | None = None,
        has_scratch_page: bool = False,
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
        num_slots = (num_pages + has_scratch_page) * page_size
        self.scratch_slot = num_pages * page_size if has_scratch_page else None
        self.kv_cache = PagedKVCache(shapes, num_slots=num_slots, dtype=self.dtype, device=self.device)
        model.set_attn_implementation(paged.NAME)
        self._capture = HiddenStateCapture(model, self.layer_ids) if self.layer_ids else None
        self._buckets: TokenBuckets | None = None
        self._attention = self._choose_attention(expected, attention, use_kernels=use_kernels)

    @property
    def attention(self) -> AttentionEntry:
        """What computes its attention."""
        return self._attention

    @property
    def max_context_tokens(self) -> int | None:
        """Positions the target was made for; None when it does not say."""
        return getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)

    @torch.inference_mode()
    def run(self, batch: FlatBatch) -> TargetOutput:
        """Read the batch's tokens. Their keys and values are stored; the tables are the caller's to move on.

        The scores may be written over by the next run.
        """
        if self._buckets is not None and self._buckets.holds(batch):
            logits, hidden = self._buckets.run(batch)
        else:
            step = paged.PagedStep(batch, self.kv_cache, self._attention.plan(batch))
            logits, hidden = self._compute(batch.input_ids, batch.positions, step, batch.logit_rows)
        return TargetOutput(self._masked(logits), hidden)

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
        return self._compute(input_ids, positions, step, 0, attention_mask=mask)

    def _compute(
        self,
        input_ids: Tensor,
        positions: Tensor,
        step: paged.PagedStep,
        logit_rows: Tensor | int,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        with self._capture or nullcontext():  # for this pass only: another runner may share the model
            output = self.model(
                input_ids=input_ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=logit_rows,
                paged_step=step,
                **options,
            )
            return output.logits[0], None if self._capture is None else self._capture.hidden()[0]

    def _masked(self, logits: Tensor) -> Tensor:
        """Rows of the embedding behind the tokenizer's ids are padding and never output."""
        if logits.shape[1] > self.vocabulary_size:
            logits[:, self.vocabulary_size :] = -torch.inf
        return logits

    def flatten(self, pieces: Sequence[Piece]) -> FlatBatch:
        """The pieces as a batch on the target's device."""
        return flatten(pieces, self.device)

    def _choose_attention(self, expected: Tensor, name: str | None, *, use_kernels: bool) -> AttentionEntry:
        """The first entry that computes what the model does. Raises: ValueError as `_check` does for the last one."""
        left_out: dict[str, str] = {}
        if name is not None:
            entries = [named_entry(name, self.kv_cache, self.page_size)]
        elif not use_kernels:
            entries = [TorchEntry()]
        else:
            choice = choose_entries(self.kv_cache, self.page_size)
            entries, left_out = choice.entries, dict(choice.left_out)
        for entry in entries:
            if entry.name == "cpu":
                fuse_layers(self.model)
            try:
                self._check(expected, entry)
            except ValueError as error:
                if entry is entries[-1]:
                    raise
                log.warning("attention %s gives way to the next: %s", entry.name, error)
                left_out[entry.name] = "it failed its check"
                continue
            reasons = "".join(f"; {other}: {reason}" for other, reason in left_out.items())
            is_worth_saying = bool(left_out) or self.device.type == "cuda"
            log.log(logging.INFO if is_worth_saying else logging.DEBUG, "attention: %s%s", entry.name, reasons)
            return entry
        raise AssertionError("there is always an entry")

    def _check(self, expected: Tensor, entry: AttentionEntry) -> None:
        """Raises: ValueError when paged attention changes what the model computes."""
        name = type(self.model).__name__
        try:
            found = self._probe(entry)
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

    @torch.inference_mode()
    def _probe(self, entry: AttentionEntry) -> Tensor:
        """Logits of the probe's last token, read in two pieces through pages that are no neighbours."""
        ids = _probe_ids(self.model)[0].tolist()
        num_needed = -(-len(ids) // self.page_size)
        table = PageTable(list(range(min(num_needed, self.num_pages)))[::-1], self.page_size)
        half = len(ids) // 2
        for part in (ids[:half], ids[half:]):
            batch = self.flatten([Piece(table, part, num_logits=1)])
            step = paged.PagedStep(batch, self.kv_cache, entry.plan(batch))
            logits, _ = self._compute(batch.input_ids, batch.positions, step, batch.logit_rows)
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
