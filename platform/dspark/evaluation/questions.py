"""Questions put to a served model through the official client, as any user's program would put them."""

import time
from dataclasses import asdict, dataclass
from typing import Any

import openai
from pydantic import Field

from dspark.config import Config
from dspark.tracking import TrackingConfig


class AskConfig(Config):
    """Serve a deployment and ask it."""

    deployment: str
    """A file for `serve run`."""
    questions: list[str] = Field(min_length=1)
    max_tokens: int = Field(160, ge=1)
    """Of each answer."""
    temperature: float = Field(0.0, ge=0)
    startup_timeout_s: float = Field(240.0, gt=0)
    """Seconds until the server must answer."""
    output: str
    """Gets answers.json and the server's log."""
    tracking: TrackingConfig = TrackingConfig()


@dataclass(frozen=True)
class Answer:
    """A streamed answer. chunks: pieces that carried text; first_s, seconds: until the first piece, and the last."""

    question: str
    text: str
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    chunks: int
    first_s: float
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.completion_tokens / self.seconds

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"tokens_per_s": round(self.tokens_per_s, 1)}


def ask(client: openai.OpenAI, question: str, *, max_tokens: int, temperature: float) -> Answer:
    """Stream one answer of the server's model. Raises: openai.OpenAIError when the server refuses or breaks off."""
    model = client.models.list().data[0].id
    started = time.perf_counter()
    first_s, pieces, finish_reason, usage = 0.0, [], None, None
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=max_tokens,
        temperature=temperature,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            finish_reason = choice.finish_reason or finish_reason
            if choice.delta.content:
                first_s = first_s or time.perf_counter() - started
                pieces.append(choice.delta.content)
    assert usage is not None, "the server sent no usage although it was asked to"
    return Answer(
        question=question,
        text="".join(pieces),
        finish_reason=finish_reason,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        chunks=len(pieces),
        first_s=round(first_s, 3),
        seconds=round(time.perf_counter() - started, 3),
    )
