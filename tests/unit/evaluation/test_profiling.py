"""From timed steps to the cost curve, and from the curve to verify lengths."""

from collections import Counter
from typing import Any

import pytest

from dspark.config import build_config
from dspark.engine.step_samples import LongSamples, Samples, fit_request_s
from dspark.engine.step_timer import LONG_REQUESTS, BatchShape, batch_shapes
from dspark.evaluation.profiling import (
    ProfileConfig,
    fingerprint_of,
    measure,
    measured_survival,
    request_tokens,
    verify_budgets,
)
from dspark.provenance import write_json
from dspark.speculation.cost_curve import CostCurve
from dspark.targets import TargetConfig

SURVIVAL = [0.8, 0.6, 0.4, 0.2]


def profile_config(**changes: Any) -> ProfileConfig:
    content = {"target": {"name": "t", "dtype": "float32", "device": "cpu"}, "output": "o"}
    return build_config(ProfileConfig, content | changes)


def step_s(shape: BatchShape, *, request_s: float) -> float:
    """A machine whose steps are exactly what the curve assumes."""
    return 0.02 + 0.001 * shape.num_tokens + (shape.num_requests - 1) * request_s


class Machine:
    """Steps and drafting by formula; the first time at each point takes a hundred times as long."""

    context_tokens = 256

    def __init__(self, long_context_tokens: int = 0) -> None:
        self.calls: Counter[Any] = Counter()
        self.long_context_tokens = long_context_tokens
        self.num_long = LONG_REQUESTS if long_context_tokens else 0

    def verify_s(self, shape: BatchShape, *, is_long: bool = False) -> float:
        more = shape.num_requests * (self.long_context_tokens - self.context_tokens) * 2e-6 if is_long else 0.0
        return self._first_slow((shape, is_long) if is_long else shape) * (step_s(shape, request_s=0.0005) + more)

    def draft_s(self, num_requests: int) -> float:
        return self._first_slow(num_requests) * (0.004 + 0.001 * num_requests)

    def _first_slow(self, point: Any) -> int:
        self.calls[point] += 1
        return 100 if self.calls[point] == 1 else 1


def test_every_point_is_measured_equally_often_and_its_first_time_does_not_count():
    config = profile_config(drafter="d", batch_tokens=(1, 8), draft_requests=(1, 4), repeats=3)
    machine = Machine()
    samples = measure(machine, config)  # type: ignore[arg-type]
    assert machine.calls == Counter(dict.fromkeys([*config.shapes, 1, 4], 4))
    assert samples.verify == {shape: pytest.approx([step_s(shape, request_s=0.0005)] * 3) for shape in config.shapes}
    assert samples.draft == {1: pytest.approx([0.005] * 3), 4: pytest.approx([0.008] * 3)}


def test_without_a_neural_drafter_no_drafting_is_measured():
    machine = Machine()
    assert measure(machine, profile_config(drafter="ngram", repeats=1)).draft == {}  # type: ignore[arg-type]
    assert all(isinstance(point, BatchShape) for point in machine.calls)


def test_the_curve_is_that_of_one_request_and_further_ones_cost_what_they_cost():
    config = profile_config(batch_tokens=(1, 4, 16), repeats=3)
    curve = measure(Machine(), config).curve({"device": "here"})  # type: ignore[arg-type]
    assert curve.batch_tokens == (1, 4, 16)
    assert curve.verify_s == pytest.approx((0.021, 0.024, 0.036))
    assert curve.request_s == pytest.approx(0.0005)
    assert curve.fingerprint == {"device": "here"}
    assert curve.draft_requests == ()


def test_what_more_context_costs_is_measured_at_a_long_one_beside_the_short_one():
    config = profile_config(batch_tokens=(1, 12, 16, 64), tokens_per_request=4, max_requests=4, repeats=3)
    machine = Machine(long_context_tokens=1256)
    curve = measure(machine, config).curve({})  # type: ignore[arg-type]
    assert curve.context_s == pytest.approx(0.002)
    assert curve.context_tokens == 256
    # As many requests as have long contexts, with about what is usually verified of each; in every sweep.
    assert machine.calls[BatchShape((4, 4, 4, 4)), True] == 4
    unmeasured = measure(Machine(), config).curve({})  # type: ignore[arg-type]
    assert (unmeasured.context_s, unmeasured.context_tokens) == (0.0, 256)


def test_context_never_costs_less_than_nothing():
    shape = BatchShape((4,))
    samples = Samples({shape: [0.1, 0.1, 0.1]}, {}, 256, LongSamples(shape, 512, [0.09, 0.3, 0.05]))
    assert samples.context_s() == 0.0


def test_of_several_requests_each_has_the_longer_context():
    shape = BatchShape((4, 4))
    samples = Samples({shape: [0.1] * 3}, {}, 250, LongSamples(shape, 1250, [0.104] * 3))
    assert samples.context_s() == pytest.approx(0.002)


