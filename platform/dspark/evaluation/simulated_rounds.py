"""What drafts come to in a simulated fleet: replayed from recorded answers, or drawn from a model of them.

Legend: A answers, N recorded rounds of all of them, K slots of a block; c conditional confidence, a survival.

An answer is a chain of rounds, each a whole block that was drafted and judged. A request that verified less of a block
than stood goes on inside of it: what is left of the block is what is drafted next, so that easy passages take more
rounds where budgets are short, as they do in an engine.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dspark.speculation.calibration import SlotScales, calibrated_survival

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class RoundPool:
    """Recorded rounds. confidence: [N, K] float64, conditional and calibrated; accepted: [N], of the whole block.

    first, number: [A], where an answer's rounds begin and how many they are; tokens: [A], its length.
    """

    confidence: Floats
    accepted: Indices
    first: Indices
    number: Indices
    tokens: Indices

    @property
    def block_size(self) -> int:
        return self.confidence.shape[1]

    @cached_property
    def mean_confidence(self) -> Floats:
        return np.asarray(self.confidence.mean(axis=0))

    @cached_property
    def mean_survival(self) -> Floats:
        """What nothing is known about starts from."""
        return np.asarray(np.cumprod(self.mean_confidence), dtype=np.float64)

    def drafts(self, rounds: Indices, offsets: Indices) -> tuple[Floats, Indices]:
        """Survival [..., K] of what is drafted `offsets` tokens into rounds, and how much of it would stand, [...].

        Slots beyond a recorded block take the mean confidence and are taken to fall.
        """
        places = offsets[..., None] + np.arange(self.block_size)
        is_known = places < self.block_size
        own = np.take_along_axis(self.confidence[rounds], np.minimum(places, self.block_size - 1), axis=-1)
        confidence = np.where(is_known, own, self.mean_confidence)
        survival: Floats = np.asarray(np.cumprod(confidence, axis=-1), dtype=np.float64)
        return survival, np.asarray(np.maximum(self.accepted[rounds] - offsets, 0))

    def advance(self, answers: Indices, rounds: Indices, offsets: Indices, tokens: Indices) -> tuple[Indices, Indices]:
        """Round and offset once so many tokens more are there; an answer's last round is followed by its first."""
        offsets = offsets + tokens
        is_through = offsets > self.accepted[rounds]
        within = (rounds - self.first[answers] + 1) % self.number[answers]
        rounds = np.where(is_through, self.first[answers] + within, rounds)
        return rounds, np.where(is_through, 0, offsets)


def recorded_rounds(
    rows: Iterable[Mapping[str, Any]], *, block_size: int, scales: SlotScales | None = None
) -> RoundPool:
    """Of the rollouts that jobs/evaluate.py writes, whole blocks of a drafter with confidences; others are left out.

    scales: its calibration for this way of decoding. Raises: ValueError when no round is left.
    """
    logits, accepted, lengths, tokens = [], [], [], []
    for row in rows:
        for turn in row["turns"]:
            whole = [r for r in turn["rounds"] if r["num_proposed"] == block_size and r["confidence_logits"]]
            if whole:
                logits += [r["confidence_logits"] for r in whole]
                accepted += [r["num_accepted"] for r in whole]
                lengths.append(len(whole))
                tokens.append(len(turn["output_ids"]))
    if not lengths:
        raise ValueError(
            f"no round of {block_size} draft tokens with confidences; record some with jobs/evaluate.py and a drafter "
            "that has a confidence head, without verify_length"
        )
    survival = calibrated_survival(torch.tensor(logits, dtype=torch.float32), scales).double().numpy()
    before = np.concatenate((np.ones((len(survival), 1)), survival[:, :-1]), axis=1)
    confidence = np.divide(survival, before, out=np.zeros_like(survival), where=before > 0)
    return _pool(confidence, accepted, lengths, tokens)


def read_rollouts(path: str | Path, *, mode: str = "greedy") -> list[dict[str, Any]]:
    """Rows of a rollouts.jsonl of one way of decoding."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["mode"] == mode and not row["error"]]


def modelled_rounds(
    rng: np.random.Generator,
    *,
    block_size: int = 7,
    acceptance: float = 0.75,
    answer_spread: float = 0.8,
    round_spread: float = 0.8,
    noise: float = 0.5,
    num_answers: int = 400,
    rounds_per_answer: int = 60,
    tokens: int = 128,
) -> RoundPool:
    """A pool with answers and passages of differing difficulty.

    acceptance: of a slot at the median, given those before it. answer_spread, round_spread, noise: standard deviations,
    in logits, of an answer's difficulty, of a round's, and of what a confidence is off by. tokens: of an answer.
    """
    shape = (num_answers, rounds_per_answer)
    middle = np.log(acceptance / (1 - acceptance))
    difficulty = rng.normal(0, answer_spread, (num_answers, 1)) + rng.normal(0, round_spread, shape)
    logit = middle + difficulty[..., None] + rng.normal(0, 0.3, (*shape, block_size))
    stands = rng.random(logit.shape) < _sigmoid(logit)
    accepted = np.cumprod(stands, axis=-1).sum(axis=-1).reshape(-1)
    seen = logit + rng.normal(0, noise, logit.shape)
    # Of what is seen so vaguely only a part is signal: the best guess is drawn towards the mean.
    variance = answer_spread**2 + round_spread**2 + 0.3**2
    confidence = _sigmoid(middle + (seen - middle) * variance / (variance + noise**2)).reshape(-1, block_size)
    return _pool(confidence, accepted.tolist(), [rounds_per_answer] * num_answers, [tokens] * num_answers)


def _pool(confidence: Floats, accepted: Sequence[int], lengths: Sequence[int], tokens: Sequence[int]) -> RoundPool:
    number = np.array(lengths, dtype=np.int64)
    first = np.cumsum(number) - number
    return RoundPool(confidence, np.array(accepted, np.int64), first, number, np.array(tokens, np.int64))


def _sigmoid(logit: Floats) -> Floats:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * logit)))
