"""Reference speculative decoding: one request at a time on the library's own KV memory, lossless, nothing clever.

Legend: l proposed tokens, T tokens of one forward pass, m captured layers, d hidden size, V target vocabulary.

    position    0 … p-1           p         p+1 … p+l
                context           anchor    proposal        the target reads anchor and proposal in one pass:
    drafter     has its features            writes it       row k of the logits judges draft token k,
    target      has its KV        row 0     row 1 … row l   row l gives the bonus token
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from dspark.drafters.base import Drafter, ReadsTokens
from dspark.engine.hidden_states import HiddenStateCapture
from dspark.engine.request import FinishReason, commit
from dspark.engine.sampling import SamplingParams, filtered_probs
from dspark.speculation.proposal import Proposal, Verdict
from dspark.speculation.rejection import verify, verify_greedy
from dspark.speculation.statistics import AcceptanceCounts, Round


@dataclass(frozen=True)
class Seconds:
    """Where the time of a rollout went: prompt and first token, the drafter in all rounds, the target in all rounds."""

    prefill: float
    draft: float
    verify: float


@dataclass(frozen=True)
class Rollout:
    """What one prompt became. output_ids ends with the stop token when finish_reason is "stop"."""

    output_ids: list[int]
    finish_reason: FinishReason
    rounds: list[Round]
    seconds: Seconds

    def counts(self) -> AcceptanceCounts:
        """The rounds, counted."""
        counts = AcceptanceCounts()
        for r in self.rounds:
            counts.add_round(r.num_proposed, r.num_accepted, r.num_committed, confidence_logits=r.confidence_logits)
        return counts


@torch.no_grad()
def speculate(
    target_model: Any,
    drafter: Drafter | None,
    prompt_ids: Sequence[int],
    *,
    sampling: SamplingParams,
    max_new_tokens: int,
    stop_ids: Collection[int],
    vocabulary_size: int,
    verify_length: int | None = None,
    generator: torch.Generator | None = None,
) -> Rollout:
    """Decode one prompt with a drafter; the output is the target's own. Without one: a token a round.

    verify_length: draft tokens per round, 0..block_size; None proposes whole blocks. A round never proposes more than
    can still be output beside the target's own token. The filters of `sampling` act on the target; the drafter gets
    its temperature. Ids from vocabulary_size on are never output. generator: on the target's device.
    Raises: ValueError for an empty prompt, max_new_tokens < 1, a verify_length outside of the block, or sampling that
    needs the engine.
    """
    _check_request(prompt_ids, max_new_tokens)
    sampling.require_plain("the reference loop")
    length = _proposal_length(drafter, verify_length)
    clock = _Clock(target_model.device)
    drafting = _Drafting(drafter, sampling.temperature, generator, target_model.device)
    output: list[int] = []
    rounds: list[Round] = []
    with _Target(target_model, () if drafter is None else drafter.target_layer_ids, vocabulary_size) as target:
        logits = target.read(prompt_ids, num_logits=1)
        first = _judge(logits, drafting.nothing, sampling, generator)
        drafting.extend([*prompt_ids, first.next_id], target.hidden())
        clock.lap("prefill")
        ended = commit([first.next_id], num_generated=0, stop_ids=stop_ids, max_tokens=max_new_tokens)
        output += ended.kept

        while ended.finish_reason is None:
            room = max_new_tokens - len(output) - 1  # beside the target's own token, which every round outputs
            proposal = drafting.propose(output[-1], min(length, room))
            clock.lap("draft")
            logits = target.read([output[-1], *proposal.token_ids.tolist()])
            verdict = _judge(logits, proposal, sampling, generator)
            target.forget(proposal.num_tokens - verdict.num_accepted)
            clock.lap("verify")
            offered = [*proposal.token_ids[: verdict.num_accepted].tolist(), verdict.next_id]
            drafting.extend(offered, target.hidden()[: verdict.accepted_length])  # anchor and accepted are context now
            clock.lap("draft")
            ended = commit(offered, num_generated=len(output), stop_ids=stop_ids, max_tokens=max_new_tokens)
            output += ended.kept
            rounds.append(_round(proposal, verdict, len(ended.kept)))
    return Rollout(output, ended.finish_reason, rounds, Seconds(**clock.laps))


def decode_plain(
    target_model: Any,
    prompt_ids: Sequence[int],
    *,
    sampling: SamplingParams,
    max_new_tokens: int,
    stop_ids: Collection[int],
    vocabulary_size: int,
    generator: torch.Generator | None = None,
) -> Rollout:
    """The same loop without a drafter: what speculation is timed against."""
    return speculate(
        target_model,
        None,
        prompt_ids,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        vocabulary_size=vocabulary_size,
        generator=generator,
    )


class _Target:
    """The target reading one request token by token or block by block, with its KV memory and its features."""

    def __init__(self, model: Any, layer_ids: Sequence[int], vocabulary_size: int) -> None:
        self._model = model
        self._vocabulary_size = vocabulary_size
        self._capture = HiddenStateCapture(model, layer_ids) if layer_ids else None
        # Without the model's config every layer keeps all positions; a layer that keeps a window only cannot forget.
        self._kv_cache = DynamicCache()

    def __enter__(self) -> "_Target":
        if self._capture is not None:
            self._capture.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._capture is not None:
            self._capture.__exit__(kind, error, trace)

    def read(self, token_ids: Sequence[int], *, num_logits: int = 0) -> Tensor:
        """Append tokens; logits of the last `num_logits` of them (0: of all), float32 [T, V], padding ids at -inf."""
        input_ids = torch.tensor([list(token_ids)], device=self._model.device)
        output = self._model(input_ids=input_ids, cache=self._kv_cache, use_cache=True, logits_to_keep=num_logits)
        logits: Tensor = output.logits[0].float()
        logits[:, self._vocabulary_size :] = -torch.inf
        return logits

    def hidden(self) -> Tensor:
        """Features of the tokens read last: [T, m*d]; nothing without a drafter."""
        return torch.empty(0) if self._capture is None else self._capture.hidden()[0]

    def forget(self, num_tokens: int) -> None:
        """Drop the last tokens from the KV memory."""
        if num_tokens:
            self._kv_cache.crop(-num_tokens)


class _Drafting:
    """One request's drafter and what it knows, or nothing at all."""

    def __init__(
        self, drafter: Drafter | None, temperature: float, generator: torch.Generator | None, device: torch.device
    ) -> None:
        self._drafter = drafter
        self._state = None if drafter is None else drafter.new_state()
        self._temperature = temperature
        self._generator = generator
        no_ids = torch.empty(0, dtype=torch.long, device=device)
        self.nothing = Proposal(token_ids=no_ids, probs=None, confidence_logits=None)

    def propose(self, anchor_id: int, num_tokens: int) -> Proposal:
        if self._drafter is None or self._state is None or num_tokens == 0:
            return self.nothing
        return self._drafter.propose(
            self._state, anchor_id, max_tokens=num_tokens, temperature=self._temperature, generator=self._generator
        )

    def extend(self, committed_ids: Sequence[int], hidden: Tensor) -> None:
        if self._drafter is not None and self._state is not None:
            if isinstance(self._drafter, ReadsTokens):
                self._drafter.extend_ids(self._state, committed_ids)
            self._drafter.extend_context(self._state, hidden)


