"""What came of a run under load, and its figures.

Throughput counts tokens by usage, never by arrivals: one step, or one chunk of a stream, may hold several tokens.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dspark.speculation.statistics import AcceptanceCounts

ROUND_FIGURES = ("accepted_length", "acceptance", "verify_length", "drafted_share", "copied_share", "round_tokens")


@dataclass
class Answer:
    """What came back for one request. arrived_s: clock readings, one per step or chunk that brought text or tokens.

    sent_s: when it was to be sent, which is where its latency begins; late_s: how much later it really was. num_tokens:
    by usage. output_ids: empty where they are not told. failure: why there is no whole answer, in words that are equal
    for equal faults.
    """

    sent_s: float
    arrived_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: str | None = None
    output_ids: list[int] = field(default_factory=list)
    late_s: float = 0.0
    failure: str | None = None


@dataclass(frozen=True)
class LoadRun:
    """All requests of one run, answers in their order. seconds: from the first request to the last token.

    full_load_*: the part in which every place was taken. counts: verified rounds; num_drafted of num_decodes steps of
    a request had a proposal made, num_copied had one looked up. told_rounds: ROUND_FIGURES as a server tells them; none
    of both where nothing is told.
    """

    answers: list[Answer]
    seconds: float
    full_load_s: float | None = None
    full_load_tokens: int | None = None
    counts: AcceptanceCounts | None = None
    num_decodes: int = 0
    num_drafted: int = 0
    num_copied: int = 0
    told_rounds: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def full_load_tokens_per_s(self) -> float | None:
        return self.full_load_tokens / self.full_load_s if self.full_load_tokens and self.full_load_s else None

    def figures(self) -> dict[str, Any]:
        """JSON-ready, of the answers that are whole; requests = finished + failed.

        first_token_ms, request_ms: from when it was to be sent to the first and to the last arrival; gap_ms: between
        arrivals of a request; token_ms: per request, from the first arrival to the last over the tokens after the
        first; user_tokens_per_s: per request, its tokens over the time from when it was to be sent to the last arrival.
        """
        whole = [answer for answer in self.answers if answer.failure is None]
        spoken = [answer for answer in whole if answer.arrived_s]
        gaps = [gap for answer in whole for gap in np.diff(answer.arrived_s).tolist()]
        per_token = [
            (answer.arrived_s[-1] - answer.arrived_s[0]) / (answer.num_tokens - 1)
            for answer in spoken
            if len(answer.arrived_s) > 1 and answer.num_tokens > 1
        ]
        lasting = [answer.arrived_s[-1] - answer.sent_s for answer in spoken]
        return {
            "requests": len(self.answers),
            "output_tokens": self.num_tokens,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "full_load_tokens_per_s": self.full_load_tokens_per_s,
            "first_token_ms": _percentiles_ms([answer.arrived_s[0] - answer.sent_s for answer in spoken]),
            "gap_ms": _percentiles_ms(gaps),
            "token_ms": _percentiles_ms(per_token),
            "request_ms": _percentiles_ms(lasting),
            "user_tokens_per_s": _speeds([a.num_tokens / s for a, s in zip(spoken, lasting, strict=True) if s > 0]),
            "finished": dict(Counter(str(answer.finish_reason) for answer in whole)),
            "failed": dict(Counter(answer.failure for answer in self.answers if answer.failure is not None)),
        } | self._round_figures()

    def _round_figures(self) -> dict[str, float | None]:
        """verify_length: draft tokens verified per step of a request, undrafted steps counted as 0."""
        if self.counts is None:
            return {name: self.told_rounds.get(name) for name in ROUND_FIGURES}
        c = self.counts
        num_rounds = c.rounds + c.plain_rounds
        return {
            "accepted_length": ratio(c.committed_tokens, c.rounds),
            "acceptance": ratio(c.accepted_tokens, c.proposed_tokens - c.after_stop_tokens),
            "verify_length": ratio(c.proposed_tokens, num_rounds),
            "drafted_share": ratio(self.num_drafted, self.num_decodes),
            "copied_share": ratio(self.num_copied, self.num_decodes),
            "round_tokens": ratio(c.committed_tokens + c.plain_committed_tokens, num_rounds),
        }


def ratio(numerator: float, denominator: float) -> float | None:
    """None over nothing."""
    return numerator / denominator if denominator else None


def _percentiles_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    if not len(seconds):
        return None
    values = (1000.0 * np.quantile(seconds, [0.5, 0.9, 0.99])).tolist()
    return {"mean": 1000.0 * float(np.mean(seconds))} | dict(zip(("p50", "p90", "p99"), values, strict=True))


def _speeds(per_s: Sequence[float]) -> dict[str, float] | None:
    """The slow end counts: p10 is what nine of ten users get at least."""
    if not len(per_s):
        return None
    p10, p50 = np.quantile(per_s, [0.1, 0.5]).tolist()
    return {"mean": float(np.mean(per_s)), "p50": p50, "p10": p10}
