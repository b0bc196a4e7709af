"""Measures through the serving engine: many conversations at once, each turn by turn, a row as each one ends.

advance(new items) -> rows that ended     the engine is full between calls; the caller hands in as many items as
                                          it got rows back
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dspark.data.decoding import Completion, DecodeRequest
from dspark.data.regeneration import Conversation, Renderer
from dspark.drafters.checkpoint import from_deepspec
from dspark.engine.config import EngineConfig
from dspark.engine.loading import LoadedEngine, load_engine
from dspark.engine.request import GenerationRequest
from dspark.engine.step import StepOutput
from dspark.errors import MissingInput, one_line
from dspark.evaluation.comparison import compare_with_generate
from dspark.evaluation.config import EvaluateConfig
from dspark.evaluation.planning import Subject, WorkItem
from dspark.provenance import read_json
from dspark.speculation.statistics import Round


@dataclass
class Task:
    """An item on its way. request, output_ids, rounds: of the turn that is being decoded."""

    item: WorkItem
    conversation: Conversation
    turns: list[dict[str, Any]] = field(default_factory=list)
    request: DecodeRequest | None = None
    output_ids: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        return self.item.row(self.turns, self.conversation.error)


class EngineWorker:
    """Keeps the engine and the conversations in it. What a conversation gets does not depend on those beside it."""

    def __init__(self, config: EvaluateConfig, subject: Subject) -> None:
        self._config, self._subject = config, subject
        self._tasks: dict[str, Task] = {}

    def advance(self, items: Sequence[WorkItem]) -> list[dict[str, Any]]:
        """Take items in and step until a row is there; all rows that ended, [] only when nothing is left to do.

        A conversation that cannot be had (template, length, memory) is a row with an error.
        """
        rows = []
        for item in items:
            rows += self._go_on(Task(item, Conversation(item.prompt)))
        while self._tasks and not rows:
            for output in self._loaded.engine.step():
                rows += self._take(output)
        return rows

    @cached_property
    def _loaded(self) -> LoadedEngine:
        """Made at the first call, so that what is wrong with it is the call's error and reaches the job as it is."""
        logging.getLogger("transformers").setLevel(logging.WARNING)
        loaded = load_engine(
            self._subject.target,
            self._subject.drafter,
            config=engine_config(self._config, self._subject),
            num_threads=self._config.threads_per_worker,
        )
        if self._config.lengths == "scheduled" and loaded.engine.policy.curve is None:
            raise MissingInput(f"lengths 'scheduled' cannot be measured: {'; '.join(loaded.notes)}")
        return loaded

    @cached_property
    def _renderer(self) -> Renderer:
        loaded, config = self._loaded, self._config
        limit = loaded.engine.max_context_tokens
        return Renderer(loaded.tokenizer, self._subject.chat, config.max_new_tokens, limit, config.seed)

    def _go_on(self, task: Task) -> list[dict[str, Any]]:
        """Ask for the next answer; the row if there is none to come."""
        if task.conversation.is_finished:
            return [task.row()]
        task.request = task.conversation.next_request(self._renderer)
        if task.request is None:
            return [task.row()]
        task.output_ids, task.rounds = [], []
        generation = self._generation(task, task.request)
        try:
            self._loaded.engine.add(generation)
        except ValueError as refusal:
            task.conversation.error = one_line(refusal)
            return [task.row()]
        self._tasks[generation.request_id] = task
        return []

    def _generation(self, task: Task, request: DecodeRequest) -> GenerationRequest:
        turn = len(task.turns)
        return GenerationRequest(
            request_id=f"{task.item.mode.name}\0{task.item.prompt.id}\0{turn}",
            prompt_ids=tuple(request.prompt_ids),
            sampling=task.item.mode.sampling,
            max_tokens=request.max_tokens,
            stop_ids=self._loaded.stop_ids,
            seed=task.item.seed(self._config.seed, turn),
        )

    def _take(self, output: StepOutput) -> list[dict[str, Any]]:
        """What a step gave one request; the row if that was the conversation's last."""
        task = self._tasks[output.request_id]
        task.output_ids += output.token_ids
        if output.round is not None:
            task.rounds.append(output.round)
        if output.finish_reason is None:
            return []
        del self._tasks[output.request_id]
        assert task.request is not None
        task.turns.append(self._turn(task, task.request, output.finish_reason))
        completion = Completion(task.request.key, task.output_ids, output.finish_reason)
        task.conversation.accept(completion, self._renderer)
        return self._go_on(task)

    def _turn(self, task: Task, request: DecodeRequest, finish_reason: str) -> dict[str, Any]:
        """As the reference worker stores it; a step's time belongs to all requests in it, so it is not split up."""
        return {
            "output_ids": task.output_ids,
            "finish_reason": finish_reason,
            "rounds": [asdict(done) for done in task.rounds],
            "seconds": None,
            "num_prompt_tokens": len(request.prompt_ids),
            "plain": None,
            "comparison": self._compare(request, task.output_ids) if task.item.compare else None,
        }

    def _compare(self, request: DecodeRequest, output_ids: list[int]) -> dict[str, Any]:
        loaded = self._loaded
        return compare_with_generate(
            loaded.target.model,
            request.prompt_ids,
            output_ids,
            max_new_tokens=request.max_tokens,
            stop_ids=sorted(loaded.stop_ids),
            vocabulary_size=loaded.target.vocabulary_size,
        )


def engine_config(config: EvaluateConfig, subject: Subject) -> EngineConfig:
    """Every request runs at once, under the one length that is measured or under the scheduler."""
    length = config.verify_length
    if config.lengths == "fixed" and length is None:
        length = from_deepspec(read_json(Path(subject.drafter) / "config.json")).block_size
    return config.engine.with_changes(verify_length=length, max_running_requests=config.concurrency)
