"""Drafting for everyone with the policy's own widths, and steps counted whether they were drafted or not."""

from collections import Counter
from typing import Any

import pytest

from dspark.attention.page_pool import PageTable
from dspark.engine.estimates import AcceptanceEstimate, PriorEstimate
from dspark.engine.policy import NUM_AHEAD, PROBE_SLOTS, SpeculationPolicy
from dspark.engine.running import RunningRequest
from dspark.engine.step import StepOutput
from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.statistics import Round
from tiny_engine import request

BLOCK = 7
DRAFTING = CostCurve((1, 64), (1.0, 3.0), (1, 8), (0.1, 0.12))
ADVERSE = CostCurve((1, 64), (1.0, 64.0), (1, 8), (9.0, 9.0))


def policy(curve: CostCurve) -> SpeculationPolicy:
    return SpeculationPolicy(
        block_size=BLOCK, curve=curve, calibration=None, verify_length=None, probe_every=1000, has_confidence=True
    )


def running(*, accepts: int) -> RunningRequest:
    """A request of whose drafts so many stood, again and again."""
    estimate = AcceptanceEstimate(PriorEstimate())
    for _ in range(60):
        estimate.update(BLOCK, accepts)
    made = RunningRequest(
        request=request([1, 2, 3], max_tokens=64),
        table=PageTable([0, 1], 64),
        memory=None,
        text=None,
        generator=None,
        estimate=estimate,
    )
    made.output_ids = [5]
    return made


@pytest.fixture
def skipping(script: Any) -> Any:
    return script("skipping")


def test_whoever_the_policy_drafts_for_is_asked_the_same_width_where_all_are(skipping: Any) -> None:
    good, bad = running(accepts=3), running(accepts=0)
    own = policy(DRAFTING).choose([good, bad], prefill_tokens=0)
    assert 0 < own[0] < BLOCK
    assert own[1] == 0
    always = policy(DRAFTING)
    skipping.draft_for_all(always)
    widths = always.choose([good, bad], prefill_tokens=0)
    assert abs(widths[0] - own[0]) <= NUM_AHEAD
    assert widths[1] == PROBE_SLOTS


def test_all_are_drafted_for_though_it_never_pays(skipping: Any) -> None:
    everyone = [running(accepts=0) for _ in range(3)]
    assert policy(ADVERSE).choose(everyone, prefill_tokens=0) == [0, 0, 0]
    always = policy(ADVERSE)
    skipping.draft_for_all(always)
    for _ in range(3):
        assert always.choose(everyone, prefill_tokens=0) == [PROBE_SLOTS] * 3


def output(request_id: str, *, committed: int, drafted: int) -> StepOutput:
    made = Round(drafted, committed - 1, committed)
    return StepOutput(request_id, [1] * committed, "", None, 3, committed, made, num_drafted=drafted)


def test_steps_without_a_draft_count_among_a_requests_steps(skipping: Any) -> None:
    counted: Counter[str] = Counter()
    steps = [output("0", committed=3, drafted=4), output("0", committed=1, drafted=0)]
    first = StepOutput("0", [1], "", None, 3, 1, None)
    skipping.count_steps([first, *steps, output("1", committed=1, drafted=0)], counted)
    found = skipping.figures(counted)
    assert found["tokens a step, predictable"] == 2.0
    assert found["drafted, predictable"] == 0.5
    assert found["accepted length, predictable"] == 3.0
    assert found["slots, predictable"] == 4.0
    assert found["tokens a step, noise"] == 1.0
    assert found["drafted, noise"] == 0.0


def test_ratios_are_taken_turn_by_turn(skipping: Any) -> None:
    def run(speed: float, draft_s: float, tokens: float) -> dict[str, float]:
        return {"tokens/s": speed, "draft s": draft_s, "tokens a step, predictable": tokens}

    base = [run(100.0, 2.0, 2.0), run(50.0, 4.0, 2.0)]
    found = skipping.beside([run(110.0, 1.0, 2.0), run(55.0, 2.0, 2.0)], base)
    assert (found["seconds"], found["of always"], found["tau of always"]) == (0.5, pytest.approx(1.1), 1.0)
    row = {"drafting": "skipping, 4 at once"} | found
    assert "tokens a step, predictable" not in skipping.columns(row, "")
    assert list(skipping.columns(row, "predictable")) == ["drafting", "tokens a step, predictable"]
