"""The plan's figures against the same worked out by hand and by trying everything."""

import itertools
from pathlib import Path

import pytest

from dspark.errors import MissingInput
from dspark.evaluation.forecast import (
    PLAIN,
    SPECULATE,
    choose_curve,
    evaluated_survival,
    forecast,
    format_forecast,
    survival_of_tau,
)
from dspark.provenance import write_json
from dspark.speculation.cost_curve import CostCurve

SURVIVAL = [0.7, 0.5, 0.35, 0.2]


def curve(*, draft_s: tuple[float, float] = (0.001, 0.002), knee: int = 16) -> CostCurve:
    """Flat up to `knee` tokens, then in proportion: memory first, then arithmetic."""
    tokens = (1, knee, 512)
    seconds = (0.010, 0.011, 0.011 * 512 / knee)
    return CostCurve(tokens, seconds, (1, 256), draft_s, fingerprint={"device": "toy", "num_threads": 2})


def test_alone_speculation_pays_and_in_a_crowd_it_does_not() -> None:
    rows = forecast(curve(), SURVIVAL, [1, 4, 16, 64, 256], min_gain=0.01)
    assert [row.advice for row in rows[:2]] == [SPECULATE, SPECULATE]
    assert rows[-1].advice == PLAIN
    assert rows[-1].verify_length == 0
    assert rows[-1].speedup == 1.0
    assert [row.verify_length for row in rows] == sorted((row.verify_length for row in rows), reverse=True)
    assert rows[-1].static_speedup < 1  # what a fixed length would lose there
    assert all(row.speedup >= 1 for row in rows)
    assert rows[-1].is_extrapolated is False


def test_of_one_request_the_length_is_the_best_there_is() -> None:
    (row,) = forecast(curve(), SURVIVAL, [1], min_gain=0.0)
    speeds = {k: (1 + sum(SURVIVAL[:k])) / (curve().verify_seconds(1 + k) + 0.001 * (k > 0)) for k in range(5)}
    best = max(speeds, key=lambda k: speeds[k])
    assert (row.verify_length, row.static_length) == (best, best)
    assert row.tokens_per_s == pytest.approx(speeds[best])
    assert row.speedup == pytest.approx(speeds[best] / speeds[0])
    assert row.tau == pytest.approx(1 + sum(SURVIVAL[:best]))


def test_of_two_requests_no_pair_of_lengths_is_better() -> None:
    (row,) = forecast(curve(knee=4), SURVIVAL, [2], min_gain=0.0)
    costs = curve(knee=4)

    def speed(lengths: tuple[int, ...]) -> float:
        tokens = 2 + sum(sum(SURVIVAL[:k]) for k in lengths)
        return tokens / (costs.verify_seconds(2 + sum(lengths)) + costs.draft_seconds(sum(k > 0 for k in lengths)))

    best = max(speed(lengths) for lengths in itertools.product(range(5), repeat=2))
    assert row.tokens_per_s == pytest.approx(best, rel=0.02)  # it stops at the first drop


def test_a_gain_below_what_is_asked_for_is_none() -> None:
    (row,) = forecast(curve(), SURVIVAL, [1], min_gain=5.0)
    assert (row.advice, row.drafted, row.speedup) == (PLAIN, 0, 1.0)


@pytest.mark.parametrize(("tau", "block"), [(1.0, 7), (2.4, 7), (8.0, 7), (1.5, 1)])
def test_survival_of_a_tau_has_that_tau(tau: float, block: int) -> None:
    survival = survival_of_tau(tau, block)
    assert len(survival) == block
    assert 1 + sum(survival) == pytest.approx(tau, abs=1e-6)
    with pytest.raises(ValueError, match=r"tau 9\.5 is not of a block of 7"):
        survival_of_tau(9.5, 7)


def test_the_table_says_where_not_to_speculate_and_what_was_not_measured() -> None:
    rows = forecast(curve(draft_s=(0.0001, 0.0001)), SURVIVAL, [1, 1000], min_gain=0.01)
    text = format_forecast(rows, 0.01)
    assert "do not speculate *" in text.splitlines()[2]
    assert "beyond what was measured" in text


def test_a_curve_of_several_is_chosen_by_its_hardware(tmp_path: Path) -> None:
    path = tmp_path / "cost_curve.json"
    with pytest.raises(MissingInput, match="run jobs/profile_engine"):
        choose_curve(path, {})
    one = curve().to_dict()
    write_json(path, [one, {**one, "fingerprint": {"device": "toy", "num_threads": 4}}])
    assert choose_curve(path, {"num_threads": 4}).fingerprint["num_threads"] == 4
    with pytest.raises(ValueError, match="2 cost curves"):
        choose_curve(path, {"device": "toy"})
    with pytest.raises(MissingInput, match="num_threads 4"):
        choose_curve(path, {"device": "H200"})


def test_survival_is_read_from_an_evaluation_up_to_where_it_is_known(tmp_path: Path) -> None:
    modes = {"greedy": {"overall": {"survival": [0.5, 0.25, None]}}, "sampled": {"overall": {"survival": [0.4]}}}
    write_json(tmp_path / "metrics.json", {"modes": modes})
    assert evaluated_survival(tmp_path, None) == [0.5, 0.25]
    assert evaluated_survival(tmp_path, "sampled") == [0.4]
    with pytest.raises(ValueError, match="it has greedy, sampled"):
        evaluated_survival(tmp_path, "other")
    with pytest.raises(MissingInput, match="jobs/evaluate"):
        evaluated_survival(tmp_path / "x", None)
