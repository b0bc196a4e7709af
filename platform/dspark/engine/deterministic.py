"""Targets whose tokens get the same bits whatever is computed beside them (`EngineConfig.deterministic`).

What a row gets depends on the shape of the products it sits in, and of what is added up for it. Two ways out:

    whole layers on our CPU kernels     a row's sums are formed in one order in every batch: it runs as it is
    anything else                       slices of N rows, each row its own piece: every product has one shape, and the
                                        attention of a row is computed alone, over as many keys as its position says

Legend: B rows (batch tokens), N rows of a slice, V vocabulary, m captured layers, d hidden size, D head width.
"""

import logging
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dspark.attention.flat_batch import FlatBatch, Piece, flatten
from dspark.attention.page_pool import PageTable
from dspark.engine.fused_layers import TargetLayer
from dspark.engine.target import Target, TargetOutput
from dspark.engine.target_runner import TargetRunner
from dspark.numerics import PackedLinear

SLICE_ROWS = 8  # enough that a decode step of a few requests reads the weights once
ANGLES_AT_ONCE = 256
WHOLE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")  # nothing beside the layers
MIXED_ROWS = re.compile("moe|experts", re.IGNORECASE)  # rows meet in products whose size depends on all of them
SHARED_ANGLES = ("dynamic", "longrope")  # of the longest request in the batch

log = logging.getLogger("dspark.engine")


