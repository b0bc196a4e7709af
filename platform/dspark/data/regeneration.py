"""From prompts to answers, turn by turn: the conversation and the Ray Data worker that holds the target."""

import json
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from dspark.chat import ChatConfig, render_prompt
from dspark.config import build_config
from dspark.data.answers import AnswerStore, GenerateConfig
from dspark.data.decoding import Completion, Decoder, DecodeRequest, DecodeRules, derive_seed, make_decoder
from dspark.data.prompts import Prompt
from dspark.engine.sampling import SamplingParams
from dspark.errors import one_line
from dspark.targets import load_target, load_target_config, load_tokenizer, stop_token_ids, vocabulary_size

MAX_ROWS_PER_TASK = 1024


@dataclass(frozen=True)
class Renderer:
    """What turns a history into a request and an output into text."""

    tokenizer: PreTrainedTokenizerBase
    chat: ChatConfig
    max_new_tokens: int
    context_tokens: int | None
    seed: int

    def request(self, prompt_id: str, turn: int, messages: Sequence[Mapping[str, str]]) -> DecodeRequest:
        """Raises: ValueError if the template refuses the history or it fills the context."""
        prompt_ids = render_prompt(self.tokenizer, messages, self.chat)
        max_tokens = self.max_new_tokens
        if self.context_tokens is not None:
            max_tokens = min(max_tokens, self.context_tokens - len(prompt_ids))
        if max_tokens < 1:
            raise ValueError(f"prompt of {len(prompt_ids)} tokens fills the target's context of {self.context_tokens}")
        seed = derive_seed(self.seed, prompt_id, turn)
        return DecodeRequest(prompt_id, prompt_ids, max_tokens, seed, tuple(messages))


@dataclass
class Conversation:
    """One row on its way: the history so far, the turns answered, and the messages still to come."""

    prompt: Prompt
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None
    _upcoming: deque[dict[str, str]] = field(init=False)
    _prompt_ids: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._upcoming = deque(self.prompt.messages)

    @property
    def is_finished(self) -> bool:
        """An empty answer ends it: what would follow is no conversation."""
        return self.error is not None or not self._upcoming or self._is_empty

    @property
    def _is_empty(self) -> bool:
        return (
            bool(self.messages)
            and self.messages[-1]["role"] == "assistant"
            and not self.messages[-1]["content"].strip()
        )

    def next_request(self, renderer: Renderer) -> DecodeRequest | None:
        """The request for the next answer; None, and an error on the row, if there cannot be one."""
        while self._upcoming:
            self.messages.append(self._upcoming.popleft())
            if self.messages[-1]["role"] == "user":
                break
        try:
            request = renderer.request(self.prompt.id, len(self.turns), self.messages)
        except Exception as error:  # whatever one row provokes in a template or tokenizer ends that row alone
            self.error = one_line(error) or type(error).__name__
            return None
        self._prompt_ids = request.prompt_ids
        return request

    def accept(self, completion: Completion, renderer: Renderer) -> None:
        """Add the answer to the history."""
        if completion.finish_reason is None:
            self.error = completion.error
            return
        output_ids = completion.output_ids
        said = output_ids[:-1] if completion.finish_reason == "stop" else output_ids
        text = str(renderer.tokenizer.decode(said, skip_special_tokens=True))
        self.messages.append({"role": "assistant", "content": text})
        turn = {"prompt_ids": self._prompt_ids, "output_ids": output_ids, "finish_reason": completion.finish_reason}
        self.turns.append(turn)

    def row(self) -> dict[str, Any]:
        """The row as stored. What was never answered, after an error or an empty answer, stays in `messages`."""
        status = "error" if self.error is not None else "empty" if self._is_empty else "ok"
        return {
            "id": self.prompt.id,
            "domain": self.prompt.domain,
            "split": self.prompt.split,
            "status": status,
            "error": self.error,
            "messages": [*self.messages, *self._upcoming],
            "turns": self.turns,
        }


