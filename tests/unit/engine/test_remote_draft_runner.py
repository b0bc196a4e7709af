"""Drafting elsewhere: the same proposals as beside the target, and no harm done by whatever befalls the link."""

import gc
import logging
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from draft_pool import DirectLink, Fate, Ticks, make_server, remote_runner
from dspark.attention.page_pool import PageTable
from dspark.drafters.checkpoint import load_drafter
from dspark.engine.draft_messages import DraftAnswer, DraftMessage, DraftUnavailable
from dspark.engine.draft_runner import DraftRunner
from dspark.engine.draws import Draws
from dspark.engine.loading import paged_runner
from dspark.engine.remote_draft_runner import RemoteDraftRunner
from dspark.engine.remote_draft_state import MOST_CLOSED
from dspark.engine.sampling import SamplingParams
from dspark.engine.step import StepOutput
from dspark.speculation.cost_curve import CostCurve
from random_drafter import random_drafter
from tiny_drafter import learn_by_heart, make_tiny_drafter
from tiny_engine import PROMPTS, greedy_continuations, ids_of, load, make_engine, request, run
from toy_sampling import misfit, sample_outputs, toy_target

NUM_NEW = 16
LONG = [(7 * k) % 300 for k in range(150)]
KINDS: dict[str, dict[str, Any]] = {
    "dspark": {},
    "dflash": {"architecture": "dflash", "markov_rank": 0, "confidence_head": False},
    "sliding": {"sliding_window": 6},
    "eagle3": {"architecture": "eagle3", "draft_vocab_size": 200},
    "mtp_one_module": {"architecture": "mtp", "layer_ids": (4,), "hidden_state": "before_norm"},
    "mtp_modules": {"architecture": "mtp", "layer_ids": (5,), "num_modules": 4},
}


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> Any:
    return load(tiny_target)


@pytest.fixture(scope="module")
def continuations(tiny_target: Path) -> list[list[int]]:
    return greedy_continuations(load(tiny_target), PROMPTS, NUM_NEW)


@pytest.fixture(scope="module")
def long_answer(tiny_target: Path) -> list[int]:
    return greedy_continuations(load(tiny_target), [LONG], NUM_NEW)[0]


def made(kind: str, folder: Path, target: Path) -> Any:
    return load_drafter(make_tiny_drafter(folder, target, **KINDS[kind]))


@pytest.fixture(scope="module", params=KINDS)
def drafter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Any:
    return made(request.param, tmp_path_factory.mktemp("drafter"), tiny_target)


@pytest.fixture(scope="module")
def dspark(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, continuations: list[list[int]]) -> Any:
    """One that knows an answer, so that proposals are accepted."""
    folder = make_tiny_drafter(tmp_path_factory.mktemp("learnt"), tiny_target)
    drafter = load_drafter(folder, trainable=True)
    learn_by_heart(drafter, load(tiny_target), PROMPTS[0], continuations[0], steps=60)
    return drafter.eval().requires_grad_(False)


def outputs_of(model: Any, drafts: DraftRunner, *, prompts: Any = PROMPTS, **options: Any) -> list[list[StepOutput]]:
    settings = {name: options.pop(name) for name in ("max_running_requests", "kv_tokens", "curve") if name in options}
    engine = make_engine(model, drafts, **settings)
    options = {"max_tokens": NUM_NEW} | options
    outputs = run(engine, [request(p, str(i), **options) for i, p in enumerate(prompts)])
    return [outputs[str(i)] for i in range(len(prompts))]


def rounds_of(outputs: list[list[StepOutput]]) -> list[list[Any]]:
    return [[(o.round.num_proposed, o.round.num_accepted) for o in one if o.round is not None] for one in outputs]


def local(drafter: Any) -> DraftRunner:
    return paged_runner(drafter, num_pages=512, page_size=4)


def test_rounds_are_those_of_a_drafter_beside_the_target(model, drafter, continuations):
    link = DirectLink(lambda: make_server(drafter))
    found = outputs_of(model, remote_runner(drafter, link))
    twin = outputs_of(model, local(drafter))
    assert [ids_of(one) for one in found] == continuations
    assert rounds_of(found) == rounds_of(twin)
    assert sum(proposed for one in rounds_of(found) for proposed, _ in one) > 100
    assert link.server.num_contexts == 0
    assert link.server.pool.num_free == link.server.pool.num_pages
    link.server.check()


