"""Does what an engine samples follow the exact distributions of a target of eight tokens?"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dspark.engine.sampling import SamplingParams, filtered_probs
from tiny_engine import ids_of, request, run
from tiny_target import small_vocabulary_target

VOCABULARY = 8
PROMPT = [0, 3, 1]


def toy_target(*, initializer_range: float = 0.7, vocab_size: int = VOCABULARY) -> Any:
    return small_vocabulary_target(vocab_size, initializer_range=initializer_range)


def misfit(
    model: Any,
    outputs: Sequence[list[int]],
    sampling: SamplingParams,
    *,
    rules: Callable[[Tensor], Tensor] | None = None,
) -> tuple[float, int]:
    """(p of a chi-square test, draws): do tokens follow the exact conditional distributions of their own prefixes?

    rules: what is asked of the logits before the temperature, [outputs, tokens, V] to the same.
    Per token before, d = sum of one-hot(drawn) - p over all draws has covariance C = sum of diag(p) - p p^T, so that
    d' C^+ d is chi-square with rank(C) degrees; the sum over the tokens before is one with all their degrees.
    """
    excess = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64)
    covariance = torch.zeros(VOCABULARY, VOCABULARY, VOCABULARY, dtype=torch.float64)
    num_draws = 0
    with torch.no_grad():
        rows = model(torch.tensor([PROMPT + ids for ids in outputs])).logits[:, len(PROMPT) - 1 : -1]
    probs = filtered_probs(rows if rules is None else rules(rows), sampling).double()
    for ids, distributions in zip(outputs, probs, strict=True):
        for before, drawn, p in zip([PROMPT[-1], *ids], ids, distributions, strict=False):
            assert p[drawn] > 0, "a token outside of the target's filters was output"
            excess[before] -= p
            excess[before, drawn] += 1
            covariance[before] += torch.diag(p) - torch.outer(p, p)
            num_draws += 1
    statistic, degrees = 0.0, 0
    for d, c in zip(excess, covariance, strict=True):
        inverse = torch.linalg.pinv(c, rtol=1e-9, hermitian=True)
        statistic += float(d @ inverse @ d)
        degrees += int(torch.linalg.matrix_rank(c, rtol=1e-9, hermitian=True))
    return float(torch.special.gammaincc(torch.tensor(degrees / 2), torch.tensor(statistic / 2))), num_draws


def sample_outputs(model: Any, engine: Any, sampling: SamplingParams, *, num: int, max_tokens: int) -> list[list[int]]:
    asked = [request(PROMPT, str(i), sampling=sampling, seed=i, max_tokens=max_tokens) for i in range(num)]
    outputs = [ids_of(found) for found in run(engine, asked).values()]
    model.set_attn_implementation("sdpa")
    return outputs


FAR = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.04, 0.03, 0.02, 0.01])
