"""Measures one prompt after another: holds target and drafter, runs conversations turn by turn, gives plain rows."""

import logging
from dataclasses import asdict
from typing import Any, cast

import torch
import transformers

from dspark.data.decoding import Completion, DecodeRequest, derive_seed
from dspark.data.regeneration import Conversation, Renderer
from dspark.drafters.base import Drafter
from dspark.drafters.checkpoint import load_drafter
from dspark.evaluation.accepted_length import Rollout, decode_plain, speculate
from dspark.evaluation.config import EvaluateConfig
from dspark.evaluation.planning import Subject, WorkItem
from dspark.provenance import fingerprint
from dspark.targets import load_target, load_target_config, load_tokenizer, stop_token_ids, vocabulary_size


class EvaluationWorker:
    """Holds the models; `evaluate` is called for one item at a time."""

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
        return {
            "id": item.prompt.id,
            "domain": item.prompt.domain,
            "prompt": fingerprint(item.prompt.messages),
            "mode": item.mode.name,
            "request": item.request,
            "error": conversation.error,
            "turns": turns,
        }

    def _speculate(self, request: DecodeRequest, item: WorkItem, *, turn: int) -> Rollout:
        return speculate(
            self._model,
            self._drafter,
            request.prompt_ids,
            verify_length=self._verify_length,
            **self._options(request, item, turn),
        )

    def _options(self, request: DecodeRequest, item: WorkItem, turn: int) -> dict[str, Any]:
        seed = derive_seed(self._seed, f"{item.mode.name}\0{request.key}", turn)
        return {
            "sampling": item.mode.sampling,
            "max_new_tokens": request.max_tokens,
            "stop_ids": self._stop_ids,
            "vocabulary_size": self._vocabulary_size,
            "generator": torch.Generator(self._model.device).manual_seed(seed),
        }

    def _turn(self, request: DecodeRequest, rollout: Rollout, item: WorkItem, *, turn: int) -> dict[str, Any]:
        plain = comparison = None
        if item.time_plain:
            timed = decode_plain(self._model, request.prompt_ids, **self._options(request, item, turn))
            plain = {"rounds": len(timed.rounds), "seconds": timed.seconds.verify}
        if item.compare:
            comparison = self._compare(request, rollout.output_ids)
        return asdict(rollout) | {
            "num_prompt_tokens": len(request.prompt_ids),
            "plain": plain,
            "comparison": comparison,
        }

    def _compare(self, request: DecodeRequest, output_ids: list[int]) -> dict[str, Any]:
        """Whether the library's own greedy output is the same; if not, where they part and how close a call it was."""
        expected = self._generate(request)
        dtype = str(self._model.dtype).removeprefix("torch.")
        if expected == output_ids:
            return {"identical": True, "dtype": dtype, "position": None, "top2_gap": None}
        pairs = zip(expected, output_ids, strict=False)
        position = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(output_ids)))
        gap = self._top2_gap(request.prompt_ids + output_ids[:position])
        return {"identical": False, "dtype": dtype, "position": position, "top2_gap": gap}

    @torch.no_grad()
    def _generate(self, request: DecodeRequest) -> list[int]:
        ids = torch.tensor([request.prompt_ids], device=self._model.device)
        padding_ids = list(range(self._vocabulary_size, self._model.lm_head.weight.shape[0]))
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=request.max_tokens,
            eos_token_id=list(self._stop_ids),
            pad_token_id=self._stop_ids[0],
            suppress_tokens=padding_ids or None,
        )
        found: list[int] = output[0, ids.shape[1] :].tolist()
        return found

    @torch.no_grad()
    def _top2_gap(self, token_ids: list[int]) -> float:
        """Difference of the two highest logits after the tokens."""
        ids = torch.tensor([token_ids], device=self._model.device)
        logits = self._model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1, : self._vocabulary_size]
        best = logits.float().topk(2).values
        return float(best[0] - best[1])