def test_a_sweep_that_was_disturbed_does_not_decide_what_a_request_costs():
    shapes = batch_shapes([1, 4, 16], tokens_per_request=4, max_requests=16)
    verify = {shape: [step_s(shape, request_s=0.0005)] * 5 for shape in shapes}
    for shape in shapes:
        if shape.num_requests > 1:
            verify[shape] = [*verify[shape][:3], 0.5, 0.4]
    assert fit_request_s(verify) == pytest.approx(0.0005)


def test_a_request_never_costs_less_than_nothing():
    verify = {
        shape: [step_s(shape, request_s=-0.001)] for shape in batch_shapes([8], tokens_per_request=1, max_requests=8)
    }
    assert fit_request_s(verify) == 0.0
    assert fit_request_s({BatchShape((4,)): [0.1]}) == 0.0


def test_the_cost_of_a_request_travels_with_the_curve(tmp_path):
    verify = {
        shape: [step_s(shape, request_s=0.002)] for shape in batch_shapes([4], tokens_per_request=1, max_requests=4)
    }
    curve = Samples(verify, {1: [0.01]}).curve({"a": 1})
    curve.save(tmp_path / "cost_curve.json")
    assert CostCurve.load(tmp_path / "cost_curve.json").request_s == pytest.approx(0.002)
    assert CostCurve.from_dict({k: v for k, v in curve.to_dict().items() if k != "request_s"}).request_s == 0.0
    with pytest.raises(ValueError, match="request_s is -1"):
        CostCurve((1,), (1.0,), request_s=-1.0)


def test_a_request_has_memory_for_its_longest_piece_or_for_all_that_is_drafted_behind_it():
    config = profile_config(batch_tokens=(1, 64), tokens_per_request=16, max_requests=4, context_tokens=10)
    assert request_tokens(config, None) == [10 + 64, 10 + 16, 10 + 16, 10 + 16]
    config = profile_config(batch_tokens=(1, 80), tokens_per_request=16, max_requests=5, context_tokens=10)
    assert request_tokens(config, None, 50) == [10 + 80, 50, 50, 50, 10 + 16]  # so many have long contexts


def test_where_verifying_is_dear_nothing_is_drafted_however_well_it_is_accepted():
    curve = CostCurve((1, 2, 4, 8), (0.010, 0.030, 0.070, 0.150), (1, 8), (0.002, 0.010))
    for row in verify_budgets(curve, [0.83, 0.7, 0.6], range(1, 9)):
        assert (row["drafted"], row["verify_length"], row["batch_tokens"]) == (0, 0.0, row["requests"])
        assert row["speedup"] == 1.0


def test_where_verifying_is_free_whole_blocks_are_verified():
    curve = CostCurve((1, 512), (0.010, 0.010), (1,), (0.001,))
    (row,) = verify_budgets(curve, SURVIVAL, [1])
    assert (row["drafted"], row["verify_length"], row["batch_tokens"]) == (1, 4.0, 5)
    assert row["speedup"] == pytest.approx((1 + sum(SURVIVAL)) / (0.011 / 0.010))


def test_for_one_request_the_length_is_the_best_of_all_on_a_curve_that_rises_faster_and_faster():
    curve = CostCurve((1, 2, 3, 4, 5), (0.010, 0.011, 0.0135, 0.018, 0.025), (1,), (0.001,))

    def rate(length: int) -> float:
        return (1 + sum(SURVIVAL[:length])) / (curve.verify_seconds(1 + length) + 0.001)

    (row,) = verify_budgets(curve, SURVIVAL, [1])
    assert row["verify_length"] == max(range(5), key=rate)
    assert row["speedup"] == pytest.approx(rate(int(row["verify_length"])) * 0.010)


def test_the_busier_the_target_the_fewer_draft_tokens_are_verified():
    curve = CostCurve((1, 16, 32, 64, 256), (0.020, 0.022, 0.030, 0.060, 0.240), (1, 32), (0.003, 0.012))
    lengths = [row["verify_length"] for row in verify_budgets(curve, SURVIVAL, (1, 8, 32))]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1]


def test_survival_is_read_up_to_where_no_round_came(tmp_path):
    write_json(tmp_path / "metrics.json", {"modes": {"greedy": {"overall": {"survival": [0.7, 0.5, None]}}}})
    assert measured_survival(tmp_path) == [0.7, 0.5]
    assert measured_survival(tmp_path / "nothing") == []


def test_the_fingerprint_tells_threads_and_types_apart(tiny_target):
    def of(dtype: str, threads: int) -> dict[str, Any]:
        target = build_config(TargetConfig, {"name": str(tiny_target), "dtype": dtype, "device": "cpu"})
        return fingerprint_of(target, threads)

    assert of("auto", 2) == of("float32", 2)  # the tiny target was saved in float32
    assert of("float32", 1) != of("float32", 2) != of("bfloat16", 2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"target": None}, "nothing to measure"),
        ({"batch_tokens": [1, 1]}, "each size once"),
        ({"draft_requests": [0]}, "1 or more"),
        ({"batch_tokens": []}, "batch_tokens"),
        ({"repeat": 3}, "did you mean 'repeats'"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(change, reason):
    with pytest.raises(ValueError, match=reason):
        profile_config(**change)
