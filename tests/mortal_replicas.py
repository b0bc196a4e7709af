"""Replicas in this process that die on demand, behind the same way to another one that those on a cluster have."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from dspark.serving.config import FailoverConfig
from dspark.serving.engine_client import Continuation, Delta, LoadReport
from dspark.serving.openai_schema import GenerateRequest, Refusal
from dspark.serving.resuming import Answers, FailoverCounts, ReplicaLost, resumed
from dspark.serving.target_replica import TargetReplica


class MortalReplicas:
    """Asks its replicas in turn; a part of an answer ends with its replica's death.

    deaths: steps that the nth replica asked for an answer survives; those asked after them live. refusals: what the nth
    one says instead. asked: continuations, as they were asked for.
    """

    def __init__(
        self,
        replicas: Sequence[TargetReplica],
        deaths: Sequence[int] = (),
        *,
        refusals: dict[int, Refusal] | None = None,
        failover: FailoverConfig | None = None,
        timeout_s: float = 60.0,
        counts: FailoverCounts | None = None,
    ) -> None:
        self.asked: list[Continuation | None] = []
        self._replicas, self._deaths = replicas, deaths
        self._refusals = refusals or {}
        self._failover = failover or FailoverConfig(max_continuations=len(deaths), min_progress_tokens=0)
        self._timeout_s = timeout_s
        self._counts = counts

    def generate(self, request_id: str, request: GenerateRequest) -> AsyncGenerator[Delta | Refusal, None]:
        def attempt(number: int, continuation: Continuation | None) -> Answers:
            return self._ask(number, f"{request_id}.{number}", request, continuation)

        return resumed(
            attempt, num_choices=request.n, config=self._failover, timeout_s=self._timeout_s, counts=self._counts
        )

    async def loads(self) -> Sequence[LoadReport | None]:
        return []

    async def metrics(self) -> Any:
        return await self._replicas[0].metrics()

    async def check_health(self) -> None:
        await self._replicas[0].check_health()

    async def _ask(
        self, number: int, request_id: str, request: GenerateRequest, continuation: Continuation | None
    ) -> Answers:
        self.asked.append(continuation)
        await asyncio.sleep(0)
        if number in self._refusals:
            yield self._refusals[number]
            return
        replica = self._replicas[number % len(self._replicas)]
        num_left = self._deaths[number] if number < len(self._deaths) else -1
        async with contextlib.aclosing(replica.generate(request_id, request, continuation)) as items:
            async for item in items:
                if num_left == 0:
                    raise ReplicaLost(f"replica {number} died")
                num_left -= 1
                yield item
