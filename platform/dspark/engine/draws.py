"""Drawing the draft tokens of many requests, slot by slot; each draws from its own generator or noise alone.

Legend: R requests, l slots, V' draft vocabulary.
"""

from collections.abc import Sequence

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
        drawing = [i for i, request in enumerate(requests) if request.temperature > 0]
        self._sampled = [i for i in drawing if requests[i].noise_key is None]
        self._seeded = [i for i in drawing if requests[i].noise_key is not None]
        self._uniforms = torch.zeros(len(self._sampled), self.num_slots, device=d2t.device)
        for row, i in enumerate(self._sampled):  # as many as it asks for, not as many as the longest beside it does
            num_own, generator = requests[i].max_tokens, requests[i].generator
            self._uniforms[row, :num_own] = torch.rand(num_own, generator=generator, device=d2t.device)
        self._scales = self._temperatures(self._sampled)
        self._seeded_scales = self._temperatures(self._seeded)

    def draw(self, logits: Tensor) -> None:
        """The next slot's token of every request. logits: [R, V'] float32."""
        drawn = argmax(logits)
        if self._sampled:
            distribution = torch.softmax(logits[self._sampled] / self._scales, dim=-1)
            drawn[self._sampled] = invert(distribution, self._uniforms[:, len(self._columns)])
            self._probs.append(distribution)
        if self._seeded:
            drawn[self._seeded] = self._with_noise(logits[self._seeded])
        self._columns.append(drawn)
        self.token_ids.append(self._d2t[drawn])

    def proposals(self, confidence_logits: Tensor | None = None) -> list[Proposal]:
        """One per request, as long as it asked for. confidence_logits: [R, l] float32."""
        columns, token_ids = torch.stack(self._columns, dim=1), torch.stack(self.token_ids, dim=1)
        probs = dict(zip(self._sampled, torch.stack(self._probs, dim=1), strict=True)) if self._sampled else {}
        confidences = None if confidence_logits is None else confidence_logits.cpu()  # where they are weighed
        support = None if self._is_whole_vocabulary else self._d2t
        return [
            Proposal(
                token_ids=token_ids[i],
                probs=probs.get(i),
                confidence_logits=None if confidences is None else confidences[i],
                support=support,
                columns=None if support is None else columns[i],
            ).first(request.max_tokens)
            for i, request in enumerate(self._requests)
        ]

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
