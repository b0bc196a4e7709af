"""Expected acceptance, by hand and on requests whose true acceptance is known."""

import random

import pytest

from dspark.engine.estimates import AcceptanceEstimate, ConfidenceDrift, PriorEstimate
from dspark.speculation.statistics import AcceptanceCounts


def draw_round(rng: random.Random, conditional: list[float]) -> tuple[int, int]:
    """A whole block proposed; the number of its tokens accepted, drawn slot by slot."""
    num_accepted = 0
    while num_accepted < len(conditional) and rng.random() < conditional[num_accepted]:
        num_accepted += 1
    return len(conditional), num_accepted


def test_before_anything_was_seen_the_first_guess_stands():
    prior = PriorEstimate(first_guess=0.5)
    assert prior.survival(3) == [0.5, 0.25, 0.125]
    assert AcceptanceEstimate(prior).survival(3) == [0.5, 0.25, 0.125]
    assert AcceptanceEstimate(prior).survival(0) == []


def test_the_prior_by_hand():
    prior = PriorEstimate(first_guess=0.5, pseudo_rounds=2)
    prior.update(3, 1)  # slot 0 stood, slot 1 fell, slot 2 was not judged
    prior.update(1, 1)  # slot 0 stood, nothing else was proposed
    first = (2 + 2 * 0.5) / (2 + 2)
    second = (0 + 2 * first) / (1 + 2)
    assert prior.conditional(4) == pytest.approx([first, second, second, second])
    assert prior.survival(3) == pytest.approx([first, first * second, first * second**2])


def test_a_requests_estimate_by_hand():
    estimate = AcceptanceEstimate(PriorEstimate(first_guess=0.5, pseudo_rounds=1e12), decay=0.5, pseudo_rounds=3)
    estimate.update(2, 2)
    estimate.update(2, 0)
    first = (0.5 * 1 + 3 * 0.5) / (0.5 + 1 + 3)
    second = (1 + 3 * 0.5) / (1 + 3)  # the second round did not come as far: its evidence does not fade
    assert estimate.conditional(3) == pytest.approx([first, second, 0.5])


def test_a_round_without_a_proposal_says_nothing():
    prior = PriorEstimate()
    estimate = AcceptanceEstimate(prior)
    estimate.update(4, 2)
    before = estimate.survival(4), prior.survival(4)
    estimate.update(0, 0)
    assert (estimate.survival(4), prior.survival(4)) == before


def test_survival_is_non_increasing_and_inside_the_unit_interval():
    rng = random.Random(0)
    prior = PriorEstimate()
    for _ in range(50):
        estimate = AcceptanceEstimate(prior)
        for _ in range(rng.randint(0, 30)):
            num_proposed = rng.randint(0, 7)
            estimate.update(num_proposed, rng.randint(0, num_proposed))
            survival = estimate.survival(9)
            assert len(survival) == 9
            assert survival == sorted(survival, reverse=True)
            assert all(0 < a < 1 for a in survival)


def test_the_prior_comes_to_the_counted_means():
    rng = random.Random(1)
    prior, counts = PriorEstimate(), AcceptanceCounts()
    for _ in range(5000):
        num_proposed, num_accepted = draw_round(rng, [0.9, 0.8, 0.6, 0.3])
        prior.update(num_proposed, num_accepted)
        counts.add_round(num_proposed, num_accepted, num_accepted + 1)
    assert prior.conditional(4) == pytest.approx(counts.conditional_acceptance, abs=0.002)  # 8 of some 2000 rounds
    assert prior.survival(4) == pytest.approx(counts.survival, abs=0.005)


def test_a_request_is_told_apart_from_the_others_and_then_follows_its_own_changes():
    rng = random.Random(2)
    prior = PriorEstimate()
    for _ in range(2000):
        prior.update(*draw_round(rng, [0.5, 0.5]))
    estimate = AcceptanceEstimate(prior)
    assert estimate.survival(1)[0] == pytest.approx(prior.survival(1)[0])
    for _ in range(30):
        estimate.update(2, 2)
    assert estimate.survival(1)[0] > 0.8
    for _ in range(30):
        estimate.update(2, 0)
    assert estimate.survival(1)[0] < 0.2


def test_new_requests_start_from_what_others_showed():
    prior = PriorEstimate(first_guess=0.5)
    for _ in range(100):
        AcceptanceEstimate(prior).update(3, 3)
    assert AcceptanceEstimate(prior).survival(3)[-1] > 0.85


def test_an_expectation_counts_as_the_mean_of_the_rounds_it_expects():
    rng = random.Random(3)
    expected, verified = PriorEstimate(), PriorEstimate()
    for _ in range(5000):
        expected.observe([0.8, 0.8 * 0.6])
        verified.update(*draw_round(rng, [0.8, 0.6]))
    assert expected.conditional(2) == pytest.approx(verified.conditional(2), abs=0.025)  # four standard deviations
    assert expected.conditional(2) == pytest.approx([0.8, 0.6], abs=0.001)


def test_a_requests_expectation_by_hand_counts_for_the_others_too():
    prior = PriorEstimate(first_guess=0.5, pseudo_rounds=2)
    estimate = AcceptanceEstimate(prior, pseudo_rounds=3)
    estimate.observe([0.9, 0.45])
    first = (0.9 + 2 * 0.5) / (1 + 2)
    second = (0.45 + 2 * first) / (0.9 + 2)
    assert prior.conditional(2) == pytest.approx([first, second])
    assert estimate.conditional(2) == pytest.approx([(0.9 + 3 * first) / (1 + 3), (0.45 + 3 * second) / (0.9 + 3)])


def test_more_accepted_than_proposed_cannot_be():
    with pytest.raises(AssertionError, match="3 of 2 draft tokens accepted"):
        AcceptanceEstimate(PriorEstimate()).update(2, 3)


def test_confidences_that_are_right_are_left_alone_and_others_corrected():
    generator = random.Random(0)
    right, bold = ConfidenceDrift(), ConfidenceDrift()
    for _ in range(3000):
        true = [0.6, 0.5, 0.4]
        num_accepted = next((k for k, c in enumerate(true) if generator.random() > c), 3)
        right.update([0.6, 0.3, 0.12], num_accepted)
        bold.update([0.8, 0.64, 0.512], num_accepted)
    assert right.corrected([0.6, 0.3, 0.12]) == pytest.approx([0.6, 0.3, 0.12], abs=0.08)
    assert bold.corrected([0.8, 0.64, 0.512]) == pytest.approx([0.6, 0.3, 0.12], abs=0.08)


def test_a_correction_needs_evidence_and_never_makes_survival_rise():
    drift = ConfidenceDrift()
    assert drift.corrected([0.9, 0.5]) == [0.9, 0.5]
    drift.update([0.1, 0.05], 2)
    assert drift.corrected([0.9, 0.5])[0] < 1.0
    for _ in range(500):
        drift.update([0.1, 0.01], 2)
    rows = drift.corrected([0.9, 0.5, 0.5, 0.0])
    assert rows == sorted(rows, reverse=True)
    assert max(rows) <= 1.0


def test_a_request_that_is_not_drafted_for_is_taken_to_be_like_all_others_again() -> None:
    prior = PriorEstimate()
    good, bad = AcceptanceEstimate(prior), AcceptanceEstimate(prior)
    for _ in range(30):
        good.update(3, 3)
        bad.update(3, 0)
    before = bad.survival(3)
    for _ in range(100):
        bad.fade()
    assert before[0] < 0.3
    assert bad.survival(3) == pytest.approx(prior.survival(3), rel=0.02)
    assert good.survival(3)[0] > 0.8