class SlicedRunner:
    """A target's runner whose steps run in slices of `num_rows` rows, the last one padded with its own last row.

    That a row's bits do not depend on its place in a slice, nor on its neighbours, is measured at the start; where they
    do, or where rows meet by design (mixtures of experts), rows run one by one.
    """

    has_pages = True

    def __init__(self, target: TargetRunner) -> None:
        self._target = target
        self.model, self.dtype, self.layer_ids = target.model, target.dtype, target.layer_ids
        self.device, self.vocabulary_size = target.device, target.vocabulary_size
        self.num_pages, self.page_size = target.num_pages, target.page_size
        self.max_context_tokens = target.max_context_tokens
        self.num_rows = 1 if _do_rows_meet(target.model) or not self._has_equal_places(SLICE_ROWS) else SLICE_ROWS
        name, attention = type(target.model).__name__, target.attention.name
        log.info("deterministic: %s runs in slices of %d tokens, attention: %s", name, self.num_rows, attention)

    def flatten(self, pieces: Sequence[Piece]) -> FlatBatch:
        """The pieces as a batch on the target's device."""
        return flatten(pieces, self.device)

    @torch.inference_mode()
    def run(self, batch: FlatBatch) -> TargetOutput:
        """As `TargetRunner.run`."""
        scores, hidden = [], []
        rows = [row for piece in batch.pieces for row in _rows(piece)]
        for first in range(0, len(rows), self.num_rows):
            own = rows[first : first + self.num_rows]
            wanted = [place for place, row in enumerate(own) if row.num_logits]
            output = self._run_slice(own, has_logits=bool(wanted))
            scores.append(output.scores[torch.tensor(wanted, dtype=torch.long, device=self.device)])
            if output.hidden is not None:
                hidden.append(output.hidden[: len(own)])
        return TargetOutput(torch.cat(scores), torch.cat(hidden) if hidden else None)

    def _run_slice(self, rows: Sequence[Piece], *, has_logits: bool) -> TargetOutput:
        """Of up to N rows. The head computes all of them or none: it has one shape as well."""
        padded = [*rows, *[rows[-1]] * (self.num_rows - len(rows))]  # which stores the same bits in the same place
        pieces = [Piece(row.table, row.token_ids, int(has_logits), row.offset) for row in padded]
        return self._target.run(self.flatten(pieces))

    def _has_equal_places(self, num_rows: int) -> bool:
        """Whether a row gets the same logits in each place of a slice, its neighbours being others each time."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.vocabulary_size, (num_rows, num_rows), generator=generator).tolist()
        table = PageTable(
            range(-(-2 * num_rows // self.page_size)), self.page_size
        )  # fewer than the runner's own check
        table.num_tokens = num_rows  # at position 0 an angle is 0 wherever it is computed
        found = []
        for place, (_, *others) in enumerate(ids):
            pieces = [Piece(table, [token_id], 1, offset) for offset, token_id in enumerate(others, start=1)]
            pieces.insert(place, Piece(table, [ids[0][0]], 1))
            found.append(self._target.run(self.flatten(pieces)).scores[place].clone())
        return all(torch.equal(scores, found[0]) for scores in found)


class AngleTable:
    """Stands in for `forward` of a rotary embedding: a position's angles, always computed among the same others."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._cos, self._sin = torch.empty(0), torch.empty(0)  # [positions so far, D] each

    def __call__(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, [..., D] in x's type. position_ids: [...]."""
        if torch.is_grad_enabled():
            angles: tuple[Tensor, Tensor] = type(self._module).forward(self._module, x, position_ids)
            return angles
        if self._cos.dtype != x.dtype:
            self._cos, self._sin = (torch.empty(0, dtype=x.dtype) for _ in range(2))
        while self._cos.shape[0] <= int(position_ids.max()):
            start = self._cos.shape[0]
            positions = torch.arange(start, start + ANGLES_AT_ONCE).unsqueeze(0)
            cos, sin = type(self._module).forward(self._module, x, positions)
            self._cos = torch.cat([self._cos, cos[0]]) if start else cos[0]
            self._sin = torch.cat([self._sin, sin[0]]) if start else sin[0]
        return self._cos[position_ids], self._sin[position_ids]


def deterministic(target: Target) -> Target:
    """A runner whose rows get the same bits in every batch: the target's own where it is one, else in slices.

    For good: from now on the model takes its angles from a table. Raises: ValueError for a target without pages.
    """
    if not isinstance(target, TargetRunner):
        raise ValueError(
            f"target class {type(target.model).__name__} is served without pages, where rows have no fixed shape; "
            "leave engine.deterministic out"
        )
    if not _is_on_kernels(target):
        return SlicedRunner(target)
    rotary = target.model.model.rotary_emb
    vars(rotary)["forward"] = AngleTable(rotary)
    return target


def _rows(piece: Piece) -> list[Piece]:
    """Each token of a piece as one of its own."""
    first_wanted = len(piece.token_ids) - piece.num_logits
    return [
        Piece(piece.table, [token_id], int(k >= first_wanted), piece.offset + k)
        for k, token_id in enumerate(piece.token_ids)
    ]


def _is_on_kernels(target: TargetRunner) -> bool:
    """Whether all that a row passes through between its embedding and its logits treats it alone.

    That is the layers and the head; the norm before the head sums up each row by itself whatever their number.
    """
    model = target.model
    is_known = type(model).__name__ in WHOLE and type(model).__module__.startswith("transformers.models.")
    if not (is_known and target.uses_kernels) or _do_rows_meet(model):
        return False
    head, layers = model.lm_head, model.model.layers
    is_fused = all(isinstance(vars(layer).get("forward"), TargetLayer) for layer in layers)
    return is_fused and isinstance(head, PackedLinear) and head.is_in_panels


def _do_rows_meet(model: nn.Module) -> bool:
    """Whether what is computed for a row depends on the others by design, whatever the shape."""
    if any(MIXED_ROWS.search(type(module).__name__) for module in model.modules()):
        return True
    return any(_rope_types(module) & {*SHARED_ANGLES} for module in model.modules())


def _rope_types(module: nn.Module) -> set[Any]:
    """Of a rotary embedding, those of its kinds of layers; none of other modules."""
    kind = getattr(module, "rope_type", None)
    return set(kind.values()) if isinstance(kind, dict) else {kind}
