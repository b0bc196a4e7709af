"""What an engine has done so far: counters that only grow, read by /metrics and by the jobs."""

from dataclasses import dataclass, field

from dspark.speculation.statistics import AcceptanceCounts


@dataclass
class EngineStats:
    """Cumulative. *_s: wall seconds. A decode of a request in a step is drafted for, or copied, or plain.

    scheduled_tokens: draft tokens given to verification; drafted_tokens: draft tokens that were proposed for it to
    choose from. copies: of the rounds, those of copied tokens.
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
    draft_s: float = 0.0
    verify_s: float = 0.0
    step_s: float = 0.0
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0})
    rounds: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    copies: AcceptanceCounts = field(default_factory=AcceptanceCounts)
