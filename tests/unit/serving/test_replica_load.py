"""What one more request costs a replica and how many it can carry, against the definitions written out."""

from pathlib import Path

import pytest

from dspark.serving.replica_load import ReplicaLoad, marginal_token_s, most_requests
from dspark.speculation.cost_curve import CostCurve
from tiny_engine import PROMPTS, load, make_engine, request


def step_s(num_requests: int) -> float:
    return 0.01 + 0.002 * num_requests**1.5


@pytest.mark.parametrize("num_running", [0, 1, 5, 7])
def test_another_request_costs_what_all_of_them_wait_longer(num_running: int) -> None:
    """Seconds per token of all, with it and without it; tokens_per_step 2."""
    cost = marginal_token_s(step_s, num_running=num_running, num_waiting=0, max_running=8, tokens_per_step=2.0)
    with_it = (num_running + 1) * step_s(num_running + 1) / 2
    without = num_running * step_s(num_running) / 2 if num_running else 0.0
    assert cost == pytest.approx(with_it - without)


def test_a_full_replica_costs_the_wait_as_well() -> None:
    full = marginal_token_s(step_s, num_running=8, num_waiting=0, max_running=8, tokens_per_step=2.0)
    assert full == pytest.approx(step_s(8) / 2 * (1 + 1 / 8))
    queued = marginal_token_s(step_s, num_running=8, num_waiting=8, max_running=8, tokens_per_step=2.0)
    assert queued == pytest.approx(step_s(8) / 2 * (1 + 9 / 8))


@pytest.mark.parametrize("floor", [None, 5.0, 40.0, 70.0, 150.0, 1000.0])
def test_as_many_as_keep_their_pace(floor: float | None) -> None:
    def keeps(num_requests: int) -> bool:
        return floor is None or 2.0 / step_s(num_requests) >= floor

    expected = max([n for n in range(1, 33) if keeps(n)], default=1)
    assert most_requests(step_s, max_running=32, tokens_per_step=2.0, min_tokens_per_s=floor) == expected


def test_an_engine_is_measured(tiny_target: Path) -> None:
    engine = make_engine(load(tiny_target), max_running_requests=4, kv_tokens=400)
    curve = CostCurve(batch_tokens=(1, 2, 4, 8), verify_s=(1.0, 1.0, 2.0, 4.0))
    known, unknown = ReplicaLoad(engine, curve), ReplicaLoad(engine)
    assert known.routing_stats(2) == {}
    assert known.capacity(5.0) == 4.0
    for number in range(6):
        engine.add(request(PROMPTS[0], str(number), max_tokens=12))
    for _ in range(4):
        engine.step()
    stats = known.routing_stats(2)
    assert stats["num_calls"] == 2
    seconds = engine.stats.step_s / engine.stats.steps
    assert stats["token_s"] == pytest.approx(seconds * (1 + 3 / 4), rel=0.35)  # full, and two wait before it
    assert unknown.routing_stats(2)["token_s"] == pytest.approx(stats["token_s"], rel=0.35)
    assert 1 <= known.capacity(1e9) < known.capacity(None) <= 4
    assert known.capacity(None) == 4.0
    while engine.has_work:
        engine.step()


def test_memory_bounds_what_can_be_carried(tiny_target: Path) -> None:
    engine = make_engine(load(tiny_target), max_running_requests=8, kv_tokens=160, prefix_cache=False)
    load_of = ReplicaLoad(engine)
    engine.add(request(PROMPTS[2], max_tokens=8))  # 45 tokens: a fourth of the memory, with what it may write
    engine.step()
    engine.step()
    assert load_of.capacity(None) == 3.0
    while engine.has_work:
        engine.step()
