"""Penalties, biases, bans and logprobs through the engine: with and without speculation what they are by hand."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.drafters.checkpoint import load_drafter
from dspark.engine.draft_runner import DraftRunner, SequentialDraftRunner
from dspark.engine.loading import paged_runner
from dspark.engine.lookup import LookupConfig
from dspark.engine.sampling import SamplingParams
from plain_sampling import decode_plainly, ruled_row
from scripted_drafters import FixedDistributionDrafter, ScriptedDrafter
from tiny_drafter import make_tiny_drafter
from tiny_engine import PROMPTS, ids_of, load, make_engine, request, run
from toy_sampling import FAR, PROMPT, misfit, sample_outputs, toy_target

NUM_NEW = 16
LOOKUP = LookupConfig(block_size=5, min_match=1, max_match=3)


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> Any:
    return load(tiny_target)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Any:
    return load_drafter(make_tiny_drafter(tmp_path_factory.mktemp("drafter"), tiny_target))


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, **options)


def ways(drafter: Any) -> list[tuple[DraftRunner | None, dict[str, Any]]]:
    """Without a drafter; with one at several lengths; with copies of the text before it."""

    def drafts() -> DraftRunner:
        return paged_runner(drafter, num_pages=512, page_size=4)

    lengths: list[tuple[DraftRunner | None, dict[str, Any]]] = [(drafts(), {"verify_length": n}) for n in (1, 2, 4)]
    return [(None, {}), *lengths, (drafts(), {"lookup": LOOKUP})]


def outputs_of(model: Any, drafts: DraftRunner | None, requests: Sequence[Any], **settings: Any) -> list[list[int]]:
    outputs = run(make_engine(model, drafts, **settings), requests)
    return [ids_of(outputs[one.request_id]) for one in requests]


LIBRARY: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.8},
    {"sequence_bias": {(40,): 5.0, (9,): -20.0, (151,): 3.0}},
    {"repetition_penalty": 1.3, "min_new_tokens": 9, "sequence_bias": {(2,): 8.0}},
    {"suppress_tokens": [40, 77, 130, 200, 201]},
]


def ours(options: dict[str, Any]) -> SamplingParams:
    names = {"min_new_tokens": "min_tokens", "suppress_tokens": "banned_token_ids"}
    fields = {names.get(name, name): value for name, value in options.items() if name != "sequence_bias"}
    bias = {token_id: value for (token_id,), value in options.get("sequence_bias", {}).items()}
    return greedy(**fields, logit_bias=bias)


@pytest.fixture(scope="module")
def librarys(tiny_target: Path) -> list[list[list[int]]]:
    """The library's own greedy output with its own logits processors."""
    model = load(tiny_target)
    return [
        [
            model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                max_new_tokens=NUM_NEW,
                eos_token_id=[2, 17],
                pad_token_id=2,
                **options,
            )[0, len(prompt) :].tolist()
            for prompt in PROMPTS[:4]
        ]
        for options in LIBRARY
    ]


def test_greedy_output_is_that_of_the_librarys_logits_processors(model: Any, drafter: Any, librarys: Any):
    requests = [
        request(prompt, f"{n} {i}", sampling=ours(options), max_tokens=NUM_NEW, stop_ids=frozenset({2, 17}))
        for n, options in enumerate(LIBRARY)
        for i, prompt in enumerate(PROMPTS[:4])
    ]
    expected = [ids for outputs in librarys for ids in outputs]
    for drafts, settings in ways(drafter):
        assert outputs_of(model, drafts, requests, **settings) == expected, settings


PENALISED = [
    greedy(presence_penalty=1.5),
    greedy(frequency_penalty=0.9),
    greedy(frequency_penalty=-0.5),
    greedy(presence_penalty=-1.0, frequency_penalty=0.3, repetition_penalty=1.2, logit_bias={40: 2.0}),
    greedy(allowed_token_ids=tuple(range(2, 60)), banned_token_ids=(40, 41), presence_penalty=2.0),
]


