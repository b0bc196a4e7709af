"""Intervals against slow twins and known truths, and verdicts by hand."""

import numpy as np
import pytest

from dspark.evaluation.evidence import (
    NUM_RESAMPLES,
    Estimate,
    Part,
    bootstrap,
    bootstrap_medians,
    combined,
    mean_estimate,
    noise_free_share,
    paired_ratio,
    ratio,
    t_quantile,
)


def ratio_of(sums):
    return ratio(sums[:, 0], sums[:, 1])


def make_sums(rng, *, seeds=1, prompts=30, rate=1.5):
    rounds = rng.integers(5, 40, size=(seeds, prompts))
    committed = rounds + rng.binomial(rounds, rate - 1)
    return np.stack([committed, rounds], axis=-1)


def bootstrap_slowly(sums, statistic, *, seed):
    """Resample by resample, seed by seed, prompt by prompt."""
    num_seeds, num_prompts, _ = sums.shape
    rng = np.random.default_rng(seed)
    prompts = rng.multinomial(num_prompts, [1 / num_prompts] * num_prompts, size=NUM_RESAMPLES)
    seeds = [[1]] * NUM_RESAMPLES
    if num_seeds > 1:
        seeds = rng.multinomial(num_seeds, [1 / num_seeds] * num_seeds, size=NUM_RESAMPLES)
    values = []
    for of_prompts, of_seeds in zip(prompts, seeds, strict=True):
        total = sum(of_seeds[m] * of_prompts[n] * sums[m, n] for m in range(num_seeds) for n in range(num_prompts))
        values.append(float(statistic(np.array([total], float))[0]))
    return np.quantile(values, [0.025, 0.975])


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_bootstrap_equals_its_slow_twin(seeds):
    sums = make_sums(np.random.default_rng(0), seeds=seeds, prompts=6)
    found = bootstrap(sums, ratio_of, seed=5)
    low, high = bootstrap_slowly(sums, ratio_of, seed=5)
    if seeds > 1:
        own = sums[..., 0].sum(axis=1) / sums[..., 1].sum(axis=1)
        reach = 4.303 * own.std(ddof=1) / 3**0.5
        low, high = min(low, own.mean() - reach), max(high, own.mean() + reach)
    assert [found.low, found.high] == pytest.approx([low, high], rel=1e-12)
    assert found.rests_on == (6, seeds)
    assert found.value == pytest.approx(sums[..., 0].sum() / sums[..., 1].sum())
    assert len(found.by_seed) == (seeds if seeds > 1 else 0)


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    estimates = [bootstrap(make_sums(rng), ratio_of, num_resamples=400) for _ in range(120)]
    share = np.mean([one.low <= 1.5 <= one.high for one in estimates])
    assert 0.88 <= share <= 1.0  # 95 % asked for, 30 prompts, 120 draws


def test_with_three_seeds_the_chance_of_training_is_in_the_interval():
    """Drafters that are equal but for how their trainings came out: at most one verdict in twenty, give or take."""
    rng = np.random.default_rng(4)
    verdicts = []
    for _ in range(100):
        rounds = rng.integers(20, 60, size=(3, 63, 2))
        rates = 0.5 + rng.normal(0, 0.02, size=(3, 1, 2))  # of a seed and a drafter
        sums = np.stack([rounds + rng.binomial(rounds, rates), rounds], axis=-1)
        estimate = bootstrap(sums, lambda s: ratio(ratio_of(s[:, 0]), ratio_of(s[:, 1])), num_resamples=400)
        verdicts.append(Part("", estimate, 1.0).verdict)
    assert verdicts.count("not shown") >= 90


def squares_of(sums):
    """Two sides' squared means. sums: [S, 2, 2], of values and their number."""
    return ratio(sums[..., 0], sums[..., 1]) ** 2


def values_around(rng, left, there_was, prompts=100):
    """[1, N, 2, 2]: two values a prompt, of much noise and these means."""
    means = rng.normal([left, there_was], 1.0, size=(1, prompts, 2))
    return np.stack([means, np.ones_like(means)], axis=-1)


@pytest.mark.parametrize(("left", "there_was", "verdict"), [(0.0, 0.8, "holds"), (0.8, 0.8, "does not")])
def test_noise_neither_makes_a_squared_error_nor_hides_that_it_is_gone(left, there_was, verdict):
    rng = np.random.default_rng(5)
    found = [noise_free_share(values_around(rng, left, there_was), squares_of, bound=0.25) for _ in range(60)]
    verdicts = [Part("", one, 0.25, is_above=False).verdict for one in found]
    other = {"holds": "does not", "does not": "holds"}[verdict]
    assert verdicts.count(verdict) > 40
    assert verdicts.count(other) <= 3  # 2.5 % asked for
    assert np.median([one.value for one in found]) == pytest.approx((left / there_was) ** 2, abs=0.15)
    assert all(one.low is None or 0 <= one.low <= one.high for one in found)


