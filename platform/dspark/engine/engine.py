"""The engine's loop: choose who drafts, propose, allocate, verify, commit.

Continuous batching over one flat forward pass of sum(1 + l_r) tokens, prompts being read beside it. Lossless: greedy
output is the target's own, sampled output follows the target's distribution, whatever drafter and lengths.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dspark.attention.flat_batch import FlatBatch
from dspark.attention.page_pool import PagePool
from dspark.engine.config import EngineConfig
from dspark.engine.deterministic import deterministic
from dspark.engine.draft_runner import DraftRunner
from dspark.engine.estimates import PriorEstimate
from dspark.engine.judging import Judge, are_plain, judge_plain
from dspark.engine.logprobs import RawLogprobs, raw_logprobs, with_logprobs
from dspark.engine.lookup import Lookup
from dspark.engine.policy import SpeculationPolicy
from dspark.engine.request import GenerationRequest, check_request, commit
from dspark.engine.request_memory import RequestMemory
from dspark.engine.request_scheduler import RequestScheduler
from dspark.engine.running import RunningRequest
from dspark.engine.starting import RequestStarter
from dspark.engine.stats import EngineStats
from dspark.engine.step import Launched, StepOutput, Work, decode, round_of
from dspark.engine.target import Target, TargetOutput
from dspark.speculation.calibration import Calibration
from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.proposal import Proposal, Verdict


class Engine:
    """Serves many requests on one target, with or without a drafter. Not thread-safe: one thread steps it.

    policy.share: bounds on what its steps draft and verify, set from outside by a fleet's lease.
    most_ahead: tokens that a request may hold memory for beyond its committed ones. meanwhile: called in the midst of
    each step, while the target computes; it may add requests, and nothing else.
    """

    def __init__(
        self,
        target: Target,
        drafts: DraftRunner | None,
        tokenizer: Any,
        *,
        config: EngineConfig,
        curve: CostCurve | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        self.config = config
        self.meanwhile: Callable[[], None] | None = None
        self.block_size = 0 if drafts is None else drafts.block_size
        self.stats = EngineStats()
        self._prior = PriorEstimate()
        self.policy = SpeculationPolicy(
            block_size=self.block_size,
            curve=curve,
            calibration=calibration,
            verify_length=config.verify_length,
            probe_every=config.probe_every,
            has_confidence=drafts is not None and drafts.has_confidence,
            min_gain=config.min_gain,
            lagged_prior=self._prior if config.lagged_capacity else None,
            corrects_curve=config.correct_curve,
        )
        self._target = deterministic(target) if config.deterministic else target
        self._drafts = drafts
        self._lookup = None if config.lookup is None else Lookup(config.lookup)
        self.most_ahead = config.num_ahead(self.block_size)
        self._memory = RequestMemory(
            PagePool(target.num_pages),
            drafts,
            page_size=target.page_size,
            num_ahead=self.most_ahead,
            prefix_cache=config.prefix_cache and target.has_pages,
            stats=self.stats,
        )
        self._requests = RequestScheduler(self._memory, max_running=config.max_running_requests, stats=self.stats)
        self._judge = Judge(target.device, is_row_by_row=config.deterministic)
        self._starter = RequestStarter(
            tokenizer, self._lookup, self._prior, page_size=target.page_size, device=target.device
        )
        self._nothing = Proposal.nothing(target.device)

    @property
    def drafter_kind(self) -> str:
        return "none" if self._drafts is None else self._drafts.kind

    @property
    def max_context_tokens(self) -> int | None:
        """Prompt and output of one request together, at most."""
        limits = (self.config.max_context_tokens, self._target.max_context_tokens)
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def max_request_tokens(self) -> int:
        """Prompt and output of one request together, at most: what the context and the KV memory hold."""
        in_memory = self.num_pages * self._target.page_size - self.most_ahead
        return min(in_memory, self.max_context_tokens or in_memory)

    @property
    def has_work(self) -> bool:
        return bool(self._requests.running or self._requests.waiting)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def running(self) -> list[RunningRequest]:
        return list(self._requests.running.values())

    @property
    def num_waiting(self) -> int:
        return len(self._requests.waiting)

    @property
    def pool(self) -> PagePool:
        """The pages of KV memory."""
        return self._memory.pool

    @property
    def num_free_pages(self) -> int:
        """Pages that no request needs yet: blank, cached, or lent to one that may grow into them."""
        return self._memory.num_free(self.running)

    @property
    def num_pages(self) -> int:
        return self.pool.num_pages

    def add(self, request: GenerationRequest) -> None:
        """Queue a request. Raises: ValueError (what, value, remedy) when it can never run."""
        check_request(
            request,
            max_context_tokens=self.max_context_tokens,
            block_size=self.block_size,
            vocabulary_size=self._target.vocabulary_size,
        )
        self._requests.check_new(request)
        self._requests.add(self._starter.start(request))

    def open_requests(self) -> list[GenerationRequest]:
        """All that run or wait, each as another engine would take it over: with its output so far."""
        return self._requests.as_continued()

    def abort(self, request_id: str) -> None:
        """End a request and free its pages; an unknown id is a no-op."""
        if self._requests.release(request_id, is_aborted=True) is not None:
            self.stats.finished["abort"] += 1

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """One engine step; [] when there is nothing to do.

        What the next one needs from the host is prepared in between: beside the target's pass where a device computes
        by itself.
        """
        launched = self._launch()
        if launched is None:
            return []
        if self.meanwhile is not None:
            self.meanwhile()
        self._requests.prepare(num_new=1 + self.most_ahead)
        self.policy.prepare()
        return self._finish(launched)

    def _launch(self) -> Launched | None:
        """Decide what this step computes, and have the target begin with it."""
        clock_s = [time.perf_counter()]
        self._requests.make_room()
        self._requests.admit()
        reading, decoding = self._requests.split(self.config.max_batch_tokens, self.policy.reserved)
        if not reading and not decoding:
            return None
        if self._lookup is not None:
            self.policy.choose_copies(decoding, self._lookup)
        prefill_tokens = sum(len(work.piece.token_ids) for work in reading)
        self.policy.room = self.config.max_batch_tokens - prefill_tokens - len(decoding)
        wanted, chosen_at = self.policy.choose(decoding, prefill_tokens=prefill_tokens), time.perf_counter()
        proposals = self._propose(decoding, wanted)
        draft_s = time.perf_counter() - chosen_at
        lengths = self.policy.verify_lengths(decoding, proposals, prefill_tokens=prefill_tokens)
        self.stats.schedule.add_budgets(lengths)
        works = reading + [
            decode(running, proposal, length)
            for running, proposal, length in zip(decoding, proposals, lengths, strict=True)
        ]
        clock_s.append(time.perf_counter())
        batch = self._target.flatten([work.piece for work in works])
        return Launched(works, batch, self._target.run(batch), clock_s, sum(n > 0 for n in wanted), draft_s)

    def _finish(self, launched: Launched) -> list[StepOutput]:
        """Wait for what the target says, and commit it."""
        works, batch, output = launched.works, launched.batch, launched.output
        verdicts, logprobs = self._decide(works, batch, output)
        clock_s = [*launched.clock_s, time.perf_counter()]
        outputs = with_logprobs(self._commit(works, verdicts, batch, output), logprobs)
        clock_s.append(time.perf_counter())
        predicted, step_s = launched.predicted_seconds(self.policy.measured_curve), clock_s[-1] - clock_s[0]
        self.stats.add_step(batch.num_tokens, clock_s)
        self.stats.schedule.add_step(predicted, step_s, launched.draft_s)
        self.policy.note_step(launched, step_s)
        return outputs

    def _decide(
        self, works: Sequence[Work], batch: FlatBatch, output: TargetOutput
    ) -> tuple[list[Verdict | None], dict[str, RawLogprobs]]:
        """Verdicts, and what requests want to know of the target's own distribution."""
        if are_plain(works) and not any(work.running.request.sampling.logprobs is not None for work in works):
            return judge_plain(works, batch, output.choices()), {}
        logprobs = raw_logprobs(works, batch, output.logits)  # before what requests ask for changes the logits
        return self._judge.judge(works, batch, output.logits), logprobs

    def check(self) -> None:
        """Nothing is lost or held twice; cheap enough to run whenever the engine is idle."""
        self._requests.check()

    def _propose(self, decoding: Sequence[RunningRequest], wanted: Sequence[int]) -> list[Proposal]:
        """A proposal per request: its copy, or what the drafter says where it is wanted, or none."""
        proposals = [self._nothing] * len(decoding)
        chosen = [i for i, length in enumerate(wanted) if length > 0]
        for i, running in enumerate(decoding):
            if running.is_copied and running.copies is not None:
                proposals[i] = running.copies.proposal(self._target.device)
            else:
                running.note_turn(is_drafted=wanted[i] > 0)
        if chosen and self._drafts is not None:
            asked = [decoding[i].draft_request(wanted[i]) for i in chosen]
            for i, proposal in zip(chosen, self._drafts.propose(asked), strict=True):
                proposals[i] = proposal
        num_copied = sum(running.is_copied for running in decoding)
        self.stats.add_decodes(len(decoding), num_copied, [proposals[i].num_tokens for i in chosen])
        return proposals

    def _commit(
        self, works: Sequence[Work], verdicts: Sequence[Verdict | None], batch: FlatBatch, output: TargetOutput
    ) -> list[StepOutput]:
        outputs = []
        for i, (work, verdict) in enumerate(zip(works, verdicts, strict=True)):
            running, table = work.running, work.piece.table
            first = batch.cu_seqlens_q[i]
            start, table.num_tokens = table.num_tokens, work.piece.stop
            if work.proposal is not None and verdict is not None:
                table.truncate(start + verdict.accepted_length)  # both caches: what was rejected is written over
            hidden = None if output.hidden is None else output.hidden[first : first + table.num_tokens - start]
            if work.proposal is None:
                self.stats.add_read(len(work.piece.token_ids), is_again=running.is_resumed)
            if verdict is None:
                anchor = [running.anchor_id] if running.is_prefilled else []  # drawn before it was preempted
                self._extend(running, [*work.piece.token_ids, *anchor], hidden)
                continue
            outputs.append(self._commit_one(work, verdict, hidden))
        return outputs

    def _commit_one(self, work: Work, verdict: Verdict, hidden: Tensor | None) -> StepOutput:
        running, request = work.running, work.running.request
        ended = commit(
            [*work.draft_ids[: verdict.num_accepted], verdict.next_id],
            num_generated=len(running.output_ids),
            stop_ids=request.stop_ids,
            max_tokens=request.max_tokens,
            text=running.text,
        )
        running.output_ids += ended.kept
        done = None if work.proposal is None else round_of(work.proposal, verdict, len(ended.kept))
        if done is not None:
            self.stats.add_round(done, is_copied=running.is_copied)
            self.stats.schedule.add_round(running.expected_survival[: done.num_proposed], done.num_accepted)
            self.policy.learn(running, done.num_proposed, done.num_accepted)
        self.stats.output_tokens += len(ended.kept)
        if ended.finish_reason is None:
            read = work.piece.token_ids if work.proposal is None else []
            self._extend(running, [*read, *ended.kept], hidden)
        else:
            self._requests.release(request.request_id)
            self.stats.finished[ended.finish_reason] += 1
        return StepOutput(
            request_id=request.request_id,
            token_ids=ended.kept,
            text=ended.text,
            finish_reason=ended.finish_reason,
            num_prompt_tokens=len(request.prompt_ids),
            num_output_tokens=len(running.output_ids),
            round=done,
            num_cached_tokens=running.num_cached,
            num_drafted=work.num_drafted,
        )

    def _extend(self, running: RunningRequest, committed_ids: Sequence[int], hidden: Tensor | None) -> None:
        if self._drafts is not None and running.is_draftable:
            self._drafts.extend(running.memory, committed_ids, hidden)
        if self._lookup is not None and running.copies is not None:
            stop = running.num_known if running.is_prefilled else running.table.num_tokens
            self._lookup.extend(running.copies, running.ids(running.copies.num_tokens, stop))
        self._memory.publish(running)
