"""Comparisons of times, throughputs and verify budgets that the paper's claims are made of.

Each function gives the comparisons of one claim, or raises NotMeasured saying what lacks.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dspark.evaluation.evidence import (
    Estimate,
    Floats,
    Part,
    bootstrap,
    bootstrap_medians,
    mean_estimate,
    paired_ratio,
    ratio,
)
from dspark.evaluation.findings import Findings, NotMeasured, budget_sums

SMALL_SHARE = 0.02  # of a round, for the sequential loop
FLAT_GROWTH, LINEAR_GROWTH = 0.1, 0.7  # of drafting time with the block: 0 is flat, 1 is in proportion
Repeat = tuple[str, int]  # mode, number
ADAPTIVE, MTP = "dspark adaptive", "mtp-{}"  # names of the contest's entrants


def timed(findings: Findings, kind: str, block_size: int) -> Mapping[str, Any]:
    """The times of a variant. Raises: NotMeasured without it."""
    for entry in (findings.round_times or {}).get("variants", ()):
        if (entry["kind"], entry["block_size"]) == (kind, block_size):
            found: Mapping[str, Any] = entry
            return found
    raise NotMeasured(f"no times of {kind} with {block_size} draft tokens")


def loop_share(findings: Findings) -> list[Part]:
    size = findings.main.block_size
    with_head, without = timed(findings, "dspark", size), timed(findings, "dflash", size)
    times = np.array([with_head["draft_s"], without["draft_s"], with_head["verify_s"]]).T
    share = bootstrap_medians(times, lambda t: ratio(t[:, 0] - t[:, 1], t[:, 0] + t[:, 2]))
    label = f"share of a round, {(findings.round_times or {})['requests']} requests, {size} draft tokens"
    return [Part(label, share, SMALL_SHARE, is_above=False)]


def drafting_growth(findings: Findings) -> list[Part]:
    sizes = sorted({entry["block_size"] for entry in (findings.round_times or {}).get("variants", ())})
    if len(sizes) < 2:
        raise NotMeasured("no drafting times at two block sizes")
    short, long = sizes[0], sizes[-1]

    def growth(kind: str) -> Estimate:
        times = np.array([timed(findings, kind, size)["draft_s"] for size in (short, long)]).T
        return bootstrap_medians(times, lambda t: (ratio(t[:, 1], t[:, 0]) - 1) / (long / short - 1))

    label = f"growth of drafting time from {short} to {long} draft tokens (0 flat, 1 in proportion)"
    return [
        Part(f"DSpark, {label}", growth("dspark"), FLAT_GROWTH, is_above=False),
        Part(f"EAGLE-3, {label}", growth("eagle3"), LINEAR_GROWTH),
    ]


def speeds(findings: Findings, entrant: str, concurrency: int, figure: str = "tokens_per_s") -> dict[Repeat, float]:
    """By mode and repeat. Raises: NotMeasured without a run."""
    rows = [row for row in findings.contest if (row["entrant"], row["concurrency"]) == (entrant, concurrency)]
    if not rows:
        raise NotMeasured(f"no run of {entrant}" + (f" at {concurrency} at once" if concurrency else ""))
    return {(str(row["mode"]), int(row["repeat"])): row[figure] for row in rows}


def user_speeds(findings: Findings, entrant: str, concurrency: int) -> dict[Repeat, float]:
    """As `speeds`, of one request: the mean of tokens per second from its sending to its end."""
    found: dict[Repeat, Any] = speeds(findings, entrant, concurrency, "user_tokens_per_s")
    return {repeat: spread["mean"] for repeat, spread in found.items()}


def paired(first: Mapping[Repeat, float], second: Mapping[Repeat, float]) -> tuple[list[float], list[float]]:
    """Of the repeats that both have. Raises: NotMeasured without one, as of runs that were stopped early."""
    shared = sorted(first.keys() & second.keys())
    if not shared:
        raise NotMeasured("no repeat in which both were run")
    return [first[one] for one in shared], [second[one] for one in shared]


def loads(findings: Findings) -> list[int]:
    """Numbers of requests at once, ascending. Raises: NotMeasured without two."""
    found = sorted({int(row["concurrency"]) for row in findings.contest})
    if len(found) < 2:
        raise NotMeasured("no runs at two loads")
    return found


def dominance(findings: Findings) -> list[Part]:
    """At equal numbers of requests more tokens/s for all is more for each user too: the frontier lies further out."""
    name = MTP.format(1)
    return [
        Part(
            f"tokens/s, adaptive over MTP-1, {load} at once",
            paired_ratio(*paired(speeds(findings, ADAPTIVE, load), speeds(findings, name, load))),
            1.0,
        )
        for load in loads(findings)
    ]


def static_under_load(findings: Findings) -> list[Part]:
    most = loads(findings)[-1]
    return [
        Part(
            f"tokens/s, MTP-{length} over MTP-1, {most} at once",
            paired_ratio(*paired(speeds(findings, MTP.format(length), most), speeds(findings, MTP.format(1), most))),
            1.0,
            is_above=False,
        )
        for length in (3, 5)
    ]


def budget_by_load(findings: Findings) -> list[Part]:
    few, many = loads(findings)[0], loads(findings)[-1]
    budgets = paired(*(speeds(findings, ADAPTIVE, load, "verify_length") for load in (many, few)))
    label = f"draft tokens verified a request, {many} at once minus {few}"
    return [Part(label, mean_estimate(np.subtract(*budgets)), 0.0, is_above=False)]


def budget_by_domain(findings: Findings) -> list[Part]:
    domains = ["math", "code", "chat"]
    sums = budget_sums(findings.budget, domains)
    if not findings.budget or not sums.sum(axis=(0, 1))[:, 1].all():
        raise NotMeasured("no mixed batch of math, code and chat")

    def gap(first: int) -> Estimate:
        def difference(s: Floats) -> Floats:
            budgets = ratio(s[..., 0], s[..., 1])
            return np.asarray(budgets[:, first] - budgets[:, first + 1])

        return bootstrap(sums, difference)

    return [Part(f"tokens verified a step, {domains[n]} minus {domains[n + 1]}", gap(n), 0.0) for n in (0, 1)]
