"""Seeded requests: the text is the seed's and the target's alone, whatever drafts, verifies and runs beside it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.drafters.checkpoint import load_drafter
from dspark.drafters.ngram import NGramConfig, NGramDrafter
from dspark.engine.draft_runner import DraftRequest, DraftRunner, NGramDraftRunner, SequentialDraftRunner
from dspark.engine.draws import NOISY_TOKENS, Draws
from dspark.engine.loading import paged_runner
from dspark.engine.lookup import LookupConfig
from dspark.engine.noise import stream_key
from dspark.engine.sampling import SamplingParams
from dspark.speculation.cost_curve import CostCurve
from plain_sampling import decode_plainly, seeded_choice
from scripted_drafters import FixedDistributionDrafter
from tiny_drafter import make_tiny_drafter
from tiny_engine import PROMPTS, VOCABULARY, ids_of, load, make_engine, request, run

NUM_NEW = 14
KINDS: dict[str, dict[str, Any]] = {
    "dspark": {},
    "reduced_vocabulary": {"draft_vocab_size": 200},
    "eagle3": {"architecture": "eagle3"},
}
PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.2, top_k=20, min_p=0.02),
    SamplingParams(temperature=0.9, repetition_penalty=1.3, presence_penalty=0.5, min_tokens=6),
    SamplingParams(temperature=0.8, frequency_penalty=0.6, logit_bias={40: 3.0}, banned_token_ids=(9, 77)),
]


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> Any:
    return load(tiny_target)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("drafters")
    return {name: load_drafter(make_tiny_drafter(folder / name, tiny_target, **shape)) for name, shape in KINDS.items()}


def asked(number: int, **options: Any) -> Any:
    fields: dict[str, Any] = {"seed": number // 2, "choice": number % 2, "max_tokens": NUM_NEW, "stop_ids": {2, 17}}
    sampling = PARAMS[number % len(PARAMS)]
    return request(PROMPTS[number % len(PROMPTS)], str(number), sampling=sampling, **fields | options)


def texts(model: Any, drafts: DraftRunner | None, requests: Sequence[Any], **settings: Any) -> list[list[int]]:
    engine = make_engine(model, drafts, **settings)
    outputs = run(engine, requests)
    assert drafts is None or settings.get("verify_length") == 0 or engine.stats.drafted_tokens > 0
    return [ids_of(outputs[one.request_id]) for one in requests]


def runner(drafter: Any) -> DraftRunner:
    return paged_runner(drafter, num_pages=512, page_size=4)


@pytest.fixture(scope="module")
def plain(model: Any) -> list[list[int]]:
    """Sampled a token at a time, without cache, batch or engine; nowhere near a tie."""
    outputs = []
    for number in range(20):
        one = asked(number)
        ids, nearest = decode_plainly(
            model,
            one.prompt_ids,
            one.sampling,
            max_tokens=NUM_NEW,
            stop_ids=one.stop_ids,
            seed=one.seed,
            choice=one.choice,
        )
        assert nearest > 1e-4, f"request {number} comes within {nearest} of a tie: give it another seed"
        outputs.append(ids)
    return outputs


@pytest.mark.parametrize("concurrency", [1, 4])
def test_without_a_drafter_the_text_is_the_plain_loops(model: Any, plain: list[list[int]], concurrency: int):
    requests = [asked(number) for number in range(20)]
    assert texts(model, None, requests, max_running_requests=concurrency) == plain


@pytest.mark.parametrize(
    ("kind", "length", "concurrency"),
    [*(("dspark", length, 4) for length in range(5)), ("dspark", 4, 1), ("reduced_vocabulary", 4, 4), ("eagle3", 4, 4)],
)
def test_with_a_drafter_it_is_the_same_at_every_length(
    model: Any, drafters: Any, plain: list[list[int]], kind: str, length: int, concurrency: int
):
    requests = [asked(number) for number in range(20)]
    drafts = runner(drafters[kind])
    assert texts(model, drafts, requests, verify_length=length, max_running_requests=concurrency) == plain


@pytest.mark.parametrize("concurrency", [1, 4])
def test_with_prompt_lookup_it_is_the_same(model: Any, drafters: Any, plain: list[list[int]], concurrency: int):
    requests = [asked(number) for number in range(20)]
    ngram = NGramDraftRunner(NGramDrafter(NGramConfig(block_size=5, min_match=1, max_match=3)))
    assert texts(model, ngram, requests, max_running_requests=concurrency) == plain
    lookup = LookupConfig(block_size=5, min_match=1, max_match=3)
    drafts = runner(drafters["dspark"])
    assert texts(model, drafts, requests, lookup=lookup, max_running_requests=concurrency) == plain


def test_with_lengths_that_the_scheduler_chooses_it_is_the_same(model: Any, drafters: Any, plain: list[list[int]]):
    curve = CostCurve((1, 64), (1.0, 1.3), (1, 8), (0.02, 0.04))
    requests = [asked(number) for number in range(20)]
    assert texts(model, runner(drafters["dspark"]), requests, curve=curve, max_running_requests=16) == plain


def test_with_a_drafter_that_knows_no_noise_it_is_the_same(model: Any, plain: list[list[int]]):
    probs = torch.softmax(torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(3)), -1)
    drafts = SequentialDraftRunner(FixedDistributionDrafter(probs, block_size=4))
    assert texts(model, drafts, [asked(number) for number in range(20)]) == plain


def test_a_hundred_requests_read_the_same_in_every_way_they_are_served(model: Any, drafters: Any):
    requests = [asked(number, seed=1000 + number, max_tokens=8) for number in range(100)]
    alone = texts(model, None, requests, max_running_requests=1)
    assert len({tuple(ids) for ids in alone}) > 90
    ngram = NGramDraftRunner(NGramDrafter(NGramConfig(block_size=5, min_match=1, max_match=3)))
    for drafts in (None, runner(drafters["dspark"]), ngram):
        assert texts(model, drafts, requests, max_running_requests=16) == alone
    assert texts(model, runner(drafters["dspark"]), requests, max_running_requests=1) == alone


@pytest.mark.parametrize("kind", ["none", "dspark", "ngram"])
def test_they_read_the_same_after_forced_preemption_and_behind_shared_pages(
    model: Any, drafters: Any, plain: list[list[int]], kind: str
):
    def drafts() -> DraftRunner | None:
        if kind == "ngram":
            return NGramDraftRunner(NGramDrafter(NGramConfig(block_size=4, min_match=1, max_match=3)))
        return runner(drafters["dspark"]) if kind == "dspark" else None

    requests = [asked(number) for number in range(20)]
    pressed = make_engine(model, drafts(), kv_tokens=120, max_running_requests=16)
    outputs = run(pressed, requests)
    assert [ids_of(outputs[one.request_id]) for one in requests] == plain
    assert pressed.stats.preemptions > 0
    warm = make_engine(model, drafts(), max_running_requests=16)
    for _ in range(2):
        outputs = run(warm, requests)
        assert [ids_of(outputs[one.request_id]) for one in requests] == plain
    assert warm.stats.prefix_cache_hits > warm.stats.prompt_tokens / 2
    assert [outputs[str(n)][0].num_cached_tokens for n in (1, 2)] == [0, 44]  # of prompts of 1 and of 45 tokens


def test_another_seed_or_choice_is_another_text_and_none_draws_anew(model: Any):
    def text(**options: Any) -> list[int]:
        one = request(PROMPTS[0], sampling=SamplingParams(temperature=1.0), **options)
        return texts(model, None, [one])[0]

    assert text(seed=5) == text(seed=5)
    assert text(seed=5) != text(seed=6)
    assert text(seed=5) != text(seed=5, choice=1)
    assert text(seed=-5) != text(seed=5)
    assert text() != text()


def test_a_seed_that_no_int64_holds_is_refused():
    with pytest.raises(ValueError, match=r"seed is 9223372036854775808; use one of"):
        request([1], seed=2**63)


def test_a_drafter_draws_what_the_target_will_draw_where_they_agree():
    """Over target ids: a reduced vocabulary draws with the noise of the ids that its own stand for."""
    d2t = torch.arange(3, 300, 3)
    logits = torch.randn(4, d2t.numel(), generator=torch.Generator().manual_seed(0)) * 3
    key = stream_key(11, 1)
    requests = [DraftRequest(None, 0, 2, 0.8, None, noise_key=key, position=30 + i) for i in range(4)]
    draws = Draws(requests, d2t, vocab_size=320)
    for _ in range(2):
        draws.draw(logits)
    likely = logits >= logits.topk(NOISY_TOKENS, dim=-1).values[:, -1:]
    probs = torch.zeros(4, 320)
    probs[:, d2t] = torch.softmax((logits / 0.8).masked_fill(~likely, -torch.inf), -1)
    for i, proposal in enumerate(draws.proposals()):
        expected = [seeded_choice(probs[i], 11, 1, 30 + i + slot)[0] for slot in range(2)]
        assert proposal.token_ids.tolist() == expected
        assert proposal.probs is None


def test_greedy_seeded_and_sampled_requests_are_drafted_for_together_as_alone():
    d2t = torch.arange(50)
    logits = [torch.randn(3, 50, generator=torch.Generator().manual_seed(n)) for n in range(3)]

    def drawn(chosen: list[int]) -> list[list[int]]:
        kinds: list[dict[str, Any]] = [
            {"temperature": 0.0, "generator": None},
            {"temperature": 1.0, "generator": None, "noise_key": stream_key(4, 0), "position": 9},
            {"temperature": 1.0, "generator": torch.Generator().manual_seed(1)},
        ]
        draws = Draws([DraftRequest(None, 0, 3, **kinds[i]) for i in chosen], d2t, vocab_size=50)
        for one in logits:
            draws.draw(one[chosen])
        proposals = draws.proposals()
        assert [p.probs is not None for p in proposals] == [i == 2 for i in chosen]
        return [p.token_ids.tolist() for p in proposals]

    assert drawn([0, 1, 2]) == [drawn([i])[0] for i in range(3)]


def test_a_drafter_equal_to_the_target_is_always_right():
    """x_t and the draft are the argmax of the same numbers: acceptance is 1, where independent draws would differ."""
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(8)) * 2
    key = stream_key(3, 0)
    for position in range(200):
        draws = Draws(
            [DraftRequest(None, 0, 1, 1.0, None, noise_key=key, position=position)], torch.arange(40), vocab_size=40
        )
        draws.draw(logits)
        (token_id,) = draws.proposals()[0].token_ids.tolist()
        assert token_id == seeded_choice(torch.softmax(logits[0], -1), 3, 0, position)[0]
