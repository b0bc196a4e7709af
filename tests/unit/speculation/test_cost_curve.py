"""A curve says what was measured, never falls, and is loaded only for the hardware it was measured on."""

import itertools
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.errors import MissingInput
from dspark.provenance import read_json, write_json
from dspark.speculation.cost_curve import CostCurve, hardware_fingerprint, isotonic
from dspark.speculation.measured_table import interpolated

CURVE = CostCurve((1, 2, 4), (1.0, 1.5, 3.5), (1, 4), (0.1, 0.7), fingerprint={"device": "cpu", "torch": "2"})


def isotonic_slowly(values: list[float]) -> list[float]:
    """The min-max formula: at i the highest, over starts j <= i, of the lowest mean of j..k over ends k >= i."""
    n = len(values)
    return [max(min(sum(values[j : k + 1]) / (k + 1 - j) for k in range(i, n)) for j in range(i + 1)) for i in range(n)]


@given(st.lists(st.floats(0.001, 1000), max_size=12))
def test_pooling_equals_the_min_max_formula_and_never_falls(values: list[float]) -> None:
    fitted = isotonic(values)
    assert list(fitted) == sorted(fitted)
    assert fitted == pytest.approx(isotonic_slowly(values))


def test_measured_takes_medians_and_pools_what_falls() -> None:
    verify = {4: [3.0, 9.0, 3.2], 1: [1.0, 1.2, 0.8], 2: [4.0, 4.4, 4.2]}
    curve = CostCurve.measured(verify, {2: [0.5], 1: [0.2, 0.3]}, buckets=(1, 4), fingerprint={"device": "cpu"})
    assert curve.batch_tokens == (1, 2, 4)
    assert curve.verify_s == pytest.approx((1.0, 3.7, 3.7))  # medians 1, 4.2 and 3.2
    assert (curve.draft_requests, curve.draft_s) == ((1, 2), (0.25, 0.5))
    assert curve.buckets == (1, 4)


@pytest.mark.parametrize(
    ("tokens", "seconds"),
    [(0, 1.0), (1, 1.0), (1.5, 1.25), (2, 1.5), (3, 2.5), (4, 3.5), (6, 5.5)],
)
def test_seconds_are_interpolated_level_below_the_table_and_go_on_beyond_it(tokens: float, seconds: float) -> None:
    assert CURVE.smooth_verify_seconds(tokens) == CURVE.verify_seconds(tokens) == pytest.approx(seconds)


def test_points_pooled_with_the_last_do_not_make_larger_batches_free() -> None:
    curve = CostCurve((1, 2, 4, 8), (1.0, 2.0, 3.0, 3.0))
    assert curve.verify_seconds(14) == pytest.approx(4.0)  # a second in the six tokens from 2 to 8


def test_a_single_point_holds_everywhere() -> None:
    assert [CostCurve((4,), (2.0,)).verify_seconds(b) for b in (1, 4, 100)] == [2.0] * 3


def test_many_sizes_at_once_equal_one_at_a_time() -> None:
    sizes = np.arange(0, 12)
    assert CURVE.smooth_verify_array(sizes).tolist() == [CURVE.smooth_verify_seconds(int(b)) for b in sizes]


def test_a_bucket_is_paid_whole() -> None:
    curve = CostCurve((1, 2, 4), (1.0, 1.5, 3.5), buckets=(1, 4))
    assert [curve.verify_seconds(b) for b in (1, 2, 3, 4)] == [1.0, 3.5, 3.5, 3.5]
    assert curve.smooth_verify_seconds(2) == 1.5
    assert curve.verify_seconds(5) == pytest.approx(4.5)  # beyond the last bucket shapes are not padded
    assert [curve.padded_tokens(b) for b in (1, 2, 4, 5)] == [1, 4, 4, 5]


def test_drafting_for_nobody_or_without_a_drafter_takes_no_time() -> None:
    assert CURVE.draft_seconds(0) == 0.0
    assert [CURVE.draft_seconds(r) for r in (1, 2, 4, 5)] == pytest.approx([0.1, 0.3, 0.7, 0.9])
    assert CostCurve((1,), (1.0,)).draft_seconds(5) == 0.0


