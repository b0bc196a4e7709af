"""What an engine has done so far: counters that only grow, read by /metrics and by the jobs."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dspark.engine.schedule_counts import ScheduleCounts
from dspark.speculation.statistics import AcceptanceCounts, Round


@dataclass
class EngineStats:
    """Cumulative. *_s: wall seconds. A decode of a request in a step is drafted for, or copied, or plain.

    scheduled_tokens: draft tokens given to verification; drafted_tokens: draft tokens that were proposed for it to
    choose from. copies: of the rounds, those of copied tokens. prefix_cache_queries, prefix_cache_hits: prompt tokens
    of started requests, and those of them found in pages; prompt_tokens are those that were read. preemptions: times
    that a running request had to give its pages back; reread_tokens: what was read to go on after them,
    or behind what another engine had output.
    requests_beyond_drafter: that went on, or began, without speculation, longer than the drafter's context.
    schedule: what the scheduler expected beside what came.
    """

    steps: int = 0
    batch_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    decodes: int = 0
    drafted: int = 0
    copied: int = 0
    drafted_tokens: int = 0
    scheduled_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    preemptions: int = 0
    reread_tokens: int = 0
    requests_beyond_drafter: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    step_s: float = 0.0
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0})
    rounds: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    copies: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    schedule: ScheduleCounts = field(default_factory=ScheduleCounts)

    def add_read(self, num_tokens: int, *, is_again: bool) -> None:
        """Count a chunk that was read, of a prompt or, after a preemption, of all there was."""
        if is_again:
            self.reread_tokens += num_tokens
        else:
            self.prompt_tokens += num_tokens

    def add_decodes(self, num_decodes: int, num_copied: int, drafted: Sequence[int]) -> None:
        """Count a step's decodes. drafted: draft tokens proposed to each of those that the drafter was asked for."""
        self.decodes += num_decodes
        self.copied += num_copied
        self.drafted += sum(num_tokens > 0 for num_tokens in drafted)
        self.drafted_tokens += sum(drafted)

    def add_round(self, done: Round, *, is_copied: bool) -> None:
        """Count a verification, or a decode without a draft token."""
        counts = (done.num_proposed, done.num_accepted, done.num_committed)
        self.scheduled_tokens += done.num_proposed
        self.rounds.add_round(*counts, confidence_logits=done.confidence_logits)
        if is_copied:
            self.copies.add_round(*counts)

    def add_step(self, batch_tokens: int, clock_s: Sequence[float]) -> None:
        """Count a step. clock_s: at its start, when all was drafted, when all was verified, at its end."""
        started, drafted, verified, ended = clock_s
        self.steps += 1
        self.batch_tokens += batch_tokens
        self.draft_s += drafted - started
        self.verify_s += verified - drafted
        self.step_s += ended - started
