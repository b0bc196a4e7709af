"""The parameters of the API that decide tokens, under the names of OpenAI or, where it has none, of vLLM."""

from typing import Annotated, Any

import pydantic
from pydantic import Field

from dspark.config import Config
from dspark.engine.request import INT64
from dspark.engine.sampling import (
    MAX_BIAS,
    MAX_REPETITION,
    MAX_TEMPERATURE,
    MIN_REPETITION,
    MIN_TOP_P,
    SamplingParams,
    TokenId,
    checked_temperature,
)

MAX_STOP_STRINGS = 16
MAX_CHOICES = 128
MAX_ID_DIGITS = 10

TokenIds = list[TokenId]


class Wire(Config):
    """JSON types as they are: "1" is no number and true is no integer."""

    model_config = pydantic.ConfigDict(strict=True, use_attribute_docstrings=True)


class RequestBody(Wire):
    """The body of a request."""

    def require_consistent(self) -> None:
        """Raises: RequestRefused (400) for fields that contradict each other."""


def _listed(stop: Any) -> Any:
    stops = [stop] if isinstance(stop, str) else stop
    if isinstance(stops, list) and "" in stops:
        raise ValueError("a stop string must not be empty")
    return stops


StopStrings = Annotated[
    list[str],
    pydantic.BeforeValidator(_listed),
    pydantic.WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": MAX_STOP_STRINGS},
            ]
        }
    ),
]


class SamplingFields(RequestBody):
    """What both endpoints take. Defaults are OpenAI's: temperature 1, the whole distribution, one choice."""

    temperature: float = Field(1.0, ge=0, le=MAX_TEMPERATURE)
    """0 takes the most likely token, else it is at least 0.01."""
    top_p: float = Field(1.0, ge=MIN_TOP_P, le=1)
    """Keep the fewest most likely tokens that hold this much probability."""
    top_k: int | None = Field(None, ge=1, lt=2**31)
    """Extension: keep this many most likely tokens."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Extension: keep tokens at least this share as likely as the most likely one."""
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    """Taken off the logits of tokens that stand in the answer."""
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    """Taken off a token's logit as often as it stands in the answer."""
    repetition_penalty: float = Field(1.0, ge=MIN_REPETITION, le=MAX_REPETITION)
    """Extension: over prompt and output, as the Hugging Face library has it."""
    logit_bias: dict[str, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]] = {}
    """Added to the logits of token ids."""
    allowed_token_ids: TokenIds | None = Field(None, min_length=1)
    """Extension: nothing else is output."""
    banned_token_ids: TokenIds = []
    """Extension: never output."""
    min_tokens: int = Field(0, ge=0)
    """Extension: nothing ends the answer before."""
    stop: StopStrings = Field(default_factory=list, max_length=MAX_STOP_STRINGS)
    """A text or several; the answer ends before the first one, in the midst of a block of accepted tokens, too."""
    stop_token_ids: TokenIds = []
    """Extension: they end the answer as the target's own stop tokens do."""
    ignore_eos: bool = False
    """Extension, for benchmarks: the target's own stop tokens do not end the answer."""
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    """The same seed gives the same text, whatever drafts for it and whoever else is served."""
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    """Answers to make; each counts as a request."""

    @pydantic.field_validator("temperature")
    @classmethod
    def _keep_logits_finite(cls, temperature: float) -> float:
        return checked_temperature(temperature)

    @pydantic.field_validator("logit_bias")
    @classmethod
    def _named_by_id(cls, biases: dict[str, float]) -> dict[str, float]:
        for key in biases:
            if not (key.isascii() and key.isdecimal() and len(key) <= MAX_ID_DIGITS):
                raise ValueError("is a map from token ids to numbers; a key is no token id")
        return biases

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens to tell beside each token's own log-probability; None tells neither."""
        raise NotImplementedError

    @property
    def sampling(self) -> SamplingParams:
        """As the engine takes them."""
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias={int(token_id): bias for token_id, bias in self.logit_bias.items()},
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            banned_token_ids=tuple(self.banned_token_ids),
            min_tokens=self.min_tokens,
            logprobs=self.num_logprobs,
        )
