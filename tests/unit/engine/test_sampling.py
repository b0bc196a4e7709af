"""Tests of the filtered distribution and of the two ways to draw from it."""

import pytest
import torch

from dspark.engine.sampling import SamplingParams, ShortlistSampler, filtered_probs, sample

FILTERS = [
    SamplingParams(temperature=0.7, top_p=0.95),
    SamplingParams(temperature=1.0, top_p=0.5),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.3, top_k=20, top_p=0.8),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0),
]


def drawn_distribution(logits: torch.Tensor, params: SamplingParams, *, shortlist: int, steps: int) -> torch.Tensor:
    """Share of evenly spaced uniform numbers that yields each token: the sampler's distribution up to 1/steps."""
    uniforms = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    token_ids = ShortlistSampler(params, shortlist=shortlist).draw(logits.expand(steps, -1), uniforms)
    return torch.bincount(token_ids, minlength=logits.shape[-1]) / steps


def test_temperature_zero_puts_all_mass_on_the_argmax() -> None:
    probs = filtered_probs(torch.tensor([0.1, 2.0, 2.0, -1.0]), SamplingParams(temperature=0))
    assert probs.tolist() == [0.0, 1.0, 0.0, 0.0]


def test_top_p_keeps_the_token_that_crosses_the_mass() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    probs = filtered_probs(logits, SamplingParams(top_p=0.6))
    torch.testing.assert_close(probs, torch.tensor([4 / 7, 3 / 7, 0.0, 0.0]))


def test_top_k_renormalises_before_top_p() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    probs = filtered_probs(logits, SamplingParams(top_k=2, top_p=0.5))
    torch.testing.assert_close(probs, torch.tensor([1.0, 0.0, 0.0, 0.0]))


def test_equal_logits_rank_by_token_id() -> None:
    probs = filtered_probs(torch.zeros(4), SamplingParams(top_k=2))
    assert probs.tolist() == [0.5, 0.5, 0.0, 0.0]


def test_sample_follows_the_probabilities() -> None:
    probs = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.0, 0.0, 0.0, 0.0])
    token_ids = sample(probs.expand(20_000, -1), torch.Generator().manual_seed(0))
    shares = torch.bincount(token_ids, minlength=8) / 20_000
    assert (shares - probs).abs().max() < 0.015  # four standard deviations of a share of 20,000 draws


@pytest.mark.parametrize("params", FILTERS, ids=str)
@pytest.mark.parametrize("shortlist", [4, 16, 256])
def test_shortlist_draws_exactly_the_filtered_distribution(params: SamplingParams, shortlist: int) -> None:
    logits = torch.randn(256, generator=torch.Generator().manual_seed(1)) * 2
    shares = drawn_distribution(logits, params, shortlist=shortlist, steps=8192)
    # A token's share is its interval of the unit line, known to one step at each end.
    assert (shares - filtered_probs(logits, params)).abs().max() < 2 / 8192


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_shortlist_is_exact_for_logits_full_of_ties(params: SamplingParams) -> None:
    logits = torch.randn(256, generator=torch.Generator().manual_seed(2)).mul(2).round().bfloat16()
    shares = drawn_distribution(logits, params, shortlist=8, steps=8192)
    assert (shares - filtered_probs(logits, params)).abs().max() < 2 / 8192


def test_a_row_draws_the_same_token_in_any_company() -> None:
    logits = torch.randn(6, 512, generator=torch.Generator().manual_seed(3)) * torch.tensor(
        [[9.0], [1], [3], [1], [9], [2]]
    )
    uniforms = torch.rand(6, generator=torch.Generator().manual_seed(4))
    sampler = ShortlistSampler(SamplingParams(temperature=0.7, top_p=0.9), shortlist=8)
    together = sampler.draw(logits, uniforms)
    alone = [int(sampler.draw(logits[i : i + 1], uniforms[i : i + 1])) for i in range(6)]
    assert together.tolist() == alone
