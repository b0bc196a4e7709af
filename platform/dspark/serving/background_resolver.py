"""Requests made ready for the engine in a thread of their own: long texts take seconds to tokenise, in which streams
and health checks must go on."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from dspark.engine.request import GenerationRequest
from dspark.serving.openai_schema import GenerateRequest, Refusal, RequestRefused
from dspark.serving.resolve import RequestResolver
from dspark.serving.tokenization import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest

P = ParamSpec("P")
R = TypeVar("R")


class BackgroundResolver:
    """`RequestResolver`'s work, for one event loop. num_resolving: choices of requests that are being made ready."""

    def __init__(self, resolver: RequestResolver, *, most_texts: int) -> None:
        """most_texts: that may wait for /tokenize and /detokenize at once; the next one gets status 429."""
        self.resolver = resolver
        self.num_resolving = 0
        self._num_texts = 0
        self._most_texts = most_texts
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="resolving")

    async def resolve(self, request_id: str, request: GenerateRequest, *, num_choices: int) -> GenerationRequest:
        """Raises: RequestRefused."""
        self.num_resolving += num_choices
        try:
            return await self._run(self.resolver.resolve, request_id, request)
        finally:
            self.num_resolving -= num_choices

    async def tokenize(self, request: TokenizeRequest) -> TokenizeAnswer | Refusal:
        """The ids that a prompt becomes."""
        return await self._text(self.resolver.tokenize, request)

    async def detokenize(self, request: DetokenizeRequest) -> DetokenizeAnswer | Refusal:
        """The text of ids."""
        return await self._text(self.resolver.detokenize, request)

    async def _text(self, work: Callable[P, R], *args: P.args, **options: P.kwargs) -> R | Refusal:
        if self._num_texts >= self._most_texts:
            message = f"{self._most_texts} texts are waiting to be read; try again later"
            return Refusal(429, message, code="rate_limit_exceeded")
        self._num_texts += 1
        try:
            return await self._run(work, *args, **options)
        except RequestRefused as refused:
            return refused.refusal
        finally:
            self._num_texts -= 1

    async def _run(self, work: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(*args, **options))
