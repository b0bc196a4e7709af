"""The paper's figures about time: the sequential loop, the frontier, and what is verified under load.

Each function gives a figure, or raises NotMeasured saying what lacks.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dspark.evaluation import published
from dspark.evaluation.evidence import Estimate, bootstrap, bootstrap_medians, mean_estimate, ratio
from dspark.evaluation.figure_parts import HEADS, LOOKS, PaperFigure, estimated_line, shown
from dspark.evaluation.findings import Findings, NotMeasured, budget_sums
from dspark.evaluation.html import DASH, decimal, percent
from dspark.evaluation.panels import Line, Panel
from dspark.evaluation.published import PublishedTarget
from dspark.evaluation.speed_claims import ADAPTIVE, Repeat, loads, speeds, user_speeds

KINDS = {"dspark": "Markov", "dspark-rnn": "RNN", "dflash": "none (DFlash)", "eagle3": "EAGLE-3"}
KIND_LOOKS = {"dspark": 0, "dspark-rnn": 3, "dflash": 1, "eagle3": 2}
SHOWN_ENTRANTS = (ADAPTIVE, "mtp-1", "mtp-3", "mtp-5", "none")


def figure_4_latency(findings: Findings, target: PublishedTarget) -> PaperFigure:
    found = findings.round_times
    if not found or not found["variants"]:
        raise NotMeasured("no times of rounds")
    variants: Sequence[Mapping[str, Any]] = found["variants"]
    by_kind = {kind: [one for one in variants if one["kind"] == kind] for kind in KINDS}
    panels = []
    for title, names in (("drafting", ("draft_s",)), ("round: drafting and verifying", ("draft_s", "verify_s"))):
        lines = [
            estimated_line(
                KINDS[kind],
                [one["block_size"] + 1 for one in entries],
                [_milliseconds(one, names) for one in entries],
                KIND_LOOKS[kind],
            )
            for kind, entries in by_kind.items()
            if entries
        ]
        panels.append(Panel(f"here, {title}", "draft length with its anchor", "ms", lines, from_zero=True))
    told = [
        Line(HEADS[head], published.FIGURE_4_LENGTHS, row, LOOKS[head]) for head, row in published.FIGURE_4_MS.items()
    ]
    panels.append(Panel("paper, round at 128 requests", "draft length with its anchor", "ms", told))
    table = [_latency_row(one, variants) for one in variants]
    lengths = dict(zip(published.FIGURE_4_LENGTHS, range(4), strict=True))
    for head, row in published.FIGURE_4_MS.items():
        for length, place in lengths.items():
            base = published.FIGURE_4_MS["none"][place]
            over = percent((row[place] - base) / row[place]) if head != "none" else DASH
            table.append([HEADS[head], "paper", str(length), DASH, decimal(row[place]), over])
    return PaperFigure(
        "figure_4_latency",
        "Figure 4: what the sequential loop costs",
        [panels],
        f"{found['repeats']} sweeps, {found['requests']} requests of {found['context_tokens']} tokens",
        "the paper's target takes 190 ms a round at 128 requests, beside which a drafter is small; here the target is "
        "hardly larger than the drafter, and a CPU gains nothing from computing a block at once",
        ["head", "", "draft length", "drafting ms", "round ms", "loop's share"],
        table,
        panel_width=4.2,
        numbers={f"{one['kind']}-{one['block_size']}": _milliseconds(one, ("draft_s",)).to_dict() for one in variants},
    )


def figure_7(findings: Findings, target: PublishedTarget) -> PaperFigure:
    counts, entrants = loads(findings), _entrants(findings)
    lines, table = [], []
    for look, name in enumerate(entrants):
        rates = [_mean(speeds(findings, name, load)) for load in counts]
        users = [_mean(user_speeds(findings, name, load)).value for load in counts]
        notes = [str(load) for load in counts] if name == ADAPTIVE else ()
        lines.append(Line(name, users, [rate.value for rate in rates], look, notes=notes))
        cells = [f"{user:.1f} / {rate.value:.0f}" for user, rate in zip(users, rates, strict=True)]
        table.append([name, *cells])
    labels = ("tokens/s of a user", "tokens/s of all")
    told = [
        Panel(
            f"paper, {model}",
            labels[0],
            "thousand tokens/s of a GPU",
            [Line.through(n, points, _look(entrants, n)) for n, points in by_entrant.items()],
        )
        for model, by_entrant in published.FIGURE_7.items()
    ]
    return PaperFigure(
        "figure_7",
        "Figure 7: throughput against the speed of a user",
        [[Panel("here", *labels, lines), *told]],
        _contest_samples(findings),
        "the paper's is live traffic on DeepSeek-V4 preview models; here a closed loop with a trained MTP module. The "
        "numbers beside the points are requests at once",
        ["decoding", *(f"{load} at once: user / all" for load in counts)],
        table,
        num_text=1,
        panel_width=4.2,
    )


def figure_8(findings: Findings, target: PublishedTarget) -> PaperFigure:
    counts, entrants = loads(findings), _entrants(findings)
    lines, table, numbers = [], [], {}
    for look, name in enumerate(entrants):
        rates = [_mean(speeds(findings, name, load)) for load in counts]
        lines.append(Line(name, counts, [rate.value for rate in rates], look))
        numbers[name] = {str(load): rate.to_dict() for load, rate in zip(counts, rates, strict=True)}
        table.append([name, "tokens/s", *(shown(rate, 0) for rate in rates)])
    lengths = [speeds(findings, ADAPTIVE, load, "verify_length") for load in counts]
    budgets = [_mean({repeat: 1 + length for repeat, length in by.items()}) for by in lengths]
    table.append([ADAPTIVE, "tokens verified", *(shown(budget) for budget in budgets)])
    adaptive = _look(entrants, ADAPTIVE)
    here = [
        Panel("here, throughput", "requests at once", "tokens/s", lines, log="x", from_zero=True),
        Panel(
            "here, verify budget",
            "requests at once",
            "tokens a request, with anchor",
            [Line(ADAPTIVE, counts, [budget.value for budget in budgets], adaptive)],
            log="x",
            from_zero=True,
        ),
        *_budget_panel(findings),
    ]
    told = [
        Panel(
            f"paper, {model}",
            "requests at once",
            "thousand tokens/s",
            [Line.through(n, points, _look(entrants, n)) for n, points in by_entrant.items()],
            from_zero=True,
        )
        for model, by_entrant in published.FIGURE_8.items()
    ]
    budget_lines = [
        Line.through(f"{ADAPTIVE}, {model}", points, adaptive + number)
        for number, (model, points) in enumerate(published.FIGURE_8_BUDGET.items())
    ]
    told.append(
        Panel("paper, verify budget", "requests at once", "tokens a request, with anchor", budget_lines, from_zero=True)
    )
    return PaperFigure(
        "figure_8",
        "Figure 8: throughput and verify budget under load",
        [here, told],
        _contest_samples(findings),
        "where a further token costs as much as it brings, as on a CPU from a few requests on, the budget falls to the "
        "anchor alone",
        ["decoding", "", *(f"{load} at once" for load in counts)],
        table,
        numbers=numbers | {"budget": [budget.to_dict() for budget in budgets]},
    )


def _budget_panel(findings: Findings) -> list[Panel]:
    """Tokens verified a step by domain, of one mixed batch."""
    domains = findings.domains
    if not findings.budget:
        return []
    sums = budget_sums(findings.budget, domains)
    values = [bootstrap(sums, lambda s, n=n: ratio(s[:, n, 0], s[:, n, 1])) for n in range(len(domains))]  # type: ignore[misc]
    line = estimated_line("one mixed batch", range(len(domains)), values, 3)
    return [Panel("here, one mixed batch", "", "tokens a request, with anchor", [line], kind="bars", ticks=domains)]


def _mean(by_repeat: Mapping[Repeat, float]) -> Estimate:
    return mean_estimate(list(by_repeat.values()))


def _milliseconds(entry: Mapping[str, Any], names: Sequence[str]) -> Estimate:
    times = 1000 * np.array([entry[name] for name in names]).T
    return bootstrap_medians(times, lambda t: t.sum(axis=-1))


def _latency_row(one: Mapping[str, Any], variants: Sequence[Mapping[str, Any]]) -> list[str]:
    size = one["block_size"]
    bare = next((v for v in variants if (v["kind"], v["block_size"]) == ("dflash", size)), None)
    over = DASH
    if bare is not None and one["kind"] in ("dspark", "dspark-rnn"):
        times = np.array([one["draft_s"], bare["draft_s"], one["verify_s"]]).T
        share = bootstrap_medians(times, lambda t: 100 * ratio(t[:, 0] - t[:, 1], t[:, 0] + t[:, 2]))
        over = f"{shown(share, 1)} %"
    drafting, whole = _milliseconds(one, ("draft_s",)), _milliseconds(one, ("draft_s", "verify_s"))
    return [KINDS.get(one["kind"], one["kind"]), "here", str(size + 1), shown(drafting), shown(whole), over]


def _entrants(findings: Findings) -> list[str]:
    found = {row["entrant"] for row in findings.contest}
    return [name for name in SHOWN_ENTRANTS if name in found] + sorted(found - set(SHOWN_ENTRANTS))


def _look(entrants: Sequence[str], name: str) -> int:
    return entrants.index(name) if name in entrants else len(entrants)


def _contest_samples(findings: Findings) -> str:
    first = [row for row in findings.contest if row["entrant"] == findings.contest[0]["entrant"]]
    requests = sorted({row["requests"] for row in first})
    repeats = len({row["repeat"] for row in findings.contest})
    return f"{repeats} repeats, {requests[0]} to {requests[-1]} requests a run"
