"""A round in one call drafts what the round in steps drafts: the states as exactly, from them the same tokens."""

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import pytest
import torch

from dspark import native
from dspark.attention.page_pool import PageTable
from dspark.engine.draft_runner import DraftRequest
from dspark.engine.fused_drafter import FusedDrafter
from dspark.engine.fused_parts import FEWEST_ANGLES
from dspark.engine.paged_draft_runner import PagedDraftRunner
from dspark.numerics import pack_linears
from dspark.speculation.proposal import Proposal
from random_drafter import HYPER, MOE, random_drafter

available = native.kernels()
pytestmark = pytest.mark.skipif(
    available is None or not available.has_products, reason="this processor has no bfloat16 products of ours"
)

WIDE = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "head_dim": 32,
    "vocab_size": 300,
    "markov_rank": 64,
    "block_size": 5,
}
NO_MARKOV = {"markov_rank": 0, "confidence_head_with_markov": False}
DRAWN: dict[str, dict[str, Any]] = {
    "plain": {},
    "anchor fusion": {"anchor_fusion": True},
    "reduced vocabulary": {"draft_vocab_size": 130},
    "padded vocabulary": {"valid_vocab_size": 270},
    "gated": {"markov_head_type": "gated"},
    "confidence of states alone": {"confidence_head_with_markov": False},
    "no markov head": NO_MARKOV,
    "scaled head with a bias": {"embedding_scale": 3.0, "logit_scale": 0.5, "lm_head_bias": True},
    "dflash": NO_MARKOV | {"architecture": "dflash", "enable_confidence_head": False},
}
UP_TO_THE_STATES: dict[str, dict[str, Any]] = {
    "rnn": {"markov_head_type": "rnn"},
    "gate too narrow to be packed": {"markov_head_type": "gated", "markov_rank": 32},
    "soft cap": {"final_logit_softcapping": 4.0, "anchor_fusion": True},
}
NOT_SERVED: dict[str, dict[str, Any]] = {
    "window": {"sliding_window": 6},
    "one window": {"sliding_window": 6, "layer_types": ("sliding_attention", "full_attention")},
    "mixture of experts": {"moe": MOE | {"moe_intermediate_size": 64}},
    "hyper-connections": {"hyper_connections": HYPER},
    "gemma4": {"model_type": "gemma4_text", "num_key_value_heads": 2, "attention_k_eq_v": True},
}
PAGES = ([3, 1, 0, 2, 10, 12], [9, 8, 4, 5, 6, 13], [11, 7, 20, 21, 22, 23])
CONTEXTS = (9, 3, 12)
LENGTHS = (4, 5, 2)


def drafter_of(changes: dict[str, Any]) -> Any:
    drafter = random_drafter(**WIDE | changes)
    for name, parameter in drafter.named_parameters():
        if parameter.dim() == 2:  # tokens that are likely, but not certain
            parameter.data *= 0.4 if "embed" in name or "w1" in name else 0.25
    return drafter.eval().requires_grad_(False)


def packed(drafter: Any) -> Any:
    drafter = copy.deepcopy(drafter).bfloat16()
    pack_linears(drafter)
    return drafter


@pytest.fixture
def on_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


