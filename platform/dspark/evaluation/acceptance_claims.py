"""Comparisons of accepted lengths, acceptance and confidences that the paper's claims are made of.

Each function gives the comparisons of one claim, or raises NotMeasured saying what lacks.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dspark.evaluation.confidence import RoundTable
from dspark.evaluation.evidence import Estimate, Floats, Part, bootstrap, noise_free_share, ratio
from dspark.evaluation.findings import (
    MAIN,
    Findings,
    NotMeasured,
    conditional_acceptance,
    reliability_sums,
    squared_calibration_error,
    tau,
    threshold_sums,
)
from dspark.speculation.calibration import SlotScales
from dspark.speculation.calibration_error import NUM_BINS
from dspark.speculation.calibration_fit import fit_sts

FLAT = 0.05  # change of conditional acceptance behind the first slot that still is flat
KEPT, VERIFIED = 0.95, 0.75  # shares of tau kept and of tokens verified under a threshold
HALF = 0.5  # of the calibration error, left by scaling
THRESHOLDS = tuple(round(0.1 * n, 1) for n in range(10))
NEAR_TIE = {"float32": 1e-3}  # gap of two logits within a dtype's rounding
COARSE_TIE = 0.25  # of the others


def ratio_of_taus(findings: Findings, first: str, second: str) -> Estimate:
    """Accepted length of one drafter over another's, on the same prompts."""
    return bootstrap(findings.sums([first, second]), lambda s: ratio(tau(s[:, 0]), tau(s[:, 1])))


def order(findings: Findings) -> list[Part]:
    dspark, dflash, eagle3 = (findings.drafter(name) for name in ("dspark", "dflash", "eagle3"))
    nothing = bootstrap(findings.sums([dflash]), lambda s: tau(s[:, 0]))
    return [
        Part("tau of DSpark over DFlash", ratio_of_taus(findings, dspark, dflash), 1.0),
        Part("tau of DFlash", nothing, 1.0),
        Part("tau of DSpark over EAGLE-3", ratio_of_taus(findings, dspark, eagle3), 1.0),
    ]


def shape_by_position(findings: Findings) -> list[Part]:
    names = [findings.drafter("dspark"), findings.drafter("dflash")]
    sums, last = findings.sums(names), findings.main.block_size

    def change(s: Floats) -> Floats:
        return conditional_acceptance(s, 1, last) - conditional_acceptance(s, 0, 1)

    steeper = bootstrap(sums, lambda s: change(s[:, 0]) - change(s[:, 1]))
    falling = bootstrap(sums, lambda s: change(s[:, 1]))
    flat = bootstrap(sums, lambda s: change(s[:, 0]))
    return [
        Part("DFlash, slots behind the first minus the first", falling, 0.0, is_above=False),
        Part("the same change, DSpark minus DFlash", steeper, 0.0),
        Part("DSpark, slots behind the first minus the first", flat, -FLAT),
    ]


def gap_by_block(findings: Findings) -> list[Part]:
    sizes = sorted({kind.block_size for kind in findings.kinds.values() if kind.architecture == "dflash"})
    if len(sizes) < 2:
        raise NotMeasured("one block size only")
    short, long = sizes[0], sizes[-1]
    names = [findings.drafter(name, block_size=size) for size in (long, short) for name in ("dspark", "dflash")]

    def growth(s: Floats) -> Floats:
        lengths = [tau(s[:, column]) for column in range(4)]
        return ratio(ratio(lengths[0], lengths[1]), ratio(lengths[2], lengths[3]))

    return [Part(f"tau over DFlash's, {long} over {short} draft tokens", bootstrap(findings.sums(names), growth), 1.0)]


def depth(findings: Findings) -> list[Part]:
    shallow, deep = findings.drafter("dspark", num_layers=2), findings.drafter("dflash", num_layers=5)
    return [Part("tau, 2-layer DSpark over 5-layer DFlash", ratio_of_taus(findings, shallow, deep), 1.0)]


def rnn(findings: Findings) -> list[Part]:
    names = findings.drafter("dspark", head="rnn"), findings.drafter("dspark")
    return [Part("tau, RNN over Markov head", ratio_of_taus(findings, *names), 1.0)]


