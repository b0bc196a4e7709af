"""How many replicas there should be: a function of requests and measured capacities, as Serve's controller calls it."""

from typing import Any

import pytest
from ray.serve._private.autoscaling_state import _resolve_policy_callable
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from dspark.serving.autoscaling import CAPACITY, HeadroomPolicy, desired_replicas
from dspark.serving.replica_load import CAPACITY as TOLD

DELAYS = {"upscale_delay_s": 0.0, "downscale_delay_s": 30.0, "downscale_to_zero_delay_s": 60.0}


def context(num_requests: float, capacities: list[float], *, target: int | None = None, **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "deployment_id": None,
        "deployment_name": "TargetReplica",
        "app_name": "app",
        "current_num_replicas": len(capacities),
        "target_num_replicas": len(capacities) if target is None else target,
        "running_replicas": [],
        "total_num_requests": num_requests,
        "total_queued_requests": 0.0,
        "aggregated_metrics": {CAPACITY: dict(enumerate(capacities))},
        "raw_metrics": {},
        "capacity_adjusted_min_replicas": 0,
        "capacity_adjusted_max_replicas": 9,
        "policy_state": {},
        "last_scale_up_time": None,
        "last_scale_down_time": None,
        "current_time": 0.0,
        "config": AutoscalingConfig(min_replicas=0, max_replicas=9, **DELAYS),
    }
    return AutoscalingContext(**fields | changes)


@pytest.mark.parametrize("num_requests", [0, 1, 5.6, 7, 7.1, 40, 100])
@pytest.mark.parametrize("capacities", [[8.0], [10.0, 6.0], [3.0, 8.0, 13.0]])
def test_it_is_the_fewest_that_are_used_to_the_target(num_requests: float, capacities: list[float]) -> None:
    mean = sum(capacities) / len(capacities)
    fewest = next(n for n in range(1000) if n * mean * 0.7 >= num_requests - 1e-9)
    assert desired_replicas(num_requests, capacities, target_utilisation=0.7) == fewest


def test_as_many_requests_need_more_replicas_where_each_carries_less() -> None:
    """The queue is the same; what was measured decides."""
    policy = HeadroomPolicy(0.5)
    assert policy(context(16, [16.0, 16.0]))[0] == 2
    assert policy(context(16, [4.0, 4.0]))[0] == 8


def test_without_figures_it_stays() -> None:
    policy = HeadroomPolicy()
    assert policy(context(50, [], target=1))[0] == 1
    assert policy(context(50, [8.0, 8.0], aggregated_metrics=None))[0] == 2
    assert policy(context(50, [0.0, 0.0]))[0] == 2


@pytest.mark.parametrize("share", [0.0, -1.0, 1.1])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="target_utilisation is"):
        HeadroomPolicy(share)


def test_the_figure_is_the_one_that_replicas_tell() -> None:
    assert CAPACITY == TOLD


def as_serve_calls_it() -> Any:
    """From the deployment file's strings, with Serve's own delays around it."""
    config = AutoscalingConfig(
        min_replicas=0,
        max_replicas=9,
        policy={
            "policy_function": "dspark.serving.autoscaling:HeadroomPolicy",
            "policy_kwargs": {"target_utilisation": 0.5},
        },
        **DELAYS,
    )
    return _apply_autoscaling_config(_resolve_policy_callable(config.policy))


def test_serve_starts_the_first_at_once_and_the_next_by_headroom() -> None:
    decide = as_serve_calls_it()
    assert decide(context(1, [], target=0))[0] == 1
    assert decide(context(0, [], target=0))[0] == 0
    assert decide(context(16, [8.0]))[0] == 4


def test_serve_goes_down_to_none_only_when_nothing_was_asked_for_long() -> None:
    decide, state, replicas = as_serve_calls_it(), {}, 2
    seen = []
    for second in range(0, 200, 10):
        now = context(0.0, [8.0] * replicas, policy_state=state)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ray.serve.autoscaling_policy.time.time", lambda second=second: 1000.0 + second)
            replicas, state = decide(now)
        seen.append(replicas)
    assert sorted(seen, reverse=True) == seen  # no flapping
    assert seen[0] == 2
    assert seen[3] == 1  # after 30 s
    assert seen[-1] == 0
    assert seen.index(0) >= 3 + 6  # 60 s after that
