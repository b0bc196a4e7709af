"""What the filters keep, found in a shortlist, is what sorting the whole vocabulary finds; drawing from it, too."""

import pytest
import torch

from dspark.engine.sampling import SamplingParams, filtered_probs
from dspark.engine.supports import RowFilters, ShortlistSampler, SupportFinder

CPU = torch.device("cpu")
FILTERS = [
    SamplingParams(temperature=0.7, top_p=0.95),
    SamplingParams(temperature=1.0, top_p=0.5),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.3, top_k=20, top_p=0.8),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.2, min_p=0.02, top_k=40, top_p=0.7),
    SamplingParams(temperature=0),
]
MORE = [
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=1.4, min_p=0.3, top_k=30),
    SamplingParams(temperature=0.8, top_k=256),
]


def name(params: SamplingParams) -> str:
    return " ".join(f"{field}={value}" for field, value in params if field in params.model_fields_set)


def drawn_distribution(logits: torch.Tensor, params: SamplingParams, *, shortlist: int, steps: int) -> torch.Tensor:
    """Share of evenly spaced uniform numbers that yields each token: the sampler's distribution up to 1/steps."""
    uniforms = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    token_ids = ShortlistSampler(params, shortlist=shortlist).draw(logits.expand(steps, -1), uniforms)
    return torch.bincount(token_ids, minlength=logits.shape[-1]) / steps


@pytest.mark.parametrize("params", FILTERS, ids=name)
@pytest.mark.parametrize("shortlist", [4, 16, 256])
def test_shortlist_draws_exactly_the_filtered_distribution(params: SamplingParams, shortlist: int) -> None:
    logits = torch.randn(256, generator=torch.Generator().manual_seed(1)) * 2
    shares = drawn_distribution(logits, params, shortlist=shortlist, steps=8192)
    # A token's share is its interval of the unit line, known to one step at each end.
    assert (shares - filtered_probs(logits, params)).abs().max() < 2 / 8192


@pytest.mark.parametrize("params", FILTERS, ids=name)
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


KINDS = {
    "flat": torch.zeros(256),
    "spread": torch.randn(256, generator=torch.Generator().manual_seed(5)) * 3,
    "tied": (torch.randn(256, generator=torch.Generator().manual_seed(6)) * 2).round(),
    "three_left": torch.full((256,), -torch.inf).index_fill(0, torch.tensor([7, 90, 200]), 1.5),
    "one_left": torch.full((256,), -torch.inf).index_fill(0, torch.tensor([31]), -4.0),
}


@pytest.mark.parametrize("shortlist", [1, 4, 16, 256])
def test_rows_of_all_kinds_and_filters_in_one_batch_keep_what_each_keeps_alone(shortlist: int) -> None:
    params = [one for one in FILTERS + MORE if one.temperature > 0]
    rows = [(logits, one) for logits in KINDS.values() for one in params]
    logits = torch.stack([row for row, _ in rows])
    probs = SupportFinder(shortlist=shortlist).probs(logits, RowFilters.of([one for _, one in rows], CPU))
    expected = torch.stack([filtered_probs(row, one) for row, one in rows])
    assert torch.equal(probs > 0, expected > 0)
    torch.testing.assert_close(probs, expected, atol=1e-6, rtol=1e-5)


def test_every_row_is_found_once() -> None:
    logits = torch.stack(list(KINDS.values()))
    params = [SamplingParams(top_p=0.9), SamplingParams(), *[SamplingParams(top_k=3)] * 3]
    found = [
        row for s in SupportFinder(shortlist=4).find(logits, RowFilters.of(params, CPU)) for row in s.rows.tolist()
    ]
    assert sorted(found) == list(range(5))


def test_a_batch_of_plain_rows_takes_no_penalties() -> None:
    with pytest.raises(ValueError, match="does not apply presence_penalty"):
        ShortlistSampler(SamplingParams(presence_penalty=1.0))
