"""What was measured, as the sums per prompt that figures and claims are made of.

Legend: M seeds, N prompts, D drafters, K slots, H thresholds, B bins. Sums of a prompt under one drafter, [2 + 2K]:
committed tokens, rounds, rounds that reached slot k, rounds that accepted it. `evidence.py` has what is done with them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from dspark.drafters import AnyDrafterConfig
from dspark.drafters.config import DrafterConfig
from dspark.evaluation.confidence import RoundTable
from dspark.evaluation.evidence import Floats, ratio
from dspark.evaluation.summary import domains_of
from dspark.speculation.calibration import SlotScales, calibrated_survival
from dspark.speculation.calibration_error import NUM_BINS, bins_of
from dspark.speculation.statistics import AcceptanceCounts

Row = Mapping[str, Any]

MAIN = "dspark"  # the name of the drafter that the others stand beside
DOMAIN_ORDER = ("math", "code", "chat")
DONE = 0.9  # share of the prompts that an evaluation has to have answered to stand beside the others'; a few may fail


class NotMeasured(Exception):
    """What a figure or a claim lacks, in words that go behind "not measured: "."""


@dataclass(frozen=True)
class Kind:
    """What sort of drafter it is. head: of the sequential loop, "vanilla", "gated", "rnn" or "none"."""

    architecture: str
    num_layers: int
    block_size: int
    head: str = "none"

    @classmethod
    def of(cls, config: AnyDrafterConfig) -> "Kind":
        """Of a drafter's shape, as `drafters.checkpoint.from_deepspec` gives it."""
        if not isinstance(config, DrafterConfig):
            return cls(config.architecture, 1, config.block_size)  # one layer, run again and again
        head = config.markov_head_type if config.markov_rank else "none"
        return cls(config.architecture, config.num_hidden_layers, config.block_size, head)


@dataclass(frozen=True)
class Findings:
    """All that is there; what is not is empty or None.

    rows: by seed and drafter, good rows of sampled decoding with whole blocks. calibration: good rows of sampled
    decoding of the main drafter, fit_ids and test_ids their two halves. contest: runs of `contest.measure`. budget:
    rows decoded under the scheduler in one mixed batch. round_times: of `round_time.measure`. lossless: metrics of
    greedy decoding beside the library's own.
    """

    kinds: Mapping[str, Kind]
    rows: Mapping[int, Mapping[str, Sequence[Row]]] = field(default_factory=dict)
    calibration: Sequence[Row] = ()
    fit_ids: frozenset[str] = frozenset()
    test_ids: frozenset[str] = frozenset()
    contest: Sequence[Row] = ()
    budget: Sequence[Row] = ()
    round_times: Mapping[str, Any] | None = None
    lossless: Mapping[str, Any] | None = None

    @property
    def main(self) -> Kind:
        """Raises: NotMeasured without the main drafter."""
        if MAIN not in self.kinds:
            raise NotMeasured(f"no drafter is called {MAIN!r}")
        return self.kinds[MAIN]

    def drafter(self, architecture: str, **wanted: Any) -> str:
        """Name of the measured drafter of this kind, else as the main one is. Raises: NotMeasured without one."""
        head = {"dspark": "vanilla"}.get(architecture, "none")
        layers = 1 if architecture in ("eagle3", "mtp") else self.main.num_layers
        kind = replace(Kind(architecture, layers, self.main.block_size, head), **wanted)
        for name, found in self.kinds.items():
            if found == kind and any(by_drafter.get(name) for by_drafter in self.rows.values()):
                return name
        what = f"{architecture} of {kind.num_layers} layers, {kind.block_size} draft tokens"
        raise NotMeasured(f"no drafter {what}" + ("" if kind.head in ("none", "vanilla") else f", head {kind.head}"))

    def sums(self, names: Sequence[str], *, domain: str | None = None) -> Floats:
        """[M, N, D, 2 + 2K] over the prompts that all these drafters answered under every seed.

        A seed whose evaluation is not done yet is left out: its few prompts would be all that is left of the others.
        Raises: NotMeasured when there is no such prompt.
        """
        trained = [seed for seed, by in self.rows.items() if all(by.get(name) for name in names)]
        every = [[self._table(seed, name, domain) for name in names] for seed in trained]
        answered = [set.intersection(*map(set, of_seed)) for of_seed in every]
        most = max(map(len, answered), default=0)
        tables = [one for one, ids in zip(every, answered, strict=True) if len(ids) >= DONE * most]
        shared = set.intersection(*(set(table) for one in tables for table in one)) if tables else set()
        if not shared:
            raise NotMeasured(f"no prompt that {', '.join(names)} answered" + (f" in {domain}" if domain else ""))
        ids = sorted(shared)
        return np.array([[[table[one] for table in of_seed] for one in ids] for of_seed in tables])

    @cached_property
    def domains(self) -> list[str]:
        """Whole domains, not single benchmarks, in the order they are shown in."""
        found = {row["domain"].split("/")[0] for by in self.rows.values() for rows in by.values() for row in rows}
        return [name for name in DOMAIN_ORDER if name in found] + sorted(found - set(DOMAIN_ORDER))

    @cached_property
    def benchmarks(self) -> list[str]:
        """Single benchmarks, "math/gsm8k"; the domains themselves where prompts have no finer ones."""
        found = {row["domain"] for by in self.rows.values() for rows in by.values() for row in rows}
        return sorted(found, key=lambda name: (self.domains.index(name.split("/")[0]), name))

    @cached_property
    def num_slots(self) -> int:
        return max(kind.block_size for kind in self.kinds.values())

    def _table(self, seed: int, name: str, domain: str | None) -> dict[str, Floats]:
        table = self._sums_by_prompt.get((seed, name))
        if table is None:
            rows = self.rows[seed][name]
            table = {row["id"]: (domains_of(row), row_sums(row, self.num_slots)) for row in rows}
            self._sums_by_prompt[seed, name] = table
        return {one: sums for one, (domains, sums) in table.items() if domain is None or domain in domains}

    @cached_property
    def _sums_by_prompt(self) -> dict[tuple[int, str], dict[str, tuple[set[str], Floats]]]:
        """Filled as it is asked for: rounds are counted once."""
        return {}


