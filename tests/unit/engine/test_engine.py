"""The engine is lossless at every verify length, alone and in company, and loses no page."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.drafters.ngram import NGramDrafter
from dspark.engine.draft_runner import NGramDraftRunner, SequentialDraftRunner
from dspark.engine.hidden_states import HiddenStateCapture
from dspark.engine.sampling import SamplingParams
from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.fleet import Share
from scripted_drafters import FixedDistributionDrafter, ScriptedDrafter
from tiny_engine import PROMPTS, VOCABULARY, greedy_continuations, ids_of, load, make_engine, request, run

NUM_NEW = 24
FLAT = CostCurve((1, 256), (1.0, 1.0001))
STEEP = CostCurve((1, 256), (1.0, 256.0))


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> Any:
    return load(tiny_target)


@pytest.fixture(scope="module")
def continuations(tiny_target: Path) -> list[list[int]]:
    return greedy_continuations(load(tiny_target), PROMPTS, NUM_NEW + 8)


class ByPrompt:
    """A scripted drafter per prompt behind one face: requests start in the order of the prompts."""

    kind, has_confidence = "scripted", False
    max_context_tokens, num_reread, num_ids_behind = None, None, 0

    def __init__(self, drafters: list[ScriptedDrafter]) -> None:
        self.block_size = drafters[0].block_size
        self.target_layer_ids = drafters[0].target_layer_ids
        self.drafters = drafters
        self.started = 0

    def new_memory(self, table: Any, stored_ids: Any = ()) -> Any:
        drafter = self.drafters[self.started % len(self.drafters)]
        self.started += 1
        return SequentialDraftRunner(drafter), drafter.new_state()

    def extend(self, memory: Any, committed_ids: Any, hidden: Any) -> None:
        runner, state = memory
        runner.extend(state, committed_ids, hidden)

    def propose(self, requests: Any) -> Any:
        return [one.memory[0].propose([replace(one, memory=one.memory[1])])[0] for one in requests]


def scripted(continuations: list[list[int]], *, block_size: int = 7, num_right: int = 99) -> ByPrompt:
    return ByPrompt(
        [
            ScriptedDrafter(prompt + continuation, block_size=block_size, num_right=num_right)
            for prompt, continuation in zip(PROMPTS, continuations, strict=True)
        ]
    )


def requests(**options: Any) -> list[Any]:
    return [request(prompt, str(i), **{"max_tokens": NUM_NEW} | options) for i, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize(("block_size", "length"), [(7, k) for k in range(8)] + [(3, 0), (3, 3), (5, 5)])
@pytest.mark.parametrize("num_right", [0, 2, 99])
def test_greedy_output_is_the_librarys_own_at_every_length(
    model, continuations, concurrency, block_size, length, num_right
):
    drafts = scripted(continuations, block_size=block_size, num_right=num_right)
    engine = make_engine(model, drafts, verify_length=length, max_running_requests=concurrency)
    outputs = run(engine, requests())
    for i, continuation in enumerate(continuations):
        assert ids_of(outputs[str(i)]) == continuation[:NUM_NEW]
        assert outputs[str(i)][-1].finish_reason == "length"
        assert outputs[str(i)][-1].num_output_tokens == NUM_NEW


@pytest.mark.parametrize("curve", [FLAT, STEEP, CostCurve((1, 8, 64), (1.0, 1.1, 3.0), buckets=(4, 8, 16, 32))])
@pytest.mark.parametrize("num_right", [0, 3, 99])
def test_greedy_output_is_the_librarys_own_with_the_scheduler_on(model, continuations, curve, num_right):
    engine = make_engine(model, scripted(continuations, num_right=num_right), curve=curve, probe_every=3)
    outputs = run(engine, requests())
    assert [ids_of(outputs[str(i)]) for i in range(len(PROMPTS))] == [c[:NUM_NEW] for c in continuations]


def test_a_long_prompt_is_read_in_pieces_beside_other_streams(model, continuations):
    engine = make_engine(model, scripted(continuations), max_batch_tokens=8)
    outputs = run(engine, requests())
    assert [ids_of(outputs[str(i)]) for i in range(len(PROMPTS))] == [c[:NUM_NEW] for c in continuations]
    assert engine.stats.prompt_tokens == sum(map(len, PROMPTS))


def test_mixed_lengths_in_one_step_do_not_disturb_each_other(model, continuations):
    engine = make_engine(model, scripted(continuations))
    mixed = [
        request(prompt, str(i), max_tokens=NUM_NEW - i, verify_length=(0, 2, 7, None)[i % 4])
        for i, prompt in enumerate(PROMPTS)
    ]
    outputs = run(engine, mixed)
    assert [ids_of(outputs[str(i)]) for i in range(len(PROMPTS))] == [
        c[: NUM_NEW - i] for i, c in enumerate(continuations)
    ]


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_output_is_never_longer_than_asked_and_nothing_is_drafted_for_nothing(model, continuations, max_tokens):
    drafts = scripted(continuations)
    engine = make_engine(model, drafts)
    outputs = run(engine, requests(max_tokens=max_tokens))
    for i, continuation in enumerate(continuations):
        assert ids_of(outputs[str(i)]) == continuation[:max_tokens]
        assert outputs[str(i)][-1].finish_reason == "length"
    asked = [length for drafter in drafts.drafters for length in drafter.proposed_lengths]
    assert all(0 < length <= max_tokens - 2 for length in asked)  # the prompt's token, and the target's own
    assert bool(asked) == (max_tokens > 2)


@pytest.mark.parametrize("position", range(1, 12))
def test_a_stop_token_anywhere_in_an_accepted_block_ends_the_output_there(model, continuations, position):
    stop_id = continuations[0][position]
    first = continuations[0].index(stop_id)
    engine = make_engine(model, scripted(continuations))
    outputs = run(engine, [request(PROMPTS[0], max_tokens=NUM_NEW, stop_ids=frozenset({stop_id, 319}))])["0"]
    assert ids_of(outputs) == continuations[0][: first + 1]
    assert outputs[-1].finish_reason == "stop"
    assert engine.stats.finished == {"stop": 1, "length": 0, "abort": 0}
    rounds = engine.stats.rounds
    assert rounds.committed_tokens + rounds.plain_committed_tokens == first  # the first came with the prompt
    assert engine.stats.output_tokens == first + 1


def test_perfect_drafts_are_accepted_whole_and_the_features_fit_their_positions(model, continuations):
    drafts = scripted(continuations)  # asserts that its anchor sits where its features end
    engine = make_engine(model, drafts)
    run(engine, requests(max_tokens=17))
    assert engine.stats.rounds.accepted_length == 8.0
    assert engine.stats.rounds.conditional_acceptance == [1.0] * 7
    states = [drafter.states[0] for drafter in drafts.drafters]
    assert all(state.hidden.shape[0] == state.num_tokens for state in states)


def test_drafters_are_given_the_features_that_the_target_has_alone(model, continuations, tiny_target):
    drafts = scripted(continuations, num_right=2)
    run(make_engine(model, drafts), requests(max_tokens=NUM_NEW))
    alone = load(tiny_target)
    for prompt, continuation, drafter in zip(PROMPTS, continuations, drafts.drafters, strict=True):
        (state,) = drafter.states
        with HiddenStateCapture(alone, (0,)) as capture, torch.no_grad():
            alone(torch.tensor([(prompt + continuation)[: state.num_tokens]]))
            expected = capture.hidden()[0]
        torch.testing.assert_close(state.hidden, expected, atol=1e-4, rtol=1e-4)


def test_prompt_lookup_is_lossless_too(model, continuations):
    engine = make_engine(model, NGramDraftRunner(NGramDrafter()))
    outputs = run(engine, requests())
    assert [ids_of(outputs[str(i)]) for i in range(len(PROMPTS))] == [c[:NUM_NEW] for c in continuations]


def test_without_a_drafter_it_decodes_plainly(model, continuations):
    engine = make_engine(model)
    outputs = run(engine, requests())
    assert [ids_of(outputs[str(i)]) for i in range(len(PROMPTS))] == [c[:NUM_NEW] for c in continuations]
    assert engine.stats.rounds.rounds == 0


def test_a_budget_that_never_pays_is_no_budget(model, continuations):
    """Verifying as dear as decoding, a drafter that is always right: nothing is verified (B22)."""
    drafts = scripted(continuations)
    dear = CostCurve((1, 256), (1.0, 1024.0))
    engine = make_engine(model, drafts, curve=dear, probe_every=10_000)
    run(engine, requests())
    assert engine.stats.scheduled_tokens == 0
    free = make_engine(model, scripted(continuations), curve=FLAT)
    run(free, requests())
    assert free.stats.scheduled_tokens > 0


def test_a_drafter_that_fails_is_left_alone_but_tried_again(model, continuations):
    wrong = scripted(continuations, num_right=0)
    curve = CostCurve((1, 256), (1.0, 8.0))
    engine = make_engine(model, wrong, curve=curve, probe_every=6)
    run(engine, requests(max_tokens=200))
    share = engine.stats.drafted / engine.stats.decodes
    assert 0 < share < 0.5
    tried = [len(drafter.proposed_lengths) for drafter in wrong.drafters]
    assert all(times >= 2 for times in tried)


@pytest.mark.parametrize("settings", [{"curve": FLAT}, {"verify_length": 3}], ids=["by curve", "fixed"])
def test_a_share_bounds_every_step(model, continuations, settings):
    engine = make_engine(model, scripted(continuations), **settings)
    engine.policy.share = Share(max_drafted=3, capacity=5)
    for one in requests():
        engine.add(one)
    while engine.has_work:
        verified, drafted = engine.stats.scheduled_tokens, engine.stats.drafted
        engine.step()
        assert engine.stats.scheduled_tokens - verified <= 5
        assert engine.stats.drafted - drafted <= 3
    assert engine.stats.scheduled_tokens > 0


def test_an_aborted_request_gives_everything_back_and_others_go_on(model, continuations):
    engine = make_engine(model, scripted(continuations), max_running_requests=4)
    for one in requests():
        engine.add(one)
    outputs: dict[str, list[int]] = {}
    for number in range(200):
        if number == 2:
            engine.abort("1")  # running
            engine.abort("7")  # waiting
            engine.abort("nobody")
        for output in engine.step():
            outputs.setdefault(output.request_id, []).extend(output.token_ids)
        engine.check()
        if not engine.has_work:
            break
    assert engine.num_free_pages == engine.num_pages
    assert engine.stats.finished["abort"] == 1
    for i in (0, 2, 3, 4, 5, 6):
        assert outputs[str(i)] == continuations[i][:NUM_NEW]
    assert "7" not in outputs


def test_a_small_memory_makes_requests_wait_and_not_fail(model, continuations):
    engine = make_engine(model, NGramDraftRunner(NGramDrafter()), kv_tokens=160)
    for one in requests():
        engine.add(one)
    outputs: dict[str, list[int]] = {}
    num_waiting = []
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).extend(output.token_ids)
        num_waiting.append(engine.num_waiting)
    assert num_waiting[0] > 0
    assert [outputs[str(i)] for i in range(len(PROMPTS))] == [c[:NUM_NEW] for c in continuations]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": []}, "the prompt is empty"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 600}, "over the context of 512"),
        ({"verify_length": 8}, "outside of the drafter's block; use 0..7"),
    ],
)
def test_what_can_never_run_is_refused_and_the_next_request_works(model, continuations, options, message):
    engine = make_engine(model, scripted(continuations))
    prompt = options.pop("prompt", PROMPTS[0])
    with pytest.raises(ValueError, match=message):
        engine.add(request(prompt, **options))
    assert ids_of(run(engine, [request(PROMPTS[0], max_tokens=5)])["0"]) == continuations[0][:5]


def test_an_id_in_use_and_a_request_over_the_memory_are_refused(model, continuations):
    engine = make_engine(model, scripted(continuations), kv_tokens=64)
    engine.add(request(PROMPTS[0], max_tokens=10))
    with pytest.raises(ValueError, match="'0' is in use"):
        engine.add(request(PROMPTS[0], max_tokens=10))
    with pytest.raises(ValueError, match="raise kv_tokens"):
        engine.add(request(PROMPTS[0], "1", max_tokens=100))


def test_a_scheduler_without_a_curve_is_refused(model, continuations):
    with pytest.raises(ValueError, match="the scheduler needs a cost curve"):
        make_engine(model, scripted(continuations), verify_length=None)
    with pytest.raises(ValueError, match=r"use 0\.\.7"):
        make_engine(model, scripted(continuations), verify_length=9)


SAMPLED = [
    SamplingParams(temperature=t, top_p=p, seeded="rejection")
    for t, p in ((0.0, 1.0), (0.3, 1.0), (0.8, 0.9), (1.0, 1.0))
]


@pytest.mark.parametrize("length", [0, 2, 4])
def test_a_seeded_request_is_its_own_solo_run_at_a_fixed_length(model, length):
    probs = torch.softmax(torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(3)), -1)

    def outputs(chosen: list[int]) -> dict[str, list[int]]:
        drafts = SequentialDraftRunner(FixedDistributionDrafter(probs, block_size=4))
        engine = make_engine(model, drafts, verify_length=length)
        asked = [request(PROMPTS[i], str(i), sampling=SAMPLED[i % 4], seed=100 + i, max_tokens=12) for i in chosen]
        return {name: ids_of(found) for name, found in run(engine, asked).items()}

    together = outputs(list(range(8)))
    for i in range(8):
        assert outputs([i])[str(i)] == together[str(i)]


def test_seeds_decide_sampled_output_and_none_draws_anew(model):
    def output(seed: int | None) -> list[int]:
        engine = make_engine(model)
        sampling = SamplingParams(temperature=1.0)
        return ids_of(run(engine, [request(PROMPTS[0], sampling=sampling, seed=seed)])["0"])

    assert output(42) == output(42)
    assert output(42) != output(43)
    assert output(None) != output(None)
