"""What the CPU kernels draw tokens by, and the proposals they make (`kernels/draw.h`); the slow twin is `Draws`.

Legend: R requests, N tokens to draft in all, V' draft vocabulary.
"""

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from dspark import native
from dspark.engine.draft_runner import DraftRequest
from dspark.engine.draws import uniforms_of
from dspark.engine.sampling import MIN_TEMPERATURE
from dspark.speculation.proposal import Proposal

CPU = torch.device("cpu")


class FusedDraws:
    """Room for what is drawn. d2t: [V'] target id of every draft id; `choice`: all of it, as the kernels read it."""

    def __init__(self, requests: Sequence[DraftRequest], d2t: Tensor, *, vocab_size: int) -> None:
        self._requests, self._d2t, num_ids = requests, d2t, d2t.numel()
        self._is_whole_vocabulary = num_ids == vocab_size
        self.lengths = [request.max_tokens for request in requests]
        self._sampled = [request.max_tokens if request.temperature > 0 else 0 for request in requests]
        self.num_tokens = sum(self.lengths)
        self._columns, self._token_ids = torch.empty(2, self.num_tokens, dtype=torch.long)
        self._probs = torch.empty(sum(self._sampled), num_ids)
        self._uniforms = _uniforms(requests) if sum(self._sampled) else None
        self._numbers = array("i", self.lengths), array("f", (request.temperature for request in requests))
        lengths, temperatures = (numbers.buffer_info()[0] for numbers in self._numbers)
        self.choice = native.Choice(
            lengths=lengths,
            temperatures=temperatures,
            uniforms=None if self._uniforms is None else self._uniforms.data_ptr(),
            d2t=d2t.data_ptr(),
            columns=self._columns.data_ptr(),
            token_ids=self._token_ids.data_ptr(),
            probs=self._probs.data_ptr(),
            num_ids=num_ids,
        )

    @staticmethod
    def serve(requests: Sequence[DraftRequest], num_draft_ids: int) -> bool:
        """Whether the kernels draw these requests' tokens: seeded and sparse ones they do not."""
        return all(request.temperature == 0 or _is_plainly_drawn(request, num_draft_ids) for request in requests)

    def proposals(self, confidence_logits: Tensor | None = None) -> list[Proposal]:
        """One per request, as long as it asked for, after the call. confidence_logits: [N] float32."""
        confidences: Sequence[Tensor | None] = [None] * len(self.lengths)
        if confidence_logits is not None:
            confidences = confidence_logits.split(self.lengths)
        parts = zip(
            self._requests,
            self._token_ids.split(self.lengths),
            self._columns.split(self.lengths),
            self._probs.split(self._sampled),
            confidences,
            strict=True,
        )
        return [
            Proposal(token_ids, None, confidence)
            if request.temperature == 0
            else Proposal(token_ids, probs, confidence)
            if self._is_whole_vocabulary
            else Proposal(token_ids, probs, confidence, self._d2t, columns)
            for request, token_ids, columns, probs, confidence in parts
        ]


def _is_plainly_drawn(request: DraftRequest, num_draft_ids: int) -> bool:
    """Whether its tokens come from all of the draft vocabulary, by numbers that are known beforehand."""
    is_dense = request.top_k is None or request.top_k >= num_draft_ids
    # Below that temperature float32 may have no number for what it makes of a logit, or none for itself.
    return request.noise_key is None and is_dense and request.temperature >= MIN_TEMPERATURE


def _uniforms(requests: Sequence[DraftRequest]) -> Tensor:
    """What tokens are drawn with: [N] float32, zeros where none are."""
    parts = [uniforms_of(one, CPU) if one.temperature > 0 else torch.zeros(one.max_tokens) for one in requests]
    uniforms = torch.cat(parts)
    assert uniforms.numel() == sum(one.max_tokens for one in requests), "a number per token to draw"
    return uniforms
