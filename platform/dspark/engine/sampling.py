"""What a request asks of its tokens, and the distribution they are drawn from. Legend: V vocabulary.

The order is vLLM's:

    target's logits                            logprobs are told of these, untouched
    allowed_token_ids, banned_token_ids        the rest at -inf
    min_tokens                                 stop ids at -inf until so many tokens are output
    logit_bias                                 added
    repetition, frequency, presence penalty    they see prompt, output and the draft tokens before the row
    temperature                                0 takes the argmax of what is there now
    min_p, top_k, top_p                        each over what the one before left
"""

import math
from collections.abc import Collection
from typing import Annotated, Literal

import pydantic
import torch
from pydantic import Field
from torch import Tensor

from dspark.config import Config

MAX_LOGPROBS = 20
MAX_BIAS = 100.0
# Beyond these, float32 has no number for what they make of a logit or a probability.
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
MIN_TOP_P = 1e-6
MIN_REPETITION, MAX_REPETITION = 0.01, 100.0

TokenId = Annotated[int, Field(ge=0)]


class SamplingParams(Config):
    """What decides a token, but for the request's stop ids and seed."""

    temperature: float = Field(1.0, ge=0, le=MAX_TEMPERATURE)
    """Divides the logits; 0 takes the most likely token, else it is at least 0.01."""
    top_k: int | None = Field(None, ge=1)
    """Keeps this many most likely tokens; None keeps all."""
    top_p: float = Field(1.0, ge=MIN_TOP_P, le=1)
    """Keeps the fewest most likely tokens that hold this much probability; 1 keeps all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Keeps tokens at least this share as likely as the most likely one; 0 keeps all."""
    repetition_penalty: float = Field(1.0, ge=MIN_REPETITION, le=MAX_REPETITION)
    """Divides positive and multiplies negative logits of tokens that stand in prompt or output; 1 does nothing."""
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    """Taken off the logits of tokens that stand in the output."""
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    """Taken off a token's logit as often as it stands in the output."""
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]] = {}
    """Added to the logits of these token ids."""
    allowed_token_ids: tuple[TokenId, ...] | None = Field(None, min_length=1)
    """No other token is output; None allows all. A stop id that is not among them never ends the output."""
    banned_token_ids: tuple[TokenId, ...] = ()
    """Never output."""
    min_tokens: int = Field(0, ge=0)
    """Neither a stop id is output, nor a stop string looked for, before so many tokens are there."""
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """Tell each output token's log-probability, and so many most likely tokens with theirs; None tells nothing."""
    seeded: Literal["invariant", "rejection"] = "invariant"
    """What a seed fixes. "invariant": the text, whatever drafts for it and how much of it; draft tokens are accepted
    less often than by rejection sampling. "rejection": the random numbers alone, so that a run that measures
    acceptance can be repeated; the text then depends on the lengths that are verified."""

    @pydantic.field_validator("temperature")
    @classmethod
    def _keep_logits_finite(cls, temperature: float) -> float:
        return checked_temperature(temperature)

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def changes_logits(self) -> bool:
        """Whether anything is asked for that comes before the temperature."""
        return bool(
            self.has_penalties
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.banned_token_ids
            or self.min_tokens
        )

    def require_plain(self, where: str) -> None:
        """Raises: ValueError when more is asked for than temperature and filters, which is all that `where` applies."""
        if self.changes_logits or self.logprobs is not None:
            fields = type(self).model_fields
            asked = [name for name in fields.keys() - PLAIN if getattr(self, name) != fields[name].default]
            raise ValueError(f"{where} does not apply {', '.join(sorted(asked))}; leave it out, or use the engine")


def checked_temperature(temperature: float) -> float:
    """Raises: ValueError for one that is neither 0 nor large enough to divide by."""
    if 0 < temperature < MIN_TEMPERATURE:
        raise ValueError(f"must be 0 (greedy) or at least {MIN_TEMPERATURE}")
    return temperature


PLAIN = {"temperature", "top_k", "top_p", "min_p", "seeded"}


def sampling_problem(
    params: SamplingParams, *, stop_ids: Collection[int], max_tokens: int, vocabulary_size: int
) -> tuple[str, str] | None:
    """The parameter that cannot be met with this target and request, and a line about it; None when all can."""
    named = {
        "logit_bias": tuple(params.logit_bias),
        "allowed_token_ids": params.allowed_token_ids or (),
        "banned_token_ids": params.banned_token_ids,
    }
    for name, token_ids in named.items():
        for token_id in token_ids:
            if token_id >= vocabulary_size:
                limit = vocabulary_size - 1
                return name, f"{name} holds token id {token_id}, which the target does not have; use 0..{limit}"
    if params.min_tokens > max_tokens:
        return "min_tokens", f"min_tokens is {params.min_tokens}, over the limit of {max_tokens} tokens; lower it"
    every = range(vocabulary_size) if params.allowed_token_ids is None else params.allowed_token_ids
    banned = frozenset(params.banned_token_ids)
    if all(token_id in banned for token_id in every):
        return "banned_token_ids", f"banned_token_ids ({len(banned)}) hold every allowed token; leave one"
    if params.min_tokens and all(token_id in banned or token_id in stop_ids for token_id in every):
        line = f"min_tokens is {params.min_tokens}, but every allowed token ends the output; allow another or use 0"
        return "min_tokens", line
    return None


def filtered_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities tokens are drawn from, float32, zero outside the filters. logits: [..., V].

    Temperature 0 puts all mass on the argmax. Equal logits rank by token id, lower first, so that the filters cut in
    one place whatever the sort.
    """
    logits = logits.float()
    if params.temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = logits / params.temperature
    if params.min_p > 0:
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(params.min_p), -torch.inf)
    if params.top_k is None and params.top_p == 1:
        return torch.softmax(logits, -1)
    ranked, token_ids = logits.sort(dim=-1, descending=True, stable=True)
    if params.top_k is not None:
        ranked[..., params.top_k :] = -torch.inf
    probs = torch.softmax(ranked, -1)
    if params.top_p < 1:
        probs = probs.masked_fill(mass_before(probs) >= params.top_p, 0.0)
    return torch.zeros_like(logits).scatter_(-1, token_ids, probs / probs.sum(-1, keepdim=True))


def mass_before(ranked_probs: Tensor) -> Tensor:
    """Of each place in rank order, the probability of those before it."""
    return torch.nn.functional.pad(ranked_probs.cumsum(-1)[..., :-1], (1, 0))


def invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Index per row at which the cumulative weight passes `uniform` of the total. weights: [R, N], not normalised."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    goal = uniforms.double()[:, None] * cumulative[:, -1:]
    index = (cumulative <= goal).sum(-1)
    last = (weights > 0).cumsum(-1).argmax(-1)  # rounding must not step past the last token that has weight
    return torch.minimum(index, last)