class Drafting:
    """A runner whose requests have a context; `in_steps`: without the round's call."""

    def __init__(
        self,
        drafter: Any,
        *,
        in_steps: bool = False,
        pages: Sequence[Sequence[int]] = PAGES,
        contexts: Sequence[int] = CONTEXTS,
        lengths: Sequence[int] = LENGTHS,
    ) -> None:
        self.runner = PagedDraftRunner(drafter, num_pages=1 + max(map(max, pages)), page_size=4)
        self.fused = self.runner._fused
        if in_steps:
            self.runner._fused = None
        self.lengths = lengths
        self.memories = [self.runner.new_memory(PageTable(own, 4)) for own in pages]
        self._dtype, self._width = drafter.backbone.fc.weight.dtype, drafter.config.feature_size
        self._generator = torch.Generator().manual_seed(0)
        self.grow(contexts)

    def grow(self, counts: Sequence[int]) -> None:
        for memory, count in zip(self.memories, counts, strict=True):
            for part in torch.randn(count, self._width, generator=self._generator).split(2):
                self.runner.extend(memory, [0] * part.shape[0], part.to(self._dtype))

    def requests(self, temperatures: Sequence[float], **options: Any) -> list[DraftRequest]:
        return [
            DraftRequest(memory, 5 + i, self.lengths[i], temperatures[i], torch.Generator().manual_seed(i), **options)
            for i, memory in enumerate(self.memories)
        ]

    @torch.inference_mode()
    def states(self) -> torch.Tensor:
        """Of whole blocks: [R, G, d] float32."""
        requests = self.requests((0.0, 0.0, 0.0))
        if self.runner._fused is None:
            self.runner._store([memory for memory in self.memories if memory.pending.num_rows])
            return self.runner._block_states(requests).float()
        return self.fused_states(requests, self.runner.block_size).float()

    @torch.inference_mode()
    def fused_states(self, requests: Sequence[DraftRequest], num_slots: int) -> torch.Tensor:
        assert self.fused is not None
        starts = [memory.num_tokens + memory.pending.num_rows for memory in self.memories]
        plan: Any = self.runner._plan(self.memories, starts, [start + self.runner.block_size for start in starts])
        return self.fused.states(requests, plan, num_slots)


@pytest.mark.parametrize("changes", (DRAWN | UP_TO_THE_STATES).values(), ids=DRAWN | UP_TO_THE_STATES)
def test_states_are_as_exact_in_one_call_as_in_steps(changes: dict[str, Any]) -> None:
    wide = drafter_of(changes)
    drafter = packed(wide)
    parts = [Drafting(wide), Drafting(drafter, in_steps=True), Drafting(drafter)]
    assert parts[0].fused is None
    for growth in ((0, 0, 0), (1, 0, 4)):
        for part in parts:
            part.grow(growth)
        exact, steps, fused = (part.states() for part in parts)
        error, their_error = (float((x - exact).norm() / exact.norm()) for x in (fused, steps))
        assert error < 0.03
        assert error < 1.1 * their_error
        assert float((fused - steps).norm() / exact.norm()) < 1e-2
        one, other = parts[2].runner.kv_cache, parts[1].runner.kv_cache
        for own, theirs in zip([*one.keys, *one.values], [*other.keys, *other.values], strict=True):
            assert float((own.float() - theirs.float()).norm() / theirs.float().norm()) < 1e-2
        assert [m.num_tokens for m in parts[2].memories] == [m.num_tokens for m in parts[1].memories]


@pytest.mark.parametrize("temperatures", [(0.0, 0.0, 0.0), (0.8, 1.3, 0.6), (0.0, 0.9, 0.0)])
@pytest.mark.parametrize("changes", DRAWN.values(), ids=DRAWN)
def test_from_equal_states_the_same_tokens_are_drawn(changes: dict[str, Any], temperatures: Sequence[float]) -> None:
    drafting = Drafting(packed(drafter_of(changes)))
    assert drafting.fused is not None
    assert drafting.fused.draws(drafting.requests(temperatures))
    found = drafting.runner.propose(drafting.requests(temperatures))
    states = drafting.fused_states(drafting.requests(temperatures), max(LENGTHS))
    with torch.inference_mode():
        expected = drafting.runner._draw(drafting.requests(temperatures), states)
    for one, twin in zip(found, expected, strict=True):
        assert_equal(one, twin)


@pytest.mark.parametrize("changes", [DRAWN["gated"], DRAWN["dflash"]], ids=["gated", "dflash"])
def test_many_requests_some_of_which_draft_nothing_are_drawn_alike(changes: dict[str, Any]) -> None:
    number = 14  # more rows than the kernels multiply at once
    drafting = Drafting(
        packed(drafter_of(changes)),
        pages=[range(6 * i, 6 * i + 6) for i in range(number)],
        contexts=[3 + 5 * i % 14 for i in range(number)],
        lengths=[(4, 0, 5, 1, 2)[i % 5] for i in range(number)],
    )
    temperatures = [(0.0, 0.9, 1.2)[i % 3] for i in range(number)]
    found = drafting.runner.propose(drafting.requests(temperatures))
    states = drafting.fused_states(drafting.requests(temperatures), 5)
    with torch.inference_mode():
        expected = drafting.runner._draw(drafting.requests(temperatures), states)
    assert [proposal.num_tokens for proposal in found] == drafting.lengths
    for one, twin in zip(found, expected, strict=True):
        if one.num_tokens:
            assert_equal(one, twin)


