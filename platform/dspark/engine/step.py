"""The parts of one engine step, and the verdicts of its verification."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dspark.attention.flat_batch import FlatBatch, Piece
from dspark.engine.request import FinishReason
from dspark.engine.running import RunningRequest
from dspark.engine.sampling import filtered_probs
from dspark.engine.target_runner import TargetOutput
from dspark.speculation.proposal import Proposal, Verdict
from dspark.speculation.rejection import verify
from dspark.speculation.statistics import Round


@dataclass(frozen=True)
class StepOutput:
    """What one request got from one step.

    token_ids: newly committed, a stop token being the last; text: newly emitted, whole characters only, without stop
    token and stop string. num_prompt_tokens, num_output_tokens: usage so far. round: None for the prompt's own token.
    """

    request_id: str
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    num_output_tokens: int
    round: Round | None


@dataclass(frozen=True)
class Work:
    """One request's part in a step: a chunk of its prompt (no proposal), or its anchor and the proposal to verify."""

    running: RunningRequest
    piece: Piece
    proposal: Proposal | None

    @property
    def yields_token(self) -> bool:
        """Not while the prompt goes on."""
        return self.piece.num_logits > 0

    @property
    def draft_ids(self) -> Sequence[int]:
        return [] if self.proposal is None else self.piece.token_ids[1:]


def read_prompt(running: RunningRequest, max_tokens: int) -> Work:
    """The next chunk of a prompt, at most so many tokens; its end yields the first output token."""
    start = running.table.num_tokens
    chunk = running.request.prompt_ids[start : start + min(running.num_unread, max_tokens)]
    return Work(running, Piece(running.table, chunk, num_logits=int(len(chunk) == running.num_unread)), None)


def decode(running: RunningRequest, proposal: Proposal) -> Work:
    """The anchor, and behind it the tokens to verify."""
    token_ids = [running.anchor_id, *proposal.token_ids.tolist()]
    return Work(running, Piece(running.table, token_ids, num_logits=len(token_ids)), proposal)


def judge(works: Sequence[Work], batch: FlatBatch, output: TargetOutput) -> list[Verdict | None]:
    """A verdict per request; None where the prompt goes on. Sampling draws from each request's own generator."""
    has_greedy = any(work.yields_token and work.running.is_greedy for work in works)
    choices = output.choices() if has_greedy else []
    nothing = Proposal(torch.empty(0, dtype=torch.long, device=output.scores.device), None, None)
    verdicts: list[Verdict | None] = []
    for i, work in enumerate(works):
        rows = slice(batch.cu_logits[i], batch.cu_logits[i + 1])
        if not work.yields_token:
            verdicts.append(None)
        elif work.running.is_greedy:
            verdicts.append(judge_greedy(choices[rows], work.draft_ids))
        else:
            probs = filtered_probs(output.logits[rows], work.running.request.sampling)
            verdicts.append(verify(probs, work.proposal or nothing, work.running.generator))
    return verdicts


def judge_greedy(choices: Sequence[int], draft_ids: Sequence[int]) -> Verdict:
    """Accept while the draft equals the target's choice; `rejection.verify_greedy` is its twin on tensors."""
    num_accepted = 0
    while num_accepted < len(draft_ids) and draft_ids[num_accepted] == choices[num_accepted]:
        num_accepted += 1
    return Verdict(num_accepted, choices[num_accepted])