@pytest.mark.parametrize("seeded", ["invariant", "rejection"])
def test_where_all_tokens_travel_sampled_rounds_are_the_same_too(model, drafter, seeded):
    options: dict[str, Any] = {"sampling": SamplingParams(temperature=0.8, seeded=seeded), "seed": 5}
    link = DirectLink(lambda: make_server(drafter))
    found = outputs_of(model, remote_runner(drafter, link, top_k=320), **options)
    twin = outputs_of(model, local(drafter), **options)
    assert [ids_of(one) for one in found] == [ids_of(one) for one in twin]
    assert rounds_of(found) == rounds_of(twin)


def sparse_misfit(num: int) -> tuple[float, int]:
    """(p of the fit, draws) of what is sampled with proposals from the three most likely of eight tokens."""
    model, sampling = toy_target(), SamplingParams(temperature=2.0, seeded="rejection")
    drafter = random_drafter(vocab_size=8, mask_token_id=7, target_layer_ids=(0,), num_target_layers=2)
    drafter = drafter.eval().requires_grad_(False)
    runner = remote_runner(drafter, DirectLink(lambda: make_server(drafter)), top_k=3)
    engine = make_engine(model, runner, max_running_requests=8, page_size=4)
    outputs = sample_outputs(model, engine, sampling, num=num, max_tokens=40)
    assert 0.2 < engine.stats.rounds.conditional_acceptance[0] < 0.6
    return misfit(model, outputs, sampling)


def test_what_sparse_proposals_are_verified_to_follows_the_target():
    p, num_draws = sparse_misfit(100)
    assert num_draws == 4_000
    assert p > 0.001


def test_the_fit_notices_probabilities_that_were_not_drawn_from(monkeypatch):
    """Those of the whole vocabulary, in place of what is left when it is cut to the most likely tokens."""
    sample = Draws._sample

    def dense(self: Draws, logits: torch.Tensor) -> torch.Tensor:
        drawn = sample(self, logits)
        self._probs[-1] = torch.softmax(logits / self._scales, dim=-1).gather(1, self._likely[-1])
        return drawn

    monkeypatch.setattr(Draws, "_sample", dense)
    assert sparse_misfit(60)[0] < 1e-4


def test_a_long_prompt_goes_ahead_and_is_drafted_for_when_it_is_there(model, dspark):
    runner = remote_runner(dspark, DirectLink(lambda: make_server(dspark)))
    link: Any = runner._link
    (found,) = outputs_of(model, runner, prompts=[LONG])
    (twin,) = outputs_of(model, local(dspark), prompts=[LONG])
    assert ids_of(found) == ids_of(twin)
    first, *rest = [one.num_proposed for one in (output.round for output in found) if one is not None]
    assert first > 0, "the prompt was sent as it was read, and was there before the first decode"
    assert all(n > 0 for n in rest[:-1])
    assert [len(message.asks) for message in link.messages][:3] == [0, 0, 1], "the first one opens the way"
    assert [message.features.shape[0] for message in link.messages][:2] == [0, len(LONG)]
    assert max(message.features.shape[0] for message in link.messages[2:]) <= 5


FATES: list[tuple[Fate, int]] = [(fate, n) for fate in ("lost", "unanswered", "restart") for n in (0, 1, 4, 9)]


@pytest.mark.parametrize(("fate", "place"), FATES)
def test_a_message_that_goes_wrong_anywhere_changes_no_output_and_drafting_goes_on(
    model, dspark, continuations, long_answer, fate, place
):
    prompts = [*PROMPTS[:4], LONG]
    link = DirectLink(lambda: make_server(dspark), lambda n: fate if n == place else "arrives")
    runner = remote_runner(dspark, link)
    engine = make_engine(model, runner)
    outputs = run(engine, [request(p, str(i), max_tokens=NUM_NEW) for i, p in enumerate(prompts)])
    assert [ids_of(outputs[str(i)]) for i in range(5)] == [*continuations[:4], long_answer]
    assert any(message.asks for message in link.messages[place + 1 :])
    assert runner.stats.is_up
    assert runner.stats.failures == (fate != "restart")
    assert link.server.stats.drafted > 0
    run(engine, [request(PROMPTS[4], "later", max_tokens=60)])  # what could not be said while the link was down
    assert link.server.num_contexts == 0
    link.server.check()


