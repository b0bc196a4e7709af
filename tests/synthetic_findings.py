"""Measurements whose truth is known: worlds in which all of the paper's claims are right, or all of them wrong."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from dspark.evaluation.findings import Findings, Kind

DOMAINS = ("math", "code", "chat")
SLOTS = 7
ROUNDS = 25
HARD_AND_EASY = (0.15, 8.0)  # powers of the main drafter's rates: what a threshold on confidence can tell apart
KINDS = {
    "dspark": Kind("dspark", 2, SLOTS, "vanilla"),
    "dflash": Kind("dflash", 2, SLOTS),
    "eagle3": Kind("eagle3", 1, SLOTS),
    "dspark-rnn": Kind("dspark", 2, SLOTS, "rnn"),
    "dflash-5-layers": Kind("dflash", 5, SLOTS),
    "dspark-3": Kind("dspark", 2, 3, "vanilla"),
    "dflash-3": Kind("dflash", 2, 3),
    "dspark-15": Kind("dspark", 2, 15, "vanilla"),
    "dflash-15": Kind("dflash", 2, 15),
}
# By drafter: acceptance at slot 1 and behind it.
AS_PUBLISHED = {
    "dspark": (0.80, 0.80),
    "dflash": (0.75, 0.60),
    "eagle3": (0.40, 0.70),
    "dspark-rnn": (0.86, 0.86),
    "dflash-5-layers": (0.72, 0.60),
    "dspark-3": (0.62, 0.62),
    "dflash-3": (0.62, 0.60),
    "dspark-15": (0.85, 0.85),
    "dflash-15": (0.70, 0.55),
}
REVERSED = {
    "dspark": (0.70, 0.40),
    "dflash": (0.70, 0.80),
    "eagle3": (0.85, 0.80),
    "dspark-rnn": (0.55, 0.35),
    "dflash-5-layers": (0.85, 0.80),
    "dspark-3": (0.85, 0.85),
    "dflash-3": (0.50, 0.50),
    "dspark-15": (0.40, 0.40),
    "dflash-15": (0.60, 0.60),
}


def make_row(
    name: str,
    domain: str,
    rng: np.random.Generator,
    rates: tuple[float, float],
    slots: int,
    *,
    sharpness: float,
    spread: Sequence[float],
) -> dict[str, Any]:
    """One answer. A round's rates are to the power of one of `spread`; its confidences have `sharpness` times the
    logits of these."""
    rounds = []
    for _ in range(ROUNDS):
        truth = np.array([rates[0], *[rates[1]] * (slots - 1)]) ** rng.choice(spread)
        stood = rng.random(slots) < truth
        accepted = slots if stood.all() else int(np.argmin(stood))
        logits = sharpness * np.log(truth / (1 - truth))
        rounds.append(make_round(slots, accepted, logits.tolist()))
    tokens = 1 + sum(r["num_committed"] for r in rounds)
    turn = {"rounds": rounds, "output_ids": [0] * tokens, "finish_reason": "length", "seconds": None, "plain": None}
    return {"id": name, "domain": domain, "mode": "sampled", "error": None, "turns": [turn]}


def make_round(proposed: int, accepted: int, logits: Sequence[float] | None = None) -> dict[str, Any]:
    return {
        "num_proposed": proposed,
        "num_accepted": accepted,
        "num_committed": accepted + 1,
        "confidence_logits": logits,
    }


def make_rows(
    rates: tuple[float, float],
    slots: int,
    *,
    seed: int,
    prompts: int = 36,
    sharpness: float = 1.0,
    spread: Sequence[float] = (1.0,),
) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    options: dict[str, Any] = {"sharpness": sharpness, "spread": spread}
    return [make_row(f"p{n:03d}", DOMAINS[n % 3], rng, rates, slots, **options) for n in range(prompts)]


def make_findings(*, is_as_published: bool = True, seeds: int = 1) -> Findings:
    """A world in which every claim holds, or one in which none does."""
    table = AS_PUBLISHED if is_as_published else REVERSED
    sharpness = 1.0 if is_as_published else -1.0  # where nothing holds, confidences say the opposite
    rows = {
        seed: {
            name: make_rows(
                table[name],
                kind.block_size,
                seed=100 * seed + place,
                sharpness=sharpness,
                spread=HARD_AND_EASY if name == "dspark" else (1.0,),
            )
            for place, (name, kind) in enumerate(KINDS.items())
        }
        for seed in range(seeds)
    }
    told_off = 3.0 if is_as_published else 0.0  # overconfident, or always at one half, which no temperature moves
    calibration = make_rows((0.8, 0.8), SLOTS, seed=7, prompts=80, sharpness=told_off, spread=(0.3, 2.0))
    ids = [row["id"] for row in calibration]
    return Findings(
        kinds=KINDS,
        rows=rows,
        calibration=calibration,
        fit_ids=frozenset(ids[::2]),
        test_ids=frozenset(ids[1::2]),
        contest=make_contest(is_as_published=is_as_published),
        budget=make_budget((6, 4, 2) if is_as_published else (2, 4, 6)),
        round_times=make_round_times(is_as_published=is_as_published),
        lossless=make_lossless(gap=None if is_as_published else 2.5),
    )


def make_contest(*, is_as_published: bool) -> list[dict[str, Any]]:
    """Five repeats; where all holds, the adaptive way is ahead, long static drafts lose and budgets fall."""
    rng = np.random.default_rng(1)
    factors = {"none": 0.9, "mtp-1": 1.0, "mtp-3": 0.8, "mtp-5": 0.6, "dspark adaptive": 1.3}
    budgets = {1: 5.0, 16: 1.0}
    if not is_as_published:
        factors = {"none": 0.9, "mtp-1": 1.0, "mtp-3": 1.2, "mtp-5": 1.4, "dspark adaptive": 0.7}
        budgets = {1: 1.0, 16: 5.0}
    rows = []
    for load, repeat, name in itertools.product(budgets, range(5), factors):
        speed = 100 * load**0.5 * factors[name] * rng.normal(1, 0.02)
        rows.append(
            {
                "mode": "greedy",
                "concurrency": load,
                "repeat": repeat,
                "entrant": name,
                "requests": max(4, load),
                "tokens_per_s": speed,
                "user_tokens_per_s": {"mean": 1.1 * speed / load},  # places fall empty towards the end
                "verify_length": budgets[load] + rng.normal(0, 0.1) if name == "dspark adaptive" else 1.0,
            }
        )
    return rows


def make_budget(lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of a mixed batch in which each domain's requests verify about so many draft tokens."""
    rng = np.random.default_rng(2)
    rows = []
    for n in range(24):
        proposed = [lengths[n % 3] + int(rng.integers(-1, 2)) for _ in range(20)]
        rounds = [make_round(length, min(1, length)) for length in proposed]
        rounds = [r | {"num_committed": r["num_accepted"] + 1} for r in rounds]
        tokens = 1 + sum(r["num_committed"] for r in rounds)
        turn = {"rounds": rounds, "output_ids": [0] * tokens, "finish_reason": "length"}
        rows.append({"id": f"b{n}", "domain": DOMAINS[n % 3], "mode": "sampled", "error": None, "turns": [turn]})
    return rows


