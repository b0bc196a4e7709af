"""The curve follows what steps take, each part by itself, and is not led astray by what will not last."""

import random
from dataclasses import replace

import pytest

from dspark.engine.curve_correction import FARTHEST, CurveCorrection
from dspark.speculation.cost_curve import CostCurve

MEASURED = CostCurve((1, 8, 64), (1.0, 1.4, 4.0), (1, 8), (0.2, 0.3), request_s=0.05)


def note(correction: CurveCorrection, *, verifying: float, drafting: float, steps: int = 300) -> None:
    """Steps that take so many times what was measured, with a tenth of noise."""
    rng = random.Random(0)
    for _ in range(steps):
        num_requests = rng.randint(1, 8)
        num_tokens = num_requests * rng.randint(1, 8)
        predicted_s = MEASURED.verify_seconds(num_tokens) + (num_requests - 1) * MEASURED.request_s
        correction.note(
            num_tokens=num_tokens,
            num_requests=num_requests,
            num_drafted=num_requests,
            draft_s=drafting * rng.uniform(0.9, 1.1) * MEASURED.draft_seconds(num_requests),
            verify_s=verifying * rng.uniform(0.9, 1.1) * predicted_s,
        )


def test_each_part_follows_by_a_factor_of_its_own() -> None:
    correction = CurveCorrection(MEASURED)
    note(correction, verifying=1.5, drafting=0.5)
    assert correction.curve.verify_seconds(20) == pytest.approx(1.5 * MEASURED.verify_seconds(20), rel=0.05)
    assert correction.curve.request_s == pytest.approx(1.5 * MEASURED.request_s, rel=0.05)
    assert correction.curve.draft_seconds(5) == pytest.approx(0.5 * MEASURED.draft_seconds(5), rel=0.05)


def test_a_size_that_was_measured_wrong_is_mended_by_itself() -> None:
    correction = CurveCorrection(MEASURED)
    for step in range(400):
        num_tokens, factor = ((8, 0.8), (1, 1.0), (64, 1.0))[step % 3]
        predicted_s = factor * MEASURED.verify_seconds(num_tokens)
        correction.note(num_tokens=num_tokens, num_requests=1, num_drafted=0, draft_s=0.0, verify_s=predicted_s)
    assert correction.curve.verify_seconds(8) == pytest.approx(0.8 * 1.4, rel=0.04)
    assert correction.curve.verify_seconds(1) == pytest.approx(1.0, rel=0.03)
    assert correction.curve.verify_seconds(64) == pytest.approx(4.0, rel=0.03)


def test_what_was_seen_of_a_size_long_ago_gives_way_to_what_all_sizes_show() -> None:
    correction = CurveCorrection(MEASURED)
    for _ in range(100):
        correction.note(num_tokens=8, num_requests=1, num_drafted=0, draft_s=0.0, verify_s=2 * 1.4)
    for _ in range(1500):
        correction.note(num_tokens=1, num_requests=1, num_drafted=0, draft_s=0.0, verify_s=1.0)
    assert correction.curve.verify_seconds(8) == pytest.approx(1.4, rel=0.03)


def test_drafting_that_was_slow_for_a_while_is_not_held_to_it_once_it_has_stopped() -> None:
    correction = CurveCorrection(MEASURED)
    note(correction, verifying=1.0, drafting=4.0)
    assert correction.curve.draft_seconds(8) > 1.0
    for _ in range(1000):
        correction.note(num_tokens=8, num_requests=8, num_drafted=0, draft_s=0.0, verify_s=1.4 + 7 * 0.05)
    assert correction.curve.draft_seconds(8) == pytest.approx(0.3, rel=0.05)


def test_long_contexts_are_part_of_what_was_predicted_and_follow_like_the_rest() -> None:
    measured = replace(MEASURED, context_s=0.5, context_tokens=100)
    correction = CurveCorrection(measured)
    for factor, num_steps in ((1.0, 200), (1.5, 600)):
        for _ in range(num_steps):
            predicted_s = measured.step_seconds(8, num_requests=2, context_tokens=8200)
            assert predicted_s == pytest.approx(1.4 + 0.05 + 4.0)
            correction.note(
                num_tokens=8,
                num_requests=2,
                num_drafted=0,
                draft_s=0.0,
                verify_s=factor * predicted_s,
                context_tokens=8200,
            )
        assert correction.curve.context_s == pytest.approx(factor * 0.5, rel=0.05)
        assert correction.curve.verify_seconds(8) == pytest.approx(factor * 1.4, rel=0.05)
        assert correction.curve.context_tokens == 100


def test_a_curve_that_is_right_stays_as_it_is() -> None:
    correction = CurveCorrection(MEASURED)
    note(correction, verifying=1.0, drafting=1.0)
    assert correction.curve.verify_s == pytest.approx(MEASURED.verify_s, rel=0.04)
    assert correction.curve.draft_s == pytest.approx(MEASURED.draft_s, rel=0.04)


def test_one_step_that_was_held_up_changes_little() -> None:
    correction = CurveCorrection(MEASURED)
    note(correction, verifying=1.0, drafting=1.0)
    for _ in range(2):
        correction.note(num_tokens=8, num_requests=1, num_drafted=1, draft_s=1.5, verify_s=7.0)
    assert correction.curve.verify_seconds(8) == pytest.approx(1.4, rel=0.05)
    assert correction.curve.draft_seconds(1) == pytest.approx(0.2, rel=0.05)


def test_seconds_of_another_order_are_another_machines_and_say_nothing() -> None:
    correction = CurveCorrection(MEASURED)
    note(correction, verifying=2 * FARTHEST, drafting=1.0)
    assert correction.curve.verify_s == MEASURED.verify_s


def test_drafting_that_takes_any_time_is_learned_since_elsewhere_it_may() -> None:
    """A guess of what it costs in draft replicas knows nothing of the way there and back."""
    correction = CurveCorrection(MEASURED)
    note(correction, verifying=1.0, drafting=4 * FARTHEST, steps=800)
    assert correction.curve.draft_seconds(5) == pytest.approx(4 * FARTHEST * MEASURED.draft_seconds(5), rel=0.1)
    assert correction.curve.verify_seconds(20) == pytest.approx(MEASURED.verify_seconds(20), rel=0.05)
