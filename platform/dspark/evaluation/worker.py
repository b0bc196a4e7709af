"""Measures through the reference loop, one prompt after another; the slow obvious twin of `engine_worker.py`."""

import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, cast

import torch
import transformers

from dspark.data.decoding import Completion, DecodeRequest
from dspark.data.regeneration import Conversation, Renderer
from dspark.drafters.base import Drafter
from dspark.drafters.checkpoint import load_drafter
from dspark.evaluation.accepted_length import Rollout, decode_plain, speculate
from dspark.evaluation.comparison import compare_with_generate
from dspark.evaluation.config import EvaluateConfig
from dspark.evaluation.planning import Subject, WorkItem
from dspark.targets import load_target, load_target_config, load_tokenizer, stop_token_ids, vocabulary_size


class EvaluationWorker:
    """Holds the models; runs conversations turn by turn, gives plain rows."""

    def __init__(self, config: EvaluateConfig, subject: Subject) -> None:
        logging.getLogger("transformers").setLevel(logging.WARNING)
        torch.set_num_threads(config.threads_per_worker)
        tokenizer = load_tokenizer(subject.target)
        shape = load_target_config(subject.target)
        self._model: Any = load_target(subject.target)
        self._stop_ids = stop_token_ids(self._model.generation_config, tokenizer)
        self._model.generation_config = transformers.GenerationConfig()  # what the target recommends is not compared
        # The drafter computes in the target's type: its inputs are the target's own states.
        drafter = load_drafter(subject.drafter, dtype=self._model.dtype, device=str(self._model.device))
        self._drafter = cast("Drafter", drafter)
        self._vocabulary_size = vocabulary_size(tokenizer)
        self._seed, self._verify_length = config.seed, config.verify_length
        self._renderer = Renderer(
            tokenizer,
            subject.chat,
            config.max_new_tokens,
            getattr(shape, "max_position_embeddings", None),
            config.seed,
        )

    def advance(self, items: Sequence[WorkItem]) -> list[dict[str, Any]]:
        """Their rows; nothing is kept between calls."""
        return [self.evaluate(item) for item in items]

    def evaluate(self, item: WorkItem) -> dict[str, Any]:
        """The item's result row. A conversation that cannot be had (template, length) is a row with an error."""
        conversation = Conversation(item.prompt)
        turns: list[dict[str, Any]] = []
        while not conversation.is_finished:
            request = conversation.next_request(self._renderer)
            if request is None:
                break
            rollout = self._speculate(request, item, turn=len(turns))
            turns.append(self._turn(request, rollout, item, turn=len(turns)))
            conversation.accept(Completion(request.key, rollout.output_ids, rollout.finish_reason), self._renderer)
        return item.row(turns, conversation.error)

    def _speculate(self, request: DecodeRequest, item: WorkItem, *, turn: int) -> Rollout:
        return speculate(
            self._model,
            self._drafter,
            request.prompt_ids,
            verify_length=self._verify_length,
            **self._options(request, item, turn),
        )

    def _options(self, request: DecodeRequest, item: WorkItem, turn: int) -> dict[str, Any]:
        generator = torch.Generator(self._model.device).manual_seed(item.seed(self._seed, turn))
        return {
            "sampling": item.mode.sampling,
            "max_new_tokens": request.max_tokens,
            "stop_ids": self._stop_ids,
            "vocabulary_size": self._vocabulary_size,
            "generator": generator,
        }

    def _turn(self, request: DecodeRequest, rollout: Rollout, item: WorkItem, *, turn: int) -> dict[str, Any]:
        plain = comparison = None
        if item.time_plain:
            timed = decode_plain(self._model, request.prompt_ids, **self._options(request, item, turn))
            plain = {"rounds": len(timed.rounds), "seconds": timed.seconds.verify}
        if item.compare:
            comparison = compare_with_generate(
                self._model,
                request.prompt_ids,
                rollout.output_ids,
                max_new_tokens=request.max_tokens,
                stop_ids=self._stop_ids,
                vocabulary_size=self._vocabulary_size,
            )
        return asdict(rollout) | {
            "num_prompt_tokens": len(request.prompt_ids),
            "plain": plain,
            "comparison": comparison,
        }