@pytest.mark.parametrize("changes", [{}, UP_TO_THE_STATES["rnn"]], ids=["in one call", "up to the states"])
def test_where_nobody_asks_for_a_token_the_contexts_are_stored_and_nothing_comes(changes: dict[str, Any]) -> None:
    drafting = Drafting(packed(drafter_of(changes)), lengths=(0, 0, 0))
    found = drafting.runner.propose(drafting.requests((0.0, 0.9, 0.0)))
    assert [proposal.num_tokens for proposal in found] == [0, 0, 0]
    assert [memory.num_tokens for memory in drafting.memories] == list(CONTEXTS)


def assert_equal(one: Proposal, twin: Proposal) -> None:
    """Tokens to the last, probabilities and confidences as closely as sums in another order allow."""
    assert torch.equal(one.token_ids, twin.token_ids)
    for name in ("probs", "confidence_logits", "support", "columns"):
        own, theirs = getattr(one, name), getattr(twin, name)
        assert (own is None) == (theirs is None), name
        if own is not None:
            tolerance = 2e-2 if name == "confidence_logits" else 1e-5  # the former are rounded to bfloat16
            torch.testing.assert_close(own, theirs, rtol=tolerance, atol=tolerance)
    if one.probs is not None:
        torch.testing.assert_close(one.probs.sum(1), torch.ones(one.num_tokens), rtol=1e-5, atol=0)
        assert bool((one.drawn_probs() > 0).all())


@pytest.mark.parametrize("changes", UP_TO_THE_STATES.values(), ids=UP_TO_THE_STATES)
@pytest.mark.parametrize("temperatures", [(0.0, 0.0, 0.0), (0.8, 1.3, 0.6)])
def test_what_the_kernels_do_not_draw_is_drawn_from_their_states(
    changes: dict[str, Any], temperatures: Sequence[float]
) -> None:
    drafting = Drafting(packed(drafter_of(changes)))
    assert drafting.fused is not None
    assert not drafting.fused.draws(drafting.requests(temperatures))
    found = drafting.runner.propose(drafting.requests(temperatures))
    states = drafting.fused_states(drafting.requests(temperatures), max(LENGTHS))
    with torch.inference_mode():
        expected = drafting.runner._draw(drafting.requests(temperatures), states)
    for one, twin in zip(found, expected, strict=True):
        assert_equal(one, twin)


@pytest.mark.parametrize("options", [{"noise_key": 7, "position": 3}, {"top_k": 8}], ids=["seeded", "sparse"])
def test_requests_of_other_kinds_are_drawn_from_their_states(options: dict[str, Any]) -> None:
    drafting = Drafting(packed(drafter_of({})))
    assert drafting.fused is not None
    assert drafting.fused.draws(drafting.requests((0.0, 0.0, 0.0), **options))
    requests = drafting.requests((0.0, 0.9, 0.0), **options)
    assert not drafting.fused.draws(requests)
    found = drafting.runner.propose(requests)
    states = drafting.fused_states(requests, max(LENGTHS))
    with torch.inference_mode():
        expected = drafting.runner._draw(drafting.requests((0.0, 0.9, 0.0), **options), states)
    for one, twin in zip(found, expected, strict=True):
        assert_equal(one, twin)


def test_given_numbers_are_drawn_with_in_place_of_the_generator() -> None:
    drafting = Drafting(packed(drafter_of({})))
    (first,) = drafting.runner.propose(drafting.requests((1.0,) * 3, uniforms=[0.0] * 5)[:1])
    (last,) = drafting.runner.propose(drafting.requests((1.0,) * 3, uniforms=[1.0 - 2.0**-24] * 5)[:1])
    assert first.probs is not None
    assert last.probs is not None
    assert int(first.token_ids[0]) == int(first.probs[0].nonzero()[0])
    assert int(last.token_ids[0]) > int(first.token_ids[0])
    assert float(last.probs[0, int(last.token_ids[0]) + 1 :].sum()) < 1e-6


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_drafts_the_same_alone_and_beside_others(temperature: float) -> None:
    drafter = packed(drafter_of({"anchor_fusion": True}))
    together = Drafting(drafter)
    found = together.runner.propose(together.requests((temperature,) * 3))
    for i in range(3):
        apart = Drafting(drafter)
        (alone,) = apart.runner.propose(apart.requests((temperature,) * 3)[i : i + 1])
        assert torch.equal(alone.token_ids, found[i].token_ids)
        assert alone.confidence_logits is not None
        assert torch.equal(alone.confidence_logits, found[i].confidence_logits)
        if alone.probs is not None:
            assert torch.equal(alone.probs, found[i].probs)