def test_a_link_that_is_cut_for_good_leaves_plain_decoding(model, dspark, continuations, caplog):
    link = DirectLink(lambda: make_server(dspark), lambda n: "lost")
    runner = remote_runner(dspark, link)
    with caplog.at_level(logging.WARNING):
        outputs = outputs_of(model, runner)
    assert [ids_of(one) for one in outputs] == continuations
    assert sum(proposed for one in rounds_of(outputs) for proposed, _ in one) == 0
    assert len([r for r in caplog.records if "decoding plainly" in r.message]) == 1
    assert not runner.stats.is_up
    assert 1 <= runner.stats.failures <= 6, "each pause is twice the one before"


def test_contexts_are_rebuilt_after_an_outage_longer_than_many_steps(model, dspark, continuations):
    """Down while the prompts are read and for some time after; then nothing is known of what was committed."""
    link = DirectLink(lambda: make_server(dspark), lambda n: "lost" if n < 3 else "restart" if n == 3 else "arrives")
    runner = remote_runner(dspark, link)
    engine = make_engine(model, runner)
    options: dict[str, Any] = {"max_tokens": 60}
    outputs = run(engine, [request(PROMPTS[0], "0", **options), request(LONG, "1", **options)])
    assert ids_of(outputs["0"])[:NUM_NEW] == continuations[0]
    drafted = [one.round.num_proposed for one in outputs["1"] if one.round is not None]
    assert drafted[0] == 0
    assert drafted[-5] > 0
    assert engine.stats.rounds.accepted_tokens > 0


def test_a_step_waits_no_longer_than_the_deadline_and_seldom(model, dspark, continuations):
    link = DirectLink(lambda: make_server(dspark), lambda n: "silent")
    runner = remote_runner(dspark, link, deadline_s=0.02)
    outputs = outputs_of(model, runner, prompts=PROMPTS[:2])
    assert [ids_of(one) for one in outputs] == continuations[:2]
    assert link.waits_s == [0.02] * runner.stats.failures
    assert 1 <= runner.stats.failures < NUM_NEW / 2


def test_the_deadline_follows_from_what_drafting_costs(dspark):
    runner = remote_runner(dspark, DirectLink(lambda: make_server(dspark)), slack_s=0.01)
    assert runner.deadline_s(4) == 0.25
    runner.curve = CostCurve((1, 8), (0.01, 0.02), (1, 8), (0.002, 0.009))
    assert runner.deadline_s(1) == pytest.approx(0.016)
    assert runner.deadline_s(8) == pytest.approx(0.037)
    fixed = remote_runner(dspark, DirectLink(lambda: make_server(dspark)), deadline_s=0.1)
    fixed.curve = runner.curve
    assert fixed.deadline_s(8) == 0.1


def test_a_drafter_of_another_target_is_refused_in_words_and_nothing_is_drafted(model, dspark, continuations, caplog):
    link = DirectLink(lambda: make_server(dspark))
    runner = remote_runner(dspark, link, identity="another target")
    with caplog.at_level(logging.WARNING):
        outputs = outputs_of(model, runner)
    assert [ids_of(one) for one in outputs] == continuations
    assert link.server.stats.drafted == 0
    assert any("give both the same target and drafter folder" in record.message for record in caplog.records)


def test_without_room_there_requests_decode_plainly_until_there_is(model, dspark, continuations):
    link = DirectLink(lambda: make_server(dspark, max_contexts=2))
    runner = remote_runner(dspark, link)
    outputs = outputs_of(model, runner)
    assert [ids_of(one) for one in outputs] == continuations
    assert runner.stats.refused > 0
    assert runner.stats.is_up
    drafted = [sum(proposed for proposed, _ in one) > 0 for one in rounds_of(outputs)]
    assert 2 <= sum(drafted) < len(PROMPTS)


def test_shared_pages_bring_their_features(model, dspark):
    """The second request reads the end of its prompt only; what is drafted for it is drafted on all of it."""

    def rounds(drafts: DraftRunner) -> tuple[list[list[Any]], int]:
        engine = make_engine(model, drafts)
        first = run(engine, [request(LONG, "0", max_tokens=NUM_NEW)])["0"]
        again = run(engine, [request([*LONG, *ids_of(first), 17], "1", max_tokens=NUM_NEW)])["1"]
        return rounds_of([again]), engine.stats.prefix_cache_hits

    link = DirectLink(lambda: make_server(dspark))
    found, hits = rounds(remote_runner(dspark, link))
    twin, _ = rounds(local(dspark))
    assert hits >= len(LONG)
    assert [accepted for _, accepted in found[0]] == [accepted for _, accepted in twin[0]]
    assert sum(message.features.shape[0] for message in link.messages) > 2 * len(LONG)


