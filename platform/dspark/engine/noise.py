"""Gumbel noise that is a function of (seed, choice, position, token): what makes a seeded text its own.

Legend: N rows, W token ids of a row.

argmax_v(log p(v) + g(v)) with independent standard Gumbel g is a draw from p. The target's token at position t is that
of its own distribution there, so the text depends on seed and target alone; a drafter that draws with the same g
proposes what the target will draw, as far as the two distributions agree, and is right iff the tokens are equal.

    stream key      of a choice of a seeded request      next(next(0, seed), choice)
    position key    of a position in the text            next(stream key, position)
    bits            of a token there                     next(position key, token id)
    uniform         (upper 52 bits + 1/2) / 2^52         strictly between 0 and 1
    noise           -log(-log(uniform))                  float64

next(key, n) = mix(key + (n + 1) * GOLDEN) modulo 2^64: the (n + 1)th output of SplitMix64 started at `key`, which needs
no outputs before it. Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014); the use of
the noise, ALGORITHMS §1.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

ROWS_AT_ONCE = 4  # of the whole vocabulary: what is computed stays in the processor's cache


def _signed(bits: int) -> int:
    """A 64-bit pattern as int64 has it."""
    return bits - (bits >> 63 << 64)


GOLDEN = _signed(0x9E3779B97F4A7C15)
FIRST = _signed(0xBF58476D1CE4E5B9)
SECOND = _signed(0x94D049BB133111EB)


def stream_key(seed: int, choice: int) -> int:
    """The key of a request's noise. seed: any int64."""
    key = _next(torch.zeros(1, dtype=torch.int64), torch.tensor([seed]))
    return int(_next(key, torch.tensor([choice])))


def position_keys(stream_keys: Sequence[int], positions: Sequence[int], device: torch.device) -> Tensor:
    """[N] int64, of a stream and a position per row."""
    keys, counters = torch.tensor([stream_keys, positions], dtype=torch.int64, device=device)
    return _next(keys, counters)


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Noise of tokens, [N, W] float64. keys: [N] of `position_keys`; token_ids: [N, W], or [W] for all rows."""
    bits = _next(keys.unsqueeze(1), token_ids)
    uniform = _shifted(bits, 12).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_()


def perturbed_argmax(scores: Tensor, keys: Tensor, token_ids: Tensor | None) -> Tensor:
    """Columns drawn from softmax(scores): [N]. scores: [N, W]; token_ids: [N, W], None where columns are the ids."""
    if token_ids is not None:
        return (scores.double() + gumbel(keys, token_ids)).argmax(-1)
    token_ids = torch.arange(scores.shape[1], device=scores.device)
    parts = zip(scores.split(ROWS_AT_ONCE), keys.split(ROWS_AT_ONCE), strict=True)
    return torch.cat([gumbel(some, token_ids).add_(rows).argmax(-1) for rows, some in parts])


def _next(keys: Tensor, counters: Tensor) -> Tensor:
    bits = (counters + 1) * GOLDEN + keys  # int64 wraps around
    bits ^= _shifted(bits, 30)
    bits *= FIRST
    bits ^= _shifted(bits, 27)
    bits *= SECOND
    bits ^= _shifted(bits, 31)
    return bits


def _shifted(bits: Tensor, places: int) -> Tensor:
    """To the right, zeros coming in; int64's own shift copies the sign."""
    return (bits >> places).bitwise_and_((1 << (64 - places)) - 1)