def first_slot(findings: Findings) -> list[Part]:
    sums = findings.sums([findings.drafter("dspark"), findings.drafter("eagle3")])
    difference = bootstrap(
        sums, lambda s: conditional_acceptance(s[:, 0], 0, 1) - conditional_acceptance(s[:, 1], 0, 1)
    )
    return [Part("acceptance at slot 1, DSpark minus EAGLE-3", difference, 0.0)]


def confident_rows(findings: Findings) -> Sequence[Mapping[str, Any]]:
    """Rows of the main drafter's first seed. Raises: NotMeasured when they carry no confidences."""
    rows = next((by[MAIN] for by in findings.rows.values() if by.get(MAIN)), [])
    if not any(r["confidence_logits"] for row in rows for turn in row["turns"] for r in turn["rounds"]):
        raise NotMeasured("no confidences of the main drafter")
    return rows


def threshold_raises(findings: Findings) -> list[Part]:
    sums = threshold_sums(confident_rows(findings), THRESHOLDS)

    def slope(s: Floats) -> Floats:
        rates = ratio(s[:, 1], s[:, 0])
        return np.asarray(rates[:, -1] - rates[:, 0])

    return [Part(f"accepted share of verified tokens, at {THRESHOLDS[-1]} minus at 0", bootstrap(sums, slope), 0.0)]


def threshold_pays(findings: Findings) -> list[Part]:
    """The threshold is chosen on every other prompt and judged on the rest, so that it is not chosen for its luck."""
    sums = threshold_sums(sorted(confident_rows(findings), key=lambda row: str(row["id"])), THRESHOLDS)
    chosen_on = sums[0, ::2].sum(axis=0)
    verified, kept = (ratio(chosen_on[side], chosen_on[side, 0]) for side in (0, 1))
    best = int(np.argmax(np.minimum(kept - KEPT, VERIFIED - verified)))  # as far from both bounds as can be
    judged = sums[:, 1::2]
    shares = [bootstrap(judged, lambda s, side=side: ratio(s[:, side, best], s[:, side, 0])) for side in (1, 0)]  # type: ignore[misc]
    return [
        Part(f"share of tau kept at threshold {THRESHOLDS[best]}", shares[0], KEPT),
        Part("share of tokens verified there", shares[1], VERIFIED, is_above=False),
    ]


def fitted_sts(findings: Findings) -> tuple[SlotScales, list[Mapping[str, Any]]]:
    """The paper's temperatures from half of the prompts, and the rows of the others.

    Raises: NotMeasured without rounds on both sides.
    """
    sides = (findings.fit_ids, findings.test_ids)
    fit, test = ([row for row in findings.calibration if row["id"] in ids] for ids in sides)
    if not (fit and test):
        raise NotMeasured("no calibration of the main drafter")
    table = RoundTable.of(fit, findings.main.block_size)
    return fit_sts(table.logits, table.num_accepted, table.num_judged, NUM_BINS, with_shift=False), test


def sts(findings: Findings) -> list[Part]:
    """In squares, from which the noise of few rounds can be taken off, as it cannot from ECE's absolute values: what
    a perfect predictor shows of these alone may be more than half of what there was."""
    scales, test = fitted_sts(findings)

    def after_and_before(s: Floats) -> Floats:
        return np.asarray(np.nanmean(squared_calibration_error(s), axis=1)[:, ::-1])  # [S, K, 2] to [S, 2]

    bound = HALF**2
    estimate = noise_free_share(reliability_sums(test, scales), after_and_before, bound=bound)
    return [Part("squared calibration error after STS over before, mean of slots", estimate, bound, is_above=False)]


def lossless(findings: Findings) -> list[Part]:
    """Answers that are equal token for token are as right as before; near ties are where rounding decides."""
    found = (findings.lossless or {}).get("generate_comparison") or {}
    if not found.get("checked"):
        raise NotMeasured("no answer was compared with the library's own")
    tie = NEAR_TIE.get(str(found["dtype"]), COARSE_TIE)
    parted = {(one["id"], one["mode"]) for one in found["first_differences"] if one["top2_gap"] > tie}
    share = 1 - len(parted) / found["checked"]
    label = f"share of greedy answers equal to the target's own ({found['dtype']}, near ties apart)"
    exact = Estimate(share, share, share)  # one real difference is one too many: nothing is sampled here
    return [Part(label, exact, 1.0 - 1e-9)]