def test_a_preempted_request_gets_its_context_again(model, dspark, continuations):
    link = DirectLink(lambda: make_server(dspark))
    engine = make_engine(model, remote_runner(dspark, link), kv_tokens=112)
    outputs = run(engine, [request(p, str(i), max_tokens=NUM_NEW) for i, p in enumerate(PROMPTS)])
    assert [ids_of(outputs[str(i)]) for i in range(len(PROMPTS))] == continuations
    assert engine.stats.preemptions > 0
    assert link.server.num_contexts == 0
    assert link.server.pool.num_free == link.server.pool.num_pages


def test_an_aborted_request_is_forgotten_there(model, dspark):
    link = DirectLink(lambda: make_server(dspark))
    runner: RemoteDraftRunner = remote_runner(dspark, link)
    engine = make_engine(model, runner)
    engine.add(request(PROMPTS[0], max_tokens=200))
    for _ in range(4):
        engine.step()
    assert link.server.num_contexts == 1
    engine.abort("0")
    assert link.server.num_contexts == 0
    assert torch.is_tensor(runner._nothing.token_ids)


def test_the_last_request_is_forgotten_there_whatever_else_is_on_its_way(model, dspark):
    """No further request may ever come here to say so: another replica may get them all."""
    link = DirectLink(lambda: make_server(dspark), lambda n: "silent" if n == 0 else "arrives")  # the way's opening
    engine = make_engine(model, remote_runner(dspark, link))
    run(engine, [request(PROMPTS[0], max_tokens=12)])
    assert not link.messages[0].parts
    assert engine.stats.drafted > 0
    assert link.server.num_contexts == 0


class Hanging:
    """A link on which nothing comes back until the test says what."""

    def __init__(self) -> None:
        self.messages: list[DraftMessage] = []
        self.answers: list[Future[DraftAnswer]] = []

    def post(self, message: DraftMessage) -> "Future[DraftAnswer]":
        self.messages.append(message)
        self.answers.append(Future())
        return self.answers[-1]


@pytest.mark.parametrize("is_lost", [False, True], ids=["answered", "lost"])
def test_what_is_closed_is_said_by_one_message_at_a_time_and_all_of_it_in_the_end(dspark, is_lost):
    """One request after the other, each the last one, over a link that hangs."""
    link = Hanging()
    runner = remote_runner(dspark, link)

    def come_back() -> None:
        if is_lost:
            link.answers[-1].set_exception(DraftUnavailable("the link is cut"))
        else:
            link.answers[-1].set_result(DraftAnswer(()))

    for _ in range(2000):
        runner.new_memory(PageTable([], 4))  # and gone
    assert [message.closed for message in link.messages] == [(), (0,)]
    assert len(runner._ahead) == 2
    come_back()
    assert len(link.messages) == 3
    assert set(link.messages[-1].closed) >= set(range(1, 2000))
    come_back()
    assert len(link.messages) == 3, "nothing was closed meanwhile"
    open_still = runner.new_memory(PageTable([], 4))
    runner.new_memory(PageTable([], 4))
    assert len(link.messages) == 3, "what the next step sends says it"
    del open_still
    assert set(link.messages[-1].closed) >= {2000, 2001}
    assert len(link.messages[-1].closed) == (2002 if is_lost else 2)
    assert len(runner._ahead) == 2


def test_a_link_that_is_down_for_long_makes_no_message_longer_and_longer(dspark):
    link = Hanging()
    runner = remote_runner(dspark, link)
    for _ in range(MOST_CLOSED + 100):
        runner.new_memory(PageTable([], 4))
    link.answers[-1].set_result(DraftAnswer(()))
    assert link.messages[-1].closed == tuple(range(100, MOST_CLOSED + 100))


def test_a_link_that_failed_keeps_no_request_alive(model, dspark):
    """An exception that an answer holds remembers the frames it was raised through, and what was asked for in them."""
    link = DirectLink(lambda: make_server(dspark), lambda n: "lost" if n in (2, 4) else "arrives")
    engine = make_engine(model, remote_runner(dspark, link, clock=Ticks(5.0)))
    gc.collect()
    gc.disable()
    try:
        run(engine, [request(PROMPTS[i], str(i), max_tokens=24) for i in range(3)])
        assert engine._drafts.stats.failures == 2
        assert engine.stats.drafted > 0
        assert link.server.num_contexts == 0
    finally:
        gc.enable()
