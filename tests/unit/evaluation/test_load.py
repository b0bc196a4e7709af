"""A closed loop on a real engine: tokens by usage, places kept full, figures by hand."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark.config import build_config
from dspark.data.prompts import Prompt
from dspark.engine.config import EngineConfig
from dspark.engine.draft_runner import SequentialDraftRunner
from dspark.engine.engine import Engine
from dspark.engine.request import GenerationRequest
from dspark.engine.sampling import SamplingParams
from dspark.engine.target_runner import TargetRunner
from dspark.evaluation.config import EvaluationMode
from dspark.evaluation.load import EngineLoad, closed_loop
from dspark.evaluation.load_config import BenchmarkConfig
from dspark.evaluation.load_run import Answer, LoadRun
from dspark.speculation.statistics import AcceptanceCounts
from dspark.targets import TargetConfig, load_target
from scripted_drafters import ScriptedDrafter
from tiny_drafter import make_tiny_drafter

GREEDY = EvaluationMode(name="greedy")
MAX_TOKENS = 13


class Clock:
    """One second later at every look; calls `look` each time."""

    def __init__(self, look: Callable[[], None] = lambda: None) -> None:
        self.now = 0.0
        self._look = look

    def __call__(self) -> float:
        self._look()
        self.now += 1.0
        return self.now


@pytest.fixture
def make_engine(tiny_target: Path) -> Callable[..., Engine]:
    def make(drafts: Any = None, *, verify_length: int | None = None) -> Engine:
        model: Any = load_target(TargetConfig(name=str(tiny_target), dtype="float32", device="cpu"))
        layer_ids = () if drafts is None else drafts.target_layer_ids
        runner = TargetRunner(model, vocabulary_size=320, layer_ids=layer_ids, num_pages=64, page_size=8)
        config = EngineConfig(page_size=8, kv_tokens=512, verify_length=verify_length)
        return Engine(runner, drafts, None, config=config)

    return make


def requests_of(lengths: Sequence[int], *, max_tokens: int = MAX_TOKENS) -> list[GenerationRequest]:
    """Requests without stop tokens: each answers with exactly `max_tokens` tokens."""
    greedy = SamplingParams(temperature=0)
    prompts = [tuple(range(20 + n, 20 + n + length)) for n, length in enumerate(lengths)]
    return [GenerationRequest(str(n), ids, greedy, max_tokens, frozenset()) for n, ids in enumerate(prompts)]


def test_the_loop_answers_as_one_request_at_a_time_would(make_engine):
    requests = requests_of([3, 5, 4, 6, 3])
    together = closed_loop(make_engine(), requests, concurrency=3)
    alone = [closed_loop(make_engine(), [request], concurrency=1).answers[0] for request in requests]
    assert [answer.output_ids for answer in together.answers] == [answer.output_ids for answer in alone]
    assert together.num_tokens == 5 * MAX_TOKENS
    assert {answer.finish_reason for answer in together.answers} == {"length"}


def test_all_places_are_taken_while_requests_wait_and_never_more(make_engine):
    engine = make_engine()
    seen = []
    clock = Clock(lambda: seen.append(engine.num_running + engine.num_waiting))
    closed_loop(engine, requests_of([3] * 7), concurrency=3, clock=clock)
    assert max(seen) == 3
    assert not engine.has_work


def test_throughput_is_tokens_by_usage_and_not_steps(make_engine):
    request = requests_of([4])[0]
    plain = closed_loop(make_engine(), [request], concurrency=1, clock=Clock())
    sequence = [*request.prompt_ids, *plain.answers[0].output_ids]
    drafts = SequentialDraftRunner(ScriptedDrafter(sequence, block_size=3, num_right=3))
    fast = closed_loop(make_engine(drafts, verify_length=3), [request], concurrency=1, clock=Clock())
    assert fast.answers[0].output_ids == plain.answers[0].output_ids
    # the prompt's token and 12 more; four a step when three drafts stand. A look at the clock more for the request.
    assert (len(plain.answers[0].arrived_s), len(fast.answers[0].arrived_s)) == (13, 4)
    assert (plain.seconds, fast.seconds) == (14.0, 5.0)
    assert (plain.tokens_per_s, fast.tokens_per_s) == (13 / 14, 13 / 5)


def test_figures_of_speculation_come_from_its_rounds(make_engine):
    request = requests_of([4])[0]
    output = closed_loop(make_engine(), [request], concurrency=1).answers[0].output_ids
    drafts = SequentialDraftRunner(ScriptedDrafter([*request.prompt_ids, *output], block_size=3, num_right=1))
    figures = closed_loop(make_engine(drafts, verify_length=2), [request], concurrency=1).figures()
    # 12 tokens after the prompt's: six rounds of two drafts, of which one stands; the last has room for one draft only
    assert figures["accepted_length"] == 2.0
    assert figures["verify_length"] == pytest.approx(11 / 6)
    assert figures["acceptance"] == pytest.approx(6 / 11)
    assert (figures["drafted_share"], figures["round_tokens"]) == (1.0, 2.0)


def test_a_plain_run_has_rounds_without_drafts(make_engine):
    figures = closed_loop(make_engine(), requests_of([3]), concurrency=1).figures()
    assert (figures["verify_length"], figures["drafted_share"], figures["round_tokens"]) == (0.0, 0.0, 1.0)
    assert figures["accepted_length"] is None
    assert figures["acceptance"] is None


def test_full_load_ends_when_a_place_stays_empty(make_engine):
    run = closed_loop(make_engine(), requests_of([3, 3, 3], max_tokens=4), concurrency=2, clock=Clock())
    # two side by side for four steps, then the third alone for four
    assert run.full_load_tokens == 8
    assert run.num_tokens == 12
    assert run.full_load_s < run.seconds
    assert run.full_load_tokens_per_s == pytest.approx(8 / run.full_load_s)


def test_fewer_requests_than_places_are_no_full_load(make_engine):
    assert closed_loop(make_engine(), requests_of([3]), concurrency=2).full_load_tokens_per_s is None


def test_figures_against_hand_calculation():
    answers = [
        Answer(sent_s=0.0, arrived_s=[1.0, 2.0, 4.0], num_tokens=7, finish_reason="stop"),
        Answer(sent_s=1.0, arrived_s=[4.0], num_tokens=1, finish_reason="length"),
    ]
    figures = LoadRun(answers, seconds=4.0).figures()
    assert (figures["requests"], figures["output_tokens"], figures["tokens_per_s"]) == (2, 8, 2.0)
    assert figures["first_token_ms"]["p50"] == 2000.0  # of 1 s and 3 s
    quantiles = {f"p{q}": pytest.approx(1000 * np.quantile([1, 2], q / 100)) for q in (50, 90, 99)}
    assert figures["gap_ms"] == {"mean": 1500.0} | quantiles
    assert figures["request_ms"]["p50"] == 3500.0  # of 4 s and 3 s
    assert figures["user_tokens_per_s"]["mean"] == pytest.approx((7 / 4 + 1 / 3) / 2)
    assert figures["user_tokens_per_s"]["p10"] < figures["user_tokens_per_s"]["p50"]
    assert figures["token_ms"]["p50"] == 500.0  # three seconds for six tokens; one token alone says nothing
    assert figures["finished"] == {"stop": 1, "length": 1}
    assert figures["full_load_tokens_per_s"] is None
    assert figures["verify_length"] is None


def test_a_run_whose_rounds_are_told_says_how_much_was_drafted():
    counts = AcceptanceCounts()
    counts.add_round(4, 3, 4)
    counts.add_round(0, 0, 1)
    run = LoadRun([Answer(0.0, [1.0], 5)], 1.0, counts=counts, num_decodes=2, num_drafted=1)
    figures = run.figures()
    assert (figures["accepted_length"], figures["acceptance"]) == (4.0, 0.75)
    assert (figures["verify_length"], figures["drafted_share"], figures["round_tokens"]) == (2.0, 0.5, 2.5)


@pytest.fixture
def config(tiny_target: Path, tmp_path: Path) -> BenchmarkConfig:
    content = {
        "drafter": str(make_tiny_drafter(tmp_path / "drafter", tiny_target)),
        "output": str(tmp_path / "benchmark"),
        "prompts": [{"path": "p.jsonl"}],
        "concurrency": [1, 2],
        "max_tokens": 12,
        "engine": {"kv_tokens": 512, "page_size": 8, "max_running_requests": 2},
        "threads": 1,
    }
    return build_config(BenchmarkConfig, content)


def prompt(name: str, text: str = "hello") -> Prompt:
    return Prompt(name, "math", "heldout", [{"role": "user", "content": text}])


PROMPTS = [prompt("a"), prompt("b", "a question"), prompt("c", "the number")]


def test_both_sides_answer_the_same_and_only_one_drafts(config):
    load = EngineLoad(config, PROMPTS)
    assert any("no cost curve" in note for note in load.notes)
    options = {"concurrency": 2, "num_requests": 4, "max_tokens": 12}
    plain, fast = (load.run(side, GREEDY, **options) for side in ("plain", "speculative"))
    assert [a.output_ids for a in plain.answers] == [a.output_ids for a in fast.answers]
    assert plain.answers[3].output_ids == plain.answers[0].output_ids  # three prompts: the first comes again
    assert plain.num_drafted == 0
    assert 0 < fast.num_drafted <= fast.num_decodes


def test_sampled_runs_can_be_repeated(config):
    load = EngineLoad(config, PROMPTS)
    mode = EvaluationMode(name="sampled", temperature=1.0)
    options = {"concurrency": 1, "num_requests": 4, "max_tokens": 12}
    first, second = (load.run("plain", mode, **options) for _ in range(2))
    assert [a.output_ids for a in first.answers] == [a.output_ids for a in second.answers]
    assert first.answers[3].output_ids != first.answers[0].output_ids  # the same prompt, another seed


def test_prompts_that_do_not_fit_are_left_out_and_counted(config):
    load = EngineLoad(config, [*PROMPTS, prompt("long", "a question " * 300)])
    assert "1 of 4 prompts are too long: left out" in load.notes
    with pytest.raises(ValueError, match=r"no prompt and max_tokens \(12\) fit"):
        EngineLoad(config, [prompt("long", "a question " * 300)])


def test_too_little_memory_for_all_places_is_refused_before_anything_is_measured(config):
    engine = config.engine.with_changes(kv_tokens=40)
    with pytest.raises(ValueError, match=r"raise engine\.kv_tokens"):
        EngineLoad(config.with_changes(engine=engine), PROMPTS)


def test_more_places_need_more_requests(config):
    config = config.with_changes(min_requests=4, requests_per_place=2)
    assert [config.num_requests(concurrency) for concurrency in (1, 2, 16)] == [4, 4, 32]


SERVER = {"endpoints": {"ours": {"base_url": "http://x/v1"}}, "output": "o", "prompts": [{"path": "p.jsonl"}]}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"endpoints": {}}, "give a drafter"),
        ({"drafter": "d"}, "or the endpoints"),
        ({"threads": 1}, "have their own threads"),
        ({"concurrency": []}, "there is no load"),
        ({"request_rates": [0.0]}, "each rate once"),
        ({"endpoints": {"ours": {"base_url": "x:80"}}}, "must start with http"),
        ({"endpoints": {"ours": {"base_url": "http://x", "body": {"model": "m"}}}}, "body holds model"),
        ({"endpoints": {}, "drafter": "d", "request_rates": [1.0]}, "request_rates are for endpoints"),
        ({"endpoints": {}, "drafter": "d", "concurrency": [], "request_rates": [1.0]}, "request_rates are for endp"),
        ({"endpoints": {}, "drafter": "ngram"}, "needs a target"),
        ({"endpoints": {}, "drafter": "d", "concurrency": [64]}, "max_running_requests"),
        ({"concurrency": [1, 1]}, "each number once"),
        ({"modes": []}, "one name each"),
        ({"prompts": []}, "prompts"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(change, reason):
    build_config(BenchmarkConfig, SERVER)
    build_config(BenchmarkConfig, SERVER | {"concurrency": [], "request_rates": [1.0]})
    with pytest.raises(ValueError, match=reason):
        build_config(BenchmarkConfig, SERVER | change)
