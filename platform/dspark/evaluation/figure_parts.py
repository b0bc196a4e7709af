"""What the paper's figures have in common: a picture's panels, its table, and the words beside both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark.evaluation.evidence import Estimate, bootstrap
from dspark.evaluation.findings import Findings, NotMeasured, tau
from dspark.evaluation.html import decimal
from dspark.evaluation.panels import Line, Panel

LABELS = {"dspark": "DSpark", "dflash": "DFlash", "eagle3": "EAGLE-3"}
LOOKS = {"dspark": 0, "dflash": 1, "eagle3": 2, "rnn": 3, "vanilla": 0, "none": 1}
HEADS = {"vanilla": "Markov", "rnn": "RNN", "none": "none (DFlash)"}
TAU = "tokens per round (tau)"


@dataclass(frozen=True)
class PaperFigure:
    """A picture's rows of panels and a table. samples: what it rests on; differs: how it is not the paper's."""

    name: str
    title: str
    rows: Sequence[Sequence[Panel]]
    samples: str
    differs: str
    columns: Sequence[str] = ()
    table: Sequence[Sequence[str]] = ()
    num_text: int = 2
    panel_width: float = 3.6
    numbers: Mapping[str, object] = field(default_factory=dict)
    """For the summary: what the picture shows."""


def shown(estimate: Estimate, digits: int = 2) -> str:
    """A value with its interval."""
    if estimate.low is None or estimate.high is None:
        return decimal(estimate.value, digits)
    return f"{estimate.value:.{digits}f} ({estimate.low:.{digits}f} to {estimate.high:.{digits}f})"


def tau_of(findings: Findings, name: str, domain: str | None) -> Estimate:
    return bootstrap(findings.sums([name], domain=domain), lambda s: tau(s[:, 0]))


def count_samples(findings: Findings, names: Sequence[str]) -> str:
    """Prompts, rounds and seeds of a figure."""
    sums = findings.sums(names)
    rounds = [int(sums[..., column, 1].sum()) for column in range(len(names))]
    seeds = f"{len(sums)} seed" + "s" * (len(sums) > 1)
    return f"{sums.shape[1]} prompts, {min(rounds):,} to {max(rounds):,} rounds a drafter, {seeds}"


def present(
    findings: Findings, wanted: Mapping[str, Mapping[str, Any]], *, is_empty_ok: bool = False
) -> dict[str, str]:
    """Names of those of the wanted drafters that were measured. Raises: NotMeasured when none was."""
    found, lacking = {}, ""
    for label, kind in wanted.items():
        try:
            found[label] = findings.drafter(**kind)
        except NotMeasured as reason:
            lacking = str(reason)
    if not found and not is_empty_ok:
        raise NotMeasured(lacking)
    return found


def estimated_line(label: str, x: Sequence[float], values: Sequence[Estimate], look: int) -> Line:
    """Values with their intervals; one without an interval stands without a band."""
    low = [value.value if value.low is None else value.low for value in values]
    high = [value.value if value.high is None else value.high for value in values]
    return Line(label, list(x), [value.value for value in values], look, low, high)
