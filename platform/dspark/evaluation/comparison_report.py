"""One HTML file about several drafters for one target: what each accepts, how each learned, what each is worth."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dspark.evaluation.html import count, decimal, picture, table, write_page
from dspark.evaluation.plots import acceptance_plot, contest_plot, learning_plot
from dspark.evaluation.report import accepted_lengths, positions


def write_comparison(
    path: str | Path,
    *,
    target: str,
    drafters: Mapping[str, Mapping[str, Any]],
    evaluations: Mapping[str, Mapping[str, Any]],
    histories: Mapping[str, Sequence[Mapping[str, Any]]],
    contest: Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]],
) -> None:
    """Write the comparison.

    drafters: by name, the figures of the training run; draft_tokens bounds the accepted length, which is at most 1
    more. evaluations: the content of each `metrics.json`. histories: rows of the training runs. contest: as
    `contest.summarize_contest` gives it.
    """
    title = f"Drafters for {target}"
    first = next((name for by in contest.values() for by_entrant in by.values() for name in by_entrant), "the first")
    sections = [
        f"<h1>{escape(title)}</h1>",
        accepted_lengths({}, evaluations),
        picture("Acceptance by position", acceptance_plot(evaluations), "Given that all positions before it stood."),
        positions(evaluations),
        picture("Learning", learning_plot(histories), "On held-out answers, teacher forced; the same steps for all."),
        _training(drafters),
        picture("Throughput", contest_plot(contest), f"Ratio to {first}; bars: the range over repeats."),
        _throughput(contest),
    ]
    write_page(path, title, sections)


def _training(drafters: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        [
            *(name, *(count(figures[key]) for key in ("draft_tokens", "parameters", "steps", "anchors"))),
            *(decimal(figures["seconds"], 1), decimal(figures["steps_per_s"])),
        ]
        for name, figures in drafters.items()
    ]
    columns = ["drafter", "draft tokens", "trained parameters", "steps", "anchors", "seconds", "steps/s"]
    return table("Training", columns, rows, num_text=1)


def _throughput(contest: Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]) -> str:
    rows = []
    for mode, by_concurrency in contest.items():
        for concurrency, by_entrant in by_concurrency.items():
            for name, f in by_entrant.items():
                ratio = f["ratio"]
                same = "" if f["compared"] is None else f"{f['identical']}/{f['compared']}"
                cells = (
                    decimal(f["tokens_per_s"]["median"], 1),
                    *(decimal(ratio[k]) for k in ("median", "low", "high")),
                )
                lengths = (decimal(f[key]) for key in ("accepted_length", "verify_length"))
                rows.append([mode, concurrency, name, *cells, *lengths, same])
    columns = [
        *("mode", "at once", "decoding", "tokens/s", "ratio", "lowest", "highest", "tau", "verify length"),
        "same output",
    ]
    return table("Tokens per second", columns, rows, num_text=3)


def format_lengths(
    lengths: Mapping[str, Mapping[str, Mapping[str, float | None]]], draft_tokens: Mapping[str, int]
) -> str:
    """Accepted lengths as a table: a line per drafter and its draft tokens, a column per mode and domain."""
    columns = [(mode, domain) for mode, by_domain in next(iter(lengths.values())).items() for domain in by_domain]
    width = max(len(name) for name in ["accepted length", *lengths])
    lines = [
        f"{'accepted length':<{width}}{'of':>4}" + "".join(f"{f'{mode} {domain}':>18}" for mode, domain in columns)
    ]
    for name, by_mode in lengths.items():
        values = (by_mode[mode].get(domain) for mode, domain in columns)
        lines.append(
            f"{name:<{width}}{1 + draft_tokens[name]:>4}"
            + "".join(f"{'-' if v is None else f'{v:.3f}':>18}" for v in values)
        )
    return "\n".join(lines)
