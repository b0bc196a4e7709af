"""The way from the API to the replicas, through a Ray Serve handle."""

import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from dspark.serving.config import FailoverConfig
from dspark.serving.engine_client import ENGINE_STOPPED, Continuation, Delta
from dspark.serving.openai_schema import GenerateRequest, Refusal
from dspark.serving.resuming import Answers, ReplicaLost, resumed
from dspark.serving.tokenization import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest

if TYPE_CHECKING:
    from prometheus_client import Metric

GRACE_S = 5.0  # that a replica has to say itself that a request took too long

log = logging.getLogger("dspark")


class ReplicaClient:
    """Replicas behind a Serve handle. An answer whose replica dies goes on with another one's help.

    timeout_s: of an answer from its request to its end. scales_to_zero: having no replica is no fault.
    """

    def __init__(
        self,
        handle: DeploymentHandle[Any],
        failover: FailoverConfig,
        *,
        timeout_s: float,
        scales_to_zero: bool = False,
    ) -> None:
        self._handle = handle
        self._generate: DeploymentHandle[Any] = handle.options(method_name="generate", stream=True)
        self._failover = failover
        self._timeout_s = timeout_s + GRACE_S
        self._scales_to_zero = scales_to_zero

    def generate(self, request_id: str, request: GenerateRequest) -> AsyncGenerator[Delta | Refusal, None]:
        def attempt(number: int, continuation: Continuation | None) -> Answers:
            name = f"{request_id}.{number}" if number else request_id  # a replica that was given up may still know it
            return self._ask(name, request, continuation)

        return resumed(attempt, num_choices=request.n, config=self._failover, timeout_s=self._timeout_s)

    async def tokenize(self, request: TokenizeRequest) -> TokenizeAnswer | Refusal:
        return await _answered(self._handle.tokenize.remote(request))

    async def detokenize(self, request: DetokenizeRequest) -> DetokenizeAnswer | Refusal:
        return await _answered(self._handle.detokenize.remote(request))

    async def metrics(self) -> "Sequence[Metric]":
        try:
            per_replica = await self._handle.broadcast("metrics").results_async(return_exceptions=True)
        except DeploymentUnavailableError:  # there is no replica
            return []
        return [family for families in per_replica if not isinstance(families, Exception) for family in families]

    async def check_health(self) -> None:
        if not self._scales_to_zero:
            await self._handle.check_health.remote()
            return
        with contextlib.suppress(DeploymentUnavailableError):  # a request to a replica would have one started
            answers = await self._handle.broadcast("check_health").results_async(return_exceptions=True)
            failures = [answer for answer in answers if isinstance(answer, Exception)]
            if len(failures) == len(answers):
                raise failures[0]

    async def _ask(self, request_id: str, request: GenerateRequest, continuation: Continuation | None) -> Answers:
        """One replica's part of an answer. Raises: ReplicaLost."""
        response = self._generate.remote(request_id, request, continuation)
        assert isinstance(response, DeploymentResponseGenerator)
        is_ended = False
        try:
            async for item in response:
                if isinstance(item, Refusal) and item.code == ENGINE_STOPPED:
                    raise ReplicaLost(item.message)
                yield item
            is_ended = True
        except BackPressureError:  # those that Serve keeps are as many as a replica takes
            is_ended = True  # it never began: cancelling it would raise the same again
            yield Refusal(429, "too many requests are waiting; try again later", code="rate_limit_exceeded")
        except DeploymentUnavailableError as error:
            is_ended = True
            raise ReplicaLost("there is no replica, and none can be started") from error
        except RayError as error:
            is_ended = True
            if isinstance(error, RayTaskError) and not isinstance(error.cause, RayActorError):
                log.exception("request %s: the replica failed", request_id)
                yield Refusal(500, "internal error; the server's log has the details", code="internal_error")
                return
            raise ReplicaLost(f"{type(error).__name__} in request {request_id}") from error
        finally:
            if not is_ended:
                response.cancel()


async def _answered(response: Awaitable[Any]) -> Any:
    """What a replica answers, or why it does not."""
    try:
        return await response
    except BackPressureError:
        return Refusal(429, "too many requests are waiting; try again later", code="rate_limit_exceeded")
    except (RayError, DeploymentUnavailableError) as error:
        log.exception("a replica failed")
        if isinstance(error, RayTaskError) and not isinstance(error.cause, RayActorError):
            return Refusal(500, "internal error; the server's log has the details", code="internal_error")
        return Refusal(503, "the replica that worked on this request failed; try again", code="replica_failed")