def test_no_curve_ever_falls() -> None:
    rng = random.Random(0)
    for _ in range(50):
        verify = {size: [rng.uniform(0.5, 2.0) for _ in range(3)] for size in rng.sample(range(1, 40), 6)}
        curve = CostCurve.measured(verify, {}, buckets=sorted(rng.sample(range(1, 50), 3)), fingerprint={})
        for seconds in (curve.verify_seconds, curve.smooth_verify_seconds):
            assert all(a <= b + 1e-12 for a, b in itertools.pairwise(map(seconds, range(60))))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((), ()), "at least one"),
        (((1, 2), (1.0,)), "batch_tokens has 2 entries and verify_s 1"),
        (((2, 1), (1.0, 2.0)), r"batch_tokens is \[2, 1\]; it must ascend"),
        (((1, 1), (1.0, 2.0)), "each size once"),
        (((0, 1), (1.0, 2.0)), "from 1 or more"),
        (((1, 2), (1.0, 0.0)), "positive number"),
        (((1, 2), (1.0, float("nan"))), "positive number"),
        (((1, 2), (2.0, 1.0)), r"verify_s is \[2\.0, 1\.0\], which falls"),
        (((1,), (1.0,), (2, 1), (1.0, 2.0)), "draft_requests"),
        (((1,), (1.0,), (), (), (8, 4)), "buckets"),
    ],
)
def test_a_table_that_cannot_be_a_curve_is_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CostCurve(*arguments)


@pytest.mark.parametrize("samples", [{1: []}, {1: [1.0], 2: [-1.0]}, {3: [float("inf")]}])
def test_a_size_without_positive_samples_is_refused(samples: dict[int, list[float]]) -> None:
    with pytest.raises(ValueError, match="verify samples at"):
        CostCurve.measured(samples, {}, fingerprint={})


def test_a_file_holds_one_curve_for_each_fingerprint(tmp_path) -> None:
    path = tmp_path / "drafter" / "cost_curve.json"
    other = CostCurve((1,), (9.0,), fingerprint={"device": "gpu", "torch": "2"})
    old = CostCurve((1,), (5.0,), fingerprint=CURVE.fingerprint)
    for curve in (old, other, CURVE):
        curve.save(path)
    assert len(read_json(path)) == 2
    assert CostCurve.load(path, CURVE.fingerprint) == CURVE
    assert CostCurve.load(path, {"torch": "2", "device": "gpu"}) == other


def test_without_a_fingerprint_the_only_curve_is_loaded(tmp_path) -> None:
    path = tmp_path / "cost_curve.json"
    CURVE.save(path)
    assert CostCurve.load(path) == CURVE
    CostCurve((1,), (9.0,)).save(path)
    with pytest.raises(ValueError, match="holds 2 cost curves"):
        CostCurve.load(path)


def test_a_missing_curve_names_the_job_that_makes_it(tmp_path) -> None:
    path = tmp_path / "cost_curve.json"
    with pytest.raises(MissingInput, match=r"run jobs/profile_engine\.py"):
        CostCurve.load(path)
    CURVE.save(path)
    with pytest.raises(MissingInput, match=r"torch is '2' there and '3' here; run jobs/profile_engine\.py"):
        CostCurve.load(path, {"device": "cpu", "torch": "3"})


@pytest.mark.parametrize("content", [{"batch_tokens": [1]}, [{"batch_tokens": [1]}], [3]])
def test_a_broken_file_is_named(tmp_path, content: object) -> None:
    path = tmp_path / "cost_curve.json"
    write_json(path, content)
    with pytest.raises(ValueError, match=r"cost_curve\.json: not a"):
        CostCurve.load(path)


def test_the_fingerprint_survives_the_file_and_tells_settings_apart(tmp_path) -> None:
    first = hardware_fingerprint("cpu", torch.float32, 2, "target")
    assert (first["device"], first["dtype"], first["num_threads"]) == ("cpu", "float32", 2)
    assert first["processor"]
    CostCurve((1,), (1.0,), fingerprint=first).save(tmp_path / "c.json")
    assert CostCurve.load(tmp_path / "c.json", first).fingerprint == first
    for other in (("cpu", torch.bfloat16, 2, "target"), ("cpu", "float32", 1, "target"), ("cpu", "float32", 2, "t")):
        assert hardware_fingerprint(*other) != first