def test_greedy_output_with_penalties_is_that_of_a_loop_by_hand(model: Any, drafter: Any):
    """Penalties see the accepted prefix inside the block: a token accepted there is penalised from the next row on."""
    requests = [
        request(prompt, f"{n} {i}", sampling=params, max_tokens=NUM_NEW)
        for n, params in enumerate(PENALISED)
        for i, prompt in enumerate(PROMPTS[:3])
    ]
    expected = [decode_plainly(model, one.prompt_ids, one.sampling, max_tokens=NUM_NEW)[0] for one in requests]
    for drafts, settings in ways(drafter):
        assert outputs_of(model, drafts, requests, **settings) == expected, settings


def test_a_right_draft_is_accepted_inside_the_block_under_penalties(model: Any):
    """The rows behind accepted tokens have their history: else the true continuation would be rejected."""
    params = greedy(presence_penalty=1.0, repetition_penalty=1.4, frequency_penalty=0.5)
    prompt = PROMPTS[0]
    true_ids, _ = decode_plainly(model, prompt, params, max_tokens=NUM_NEW)
    drafts = SequentialDraftRunner(ScriptedDrafter([*prompt, *true_ids], block_size=5, num_right=5))
    engine = make_engine(model, drafts)
    outputs = run(engine, [request(prompt, sampling=params, max_tokens=NUM_NEW)])["0"]
    assert ids_of(outputs) == true_ids
    assert engine.stats.rounds.conditional_acceptance == [1.0] * 5


PENALISED_DRAWS = SamplingParams(
    temperature=0.9,
    presence_penalty=0.6,
    frequency_penalty=0.2,
    repetition_penalty=1.3,
    logit_bias={2: 0.7},
    min_p=0.02,
)


@pytest.mark.parametrize("seeded", ["rejection", "invariant"])
def test_sampled_tokens_follow_the_penalised_target(seeded: Any):
    model = toy_target()
    sampling = PENALISED_DRAWS.with_changes(seeded=seeded)
    engine = make_engine(
        model, SequentialDraftRunner(FixedDistributionDrafter(FAR, block_size=3)), max_running_requests=64
    )
    outputs = sample_outputs(model, engine, sampling, num=400, max_tokens=50)

    def penalised(rows: torch.Tensor) -> torch.Tensor:
        return torch.stack(
            [
                torch.stack([ruled_row(row, sampling, PROMPT, ids[:k]) for k, row in enumerate(own)])
                for own, ids in zip(rows, outputs, strict=True)
            ]
        )

    p, num_draws = misfit(model, outputs, sampling, rules=penalised)
    assert num_draws == 20_000
    assert p > 0.001
    assert misfit(model, outputs, sampling.with_changes(min_p=0.0))[0] < 1e-6  # and not the target as it is
    assert 0.05 < engine.stats.rounds.conditional_acceptance[0] < 0.95


def test_every_token_is_at_least_min_p_as_likely_as_the_likeliest(model: Any, drafter: Any):
    sampling = SamplingParams(temperature=1.0, min_p=0.3)
    for drafts, settings in ways(drafter)[::2]:
        (ids,) = outputs_of(model, drafts, [request(PROMPTS[0], sampling=sampling, max_tokens=200)], **settings)
        model.set_attn_implementation("sdpa")
        with torch.no_grad():
            probs = torch.softmax(model(torch.tensor([PROMPTS[0] + ids])).logits[0, len(PROMPTS[0]) - 1 : -1], -1)
        share = probs.gather(1, torch.tensor(ids)[:, None])[:, 0] / probs.amax(-1)
        assert float(share.min()) >= 0.3 - 1e-4


