"""What requests ask of logits before the temperature: allowed and banned ids, min_tokens, bias and penalties.

Legend: n rows of one request in a step, V vocabulary, C tokens a request's penalties are about.

    row       0                      1              …    n-1
    history   prompt, output         … x_1          …    … x_1 … x_(n-1)        x: the draft tokens
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark.engine.request import GenerationRequest
from dspark.engine.sampling import SamplingParams


@dataclass(frozen=True)
class Penalties:
    """Of n rows: token_ids [C]; per row and token what the logit is divided by (multiplied, below 0) and then less."""

    token_ids: NDArray[np.int64]
    divisors: NDArray[np.float32]
    losses: NDArray[np.float32]


class TokenHistory:
    """How often each token stands in a request's output, and which ones stand in its prompt."""

    def __init__(self, prompt_ids: Sequence[int] = ()) -> None:
        self._columns = {token_id: column for column, token_id in enumerate(dict.fromkeys(prompt_ids))}
        self._num_prompt = len(self._columns)
        self._counts = [0] * self._num_prompt
        self._num_counted = 0

    def penalties(self, output_ids: Sequence[int], draft_ids: Sequence[int], params: SamplingParams) -> Penalties:
        """What the next len(draft_ids) + 1 tokens are penalised by. output_ids: all so far, only ever growing."""
        for token_id in output_ids[self._num_counted :]:
            self._counts[self._column(token_id)] += 1
        self._num_counted = len(output_ids)
        drafted = [self._column(token_id) for token_id in draft_ids]
        shape = (len(draft_ids) + 1, len(self._counts))
        counts = np.broadcast_to(np.array(self._counts, dtype=np.float32), shape).copy()
        for k, column in enumerate(drafted):
            counts[k + 1 :, column] += 1
        in_output = counts > 0
        stands = in_output | (np.arange(shape[1]) < self._num_prompt)  # not what was drafted once and rejected
        return Penalties(
            token_ids=np.fromiter(self._columns, dtype=np.int64, count=shape[1]),
            divisors=np.where(stands, np.float32(params.repetition_penalty), np.float32(1)),
            losses=np.float32(params.frequency_penalty) * counts
            + np.float32(params.presence_penalty) * in_output.astype(np.float32),
        )

    def _column(self, token_id: int) -> int:
        column = self._columns.setdefault(token_id, len(self._counts))
        if column == len(self._counts):
            self._counts.append(0)
        return column


class LogitRules:
    """Those of one request, for as long as it runs."""

    def __init__(self, request: GenerationRequest, device: torch.device) -> None:
        params = request.sampling
        banned = set(params.banned_token_ids)
        allowed = params.allowed_token_ids
        self._params = params
        self._banned = torch.tensor(sorted(banned), dtype=torch.int64, device=device)
        self._allowed = None if allowed is None else torch.tensor(sorted({*allowed} - banned), device=device)
        self._stops = torch.tensor(sorted(request.stop_ids), dtype=torch.int64, device=device)
        self._biased = torch.tensor(list(params.logit_bias), dtype=torch.int64, device=device)
        self._biases = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device)
        self._history = TokenHistory(request.prompt_ids if params.repetition_penalty != 1 else ())

    def mask_and_bias(self, rows: Tensor, num_output: int) -> None:
        """All but the penalties, in place. rows: [n, V] float32, of the tokens after `num_output` of the output."""
        if self._allowed is not None:
            kept = rows[:, self._allowed]
            rows.fill_(-torch.inf)
            rows[:, self._allowed] = kept
        elif self._banned.numel():
            rows.index_fill_(1, self._banned, -torch.inf)
        num_early = self._params.min_tokens - num_output
        if num_early > 0 and self._stops.numel():
            rows[:num_early].index_fill_(1, self._stops, -torch.inf)
        if self._biased.numel():
            rows.index_add_(1, self._biased, self._biases.expand(rows.shape[0], -1))

    def penalties(self, output_ids: Sequence[int], draft_ids: Sequence[int]) -> Penalties | None:
        """Those of the rows after the output and after each draft token; None without any."""
        if not self._params.has_penalties:
            return None
        return self._history.penalties(output_ids, draft_ids, self._params)


def penalise(logits: Tensor, penalties: Sequence[tuple[int, Penalties]]) -> None:
    """Apply penalties in place, all at once. logits: [N, V]; penalties: those of rows from a first one on."""
    if not penalties:
        return
    rows, columns, divisors, losses = [], [], [], []
    for first, one in penalties:
        shape = one.losses.shape
        rows.append(np.broadcast_to(np.arange(first, first + shape[0])[:, None], shape).ravel())
        columns.append(np.broadcast_to(one.token_ids, shape).ravel())
        divisors.append(one.divisors.ravel())
        losses.append(one.losses.ravel())
    where = tuple(torch.from_numpy(np.concatenate(parts)).to(logits.device) for parts in (rows, columns))
    divisor, loss = (torch.from_numpy(np.concatenate(parts)).to(logits.device) for parts in (divisors, losses))
    values = logits[where]
    logits.index_put_(where, torch.where(values > 0, values / divisor, values * divisor) - loss)
