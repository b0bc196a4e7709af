"""The paper's figures about accepted lengths, drawn from what was measured, the paper's beside it.

Each function gives a figure, or raises NotMeasured saying what lacks.
"""

from dspark.evaluation import published
from dspark.evaluation.evidence import bootstrap
from dspark.evaluation.figure_parts import (
    HEADS,
    LABELS,
    LOOKS,
    TAU,
    PaperFigure,
    count_samples,
    estimated_line,
    present,
    shown,
    tau_of,
)
from dspark.evaluation.findings import Findings, conditional_acceptance
from dspark.evaluation.html import DASH, decimal
from dspark.evaluation.panels import Line, Panel
from dspark.evaluation.published import PublishedTarget
from dspark.evaluation.tasks import STAND_IN

MIN_REACHED = 20  # rounds that a position is drawn from


def table_1(findings: Findings, target: PublishedTarget) -> PaperFigure:
    names = present(findings, {name: {"architecture": name} for name in ("dspark", "dflash", "eagle3")})
    groups = [*findings.benchmarks, *(name for name in findings.domains if name not in findings.benchmarks)]
    groups.sort(key=_place_in_paper)
    paper = published.table_1(target)
    found = {key: [tau_of(findings, name, group) for group in groups] for key, name in names.items()}
    here = [estimated_line(LABELS[key], range(len(row)), row, LOOKS[key]) for key, row in found.items()]
    told = [Line(LABELS[key], range(12), list(paper[key].values()), LOOKS[key]) for key in LOOKS if key in paper]
    ticks = list(paper["dspark"])
    table = []
    for key, row in found.items():
        table.append([LABELS[key], "here", *(shown(estimate) for estimate in row)])
        matched = [paper[key].get(group.split("/")[-1]) for group in groups]
        table.append([LABELS[key], "paper", *(decimal(value) for value in matched)])
    return PaperFigure(
        "table_1",
        "Table 1: accepted length by benchmark",
        [
            [Panel("here", "", TAU, here, kind="bars", ticks=[g.split("/")[-1] for g in groups], from_zero=True)],
            [Panel(f"paper, {published.NAMES[target]}", "", TAU, told, kind="bars", ticks=ticks, from_zero=True)],
        ],
        count_samples(findings, list(names.values())),
        "target and training are far smaller; a benchmark named -standin is another set in its place; without the "
        "benchmarks' files the domains are of the project's own held-out prompts",
        ["drafter", "", *(group.split("/")[-1] for group in groups)],
        table,
        panel_width=9.0,
        numbers={key: {g: e.to_dict() for g, e in zip(groups, row, strict=True)} for key, row in found.items()},
    )


def _place_in_paper(group: str) -> int:
    """Of a benchmark or its stand-in; domains keep their order behind them."""
    name = group.split("/")[-1].removesuffix(STAND_IN)
    return published.BENCHMARKS.index(name) if name in published.BENCHMARKS else len(published.BENCHMARKS)


def figure_2(findings: Findings, target: PublishedTarget) -> PaperFigure:
    names = present(findings, {name: {"architecture": name} for name in ("dspark", "dflash", "eagle3")})
    size = findings.main.block_size
    here, table, numbers = [], [], {}
    for domain in findings.domains:
        lines = []
        for key, name in names.items():
            sums = findings.sums([name], domain=domain)
            reached = sums[:, :, 0, 2 : 2 + size].sum(axis=(0, 1))
            rates = [
                bootstrap(sums, lambda s, k=k: conditional_acceptance(s[:, 0], k, k + 1))  # type: ignore[misc]
                for k in range(size)
                if reached[k] >= MIN_REACHED
            ]
            lines.append(estimated_line(LABELS[key], range(1, len(rates) + 1), rates, LOOKS[key]))
            paper = published.FIGURE_2.get(domain, {}).get(key, ())
            cells = [*(shown(rate) for rate in rates), *[DASH] * (size - len(rates))]
            table.append([domain, LABELS[key], "here", *cells])
            if len(paper) == size:
                table.append([domain, LABELS[key], "paper", *(decimal(rate) for rate in paper)])
            numbers[f"{domain}/{key}"] = [rate.to_dict() for rate in rates]
        here.append(Panel(f"here, {domain}", "position", "conditional acceptance", lines, limits=(0, 1.02)))
    told = [
        Panel(
            f"paper, {domain}",
            "position",
            "conditional acceptance",
            [Line(LABELS[key], range(1, 8), rates, LOOKS[key]) for key, rates in by_drafter.items()],
            limits=(0, 1.02),
        )
        for domain, by_drafter in published.FIGURE_2.items()
    ]
    return PaperFigure(
        "figure_2",
        "Figure 2: acceptance by position, given that all positions before it stood",
        [here, told],
        count_samples(findings, list(names.values())),
        f"later positions rest on the few rounds that came so far, which are the easy ones; under {MIN_REACHED} rounds "
        "a position is left out",
        ["domain", "drafter", "", *(str(k) for k in range(1, size + 1))],
        table,
        num_text=3,
        numbers=numbers,
    )