class _Clock:
    """Seconds by name; each lap ends where the next begins."""

    def __init__(self, device: torch.device) -> None:
        self.laps = {"prefill": 0.0, "draft": 0.0, "verify": 0.0}
        self._device = device
        self._last = self._now()

    def lap(self, name: str) -> None:
        now = self._now()
        self.laps[name] += now - self._last
        self._last = now

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # kernels run behind; without this the wrong lap pays for them
        return time.perf_counter()


def _judge(logits: Tensor, proposal: Proposal, sampling: SamplingParams, generator: torch.Generator | None) -> Verdict:
    if sampling.temperature == 0:
        return verify_greedy(logits, proposal)
    return verify(filtered_probs(logits, sampling), proposal, generator)


def _round(proposal: Proposal, verdict: Verdict, num_committed: int) -> Round:
    logits = proposal.confidence_logits
    confidence_logits = None if logits is None else logits.tolist()
    return Round(proposal.num_tokens, verdict.num_accepted, num_committed, confidence_logits)


def _proposal_length(drafter: Drafter | None, verify_length: int | None) -> int:
    block_size = 0 if drafter is None else drafter.block_size
    length = block_size if verify_length is None else verify_length
    if not 0 <= length <= block_size:
        raise ValueError(f"verify_length {length} is outside of the drafter's block; use 0..{block_size}")
    return length


def _check_request(prompt_ids: Sequence[int], max_new_tokens: int) -> None:
    if not prompt_ids:
        raise ValueError("the prompt is empty; the target needs at least one token to start from")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; use 1 or more")
