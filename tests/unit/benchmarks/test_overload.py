"""When a flood of requests counts as survived, and how large the fleet is that gets it."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

OPTIONS = Namespace(seconds=2.0)


@pytest.fixture
def overload(script: Any) -> Any:
    return script("overload")


def has_failed(overload: Any, *answers: tuple[int, float, bool], free_s: float | None = 0.1) -> bool:
    report = overload._report([overload.Answer(*one) for one in answers], 3.0, free_s, OPTIONS)
    return overload._has_failed(report, 20.0)


def test_answers_in_time_and_refusals_with_a_time_are_well(overload: Any) -> None:
    assert not has_failed(overload, (200, 19.0, False), (429, 0.1, True), (503, 0.1, True))


def test_an_admitted_request_that_takes_too_long_is_a_failure_and_so_is_none_admitted(overload: Any) -> None:
    assert has_failed(overload, (200, 1.0, False), (200, 21.0, False))
    assert has_failed(overload, (429, 0.1, True))


@pytest.mark.parametrize("answer", [(0, 120.0, False), (500, 0.1, False), (429, 0.1, False)])
def test_no_answer_a_wrong_one_and_a_refusal_for_ever_are_failures(
    overload: Any, answer: tuple[int, float, bool]
) -> None:
    assert has_failed(overload, (200, 1.0, False), answer)


def test_what_is_left_running_is_a_failure(overload: Any) -> None:
    assert has_failed(overload, (200, 1.0, False), free_s=None)


def test_the_fleet_is_as_large_as_the_deployment_file_says(script: Any, overload: Any) -> None:
    running, deployment = script("running_fleet"), Path(__file__).parents[3] / "deployments"
    assert (overload._options([]).replicas, overload._options([]).clients) == (None, None)
    fleet = running.RunningFleet(deployment / "dspark.yaml", {}, num_replicas=None)
    assert (fleet.num_replicas, fleet.num_places) == (2, 64)
    one = running.RunningFleet(deployment / "dspark.yaml", {"engine": {"max_running_requests": 8}}, num_replicas=1)
    assert (one.num_replicas, one.num_places) == (1, 8)
    with pytest.raises(ValueError, match="no fixed number"):
        running.RunningFleet(deployment / "dspark_autoscaling.yaml", {})
