"""From result rows to figures per mode and domain, and the table that is printed."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dspark.evaluation.config import EvaluationMode
from dspark.speculation.statistics import DEFINITION, AcceptanceCounts, bootstrap_interval

Row = Mapping[str, Any]


def summarize(rows: Sequence[Row], modes: Sequence[EvaluationMode], *, seed: int) -> dict[str, Any]:
    """{"definition", "modes": {mode: {"sampling", "domains", "overall", "failed"}}, "generate_comparison"}.

    A domain written "math/gsm8k" also counts towards "math". Prompts of a mode = those in its figures + failed.
    """
    by_mode = {}
    for mode in modes:
        of_mode = [row for row in rows if row["mode"] == mode.name]
        good = [row for row in of_mode if row["error"] is None]
        domains = sorted({name for row in good for name in domains_of(row)})
        by_mode[mode.name] = {
            "sampling": mode.model_dump(exclude={"name"}),
            "domains": {name: _figures([r for r in good if name in domains_of(r)], seed) for name in domains},
            "overall": _figures(good, seed),
            "failed": dict(Counter(row["error"] for row in of_mode if row["error"] is not None)),
        }
    return {"definition": DEFINITION, "modes": by_mode, "generate_comparison": _comparison(rows)}


def format_table(metrics: Mapping[str, Any]) -> str:
    """The figures as text: accepted length per mode and domain, then every rate by position."""
    shown = "{:<10} {:<20} {:>7} {:>6} {:>7} {:>6} {:>15} {:>9} {:>10} {:>9}"
    names = (
        "mode",
        "domain",
        "prompts",
        "turns",
        "rounds",
        "tau",
        "95 % interval",
        "draft ms",
        "verify ms",
        "speed-up",
    )
    lines = [shown.format(*names)]
    for mode, domain, f in _groups(metrics):
        times = [_number(f[key]) for key in ("draft_ms_per_round", "verify_ms_per_round", "speedup")]
        length = (_number(f["accepted_length"]), _interval(f["accepted_length_interval"]))
        lines.append(shown.format(mode, domain, f["prompts"], f["turns"], f["rounds"], *length, *times))
    lines += ["", *_position_lines(metrics), "", metrics["definition"]]
    found = metrics["generate_comparison"]
    if found["checked"]:
        lines.append(
            f"greedy output identical to generate: {found['identical']} of {found['checked']} ({found['dtype']})"
        )
    return "\n".join(lines)


def _figures(rows: Sequence[Row], seed: int) -> dict[str, Any]:
    """Figures of one group. Times are of the drafted rounds and of the plain rounds beside them, prefill left out."""
    per_prompt = [_counts(turn for turn in row["turns"]) for row in rows]
    counts = AcceptanceCounts()
    for one in per_prompt:
        counts = counts.merge(one)
    turns = [turn for row in rows for turn in row["turns"]]
    seconds = [turn["seconds"] for turn in turns if turn["seconds"] is not None]
    num_rounds = counts.rounds + counts.plain_rounds if seconds else 0  # through the engine rounds have no own time
    interval = bootstrap_interval([c.committed_tokens for c in per_prompt], [c.rounds for c in per_prompt], seed=seed)
    return {
        "prompts": len(rows),
        "turns": len(turns),
        "multi_turn_prompts": sum(len(row["turns"]) > 1 for row in rows),
        "output_tokens": sum(len(turn["output_ids"]) for turn in turns),
        "accepted_length_interval": None if interval is None else list(interval),
        "draft_ms_per_round": _ms(sum(one["draft"] for one in seconds), num_rounds),
        "verify_ms_per_round": _ms(sum(one["verify"] for one in seconds), num_rounds),
        **_speed([turn for turn in turns if turn["plain"] is not None]),
        **counts.to_dict(),
    }


def _speed(timed: Sequence[Row]) -> dict[str, Any]:
    """Seconds a token without the drafter over seconds a token with it, over the same turns; None if none was timed."""
    plain_tokens = sum(turn["plain"]["rounds"] for turn in timed)
    plain_s = sum(turn["plain"]["seconds"] for turn in timed)
    tokens = sum(r["num_committed"] for turn in timed for r in turn["rounds"])
    seconds = sum(turn["seconds"]["draft"] + turn["seconds"]["verify"] for turn in timed)
    known = plain_tokens > 0 and tokens > 0 and seconds > 0
    return {
        "timed_turns": len(timed),
        "plain_ms_per_token": _ms(plain_s, plain_tokens),
        "speedup": (plain_s / plain_tokens) / (seconds / tokens) if known else None,
    }


def _counts(turns: Iterable[Row]) -> AcceptanceCounts:
    counts = AcceptanceCounts()
    for turn in turns:
        for r in turn["rounds"]:
            counts.add_round(
                r["num_proposed"], r["num_accepted"], r["num_committed"], confidence_logits=r["confidence_logits"]
            )
    return counts


def _comparison(rows: Sequence[Row]) -> dict[str, Any]:
    """checked and identical count prompts; a prompt is identical when each of its turns is."""
    compared = [row for row in rows if row["error"] is None and any(turn["comparison"] for turn in row["turns"])]
    differences = [
        {"id": row["id"], "mode": row["mode"], "turn": number} | turn["comparison"]
        for row in compared
        for number, turn in enumerate(row["turns"])
        if not turn["comparison"]["identical"]
    ]
    dtypes = sorted({turn["comparison"]["dtype"] for row in compared for turn in row["turns"]})
    return {
        "checked": len(compared),
        "identical": len(compared) - len({(d["id"], d["mode"]) for d in differences}),
        "dtype": ", ".join(dtypes) or None,
        "first_differences": differences,
    }


def _position_lines(metrics: Mapping[str, Any]) -> list[str]:
    labels = {
        "conditional_acceptance": "conditional acceptance",
        "mean_confidence": "mean confidence",
        "survival": "survival",
        "predicted_survival": "predicted survival",
    }
    width = max((len(f["survival"]) for _, _, f in _groups(metrics)), default=0)
    lines = [f"{'mode':<10} {'domain':<20} {'by position':<22} " + " ".join(f"{k:>5}" for k in range(1, width + 1))]
    for mode, domain, figures in _groups(metrics):
        for key, label in labels.items():
            if figures[key] is not None:
                values = " ".join(f"{_number(value):>5}" for value in figures[key])
                lines.append(f"{mode:<10} {domain:<20} {label:<22} {values}")
    return lines


def _groups(metrics: Mapping[str, Any]) -> list[tuple[str, str, Mapping[str, Any]]]:
    return [
        (mode, domain, figures)
        for mode, content in metrics["modes"].items()
        for domain, figures in [*content["domains"].items(), ("overall", content["overall"])]
    ]


def domains_of(row: Row) -> set[str]:
    """The domains a row counts towards: "math/gsm8k" and "math"."""
    return {row["domain"], row["domain"].split("/")[0]}


def _ms(seconds: float, count: int) -> float | None:
    return 1000.0 * seconds / count if count else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _interval(bounds: Sequence[float] | None) -> str:
    return "-" if bounds is None else f"{bounds[0]:.2f} .. {bounds[1]:.2f}"
