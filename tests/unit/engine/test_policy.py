"""Who is drafted for and how much is verified: fixed lengths, what pays, probes, and what is learnt from verdicts."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dspark.attention.page_pool import PageTable
from dspark.engine.estimates import AcceptanceEstimate, PriorEstimate
from dspark.engine.policy import NUM_AHEAD, PROBE_LENGTH, PROBE_SLOTS, SpeculationPolicy
from dspark.engine.probing import LEFT_IN_PEACE, MOST_PROBED, PROBE_SHARE
from dspark.engine.running import RunningRequest
from dspark.engine.sampling import SamplingParams
from dspark.engine.step import Launched
from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.fleet import Share
from dspark.speculation.proposal import Proposal
from tiny_engine import request

FLAT = CostCurve((1, 256), (1.0, 1.001))
DEAR = CostCurve((1, 256), (1.0, 512.0))
DRAFTING = CostCurve((1, 256), (1.0, 2.0), (1, 8), (0.1, 0.12))
BLOCK = 7


def policy(**options: Any) -> SpeculationPolicy:
    settings: dict[str, Any] = {
        "block_size": BLOCK,
        "curve": FLAT,
        "calibration": None,
        "verify_length": None,
        "probe_every": 5,
        "has_confidence": True,
    }
    return SpeculationPolicy(**settings | options)


def running(*, num_output: int = 1, temperature: float = 0.0, **options: Any) -> RunningRequest:
    asked = request([1, 2, 3], sampling=SamplingParams(temperature=temperature), **options)
    made = RunningRequest(
        request=asked,
        table=PageTable([0, 1], 16),
        memory=None,
        text=None,
        generator=None,
        estimate=AcceptanceEstimate(PriorEstimate()),
    )
    made.output_ids = [5] * num_output
    return made


def proposal(*confidences: float) -> Proposal:
    return Proposal(torch.arange(len(confidences)), None, torch.logit(torch.tensor(confidences)))


def test_fixed_lengths_go_before_the_curve_and_the_request_before_the_engine() -> None:
    everyone = [running(), running(verify_length=2), running(verify_length=0)]
    assert policy(verify_length=4, curve=DEAR).choose(everyone, prefill_tokens=0) == [4, 2, 0]


def test_nothing_is_drafted_that_could_not_be_output() -> None:
    short = running(num_output=3, max_tokens=6)  # two draft tokens and the target's own
    assert policy().choose([short], prefill_tokens=0)[0] <= 2
    assert policy(verify_length=7).choose([short], prefill_tokens=0) == [2]
    assert policy(verify_length=7).choose([running(num_output=5, max_tokens=6)], prefill_tokens=0) == [0]


@pytest.mark.parametrize(("has_confidence", "num_ahead"), [(True, NUM_AHEAD), (False, 0)])
def test_no_more_is_drafted_than_may_be_worth_verifying(has_confidence, num_ahead) -> None:
    curve = CostCurve((1, 2, 3, 4, 64), (1.0, 1.1, 2.0, 3.0, 63.0))  # the first draft token is cheap, others are not
    chooser, asked = policy(curve=curve, has_confidence=has_confidence), running()
    (wanted,) = chooser.choose([asked], prefill_tokens=0)
    assert wanted == 1 + num_ahead
    drafted = proposal(*[0.6] * wanted) if has_confidence else Proposal(torch.arange(wanted), None, None)
    assert chooser.verify_lengths([asked], [drafted], prefill_tokens=0) == [1]


def test_a_step_keeps_room_for_what_was_verified_lately_and_not_for_whole_blocks() -> None:
    chooser, open_ones = policy(), [running(), running()]
    assert chooser.reserved(open_ones) == 2
    for _ in range(30):
        chooser.verify_lengths(open_ones, [proposal(0.9, 0.9), proposal()], prefill_tokens=0)
    assert chooser.reserved(open_ones) == 2 + 2
    assert chooser.reserved([*open_ones, running(verify_length=5)]) == 2 + 2 + 6
    assert policy(verify_length=3).reserved(open_ones) == 8


def test_no_more_is_verified_than_fits_beside_the_steps_other_tokens() -> None:
    chooser, everyone = policy(), [running(), running(verify_length=2)]
    proposals = [proposal(*[0.9] * 5), proposal(*[0.9] * 2)]
    chooser.room = 5
    assert chooser.verify_lengths(everyone, proposals, prefill_tokens=0) == [3, 2]
    chooser.room = -4
    assert chooser.verify_lengths(everyone, proposals, prefill_tokens=0) == [0, 2]
    assert chooser.choose([everyone[0]], prefill_tokens=0)[0] <= PROBE_SLOTS


def failing(**options: Any) -> RunningRequest:
    """A request whose draft tokens have all been wrong."""
    made = running(max_tokens=10_000, **options)
    for _ in range(20):
        made.estimate.update(BLOCK, 0)
    return made


def steps_until_probed(chooser: SpeculationPolicy, everyone: list[RunningRequest]) -> tuple[int, list[int]]:
    """Steps that nobody was drafted for, and what was asked for in the first one where somebody was."""
    for step in range(1000):
        wanted = chooser.choose(everyone, prefill_tokens=0)
        if any(wanted):
            return step, wanted
        for one in everyone:
            one.steps_undrafted += 1
    return 1000, []


def test_probes_cost_a_hundredth_of_the_time_and_those_who_wait_are_probed_together() -> None:
    chooser, everyone = policy(curve=DRAFTING), [failing(), failing(), failing(verify_length=0)]
    num_steps, wanted = steps_until_probed(chooser, everyone)
    cost_s = DRAFTING.draft_seconds(2) + DRAFTING.verify_seconds(3 + 2 * PROBE_LENGTH) - DRAFTING.verify_seconds(3)
    assert wanted == [PROBE_SLOTS, PROBE_SLOTS, 0]
    num_waited = num_steps - 5 + 1  # before, nobody was due
    assert num_waited * PROBE_SHARE * DRAFTING.verify_seconds(3) == pytest.approx(cost_s, rel=0.2)


def test_after_a_step_that_drafts_for_nobody_the_same_requests_are_left_in_peace_for_a_few() -> None:
    chooser, everyone = policy(curve=DEAR), [running(), running()]
    assert chooser.choose(everyone, prefill_tokens=0) == [0, 0]
    chooser.curve = FLAT  # from now on drafting would pay
    assert [any(chooser.choose(everyone, prefill_tokens=0)) for _ in range(LEFT_IN_PEACE + 1)] == [
        *[False] * LEFT_IN_PEACE,
        True,
    ]
    chooser = policy(curve=DEAR)
    chooser.choose(everyone, prefill_tokens=0)
    chooser.curve = FLAT
    assert any(chooser.choose([*everyone, running()], prefill_tokens=0))  # others than those


def test_no_more_than_a_few_are_probed_at_once_those_first_that_waited_longest() -> None:
    everyone = [failing() for _ in range(3 * MOST_PROBED)]
    for place in (2, 5):
        everyone[place].steps_undrafted = 100
    _, wanted = steps_until_probed(policy(curve=DRAFTING), everyone)
    assert sum(length > 0 for length in wanted) == MOST_PROBED
    assert wanted[2] > 0
    assert wanted[5] > 0


def test_nobody_is_probed_where_even_the_best_would_not_pay() -> None:
    assert steps_until_probed(policy(curve=DEAR), [failing(), failing()]) == (1000, [])


@pytest.mark.parametrize(("has_confidence", "expected"), [(True, 0), (False, PROBE_LENGTH)])
def test_a_probe_without_confidences_is_verified_or_nothing_would_be_learnt(has_confidence, expected) -> None:
    chooser, one = policy(curve=DRAFTING, has_confidence=has_confidence), failing()
    steps_until_probed(chooser, [one])
    assert chooser.allocate([one], [[0.002, 0.001, 0.0005]], prefill_tokens=0) == [expected]


def test_a_curve_of_another_pace_is_corrected_by_what_steps_take() -> None:
    curve = CostCurve((1, 2, 8), (1.0, 1.1, 1.7), (1, 8), (0.2, 0.3))
    seen, kept = policy(curve=curve, corrects_curve=True), policy(curve=curve)
    for chooser in (seen, kept):
        assert chooser.choose([running()], prefill_tokens=0)[0] > 0
        for _ in range(300):  # drafting takes six times as long
            chooser.note_step(
                Launched([SimpleNamespace(num_context=0)], SimpleNamespace(num_tokens=2), None, [], 1, 1.2), 2.3
            )
    assert seen.choose([running()], prefill_tokens=0) == [0]
    assert kept.choose([running()], prefill_tokens=0)[0] > 0


def test_a_gain_too_small_to_be_sure_of_is_left() -> None:
    curve = CostCurve((1, 2, 3), (1.0, 1.5, 2.0))  # 1.6 tokens in 1.5 seconds: 7 % more
    assert policy(curve=curve).choose([running()], prefill_tokens=0)[0] > 0
    assert policy(curve=curve, min_gain=0.1).choose([running()], prefill_tokens=0) == [0]


def test_survival_is_the_product_of_confidences_and_of_past_rounds_without_them() -> None:
    plain = Proposal(torch.arange(2), None, None)
    one, other = running(), running()
    rows = policy().survival([one, other], [proposal(0.5, 0.4, 0.9), plain])
    assert rows[0] == pytest.approx([0.5, 0.2, 0.18])
    assert rows[1] == other.estimate.survival(2)
    assert one.confident_survival == pytest.approx([0.5, 0.2, 0.18])
    assert other.confident_survival is None


def test_confidences_that_prove_too_bold_are_believed_less_in_their_own_mode_only() -> None:
    chooser, greedy, sampled = policy(), running(), running(temperature=1.0)
    for _ in range(400):
        chooser.survival([greedy], [proposal(0.9, 0.9)])
        chooser.learn(greedy, 2, 0)
    assert chooser.survival([greedy], [proposal(0.9, 0.9)])[0][0] < 0.2
    assert chooser.survival([sampled], [proposal(0.9, 0.9)])[0][0] == pytest.approx(0.9)


def test_rounds_without_confidences_teach_the_estimate() -> None:
    chooser, one = policy(has_confidence=False), running()
    before = one.estimate.survival(1)[0]
    for _ in range(20):
        chooser.survival([one], [Proposal(torch.arange(1), None, None)])
        chooser.learn(one, 1, 0)
    assert one.estimate.survival(1)[0] < before / 2


def test_a_capacity_from_outside_bounds_what_is_verified() -> None:
    chooser, everyone = policy(), [running(), running()]
    rows = [[0.9, 0.8, 0.7], [0.95, 0.9, 0.85]]
    assert sum(chooser.allocate(everyone, rows, prefill_tokens=0)) == 6
    chooser.share = Share(capacity=2)
    assert chooser.allocate(everyone, rows, prefill_tokens=0) in ([0, 2], [1, 1])


@pytest.mark.parametrize("curve", [FLAT, None])
def test_a_share_bounds_fixed_lengths_too_with_and_without_a_curve(curve) -> None:
    chooser, everyone = policy(curve=curve, verify_length=3), [running(), running(), running(verify_length=7)]
    rows = [[0.9] * 3, [0.9] * 3, [0.9] * 7]
    assert chooser.choose(everyone, prefill_tokens=0) == [3, 3, 7]
    chooser.share = Share(capacity=5)
    assert chooser.choose(everyone, prefill_tokens=0) == [2, 2, 1]
    assert chooser.allocate(everyone, rows, prefill_tokens=0) == [2, 2, 1]
    chooser.share = Share(max_drafted=2)
    assert chooser.choose(everyone, prefill_tokens=0) == [3, 3, 0]
    chooser.share = Share(max_drafted=0, capacity=0)
    assert chooser.choose(everyone, prefill_tokens=0) == [0, 0, 0]
    assert chooser.allocate(everyone, rows, prefill_tokens=0) == [0, 0, 0]


def test_a_share_bounds_who_is_drafted_for_where_the_curve_decides() -> None:
    chooser, everyone = policy(), [running() for _ in range(5)]
    assert sum(n > 0 for n in chooser.choose(everyone, prefill_tokens=0)) == 5
    chooser.share = Share(max_drafted=2)
    assert sum(n > 0 for n in chooser.choose(everyone, prefill_tokens=0)) == 2


def test_a_floor_is_verified_where_the_curve_would_not_and_weights_say_whose() -> None:
    chooser, everyone = policy(curve=DEAR), [running(), running(priority=-1)]
    rows = [[0.9, 0.8], [0.5, 0.4]]
    assert chooser.allocate(everyone, rows, prefill_tokens=0) == [0, 0]
    chooser.share = Share(floor=2)
    assert chooser.allocate(everyone, rows, prefill_tokens=0) == [2, 0]
    chooser.share = Share(floor=2, weights={-1: 4.0})
    assert chooser.allocate(everyone, rows, prefill_tokens=0) == [0, 2]


@pytest.mark.parametrize("is_lagged", [False, True])
def test_behind_long_contexts_draft_tokens_are_cheap_beside_the_step(is_lagged: bool) -> None:
    verifying = CostCurve((1, 256), (1.0, 154.0), context_s=1000.0)
    drafting = replace(verifying, draft_requests=(1, 8), draft_s=(4.0, 4.0))
    prior, drafted = PriorEstimate() if is_lagged else None, {}
    for num_stored in (0, 100):
        asked, chooser = running(), policy(curve=verifying, lagged_prior=prior)
        asked.table.num_tokens = num_stored
        wanted = policy(curve=drafting, lagged_prior=prior).choose([asked], prefill_tokens=0)
        for _ in range(4):  # what is lagged goes by the steps before
            lengths = chooser.verify_lengths([asked], [proposal(0.5, 0.5)], prefill_tokens=0)
        drafted[num_stored] = (wanted[0] > 0, lengths)
    assert drafted == {0: (False, [0]), 100: (True, [2])}
