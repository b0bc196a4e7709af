"""The parts of one engine step."""

from collections.abc import Sequence
from dataclasses import dataclass

from dspark.attention.flat_batch import FlatBatch, Piece
from dspark.engine.request import FinishReason
from dspark.engine.running import RunningRequest
from dspark.engine.schedule_counts import PredictedSeconds
from dspark.engine.target import TargetOutput
from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.proposal import Proposal, Verdict
from dspark.speculation.statistics import Round


@dataclass(frozen=True)
class TokenLogprobs:
    """Of one output token: its own log-probability, and the most likely tokens as (id, log-probability), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class StepOutput:
    """What one request got from one step.

    token_ids: newly committed, a stop token being the last; text: newly emitted, whole characters only, without stop
    token and stop string. num_prompt_tokens, num_output_tokens: usage so far. round: None for the prompt's own token.
    logprobs: an entry per token id, where the request asks for them. num_cached_tokens: of the prompt, found in the
    prefix cache. num_drafted: draft tokens proposed, of which the round may have verified fewer.
    """

    request_id: str
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    num_output_tokens: int
    round: Round | None
    logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    num_drafted: int = 0
    draft_s: float = 0.0


@dataclass(frozen=True)
class Work:
    """One request's part in a step: a chunk of its prompt (no proposal), or its anchor and the proposal to verify.

    num_drafted: tokens of the proposal before it was cut to what is verified. num_context: tokens there before it.
    """

    running: RunningRequest
    piece: Piece
    proposal: Proposal | None
    num_drafted: int = 0
    num_context: int = 0

    @property
    def yields_token(self) -> bool:
        """Not while there is more to read."""
        return self.piece.num_logits > 0

    @property
    def draft_ids(self) -> Sequence[int]:
        return [] if self.proposal is None else self.piece.token_ids[1:]


@dataclass(frozen=True)
class Launched:
    """A step that the target has begun with. clock_s: at its start, and when all was drafted. num_drafted: requests
    that the drafter was asked for, which took draft_s."""

    works: list[Work]
    batch: FlatBatch
    output: TargetOutput
    clock_s: list[float]
    num_drafted: int = 0
    draft_s: float = 0.0

    @property
    def context_tokens(self) -> int:
        """What its requests had in KV memory before it, all together."""
        return sum(work.num_context for work in self.works)

    def predicted_seconds(self, curve: CostCurve | None) -> PredictedSeconds | None:
        """None without a curve."""
        if curve is None:
            return None
        num_requests = len(self.works)
        return PredictedSeconds(
            verify_s=curve.step_seconds(self.batch.num_tokens, num_requests=num_requests),
            context_s=curve.context_seconds(num_requests, self.context_tokens),
            draft_s=curve.draft_seconds(self.num_drafted),
        )


def read_prompt(running: RunningRequest, max_tokens: int) -> Work:
    """The next chunk of what there is to read, at most so many tokens; a prompt's end yields the first output token.

    After a preemption that token has been drawn already, and nothing is drawn twice.
    """
    start = running.table.num_tokens
    chunk = running.ids(start, start + min(running.num_unread, max_tokens))
    is_first_drawn = len(chunk) == running.num_unread and not running.output_ids
    return Work(running, Piece(running.table, chunk, num_logits=int(is_first_drawn)), None, num_context=start)


def decode(running: RunningRequest, proposal: Proposal, length: int) -> Work:
    """The anchor, and behind it the first `length` tokens of the proposal, which are to be verified."""
    verified = proposal.first(length)
    token_ids = [running.anchor_id, *verified.token_ids.tolist()]
    piece = Piece(running.table, token_ids, num_logits=len(token_ids))
    return Work(running, piece, verified, num_drafted=proposal.num_tokens, num_context=running.table.num_tokens)


def round_of(proposal: Proposal, verdict: Verdict, num_committed: int) -> Round:
    """What is counted of a verification."""
    logits = None if proposal.confidence_logits is None else proposal.confidence_logits.tolist()
    return Round(proposal.num_tokens, verdict.num_accepted, num_committed, logits)