@pytest.mark.parametrize(
    "changes",
    [{"markov_head_type": "gated", "anchor_fusion": True}, NO_MARKOV, DRAWN["dflash"]],
    ids=["gated", "no markov head", "dflash"],
)
def test_two_threads_draft_what_one_does(changes: dict[str, Any], on_threads: Callable[[int], None]) -> None:
    found: list[list[Proposal]] = []
    for num_threads in (1, 2):
        on_threads(num_threads)
        drafting = Drafting(packed(drafter_of(changes)))
        found.append(drafting.runner.propose(drafting.requests((0.0, 0.7, 0.0))))
    for one, other in zip(*found, strict=True):
        for name in ("token_ids", "probs", "confidence_logits"):
            own, theirs = getattr(one, name), getattr(other, name)
            assert (own is None) == (theirs is None)
            assert own is None or torch.equal(own, theirs), name


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("changes", [{}, DRAWN["dflash"]], ids=["dspark", "dflash"])
def test_of_equal_logits_the_first_is_taken(
    changes: dict[str, Any], num_threads: int, on_threads: Callable[[int], None]
) -> None:
    """Those of columns 7 and 50 on, which different threads look at, are the largest or the smallest there are."""
    on_threads(num_threads)
    drafter = drafter_of(changes)
    heads = [drafter.backbone.lm_head.weight] + ([drafter.markov_head.markov_w2.weight] if not changes else [])
    for weight in heads:
        row = weight[50].clone()
        weight[:50], weight[50:], weight[7] = 0.0, row, row
    drafting = Drafting(packed(drafter))
    tokens = [proposal.token_ids.tolist() for proposal in drafting.runner.propose(drafting.requests((0.0, 0.0, 0.0)))]
    assert set(chain.from_iterable(tokens)) <= {0, 7}


@pytest.mark.parametrize("num_context", [FEWEST_ANGLES - 2, FEWEST_ANGLES + 30])
def test_positions_behind_the_table_of_angles_are_turned_as_others(num_context: int) -> None:
    drafter = packed(drafter_of({"max_position_embeddings": 4 * FEWEST_ANGLES}))
    parts = [Drafting(drafter, in_steps=True), Drafting(drafter)]
    for part in parts:
        part.runner = PagedDraftRunner(drafter, num_pages=200, page_size=4)
        part.fused = part.runner._fused
        part.runner._fused = None if part is parts[0] else part.fused
        part.memories = [part.runner.new_memory(PageTable(range(200), 4))]
        features = torch.randn(num_context, part._width, generator=torch.Generator().manual_seed(3)).bfloat16()
        part.runner.extend(part.memories[0], [0] * features.shape[0], features)
    steps, fused = (part.states() for part in parts)
    assert float((fused - steps).norm() / steps.norm()) < 1e-2


@pytest.mark.parametrize("changes", NOT_SERVED.values(), ids=NOT_SERVED)
def test_other_drafters_go_in_steps(changes: dict[str, Any]) -> None:
    drafting = Drafting(packed(drafter_of(changes)))
    assert drafting.fused is None
    assert len(drafting.runner.propose(drafting.requests((0.0, 0.0, 0.0)))) == 3


def test_many_features_are_stored_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark.engine.paged_draft_runner.MOST_ROWS", 4)
    drafting = Drafting(packed(drafter_of({})))
    calls = []
    monkeypatch.setattr(FusedDrafter, "propose", lambda self, requests, plan: calls.append(requests) or [])
    drafting.runner.propose(drafting.requests((0.0, 0.0, 0.0)))
    assert [request.memory.pending.num_rows for request in calls[0]] == [0, 0, 0]
    assert [memory.num_tokens for memory in drafting.memories] == list(CONTEXTS)
