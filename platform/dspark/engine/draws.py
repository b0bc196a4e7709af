"""Drawing the draft tokens of many requests, slot by slot; each draws from its own generator or noise alone.

Legend: R requests, l slots, V' draft vocabulary, k tokens that a sparse proposal draws from in each slot.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dspark.engine.draft_runner import DraftRequest
from dspark.engine.noise import perturbed_argmax, position_keys
from dspark.engine.sampling import invert
from dspark.numerics import argmax
from dspark.speculation.proposal import Proposal

NOISY_TOKENS = 64  # of a seeded request's slot, the most likely; what is drawn beside them is rarely right anyway


class Draws:
    """What has been drawn so far. d2t: [V'] target id of every draft id; `token_ids`: target ids, [R] per slot."""

    def __init__(self, requests: Sequence[DraftRequest], d2t: Tensor, *, vocab_size: int) -> None:
        self.num_slots = max(request.max_tokens for request in requests)
        self.token_ids: list[Tensor] = []
        self._requests, self._d2t = requests, d2t
        self._is_whole_vocabulary = d2t.numel() == vocab_size
        self._columns: list[Tensor] = []
        self._probs: list[Tensor] = []
        self._likely: list[Tensor] = []  # draft ids that the columns of sparse probabilities stand for
        drawing = [i for i, request in enumerate(requests) if request.temperature > 0]
        self._sampled = [i for i in drawing if requests[i].noise_key is None]
        self._seeded = [i for i in drawing if requests[i].noise_key is not None]
        self._uniforms = torch.zeros(len(self._sampled), self.num_slots, device=d2t.device)
        for row, i in enumerate(self._sampled):  # as many as it asks for, not as many as the longest beside it does
            self._uniforms[row, : requests[i].max_tokens] = uniforms_of(requests[i], d2t.device)
        self._top_k = _common_top_k([requests[i] for i in self._sampled], d2t.numel())
        self._scales = self._temperatures(self._sampled)
        self._seeded_scales = self._temperatures(self._seeded)

    def draw(self, logits: Tensor) -> None:
        """The next slot's token of every request. logits: [R, V'] float32."""
        drawn = argmax(logits)
        if self._sampled:
            drawn[self._sampled] = self._sample(logits[self._sampled])
        if self._seeded:
            drawn[self._seeded] = self._with_noise(logits[self._seeded])
        self._columns.append(drawn)
        self.token_ids.append(self._d2t[drawn])

    def _sample(self, logits: Tensor) -> Tensor:
        """Draft ids of the sampled requests: [n]. logits: [n, V']."""
        likely = None
        if self._top_k is not None:
            likely = logits.topk(self._top_k, dim=-1).indices.sort(dim=-1).values
            logits = logits.gather(1, likely)
            self._likely.append(likely)
        self._probs.append(torch.softmax(logits / self._scales, dim=-1))
        columns = invert(self._probs[-1], self._uniforms[:, len(self._columns)])
        return columns if likely is None else likely.gather(1, columns.unsqueeze(1))[:, 0]

    def proposals(self, confidence_logits: Tensor | None = None) -> list[Proposal]:
        """One per request, as long as it asked for. confidence_logits: [R, l] float32."""
        columns, token_ids = torch.stack(self._columns, dim=1), torch.stack(self.token_ids, dim=1)
        probs = dict(zip(self._sampled, torch.stack(self._probs, dim=1), strict=True)) if self._sampled else {}
        confidences = None if confidence_logits is None else confidence_logits.cpu()  # where they are weighed
        likely = dict(zip(self._sampled, torch.stack(self._likely, dim=1), strict=True)) if self._likely else {}
        support = None if self._is_whole_vocabulary else self._d2t
        proposals = []
        for i, request in enumerate(self._requests):
            own = Proposal(
                token_ids=token_ids[i],
                probs=probs.get(i),
                confidence_logits=None if confidences is None else confidences[i],
                support=support if i in probs else None,
                columns=columns[i] if i in probs and support is not None else None,
            ).first(request.max_tokens)
            proposals.append(self._sparse(own, likely[i], columns[i]) if i in likely else own)
        return proposals

    def _sparse(self, proposal: Proposal, likely: Tensor, columns: Tensor) -> Proposal:
        """The proposal over the ids that any of its slots drew from. likely: [l, k] draft ids; columns: [l] drawn."""
        assert proposal.probs is not None, "what is drawn from few tokens has their probabilities"
        num_tokens = proposal.num_tokens
        draft_ids, places = likely[:num_tokens].unique(return_inverse=True)
        probs = proposal.probs.new_zeros(num_tokens, draft_ids.numel()).scatter_(1, places, proposal.probs)
        return replace(
            proposal,
            probs=probs,
            support=self._d2t[draft_ids],
            columns=torch.searchsorted(draft_ids, columns[:num_tokens]),
        )

    def _with_noise(self, logits: Tensor) -> Tensor:
        """Draft ids of the seeded requests: the target will draw with the same noise. logits: [n, V']."""
        requests = [self._requests[i] for i in self._seeded]
        positions = [request.position + len(self._columns) for request in requests]
        keys = position_keys([request.noise_key or 0 for request in requests], positions, logits.device)
        likely = logits.topk(min(NOISY_TOKENS, logits.shape[1]), dim=-1)
        best = perturbed_argmax(likely.values / self._seeded_scales, keys, self._d2t[likely.indices])
        return likely.indices.gather(1, best.unsqueeze(1))[:, 0]

    def _temperatures(self, chosen: Sequence[int]) -> Tensor:
        values = [self._requests[i].temperature for i in chosen]
        return torch.tensor(values, device=self._d2t.device).unsqueeze(1)


def uniforms_of(request: DraftRequest, device: torch.device) -> Tensor:
    """[max_tokens] float32 in [0, 1): the request's own numbers, or its generator's next ones."""
    if request.uniforms is not None:
        return torch.tensor(request.uniforms[: request.max_tokens], dtype=torch.float32, device=device)
    return torch.rand(request.max_tokens, generator=request.generator, device=device)


def _common_top_k(sampled: Sequence[DraftRequest], num_draft_ids: int) -> int | None:
    """Tokens that all sampled requests of a batch draw from, or None for all of the draft vocabulary.

    Requests that ask for different numbers get the largest: each carries the distribution that it was drawn from.
    """
    asked = [num_draft_ids if request.top_k is None else request.top_k for request in sampled]
    most = max(asked, default=num_draft_ids)
    return None if most >= num_draft_ids else most
