"""What the DSpark paper claims, each decided by what was measured: holds, does not, or not shown.

A claim is one or more comparisons of a value with a bound; `evidence.Part` decides each by its interval. Nothing is
decided by hand: without its measurement a claim is not shown, and the reason says what lacks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dspark.evaluation import acceptance_claims, speed_claims
from dspark.evaluation.evidence import Part, Verdict, combined
from dspark.evaluation.findings import Findings, NotMeasured


@dataclass(frozen=True)
class Claim:
    """One claim and what became of it. source: where the paper makes it; samples: what the verdict rests on."""

    name: str
    statement: str
    source: str
    published: str
    verdict: Verdict
    reason: str
    samples: str
    parts: tuple[Part, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        content = {key: getattr(self, key) for key in ("name", "statement", "source", "published", "verdict", "reason")}
        return content | {"samples": self.samples, "parts": [part.to_dict() for part in self.parts]}


@dataclass(frozen=True)
class Criterion:
    """How a claim is decided. parts: gives the comparisons, or raises NotMeasured."""

    name: str
    statement: str
    source: str
    published: str
    parts: Callable[[Findings], list[Part]]
    rests_on: str = "rows"

    def judge(self, findings: Findings) -> Claim:
        told = (self.name, self.statement, self.source, self.published)
        try:
            parts = tuple(self.parts(findings))
        except NotMeasured as lacking:
            return Claim(*told, "not shown", f"not measured: {lacking}", "none")
        return Claim(*told, combined(parts), reason_of(parts), samples_of(findings, self.rests_on, parts), parts)


def judge_all(findings: Findings) -> list[Claim]:
    """Every claim, in the paper's order."""
    return [criterion.judge(findings) for criterion in CRITERIA]


def reason_of(parts: Sequence[Part]) -> str:
    """One line: which comparison decided, or which one did not."""
    if combined(parts) == "holds":
        return (
            "the interval lies wholly on the claimed side" if len(parts) == 1 else f"all {len(parts)} comparisons hold"
        )
    wanted: Verdict = "does not" if combined(parts) == "does not" else "not shown"
    part = next(part for part in parts if part.verdict == wanted)
    value = part.estimate
    if value.low is None or value.high is None:
        return f"{part.label}: too few samples for an interval"
    where = f"{value.value:.3g} ({value.low:.3g} to {value.high:.3g})"
    if wanted == "does not":
        return f"{part.label}: {where} is {'below' if part.is_above else 'above'} {part.bound:g}"
    return f"{part.label}: {where} does not tell it from {part.bound:g}"


def samples_of(findings: Findings, rests_on: str, parts: Sequence[Part]) -> str:
    """How much the comparisons rest on, in words: of several the least."""
    if rests_on in ("rows", "budget"):
        prompts, seeds = (
            min(sizes) for sizes in zip(*(part.estimate.rests_on or (0, 0) for part in parts), strict=True)
        )
        told = f"{prompts} prompts, {seeds} seed{'s' * (seeds > 1)} of training"
        return told if rests_on == "rows" else f"{told}, domains in one batch"
    if rests_on == "calibration":
        return f"{len(findings.fit_ids)} prompts fitted on, {len(findings.test_ids)} tested on"
    if rests_on == "contest":
        return f"{len({row['repeat'] for row in findings.contest})} repeats of each load"
    if rests_on == "round_times":
        return f"{(findings.round_times or {}).get('repeats', 0)} timed sweeps"
    return f"{((findings.lossless or {}).get('generate_comparison') or {}).get('checked', 0)} answers compared"


CRITERIA = (
    Criterion(
        "order",
        "DSpark accepts more than DFlash, DFlash more than nothing, and DSpark more than EAGLE-3",
        "Table 1",
        "Qwen3-4B: +16 % over DFlash, +31 % over EAGLE-3",
        acceptance_claims.order,
    ),
    Criterion(
        "acceptance by position",
        "Behind the first slot conditional acceptance falls with DFlash, and with DSpark by less than 0.05",
        "Figure 2",
        "math: DSpark 0.905 to 0.882, DFlash 0.885 to 0.828",
        acceptance_claims.shape_by_position,
    ),
    Criterion(
        "slot 1",
        "DSpark's first slot is accepted more often than EAGLE-3's",
        "Figure 2",
        "math 0.905 for 0.811, chat 0.735 for 0.534",
        acceptance_claims.first_slot,
    ),
    Criterion(
        "depth",
        "DSpark of 2 layers accepts at least what DFlash of 5 layers does",
        "Figure 3",
        "5.70 for 5.40 on GSM8K, and so on all nine",
        acceptance_claims.depth,
    ),
    Criterion(
        "block size",
        "The gap between DSpark and DFlash grows with the block",
        "Figure 4",
        "math: +7 % at draft length 4, +30 % at 16",
        acceptance_claims.gap_by_block,
    ),
    Criterion(
        "RNN head",
        "The RNN head accepts slightly more than the Markov head",
        "Figure 4",
        "+3 % at draft length 8, +7 % at 16 (math)",
        acceptance_claims.rnn,
    ),
    Criterion(
        "sequential loop",
        "The sequential loop takes at most 2 % of a round",
        "Figure 4",
        "+0.6 % at draft length 8, +1.3 % at 16, 128 requests",
        speed_claims.loop_share,
        "round_times",
    ),
    Criterion(
        "drafting time",
        "Drafting time is flat in the block's length with DSpark and in proportion to it with EAGLE-3",
        "Section 2",
        "one parallel pass against one pass a token",
        speed_claims.drafting_growth,
        "round_times",
    ),
    Criterion(
        "threshold",
        "A higher threshold raises the accepted share of verified tokens",
        "Figure 5",
        "chat: 46 % at 0, 96 % at 0.9",
        acceptance_claims.threshold_raises,
    ),
    Criterion(
        "threshold pays",
        "Some threshold keeps 95 % of tau for at most 75 % of the verified tokens",
        "Figure 5",
        "chat at 0.4: 95 % for 74 %",
        acceptance_claims.threshold_pays,
    ),
    Criterion(
        "STS",
        "Sequential temperature scaling halves the calibration error or better",
        "Figure 6",
        "5.7 to 2.0 % at slot 1, 3.3 to 0.4 % at slot 7",
        acceptance_claims.sts,
        "calibration",
    ),
    Criterion(
        "frontier",
        "Adaptive DSpark gives more tokens/s than static MTP-1 at every load",
        "Figure 7",
        "+51 % at 80 tokens/s a user",
        speed_claims.dominance,
        "contest",
    ),
    Criterion(
        "static under load",
        "Static MTP-3 and MTP-5 lose throughput against MTP-1 under load",
        "Section 5.1",
        "stated, without figures",
        speed_claims.static_under_load,
        "contest",
    ),
    Criterion(
        "budget by load",
        "The verify budget falls as load rises",
        "Figure 8",
        "4.94 tokens a request at 20 at once, 3.47 at 204",
        speed_claims.budget_by_load,
        "contest",
    ),
    Criterion(
        "budget by domain",
        "Within one mixed batch math is given more to verify than code, and code more than chat",
        "Section 3.2",
        "follows from survival by domain",
        speed_claims.budget_by_domain,
        "budget",
    ),
    Criterion(
        "lossless",
        "GSM8K is answered as rightly with speculation as without: greedy answers are the same",
        "Section 2",
        "lossless by construction",
        acceptance_claims.lossless,
        "lossless",
    ),
)
