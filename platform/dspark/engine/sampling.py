"""The distribution tokens are drawn from, and drawing from it. Legend: R rows, V vocabulary, K shortlist."""

import torch
from pydantic import Field
from torch import Tensor

from dspark.config import Config

SHORTLIST = 64  # tokens looked at first; a row whose nucleus may be wider is sorted in full


class SamplingParams(Config):
    """Filters applied in this order: temperature, top-k, top-p."""

    temperature: float = Field(1.0, ge=0)
    """Divides the logits; 0 takes the most likely token."""
    top_k: int | None = Field(None, ge=1)
    """Keeps this many most likely tokens; None keeps all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keeps the fewest most likely tokens that hold this much probability; 1 keeps all."""


def filtered_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities tokens are drawn from, float32, zero outside the filters. logits: [..., V].

    Temperature 0 puts all mass on the argmax. Equal logits rank by token id, lower first, so that the filters cut in
    one place whatever the sort.
    """
    logits = logits.float()
    if params.temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = logits / params.temperature
    if params.top_k is None and params.top_p == 1:
        return torch.softmax(logits, -1)
    probs = torch.softmax(logits, -1)
    ranked, token_ids = logits.sort(dim=-1, descending=True, stable=True)
    if params.top_k is None:
        probs = probs.gather(-1, token_ids)
    else:
        ranked[..., params.top_k :] = -torch.inf
        probs = torch.softmax(ranked, -1)
    probs = _cut_at_top_p(probs, params.top_p)
    return torch.zeros_like(logits).scatter_(-1, token_ids, probs / probs.sum(-1, keepdim=True))


def sample(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One token id per row, [...] int64. probs: [..., V]."""
    rows = probs.reshape(-1, probs.shape[-1])
    return torch.multinomial(rows, 1, generator=generator).view(probs.shape[:-1])


class ShortlistSampler:
    """Draws from `filtered_probs` without sorting the vocabulary where few tokens hold the mass.

    Token = inverse of the cumulative filtered distribution at a uniform number, so a row's token depends on its own
    logits and number alone. Buffers are kept: fresh memory of this size costs more than the arithmetic.
    """

    def __init__(self, params: SamplingParams, *, shortlist: int = SHORTLIST) -> None:
        self.params = params
        self.shortlist = shortlist
        self._buffers: dict[str, Tensor] = {}

    def draw(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        """Token ids, [R] int64. logits: [R, V]; uniforms: [R] in [0, 1)."""
        if self.params.temperature == 0:
            return logits.argmax(-1)
        if self.params.top_k is None and self.params.top_p == 1:
            return invert(filtered_probs(logits, self.params), uniforms)
        width = min(self.shortlist, logits.shape[-1])
        return self._draw_short(logits, uniforms, width)

    def _draw_short(self, logits: Tensor, uniforms: Tensor, width: int) -> Tensor:
        token_ids, kept, is_settled = self._shortlist(logits, width)
        drawn = token_ids.gather(-1, invert(kept, uniforms)[:, None])[:, 0]
        unsettled = (~is_settled).nonzero()[:, 0]  # synchronises with the device; the ids are read right after anyway
        if unsettled.numel():
            rows, numbers = logits[unsettled], uniforms[unsettled]
            wider = width * 16
            if wider < logits.shape[-1]:
                drawn[unsettled] = self._draw_short(rows, numbers, wider)
            else:
                drawn[unsettled] = _draw_sorted(rows, self.params, numbers)
        return drawn

    def _shortlist(self, logits: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """The `width` best tokens in rank order, their filtered mass, and which rows are settled.

        A row is settled when the filters cut above the shortlist's worst logit: tokens tied with the worst may go on
        outside of it.
        """
        best, token_ids = logits.topk(width, dim=-1)
        token_ids, by_id = token_ids.sort(dim=-1)
        best, by_logit = best.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
        token_ids = token_ids.gather(-1, by_logit)
        is_sure = best > best[:, -1:]
        kept = _cut_at_top_p(self._ranked_probs(logits, best, token_ids), self.params.top_p)
        is_settled = ~((kept > 0) & ~is_sure).any(-1)
        if self.params.top_k is not None:
            is_settled &= is_sure.sum(-1) >= self.params.top_k
        return token_ids, kept, is_settled

    def _ranked_probs(self, logits: Tensor, best: Tensor, token_ids: Tensor) -> Tensor:
        """Probabilities of the shortlist after temperature and top-k."""
        if self.params.top_k is None:
            return self._probs(logits).gather(-1, token_ids)
        scaled = best.float() / self.params.temperature
        scaled[:, self.params.top_k :] = -torch.inf
        return torch.softmax(scaled, -1)

    def _probs(self, logits: Tensor) -> Tensor:
        scaled = self._buffer("scaled", logits).copy_(logits).div_(self.params.temperature)
        return torch.softmax(scaled, -1, out=self._buffer("probs", logits))

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        rows, width = like.shape
        held = self._buffers.get(name)
        if held is None or held.shape[0] < rows or held.shape[1] != width or held.device != like.device:
            held = self._buffers[name] = torch.empty(rows, width, dtype=torch.float32, device=like.device)
        return held[:rows]


def _draw_sorted(logits: Tensor, params: SamplingParams, uniforms: Tensor) -> Tensor:
    """The same draw over the whole vocabulary in rank order."""
    token_ids = logits.float().sort(dim=-1, descending=True, stable=True).indices
    ranked = filtered_probs(logits, params).gather(-1, token_ids)
    return token_ids.gather(-1, invert(ranked, uniforms)[:, None])[:, 0]


def _cut_at_top_p(ranked_probs: Tensor, top_p: float) -> Tensor:
    """Probabilities in rank order with those after the first `top_p` of mass set to zero."""
    if top_p == 1:
        return ranked_probs
    before = torch.nn.functional.pad(ranked_probs.cumsum(-1)[..., :-1], (1, 0))
    return ranked_probs.masked_fill(before >= top_p, 0.0)


def invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Index per row at which the cumulative weight passes `uniform` of the total. weights: [R, N], not normalised."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    goal = uniforms.double()[:, None] * cumulative[:, -1:]
    index = (cumulative <= goal).sum(-1)
    last = (weights > 0).cumsum(-1).argmax(-1)  # rounding must not step past the last token that has weight
    return torch.minimum(index, last)