def test_where_nothing_but_noise_was_there_no_share_of_it_is_left():
    values = np.array([[1.0, 1.0], [-1.0, 1.0]] * 10)[None, :, None].repeat(2, axis=2)
    found = noise_free_share(values, squares_of, bound=0.25)
    assert np.isnan(found.value)
    assert Part("", found, 0.25).verdict == "not shown"


def test_swapping_whose_figures_are_whose_shows_nothing():
    """Two drafters under shuffled labels differ by chance alone, which a verdict may mistake one time in twenty."""
    rng = np.random.default_rng(2)
    both = np.concatenate([make_sums(rng, rate=1.3), make_sums(rng, rate=1.7)])  # [2, N, 2], far apart
    verdicts = []
    for _ in range(60):
        order = rng.permuted(np.array([[0, 1]] * both.shape[1]), axis=1)
        shuffled = np.stack([both[order[:, k], np.arange(both.shape[1])] for k in (0, 1)], axis=1)[None]
        estimate = bootstrap(shuffled, lambda s: ratio(ratio_of(s[:, 0]), ratio_of(s[:, 1])), num_resamples=500)
        verdicts.append(Part("", estimate, 1.0).verdict)
    assert verdicts.count("not shown") >= 50
    told = np.stack([both[1], both[0]], axis=1)[None]
    assert Part("", bootstrap(told, lambda s: ratio(ratio_of(s[:, 0]), ratio_of(s[:, 1]))), 1.0).verdict == "holds"


def test_one_prompt_has_no_interval():
    sums = np.zeros((1, 4, 2))
    sums[0, 0] = (3, 2)
    found = bootstrap(sums, ratio_of)
    assert (found.value, found.low, found.high) == (1.5, None, None)
    assert Part("", found, 1.0).verdict == "not shown"


def test_a_value_that_most_resamples_lack_has_no_interval():
    sums = np.zeros((1, 10, 2))
    sums[0, :, 0] = 1
    sums[0, 0] = (1, 1)  # the only prompt with a round at this slot
    assert bootstrap(sums, ratio_of).low is None


def test_medians_are_resampled_by_whole_sweeps():
    rng = np.random.default_rng(3)
    drift = rng.normal(1, 0.3, size=21)  # of the machine, which meets both alike
    found = bootstrap_medians(np.array([drift * 2.0, drift * 1.0]).T, lambda t: ratio(t[:, 0], t[:, 1]))
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))
    assert bootstrap_medians([[1.0, 2.0]] * 4, lambda t: t[:, 0]).low is None


def test_paired_ratios_by_hand():
    found = paired_ratio([2.0, 8.0], [1.0, 2.0])  # ratios 2 and 4: mean of logs 1.5 log 2, spread of it log 2 / sqrt 2
    reach = 12.706 * np.log(2) / 2
    assert found.value == pytest.approx(2**1.5)
    assert found.low == pytest.approx(2**1.5 * np.exp(-reach))
    assert paired_ratio([2.0], [1.0]) == Estimate(2.0, None, None)


@pytest.mark.parametrize(("degrees", "quantile"), [(1, 12.706), (10, 2.228), (11, 2.201), (30, 2.042), (10**6, 1.960)])
def test_quantiles_of_students_t(degrees, quantile):
    assert t_quantile(degrees) == pytest.approx(quantile, abs=1e-3)


def test_a_mean_has_students_interval():
    found = mean_estimate([1.0, 2.0, 3.0])
    assert (found.value, found.high) == pytest.approx((2.0, 2.0 + 4.303 / 3**0.5))


@pytest.mark.parametrize(
    ("low", "high", "is_above", "verdict"),
    [
        (1.1, 1.3, True, "holds"),
        (0.7, 0.9, True, "does not"),
        (0.9, 1.1, True, "not shown"),
        (0.7, 0.9, False, "holds"),
        (1.1, 1.3, False, "does not"),
    ],
)
def test_a_comparison_is_decided_by_its_whole_interval(low, high, is_above, verdict):
    assert Part("", Estimate((low + high) / 2, low, high), 1.0, is_above=is_above).verdict == verdict


def test_a_claim_is_as_good_as_its_weakest_part():
    holds, fails = (Part("", Estimate(v, v - 0.1, v + 0.1), 1.0) for v in (1.5, 0.5))
    unsure = Part("", Estimate(1.0, 0.9, 1.1), 1.0)
    assert combined([holds, holds]) == "holds"
    assert combined([holds, unsure]) == "not shown"
    assert combined([holds, unsure, fails]) == "does not"
    assert combined([]) == "not shown"