@pytest.mark.parametrize("buckets", [(), (4, 8, 16, 1000)])
def test_the_tabulated_curve_is_the_curve(buckets: tuple[int, ...]) -> None:
    curve = CostCurve((1, 8, 64), (1.0, 1.4, 4.0), (1, 8), (0.2, 0.3), buckets=buckets)
    for num_tokens in (3, 300, 5000, 20):
        seconds, padded = curve.lookup.verifying(num_tokens)
        for n in range(0, num_tokens + 1, 1 + num_tokens // 50):
            assert padded[n] == curve.padded_tokens(n)
            assert seconds[padded[n]] == pytest.approx(curve.verify_seconds(n))
            assert seconds[n] == pytest.approx(curve.smooth_verify_seconds(n))
    for num_requests in (5, 700):
        drafting = curve.lookup.drafting(num_requests)
        for n in (0, 1, min(5, num_requests), num_requests):
            assert drafting[n] == pytest.approx(curve.draft_seconds(n))
    assert set(CostCurve((1, 8), (1.0, 1.4)).lookup.drafting(3)) == {0.0}  # nothing of a drafter was measured


def test_a_step_costs_more_with_every_request_and_every_token_of_context_beyond_those_measured() -> None:
    curve = CostCurve((1, 8), (1.0, 1.7), request_s=0.5, context_s=2.0, context_tokens=100)
    assert curve.step_seconds(8, num_requests=1) == pytest.approx(1.7)
    assert curve.step_seconds(8, num_requests=3, context_tokens=1300) == pytest.approx(1.7 + 2 * 0.5 + 2.0)
    steps = [curve.step_seconds(8, num_requests=3, context_tokens=tokens) for tokens in range(0, 2000, 50)]
    assert steps == sorted(steps)
    assert steps[0] == steps[6] == curve.step_seconds(8, num_requests=3)  # shorter ones take nothing away


def test_what_context_costs_is_kept_in_the_file_and_0_where_an_old_one_lacks_it(tmp_path: Path) -> None:
    curve = CostCurve((1,), (1.0,), context_s=0.25, context_tokens=256)
    curve.save(tmp_path / "cost_curve.json")
    assert CostCurve.load(tmp_path / "cost_curve.json") == curve
    old = {name: value for name, value in curve.to_dict().items() if not name.startswith("context")}
    assert CostCurve.from_dict(old).step_seconds(1, num_requests=1, context_tokens=10**6) == 1.0
    with pytest.raises(ValueError, match="context_s is -1"):
        CostCurve((1,), (1.0,), context_s=-1.0)


def test_drafting_that_cannot_be_measured_is_as_dear_beside_a_step_as_on_the_most_similar_hardware() -> None:
    own = CostCurve((1, 8), (2.0, 4.0), fingerprint={"processor": "a", "num_threads": 1})
    other = CostCurve((1, 8), (8.0, 9.0), (1, 4), (3.0, 5.0), fingerprint={"processor": "b", "num_threads": 2})
    similar = CostCurve((1, 8), (1.0, 1.5), (1, 4), (0.2, 0.3), fingerprint={"processor": "a", "num_threads": 2})
    bare = CostCurve((1,), (1.0,), fingerprint=own.fingerprint)  # it knows nothing of drafting
    guessed = own.with_guessed_drafting([other, similar, bare])
    assert (guessed.draft_requests, guessed.draft_s) == ((1, 4), (0.4, 0.6))
    assert replace(guessed, draft_requests=(), draft_s=()) == own


def test_without_another_curve_drafting_takes_a_share_of_a_step() -> None:
    guessed = CostCurve((1, 8), (2.0, 4.0)).with_guessed_drafting([])
    assert [guessed.draft_seconds(number) for number in (0, 1, 8)] == [0.0, 0.5, 1.0]


def test_looked_up_seconds_are_those_between_the_points() -> None:
    curve = CostCurve((2, 8, 64), (1.0, 1.7, 4.1), (2, 8), (0.2, 0.5), buckets=(4, 16))
    for tokens in (0, 1, 2, 3, 7, 8, 40, 64, 100, 1023, 1024, 5000):
        expected = float(interpolated(np.float64(tokens), curve.batch_tokens, curve.verify_s))
        assert curve.smooth_verify_seconds(tokens) == pytest.approx(expected, rel=1e-12)
        assert curve.smooth_verify_seconds(float(tokens)) == pytest.approx(expected, rel=1e-12)
    assert [curve.draft_seconds(n) for n in (0, 1, 5, 8, 10)] == pytest.approx([0.0, 0.2, 0.35, 0.5, 0.6])
    assert CostCurve((1,), (1.0,)).draft_seconds(7) == 0.0
