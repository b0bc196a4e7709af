"""The way from the API to the replicas, through a Ray Serve handle."""

import logging
from collections.abc import AsyncGenerator, Awaitable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from dspark.serving.config import FailoverConfig
from dspark.serving.engine_client import ENGINE_STOPPED, Continuation, Delta, LoadReport
from dspark.serving.every_replica import Silent, ask_any, ask_every
from dspark.serving.metrics import counter, gauge, with_label
from dspark.serving.openai_schema import GenerateRequest, Refusal
from dspark.serving.resuming import Answers, FailoverCounts, ReplicaLost, resumed
from dspark.serving.this_replica import ingress_name
from dspark.serving.tokenization import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest

if TYPE_CHECKING:
    from prometheus_client import Metric

GRACE_S = 5.0  # that a replica has to say itself that a request took too long
ANSWER_S = 2.0  # that a replica has to tell its metrics, its load or its health; others' answers do not wait for it
TAKEN_AWAY = "ray.kill"  # in the reason of an actor's death where Serve ended it

log = logging.getLogger("dspark")


class NoReplica(Exception):
    """There is none to answer."""


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
        self._counts = FailoverCounts()
        self._name = ingress_name()

    def generate(self, request_id: str, request: GenerateRequest) -> AsyncGenerator[Delta | Refusal, None]:
        def attempt(number: int, continuation: Continuation | None) -> Answers:
            name = f"{request_id}.{number}" if number else request_id  # a replica that was given up may still know it
            return self._ask(name, request, continuation)

        return resumed(
            attempt, num_choices=request.n, config=self._failover, timeout_s=self._timeout_s, counts=self._counts
        )

    async def tokenize(self, request: TokenizeRequest) -> TokenizeAnswer | Refusal:
        return await _answered(self._handle.tokenize.remote(request))

    async def detokenize(self, request: DetokenizeRequest) -> DetokenizeAnswer | Refusal:
        return await _answered(self._handle.detokenize.remote(request))

    async def loads(self) -> Sequence[LoadReport | None]:
        try:
            answers = await ask_every(self._handle, "load", timeout_s=ANSWER_S)
        except Silent:
            return []
        return [None if isinstance(one, Silent) else one for one in answers if isinstance(one, LoadReport | Silent)]

    async def metrics(self) -> "Sequence[Metric]":
        answers = await ask_every(self._handle, "metrics", timeout_s=ANSWER_S)
        told = [families for families in answers if not isinstance(families, Exception)]
        return [family for families in told for family in families] + self._own_families(len(told), len(answers))

    async def check_health(self) -> None:
        answer = await ask_any(self._handle, "is_healthy", timeout_s=ANSWER_S)
        if isinstance(answer, Exception):
            raise answer
        if answer is None and not self._scales_to_zero:
            raise NoReplica("no replica runs")

    def _own_families(self, num_told: int, num_asked: int) -> "list[Metric]":
        """How many replicas there are behind this process, and what became of answers whose replica was lost."""
        text = "Answers that lost a replica, by what became of them."
        outcomes = asdict(self._counts)
        families = [
            gauge("replicas_running", "Target replicas that this process of the API knows.", num_asked),
            gauge("replicas_silent", "… of which did not tell their metrics in time.", num_asked - num_told),
            *(counter("answers_interrupted", text, number, {"outcome": name}) for name, number in outcomes.items()),
        ]
        return with_label(families, "replica", self._name)

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
            raise ReplicaLost("there is no replica, and none can be started", "missing") from error
        except RayError as error:
            is_ended = True
            if isinstance(error, RayTaskError) and not isinstance(error.cause, RayActorError):
                log.exception("request %s: the replica failed", request_id)
                yield Refusal(500, "internal error; the server's log has the details", code="internal_error")
                return
            is_taken_away = isinstance(error, ActorDiedError) and TAKEN_AWAY in str(error)
            how: Literal["taken_away", "died"] = "taken_away" if is_taken_away else "died"
            raise ReplicaLost(f"{type(error).__name__} in request {request_id}", how) from error
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
