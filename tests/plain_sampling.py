"""Sampling as one would write it first: a token at a time, dictionaries, Python's own integers."""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from dspark.engine.sampling import SamplingParams, filtered_probs

WORD = 2**64


def ruled_row(
    row: Tensor,
    params: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    stop_ids: Collection[int] = (),
) -> Tensor:
    """Logits of the token after `output_ids`, before the temperature. row: [V]."""
    logits: dict[int, float] = dict(enumerate(row.tolist()))
    counts, seen = Counter(output_ids), {*prompt_ids, *output_ids}
    for token_id in logits:
        is_allowed = params.allowed_token_ids is None or token_id in params.allowed_token_ids
        is_early_stop = len(output_ids) < params.min_tokens and token_id in stop_ids
        if not is_allowed or token_id in params.banned_token_ids or is_early_stop:
            logits[token_id] = -math.inf
        logits[token_id] += params.logit_bias.get(token_id, 0.0)
        if token_id in seen:
            penalty = params.repetition_penalty
            logits[token_id] *= 1 / penalty if logits[token_id] > 0 else penalty
        logits[token_id] -= params.frequency_penalty * counts[token_id]
        logits[token_id] -= params.presence_penalty if counts[token_id] else 0.0
    return torch.tensor([logits[token_id] for token_id in range(len(logits))])


def next_bits(key: int, counter: int) -> int:
    """The (counter + 1)th output of SplitMix64 started at `key`."""
    bits = (key + (counter + 1) * 0x9E3779B97F4A7C15) % WORD
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % WORD
    return bits ^ (bits >> 31)


def plain_noise(seed: int, choice: int, position: int, token_id: int) -> float:
    bits = next_bits(next_bits(next_bits(next_bits(0, seed), choice), position), token_id)
    return -math.log(-math.log(((bits >> 12) + 0.5) / 2**52))


def seeded_choice(probs: Tensor, seed: int, choice: int, position: int) -> tuple[int, float]:
    """The token that the seed draws there, and how far ahead of the second it is. probs: [V]."""
    scores = {
        token_id: math.log(p) + plain_noise(seed, choice, position, token_id)
        for token_id, p in enumerate(probs.tolist())
        if p > 0
    }
    first, *rest = sorted(scores, key=lambda token_id: -scores[token_id])
    return first, scores[first] - scores[rest[0]] if rest else math.inf


@torch.no_grad()
def decode_plainly(
    model: Any,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    max_tokens: int,
    stop_ids: Collection[int] = (),
    seed: int = 0,
    choice: int = 0,
) -> tuple[list[int], float]:
    """Output of a greedy or a seeded request, and the nearest tie on the way: the least lead of a token, in logits."""
    output_ids: list[int] = []
    nearest = math.inf
    model.set_attn_implementation("sdpa")
    while len(output_ids) < max_tokens and not (output_ids and output_ids[-1] in stop_ids):
        row = model(torch.tensor([[*prompt_ids, *output_ids]])).logits[0, -1].float()
        row = ruled_row(row, params, prompt_ids, output_ids, stop_ids)
        if params.temperature == 0:
            best = row.topk(2)
            token_id, lead = int(best.indices[0]), float(best.values[0] - best.values[1])
        else:
            position = len(prompt_ids) + len(output_ids)
            token_id, lead = seeded_choice(filtered_probs(row, params), seed, choice, position)
        output_ids.append(token_id)
        nearest = min(nearest, lead)
    return output_ids, nearest
