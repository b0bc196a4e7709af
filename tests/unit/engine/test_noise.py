"""Noise that is a hash: the same everywhere, and yet as independent and as Gumbel as noise drawn from a generator."""

import pytest
import torch
from torch import Tensor

from dspark.engine.noise import gumbel, perturbed_argmax, position_keys, stream_key
from plain_sampling import plain_noise, seeded_choice

CPU = torch.device("cpu")
SEEDS = (0, 1, -1, 2**63 - 1, -(2**63), 123456789)


@pytest.fixture(scope="module")
def series() -> dict[str, Tensor]:
    """The noise along each of its arguments, the others held."""
    many, few = range(32_768), range(2048)
    token, numbers = torch.tensor([42]), torch.tensor(many)
    by_seed = position_keys([stream_key(seed, 0) for seed in few], [3] * len(few), CPU)
    by_choice = position_keys([stream_key(5, choice) for choice in few], [3] * len(few), CPU)
    return {
        "tokens": gumbel(keys_of(torch.tensor([11])), numbers)[0],
        "positions": gumbel(keys_of(numbers), token)[:, 0],
        "seeds": gumbel(by_seed, token)[:, 0],
        "choices": gumbel(by_choice, token)[:, 0],
    }


def keys_of(positions: Tensor, *, seed: int = 7, choice: int = 0) -> Tensor:
    return position_keys([stream_key(seed, choice)] * len(positions), positions.tolist(), CPU)


def uniforms(noise: Tensor) -> Tensor:
    return torch.exp(-torch.exp(-noise))


def chi_square_p(counts: Tensor, expected: Tensor) -> float:
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((counts.numel() - 1) / 2), statistic / 2))


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_is_that_of_whole_numbers_modulo_two_to_the_64(seed):
    for choice in (0, 3):
        for position in (0, 5, 100_000):
            key = position_keys([stream_key(seed, choice)], [position], CPU)
            found = gumbel(key, torch.tensor([0, 1, 49_151, 2**31]))[0].tolist()
            expected = [plain_noise(seed, choice, position, token_id) for token_id in (0, 1, 49_151, 2**31)]
            assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("along", ["tokens", "positions", "seeds", "choices"])
def test_noise_is_gumbel_and_independent_of_its_neighbours(series: dict[str, Tensor], along: str):
    uniform = uniforms(series[along])
    counts = torch.bincount((uniform * 64).long(), minlength=64).double()
    assert chi_square_p(counts, torch.full((64,), len(uniform) / 64, dtype=torch.float64)) > 0.001
    places = (uniform * 8).long()
    for distance in (1, 2, 64):
        pairs = places[:-distance] * 8 + places[distance:]
        counts = torch.bincount(pairs, minlength=64).double()
        assert chi_square_p(counts, torch.full((64,), len(pairs) / 64, dtype=torch.float64)) > 0.001


def test_equal_token_and_position_numbers_are_not_related():
    """Token v at position t and token t at position v have noise of their own."""
    noise = gumbel(keys_of(torch.arange(256)), torch.arange(256))
    upper = torch.ones(256, 256).triu(1).flatten().bool()
    a, b = noise.flatten()[upper], noise.T.flatten()[upper]
    correlation = torch.corrcoef(torch.stack([a, b]))[0, 1]
    assert abs(float(correlation)) < 4 / len(a) ** 0.5


def test_the_argmax_under_noise_is_a_draw_from_the_distribution():
    probs = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.06, 0.04], dtype=torch.float64)
    keys = keys_of(torch.arange(20_000))
    drawn = perturbed_argmax(probs.log().float().expand(20_000, -1), keys, None)
    assert chi_square_p(torch.bincount(drawn, minlength=6).double(), 20_000 * probs) > 0.001


def test_the_draw_is_the_plain_one_and_does_not_depend_on_the_order_of_columns():
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(0)) * 2
    positions = torch.arange(100, 109)
    keys = keys_of(positions, seed=-3, choice=2)
    expected = [
        seeded_choice(p, -3, 2, t)[0] for p, t in zip(torch.softmax(logits, -1), positions.tolist(), strict=True)
    ]
    assert perturbed_argmax(logits, keys, None).tolist() == expected
    order = logits.argsort(dim=-1, descending=True)
    columns = perturbed_argmax(logits.gather(1, order), keys, order)
    assert order.gather(1, columns[:, None])[:, 0].tolist() == expected


def test_a_token_without_probability_is_never_drawn():
    scores = torch.tensor([[0.0, -torch.inf, 0.0]]).expand(2000, -1)
    assert set(perturbed_argmax(scores, keys_of(torch.arange(2000)), None).tolist()) == {0, 2}


def test_two_distributions_draw_the_same_token_nearly_as_often_as_any_scheme_lets_them():
    """At least (1 - TV) / (1 + TV) of the time, at most 1 - TV; independent draws would agree far less."""
    target = torch.tensor([0.3, 0.25, 0.2, 0.1, 0.1, 0.05])
    draft = torch.tensor([0.25, 0.3, 0.1, 0.2, 0.05, 0.1])
    keys = keys_of(torch.arange(20_000))
    drawn = [perturbed_argmax(p.log().expand(20_000, -1), keys, None) for p in (target, draft)]
    agreed = float((drawn[0] == drawn[1]).double().mean())
    distance = 0.5 * float((target - draft).abs().sum())
    assert (1 - distance) / (1 + distance) - 0.01 < agreed < 1 - distance
    assert agreed > float((target * draft).sum()) + 0.3
