"""Log-probabilities of output tokens by the target's own distribution, before anything a request asks of it.

This is vLLM's default, `raw_logprobs`: neither bias, penalties and bans nor temperature and filters are in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dspark.attention.flat_batch import FlatBatch
from dspark.engine.step import StepOutput, TokenLogprobs, Work


@dataclass(frozen=True)
class RawLogprobs:
    """Of one request in one step: rows [l + 1, V] float32, and how many of the most likely tokens to tell."""

    rows: Tensor
    num_top: int

    def of(self, token_ids: Sequence[int]) -> list[TokenLogprobs]:
        """One entry per token; they are those of the first rows."""
        rows = self.rows[: len(token_ids)]
        own = rows.gather(1, torch.tensor(token_ids, device=rows.device).unsqueeze(1))[:, 0].tolist()
        top = rows.topk(min(self.num_top, rows.shape[1]), dim=-1)
        best = [
            tuple(zip(ids, values, strict=True))
            for ids, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        ]
        return [TokenLogprobs(*entry) for entry in zip(token_ids, own, best, strict=True)]


def raw_logprobs(works: Sequence[Work], batch: FlatBatch, logits: Tensor) -> dict[str, RawLogprobs]:
    """By request id, of those that ask for them. logits: [N, V] as the target gave them."""
    found = {}
    for i, work in enumerate(works):
        num_top = work.running.request.sampling.logprobs
        if num_top is not None and work.yields_token:
            rows = torch.log_softmax(logits[batch.cu_logits[i] : batch.cu_logits[i + 1]], -1)
            found[work.running.request.request_id] = RawLogprobs(rows, num_top)
    return found


def with_logprobs(outputs: list[StepOutput], raw: dict[str, RawLogprobs]) -> list[StepOutput]:
    """The outputs, those that ask for it with an entry per token."""
    if not raw:
        return outputs
    return [
        replace(output, logprobs=raw[output.request_id].of(output.token_ids)) if output.request_id in raw else output
        for output in outputs
    ]
