"""Completions from servers, as the decoder of a target in this process gives them: exact token ids or a reason."""

import asyncio
import logging
import queue
import threading
from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from transformers import PreTrainedTokenizerBase

from dspark.chat import ChatConfig, with_system_prompt
from dspark.data.backend import BackendConfig
from dspark.data.decoding import Completion, DecodeRequest, DecodeRules
from dspark.data.endpoint_pool import EndpointPool, RequestRejected
from dspark.engine.request import commit
from dspark.errors import DsparkError

REPLACEMENT = "\ufffd"
MAX_REJECTED_AT_FIRST = 8  # when so many have gone wrong and none has come well, the settings are at fault

log = logging.getLogger("dspark.generate")


class EndpointDecoder:
    """A `Decoder` whose target is behind endpoints. Use it as a context manager.

    Raises: DsparkError in `step` when no endpoint can go on, or the settings do not fit the servers.
    """

    def __init__(
        self, config: BackendConfig, rules: DecodeRules, tokenizer: PreTrainedTokenizerBase, chat: ChatConfig
    ) -> None:
        self._config = config
        self._rules = rules
        self._chat = chat
        self._reader = AnswerReader(rules, tokenizer, config)
        self._pool = EndpointPool(config)
        self._waiting: deque[DecodeRequest] = deque()
        self._num_open = 0
        self._num_good = 0
        self._rejected: Counter[str] = Counter()
        self._ended: queue.SimpleQueue[tuple[DecodeRequest, Future[dict[str, Any]]]] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="endpoints", daemon=True)

    def __enter__(self) -> "EndpointDecoder":
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._pool.check(), self._loop).result()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def capacity(self) -> int:
        """Most requests under way at once."""
        return self._pool.capacity

    @property
    def is_idle(self) -> bool:
        return not self._waiting and self._num_open == 0

    def submit(self, request: DecodeRequest, *, first: bool = False) -> None:
        if first:
            self._waiting.appendleft(request)
        else:
            self._waiting.append(request)

    def step(self) -> list[Completion]:
        """Send what may be sent, wait until something has come."""
        while self._waiting and self._num_open < self.capacity:
            self._send(self._waiting.popleft())
        ended = [self._ended.get()]
        while not self._ended.empty():
            ended.append(self._ended.get())
        self._num_open -= len(ended)
        completions = [self._read(request, future) for request, future in ended]
        self._watch(completions)
        return completions

    def close(self) -> None:
        """End the requests under way and the thread they run in."""
        if not self._loop.is_running():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for endpoint in self._pool.endpoints:
            log.info("endpoint %s: %d answers, %d failures", endpoint.url, endpoint.num_answered, endpoint.num_failed)
        for reason, count in self._rejected.most_common():
            log.warning("%d answers rejected: %s", count, reason)

    async def _end(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._pool.close()

    def _send(self, request: DecodeRequest) -> None:
        path = "chat/completions" if self._config.api == "chat" else "completions"
        future = asyncio.run_coroutine_threadsafe(self._pool.post(path, self._body(request)), self._loop)
        future.add_done_callback(lambda done: self._ended.put((request, done)))
        self._num_open += 1

    def _read(self, request: DecodeRequest, future: "Future[dict[str, Any]]") -> Completion:
        """In the caller's thread, not where requests run: tokenizers are for one thread at a time."""
        try:
            return self._reader.read(request, future.result())
        except RequestRejected as rejected:
            return Completion(request.key, [], None, f"endpoint: {rejected}")

    def _body(self, request: DecodeRequest) -> dict[str, Any]:
        sampling = self._rules.sampling
        body: dict[str, Any] = {
            "model": self._config.model,
            "max_tokens": request.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "return_token_ids": True,
        }
        if sampling.top_k is not None:
            body["top_k"] = sampling.top_k
        if self._config.send_seed and sampling.temperature > 0:
            body["seed"] = request.seed
        if self._config.api == "completions":
            return body | {"prompt": request.prompt_ids}
        options = self._chat.template_options
        body["messages"] = with_system_prompt(request.messages, self._chat)
        return body | ({"chat_template_kwargs": options} if options else {})

    def _watch(self, completions: list[Completion]) -> None:
        """Raises: DsparkError when all that came at first went wrong: the rest would, too."""
        for completion in completions:
            if completion.error is None:
                self._num_good += 1
            else:
                self._rejected[completion.error] += 1
        if not self._num_good and self._rejected.total() >= MAX_REJECTED_AT_FIRST:
            (reason, _), *_ = self._rejected.most_common()
            raise DsparkError(f"none of the first {self._rejected.total()} requests was answered well: {reason}")


class AnswerReader:
    """Turns the JSON of an answer into a completion."""

    def __init__(self, rules: DecodeRules, tokenizer: PreTrainedTokenizerBase, config: BackendConfig) -> None:
        self._rules = rules
        self._tokenizer = tokenizer
        self._config = config
        eos = tokenizer.eos_token_id
        self._usual_end = int(eos) if eos in rules.stop_ids else next(iter(rules.stop_ids))

    def read(self, request: DecodeRequest, answer: Mapping[str, Any]) -> Completion:
        """Ids as a local decoder gives them: a stop token is the last one, an answer that was cut has none.

        Raises: RequestRejected with a reason that is equal for equal faults; DsparkError where the server gives no
        token ids and the config allows no others.
        """
        choice = answer["choices"][0] if answer.get("choices") else {}
        reason = choice.get("finish_reason")
        if reason not in ("stop", "length"):
            raise RequestRejected(f"ended with finish_reason {reason!r}")
        self._check_prompt(request, choice, answer)
        if choice.get("token_ids") is None:
            if not self._config.retokenize:
                raise self._without_ids()
            output_ids = self._retokenized(choice, answer.get("usage") or {}, was_stopped=reason == "stop")
        else:
            output_ids = [int(token_id) for token_id in choice["token_ids"]]
        if any(not 0 <= token_id < self._rules.vocabulary_size for token_id in output_ids):
            raise RequestRejected("holds token ids outside of the target's vocabulary")
        cut = commit(output_ids, num_generated=0, stop_ids=self._rules.stop_ids, max_tokens=request.max_tokens)
        if cut.finish_reason is not None:
            return Completion(request.key, cut.kept, cut.finish_reason)
        if reason == "length":  # a limit of the server's own
            return Completion(request.key, cut.kept, "length")
        end = self._told_end(choice)
        if end is None:
            raise RequestRejected("was stopped by something else than a stop token of the target")
        return Completion(request.key, [*cut.kept, end], "stop")

    def _check_prompt(self, request: DecodeRequest, choice: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        """Raises: RequestRejected unless the target saw the very prompt that was rendered here."""
        seen = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
        if seen is not None:
            if list(seen) != list(request.prompt_ids):
                raise RequestRejected("the target saw another prompt than the chat template gives here")
        elif self._config.api == "chat":
            if not self._config.retokenize:
                raise self._without_ids()
            if (answer.get("usage") or {}).get("prompt_tokens") != len(request.prompt_ids):
                raise RequestRejected("the prompt's length is another one than the chat template gives here")

    def _retokenized(self, choice: Mapping[str, Any], usage: Mapping[str, Any], *, was_stopped: bool) -> list[int]:
        """Ids of an answer's text. Raises: RequestRejected where the target may have written others."""
        message = choice.get("message") or {}
        text = choice.get("text") or message.get("content") or ""
        if REPLACEMENT in text:
            raise RequestRejected("retokenized: the text holds half a character")
        token_ids = [int(i) for i in self._tokenizer(text, add_special_tokens=False)["input_ids"]]
        if self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False) != text:
            raise RequestRejected("retokenized: decoding the ids gives another text")
        if set(token_ids) & set(self._rules.stop_ids):
            raise RequestRejected("retokenized: the text spells a stop token")
        # Servers differ in whether the stop token counts.
        if usage.get("completion_tokens", len(token_ids)) not in {len(token_ids), len(token_ids) + was_stopped}:
            raise RequestRejected("retokenized: the server counted another number of tokens")
        if not was_stopped:
            return token_ids
        end = self._told_end(choice)
        return [*token_ids, self._usual_end if end is None else end]

    def _told_end(self, choice: Mapping[str, Any]) -> int | None:
        """The stop token that ended the answer, as vLLM and SGLang name it."""
        told = choice.get("stop_reason", choice.get("matched_stop"))
        return told if isinstance(told, int) and told in self._rules.stop_ids else None

    def _without_ids(self) -> DsparkError:
        return DsparkError(
            f"the endpoints of {self._config.model!r} return no token ids (prompt_token_ids, token_ids); serve it with "
            "this project or a vLLM that knows return_token_ids, or set backend.retokenize=true"
        )