def deal(prompts: Sequence[Prompt], num_workers: int) -> list[list[Prompt]]:
    """Tasks of about equal work, longest rows first in each, so that no worker is left with a long row at the end."""
    by_work = sorted(prompts, key=lambda p: (-p.num_turns, -sum(len(m["content"]) for m in p.messages), p.id))
    num_tasks = num_workers * -(-len(prompts) // (num_workers * MAX_ROWS_PER_TASK))
    tasks = [by_work[start::num_tasks] for start in range(num_tasks)]
    return [task for task in tasks if task]


class AnswerWorker:
    """Ray Data worker: prompts in, written parts and their counts out. Loads the target once."""

    def __init__(self, config: dict[str, Any], sampling: dict[str, Any], run: str) -> None:
        logging.getLogger("transformers").setLevel(logging.WARNING)
        generate = build_config(GenerateConfig, config)
        torch.set_num_threads(generate.threads_per_worker)
        tokenizer = load_tokenizer(generate.target)
        rules = decode_rules(generate, build_config(SamplingParams, sampling), tokenizer)
        decoder = make_decoder(
            load_target(generate.target), rules, num_slots=generate.batch_size, max_kv_tokens=generate.max_kv_tokens
        )
        self._store = AnswerStore(generate.output)
        self._answerer = Answerer(generate, decoder, tokenizer, run, max_open=MAX_ROWS_PER_TASK)

    def __call__(self, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """batch: column `prompts`, each a JSON list of prompts. Yields counts after each part written."""
        for task in batch["prompts"]:
            prompts = [Prompt(**prompt) for prompt in json.loads(task)]
            done = self._store.done_ids()  # of this very task, if it is tried again after a worker died
            yield from self._answerer.answer([prompt for prompt in prompts if prompt.id not in done])


def decode_rules(config: GenerateConfig, sampling: SamplingParams, tokenizer: PreTrainedTokenizerBase) -> DecodeRules:
    """What holds for every answer of a run."""
    return DecodeRules(
        sampling=sampling,
        stop_ids=stop_token_ids(config.target, tokenizer),
        vocabulary_size=vocabulary_size(tokenizer),
    )


class Answerer:
    """Takes prompts through a decoder, turn by turn, and writes the rows. max_open: conversations begun at once."""

    def __init__(
        self, config: GenerateConfig, decoder: Decoder, tokenizer: PreTrainedTokenizerBase, run: str, *, max_open: int
    ) -> None:
        shape = load_target_config(config.target)
        self._renderer = Renderer(
            tokenizer,
            config.chat,
            config.sampling.max_new_tokens,
            getattr(shape, "max_position_embeddings", None),
            config.seed,
        )
        self._decoder = decoder
        self._store = AnswerStore(config.output)
        self._rows_per_part = config.rows_per_part
        self._run = run
        self._max_open = max_open

    def answer(self, prompts: Sequence[Prompt]) -> Iterator[dict[str, Any]]:
        """Counts after each part written."""
        started = time.monotonic()
        rows: list[dict[str, Any]] = []
        for row in self._finished_rows(prompts):
            rows.append(row)
            if len(rows) >= self._rows_per_part:
                yield self._write(rows, time.monotonic() - started)
                rows, started = [], time.monotonic()
        if rows:
            yield self._write(rows, time.monotonic() - started)

    def _finished_rows(self, prompts: Sequence[Prompt]) -> Iterator[dict[str, Any]]:
        """Rows in the order in which they finish."""
        waiting = deque(prompts)
        begun: dict[str, Conversation] = {}
        while waiting or begun:
            while waiting and len(begun) < self._max_open:
                prompt = waiting.popleft()
                begun[prompt.id] = Conversation(prompt)
                yield from self._go_on(begun, prompt.id, first=False)
            for completion in self._decoder.step() if begun else ():
                begun[completion.key].accept(completion, self._renderer)
                yield from self._go_on(begun, completion.key, first=True)

    def _go_on(self, begun: dict[str, Conversation], prompt_id: str, *, first: bool) -> Iterator[dict[str, Any]]:
        """Ask for the next answer, or yield the row, and forget it, if there is none to come."""
        conversation = begun[prompt_id]
        if not conversation.is_finished:
            request = conversation.next_request(self._renderer)
            if request is not None:
                self._decoder.submit(request, first=first)
                return
        del begun[prompt_id]
        yield conversation.row()

    def _write(self, rows: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
        self._store.write_part(rows, run=self._run)
        tokens = sum(len(turn["output_ids"]) for row in rows for turn in row["turns"])
        return {"rows": [len(rows)], "tokens": [tokens], "seconds": [seconds]}


def task_json(prompts: Sequence[Prompt]) -> str:
    """A task as the worker reads it."""
    return json.dumps([asdict(prompt) for prompt in prompts])