def make_round_times(*, is_as_published: bool) -> dict[str, Any]:
    """Milliseconds: a parallel drafter flat in the block and an autoregressive one in proportion, or the reverse."""
    rng = np.random.default_rng(3)
    variants = []
    for size in (3, 7, 15):
        parallel, chain = (2.0, 0.5 * size) if is_as_published else (0.5 * size, 2.0)
        loop = 0.1 if is_as_published else 8.0
        drafting = {"dspark": parallel + loop, "dspark-rnn": parallel + 2 * loop, "dflash": parallel, "eagle3": chain}
        for kind, ms in drafting.items():
            seconds = {"draft_s": (ms / 1000) * rng.normal(1, 0.01, 21), "verify_s": 0.03 * rng.normal(1, 0.01, 21)}
            variants.append({"kind": kind, "block_size": size} | {key: v.tolist() for key, v in seconds.items()})
    return {"requests": 8, "context_tokens": 256, "repeats": 21, "variants": variants}


def make_lossless(*, gap: float | None) -> dict[str, Any]:
    differences = [] if gap is None else [{"id": "p000", "mode": "greedy", "turn": 0, "top2_gap": gap, "position": 3}]
    comparison = {"checked": 12, "identical": 12 - len(differences), "dtype": "float32"}
    return {"generate_comparison": comparison | {"first_differences": differences}}