def row_sums(row: Row, num_slots: int) -> Floats:
    """[2 + 2K] of one result row."""
    counts = AcceptanceCounts()
    for turn in row["turns"]:
        for r in turn["rounds"]:
            counts.add_round(r["num_proposed"], r["num_accepted"], r["num_committed"])
    padding = [0] * (num_slots - len(counts.reached))
    return np.array(
        [counts.committed_tokens, counts.rounds, *counts.reached, *padding, *counts.accepted, *padding], np.float64
    )


def tau(sums: Floats) -> Floats:
    """Accepted length. sums: [..., 2 + 2K]."""
    return ratio(sums[..., 0], sums[..., 1])


def conditional_acceptance(sums: Floats, first: int, last: int) -> Floats:
    """Share accepted of what was reached at slots first..last-1, all together. sums: [..., 2 + 2K]; slots from 0."""
    num_slots = (sums.shape[-1] - 2) // 2
    reached = sums[..., 2 + first : 2 + last].sum(axis=-1)
    accepted = sums[..., 2 + num_slots + first : 2 + num_slots + last].sum(axis=-1)
    return ratio(accepted, reached)


def threshold_sums(rows: Sequence[Row], thresholds: Sequence[float]) -> Floats:
    """[1, N, 3, H]: verified tokens, committed tokens and rounds if blocks ended before the first unsure slot.

    A slot is unsure when its own confidence is below the threshold. The rounds are those of whole blocks, cut: what
    a cut round would have been followed by is not decoded anew. Anchor and bonus are counted.
    """
    table = []
    for row in rows:
        sums = np.zeros((3, len(thresholds)))
        for r in (r for turn in row["turns"] for r in turn["rounds"]):
            if r["num_proposed"] and r["confidence_logits"] is not None:
                confidences = 1 / (1 + np.exp(-np.array(r["confidence_logits"])))
                for place, threshold in enumerate(thresholds):
                    unsure = np.flatnonzero(confidences < threshold)
                    length = int(unsure[0]) if len(unsure) else r["num_proposed"]
                    sums[:, place] += (length + 1, min(r["num_committed"], length + 1), 1)
        table.append(sums)
    return np.array([table])


def reliability_sums(rows: Sequence[Row], scales: SlotScales, num_bins: int = NUM_BINS) -> Floats:
    """[1, N, K, 2, B, 2]: predicted minus accepted, and rounds, per slot, before and after scaling, and bin.

    ECE at a slot = sum over bins of |the first| / sum of the second.
    """
    table = np.zeros((1, len(rows), len(scales), 2, num_bins, 2))
    for place, row in enumerate(rows):
        rounds = RoundTable.of([row], len(scales))
        for side, given in enumerate((None, scales)):
            predicted = calibrated_survival(rounds.logits, given).numpy()
            for k in range(len(scales)):
                here = rounds.num_judged > k
                bins = bins_of(predicted[here, k], num_bins)
                excess = predicted[here, k] - (rounds.num_accepted[here] > k)
                table[0, place, k, side, :, 0] = np.bincount(bins, excess, num_bins)
                table[0, place, k, side, :, 1] = np.bincount(bins, minlength=num_bins)
    return table


def calibration_error(sums: Floats) -> Floats:
    """ECE. sums: [..., B, 2]."""
    return ratio(np.abs(sums[..., 0]).sum(axis=-1), sums[..., 1].sum(axis=-1))


def squared_calibration_error(sums: Floats) -> Floats:
    """Mean over rounds of their bin's squared gap between predicted and accepted. sums: [..., B, 2]."""
    gaps = np.nansum(ratio(sums[..., 0] ** 2, sums[..., 1]), axis=-1)
    return ratio(gaps, sums[..., 1].sum(axis=-1))


def budget_sums(rows: Sequence[Row], domains: Sequence[str]) -> Floats:
    """[1, N, domains, 2]: verified tokens with the anchor, and steps; a step without a proposal verifies its anchor."""
    table = np.zeros((1, len(rows), len(domains), 2))
    for place, row in enumerate(rows):
        rounds = [r for turn in row["turns"] for r in turn["rounds"]]
        tokens = sum(len(turn["output_ids"]) - 1 for turn in row["turns"])  # the first one is the prefill's
        steps = len(rounds) + max(0, tokens - sum(r["num_committed"] for r in rounds))
        for column, domain in enumerate(domains):
            if domain in domains_of(row):
                table[0, place, column] = (sum(r["num_proposed"] for r in rounds) + steps, steps)
    return table
