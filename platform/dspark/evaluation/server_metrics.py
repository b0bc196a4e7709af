"""What a server of ours tells of itself at /metrics, as figures of the time between two looks at it."""

from collections.abc import Mapping

from dspark.evaluation.load_run import ratio

PREFIX = "dspark_"


def sum_samples(text: str) -> dict[str, float]:
    """Our counters and gauges in a Prometheus text by name, summed over labels; {} of another server's."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith(PREFIX):
            name, value = line.rsplit(" ", 1)
            sums[name.split("{")[0]] = sums.get(name.split("{")[0], 0.0) + float(value)
    return sums


def round_figures(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float | None]:
    """`load_run.ROUND_FIGURES` of what was served between two looks; {} where nothing is told.

    A decode without a draft token commits one token.
    """
    if "dspark_decodes_total" not in before or "dspark_decodes_total" not in after:
        return {}

    def grown(name: str) -> float:
        return after.get(f"dspark_{name}_total", 0.0) - before.get(f"dspark_{name}_total", 0.0)

    rounds, plain_rounds, decodes = grown("rounds"), grown("plain_rounds"), grown("decodes")
    return {
        "accepted_length": ratio(grown("committed_tokens"), rounds),
        "acceptance": ratio(grown("accepted_tokens"), grown("verified_tokens")),
        "verify_length": ratio(grown("verified_tokens"), decodes),
        "drafted_share": ratio(grown("drafted_decodes"), decodes),
        "copied_share": ratio(grown("copied_decodes"), decodes),
        "round_tokens": ratio(grown("committed_tokens") + plain_rounds, rounds + plain_rounds),
    }