def test_a_biased_token_is_never_or_always_output(model: Any, drafter: Any):
    (free,) = outputs_of(model, None, [request(PROMPTS[0], max_tokens=NUM_NEW)])
    never = greedy(logit_bias={free[3]: -100.0})
    always = greedy(logit_bias={123: 100.0})
    for drafts, settings in ways(drafter):
        requests = [request(PROMPTS[0], str(n), sampling=s, max_tokens=NUM_NEW) for n, s in enumerate((never, always))]
        without, only = outputs_of(model, drafts, requests, **settings)
        assert free[3] not in without
        assert only == [123] * NUM_NEW


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_stop_token_comes_before_min_tokens(model: Any, drafter: Any, temperature: float):
    """The stop tokens are as likely as can be, so that output ends as soon as it may, in mid-block too."""
    sampling = SamplingParams(temperature=temperature, min_tokens=7, logit_bias={2: 100.0})
    for drafts, settings in ways(drafter):
        asked = request(PROMPTS[0], sampling=sampling, stop_ids=frozenset({2, 17}), seed=3, max_tokens=NUM_NEW)
        (ids,) = outputs_of(model, drafts, [asked], **settings)
        assert len(ids) == 8
        assert ids[-1] == 2
        assert not {2, 17} & set(ids[:-1])


@pytest.mark.parametrize(
    ("sampling", "line"),
    [
        (greedy(logit_bias={320: 1.0}), "token id 320.*use 0..319"),
        (greedy(min_tokens=25), "min_tokens is 25, over the limit of 24"),
        (greedy(allowed_token_ids=(5,), banned_token_ids=(5,)), "leave one"),
    ],
)
def test_what_no_output_can_meet_is_refused_when_it_is_added(model: Any, sampling: SamplingParams, line: str):
    engine = make_engine(model)
    with pytest.raises(ValueError, match=line):
        engine.add(request(PROMPTS[0], sampling=sampling))
    assert not engine.has_work


@pytest.mark.parametrize("params", [greedy(), greedy(repetition_penalty=1.4), SamplingParams(temperature=1.3, top_k=9)])
def test_logprobs_are_the_targets_own_with_and_without_speculation(model: Any, drafter: Any, params: SamplingParams):
    sampling = params.with_changes(logprobs=3)
    prompt = PROMPTS[1]
    for drafts, settings in ways(drafter):
        asked = request(prompt, sampling=sampling, seed=4, max_tokens=NUM_NEW)
        outputs = run(make_engine(model, drafts, **settings), [asked])["0"]
        ids, told = ids_of(outputs), [entry for output in outputs for entry in output.logprobs or []]
        assert [entry.token_id for entry in told] == ids
        assert len(ids) == NUM_NEW
        model.set_attn_implementation("sdpa")
        with torch.no_grad():
            rows = torch.log_softmax(model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1], -1)
        own = rows.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
        assert [entry.logprob for entry in told] == pytest.approx(own, abs=1e-3)
        assert not all(math.isclose(entry.logprob, 0.0, abs_tol=1e-6) for entry in told)
        best = rows.topk(3, dim=-1)
        assert [[token_id for token_id, _ in entry.top] for entry in told] == best.indices.tolist()
        values = [value for entry in told for _, value in entry.top]
        assert values == pytest.approx(best.values.flatten().tolist(), abs=1e-3)


def test_there_is_a_logprob_per_token_that_stands_and_none_where_nobody_asks(model: Any, drafter: Any):
    """Output that ends inside a block: what was accepted behind the stop has no entry."""
    (free,) = outputs_of(model, None, [request(PROMPTS[0], max_tokens=NUM_NEW)])
    drafts = SequentialDraftRunner(ScriptedDrafter([*PROMPTS[0], *free], block_size=7, num_right=7))
    stop_ids = frozenset({free[4]})
    requests = [
        request(PROMPTS[0], "told", sampling=greedy(logprobs=0), stop_ids=stop_ids, max_tokens=NUM_NEW),
        request(PROMPTS[0], "plain", stop_ids=stop_ids, max_tokens=NUM_NEW),
    ]
    outputs = run(make_engine(model, drafts, max_running_requests=1), requests)
    assert ids_of(outputs["told"]) == ids_of(outputs["plain"]) == free[: free.index(free[4]) + 1]
    assert all(len(output.logprobs or []) == len(output.token_ids) for output in outputs["told"])
    assert all(entry.top == () for output in outputs["told"] for entry in output.logprobs or [])
    assert all(output.logprobs is None for output in outputs["plain"])
