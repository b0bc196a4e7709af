"""What the API and a target replica say to each other, and the way there through Ray Serve."""

import logging
from collections.abc import AsyncGenerator, Awaitable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from dspark.engine.request import FinishReason
from dspark.serving.openai_schema import GenerateRequest, Refusal
from dspark.serving.speculation_metrics import StepDraft
from dspark.serving.token_logprobs import ShownLogprobs
from dspark.serving.tokenization import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest
from dspark.serving.tool_calls import ToolCall

if TYPE_CHECKING:
    from prometheus_client import Metric

log = logging.getLogger("dspark")

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

    async def metrics(self) -> "Sequence[Metric]":
        """Metric families of every replica, those of one name not joined yet."""
        ...

    async def check_health(self) -> None:
        """Raises: whatever keeps the engine from answering."""
        ...


class ReplicaClient:
    """Replicas behind a Serve handle."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._generate: DeploymentHandle[Any] = handle.options(method_name="generate", stream=True)

    async def generate(self, request_id: str, request: GenerateRequest) -> AsyncGenerator[Delta | Refusal, None]:
        response = self._generate.remote(request_id, request)
        assert isinstance(response, DeploymentResponseGenerator)
        ended, num_open = False, request.n
        try:
            async for item in response:
                num_open -= isinstance(item, Refusal) or item.finish_reason is not None
                ended = isinstance(item, Refusal) or num_open == 0
                yield item
            ended = True
        except BackPressureError:
            yield Refusal(429, "too many requests are waiting; try again later", code="rate_limit_exceeded")
        except RayError:
            log.exception("request %s: the replica failed", request_id)
            yield Refusal(503, "the replica that worked on this request failed; try again", code="replica_failed")
        finally:
            if not ended:
                response.cancel()

    async def tokenize(self, request: TokenizeRequest) -> TokenizeAnswer | Refusal:
        return await _answered(self._handle.tokenize.remote(request))

    async def detokenize(self, request: DetokenizeRequest) -> DetokenizeAnswer | Refusal:
        return await _answered(self._handle.detokenize.remote(request))

    async def metrics(self) -> "Sequence[Metric]":
        per_replica = await self._handle.broadcast("metrics").results_async(return_exceptions=True)
        return [family for families in per_replica if not isinstance(families, Exception) for family in families]

    async def check_health(self) -> None:
        await self._handle.check_health.remote()


async def _answered(response: Awaitable[Any]) -> Any:
    """What a replica answers, or why it does not."""
    try:
        return await response
    except BackPressureError:
        return Refusal(429, "too many requests are waiting; try again later", code="rate_limit_exceeded")
    except RayError:
        log.exception("a replica failed")
        return Refusal(503, "the replica that worked on this request failed; try again", code="replica_failed")