def _layers(label: str) -> str:
    return f"{label} layer{'' if label.endswith(' 1') else 's'}"


def figure_3(findings: Findings, target: PublishedTarget) -> PaperFigure:
    wanted = {
        f"{LABELS[name]}, {layers}": {"architecture": name, "num_layers": layers}
        for name, layers in (("dspark", 1), ("dspark", 2), ("dspark", 5), ("dflash", 2), ("dflash", 5))
    }
    names = present(findings, wanted)
    groups = findings.domains
    found = {label: [tau_of(findings, name, group) for group in groups] for label, name in names.items()}
    paper = {
        f"{LABELS[name]}, {layers}": [published.by_domain(row)[domain] for domain in published.DOMAINS]
        for (name, layers), row in published.FIGURE_3.items()
    }
    looks = {label: number for number, label in enumerate(wanted)}
    here = [estimated_line(_layers(label), range(len(row)), row, looks[label]) for label, row in found.items()]
    told = [Line(_layers(label), range(3), row, looks[label]) for label, row in paper.items()]
    table = [[label, "here", *(shown(estimate) for estimate in row)] for label, row in found.items()]
    table += [[label, "paper", *(decimal(value) for value in row)] for label, row in paper.items()]
    return PaperFigure(
        "figure_3",
        "Figure 3: depth",
        [
            [
                Panel("here", "", TAU, here, kind="bars", ticks=groups, from_zero=True),
                Panel("paper", "", TAU, told, kind="bars", ticks=list(published.DOMAINS), from_zero=True),
            ]
        ],
        count_samples(findings, list(names.values())),
        "all depths are trained with the same few steps here, which favours the shallow ones",
        ["drafter, layers", "", *groups],
        sorted(table, key=lambda row: looks[row[0]]),
        panel_width=5.0,
        numbers={label: [estimate.to_dict() for estimate in row] for label, row in found.items()},
    )


def figure_4(findings: Findings, target: PublishedTarget) -> PaperFigure:
    """Accepted length by the draft's length; the time of a round has a figure of its own, see `speed_figures`."""
    sizes = sorted({kind.block_size for kind in findings.kinds.values()})
    here, table, numbers = [], [], {}
    for domain in findings.domains:
        lines = []
        for head, label in HEADS.items():
            architecture = {"none": "dflash"}.get(head, "dspark")
            wanted = {str(size): {"architecture": architecture, "block_size": size, "head": head} for size in sizes}
            names = present(findings, wanted, is_empty_ok=True)
            if not names:
                continue
            lengths = [int(size) + 1 for size in names]
            values = [tau_of(findings, name, domain) for name in names.values()]
            lines.append(estimated_line(label, lengths, values, LOOKS[head]))
            numbers[f"{domain}/{head}"] = {n: value.to_dict() for n, value in zip(lengths, values, strict=True)}
            by_length = dict(zip(lengths, values, strict=True))
            cells = [shown(by_length[n + 1]) if n + 1 in by_length else DASH for n in sizes]
            table.append([domain, label, "here", *cells])
            told = dict(zip(published.FIGURE_4_LENGTHS, published.FIGURE_4.get(domain, {}).get(head, ()), strict=False))
            table.append([domain, label, "paper", *(decimal(told.get(size + 1)) for size in sizes)])
        here.append(Panel(f"here, {domain}", "draft length with its anchor", TAU, lines))
    paper = [
        Panel(
            f"paper, {domain}",
            "draft length with its anchor",
            TAU,
            [Line(HEADS[head], published.FIGURE_4_LENGTHS, row, LOOKS[head]) for head, row in by_head.items()],
        )
        for domain, by_head in published.FIGURE_4.items()
    ]
    every = [name for name, kind in findings.kinds.items() if kind.architecture in ("dspark", "dflash")]
    measured = [name for name in every if any(by.get(name) for by in findings.rows.values())]
    return PaperFigure(
        "figure_4",
        "Figure 4: length of the draft, and what makes the sequential bias",
        [here, paper],
        count_samples(findings, measured),
        "each length is a training of its own, as in the paper",
        ["domain", "head", "", *(str(size + 1) for size in sizes)],
        table,
        num_text=3,
        numbers=numbers,
    )
