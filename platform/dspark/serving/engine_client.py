"""What the API and a target replica say to each other."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from dspark.engine.request import FinishReason
from dspark.serving.openai_schema import GenerateRequest, Refusal
from dspark.serving.speculation_metrics import StepDraft
from dspark.serving.token_logprobs import ShownLogprobs
from dspark.serving.tokenization import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest
from dspark.serving.tool_calls import ToolCall

if TYPE_CHECKING:
    from prometheus_client import Metric
ENGINE_STOPPED = "engine_stopped"  # code of a refusal: this replica's engine has ended, another one may go on

AnswerEnd = FinishReason | Literal["tool_calls"]


@dataclass(frozen=True)
class Delta:
    """What one engine step added to an answer; counts are the usage so far. The last one has a finish reason.

    prompt_token_ids: what the target saw, on the first one and only where token ids are asked for. index: which of the
    request's choices it belongs to. logprobs: an entry per token id, where they are asked for. num_cached_tokens: of
    the prompt, found in the prefix cache. draft: of a decode, where the request asks for it. tool_calls: what was found
    in the text, and is no longer there; the engine itself knows of none.
    """

    text: str
    token_ids: list[int]
    finish_reason: AnswerEnd | None
    num_prompt_tokens: int
    num_output_tokens: int
    prompt_token_ids: tuple[int, ...] | None = None
    index: int = 0
    logprobs: list[ShownLogprobs] | None = None
    num_cached_tokens: int = 0
    draft: StepDraft | None = None
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Continuation:
    """What a replica is told beside a request that another one began: the ids output so far of each choice that has not
    ended. Others are not made again."""

    output_ids: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True)
class LoadReport:
    """How a replica stands, in choices of requests: those open, and those that run at once.

    num_ahead: of those open, such as do not stand behind others (a `priority` up to 0); None: all. num_urgent: of
    these, such as go before others.
    per_s: those that end in a second while others wait, of late; None while it has no pace.
    """

    replica_id: str
    num_open: int
    max_running: int
    per_s: float | None
    num_ahead: int | None = None
    num_urgent: int = 0


class EngineClient(Protocol):
    """The engine as the API sees it: one in this process, or replicas behind a Serve handle."""

    def generate(self, request_id: str, request: GenerateRequest) -> AsyncGenerator[Delta | Refusal, None]:
        """The answer step by step, its choices in turn as steps yield them; each ends with a finish reason.

        A refusal comes first, or last where something broke. Closing it frees all.
        """
        ...

    async def tokenize(self, request: TokenizeRequest) -> TokenizeAnswer | Refusal:
        """The ids that a prompt becomes."""
        ...

    async def detokenize(self, request: DetokenizeRequest) -> DetokenizeAnswer | Refusal:
        """The text of ids."""
        ...

    async def loads(self) -> Sequence[LoadReport | None]:
        """How each replica stands; None in the place of one that does not answer in time."""
        ...

    async def metrics(self) -> "Sequence[Metric]":
        """Metric families of every replica, those of one name not joined yet."""
        ...

    async def check_health(self) -> None:
        """Raises: whatever keeps the engine from answering."""
        ...
