"""All passes in one call draft as exactly as pass by pass, alone, among others and as contexts grow."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from dspark import native
from dspark.attention.page_pool import PageTable
from dspark.drafters.mtp import one_layer_config
from dspark.engine.draft_runner import DraftRequest
from dspark.engine.fused_chain import FusedChain
from dspark.engine.fused_parts import FEWEST_ANGLES
from dspark.engine.paged_autoregressive_runner import PagedAutoregressiveRunner
from dspark.numerics import pack_linears
from dspark.speculation.proposal import Proposal
from random_autoregressive import random_autoregressive_drafter

available = native.kernels()
pytestmark = pytest.mark.skipif(
    available is None or not available.has_products, reason="this processor has no bfloat16 products of ours"
)

SIZES: dict[str, Any] = {"hidden_size": 128, "vocab_size": 300}
LAYER: dict[str, Any] = {
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4 * FEWEST_ANGLES,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def mtp(name: str = "Llama", **changes: Any) -> dict[str, Any]:
    target = getattr(transformers, f"{name}Config")(**SIZES | LAYER | {"num_hidden_layers": 4} | changes)
    return SIZES | {"architecture": "mtp", "block": one_layer_config(target)}


FUSED: dict[str, dict[str, Any]] = {
    "eagle3": SIZES | LAYER,
    "eagle3 with a reduced vocabulary": SIZES | LAYER | {"draft_vocab_size": 130},
    "eagle3 with a padded vocabulary": SIZES | LAYER | {"valid_vocab_size": 270},
    "mtp": mtp(),
    "mtp of qwen3": mtp("Qwen3"),
}
PASS_BY_PASS: dict[str, dict[str, Any]] = {
    "modules": mtp() | {"num_modules": 4},
    "another layer": mtp("Olmo2"),
    "angles of the longest request": mtp(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    ),
    "too narrow to be packed": {"hidden_size": 16, "vocab_size": 61},
}
PAGES = ([3, 1, 0, 2, 10, 12, 24, 25], [9, 8, 4, 5, 6, 13, 14, 15], [11, 7, 20, 21, 22, 23, 16, 17])
PROMPTS = (9, 3, 12)
LENGTHS = (3, 4, 2)


def drafter_of(changes: dict[str, Any]) -> Any:
    drafter = random_autoregressive_drafter(**changes)
    for name, parameter in drafter.named_parameters():
        if parameter.dim() == 2:  # tokens that are likely, but not certain
            parameter.data *= 0.4 if "embed" in name else 0.25
    return drafter.eval().requires_grad_(False)


def packed(drafter: Any) -> Any:
    drafter = copy.deepcopy(drafter).bfloat16()
    pack_linears(drafter)
    return drafter


class Drafting:
    """A runner with some requests; ids and features that it was told, for a twin that keeps nothing."""

    def __init__(
        self,
        drafter: Any,
        *,
        pages: Sequence[Sequence[int]] = PAGES,
        prompts: Sequence[int] = PROMPTS,
        lengths: Sequence[int] = LENGTHS,
    ) -> None:
        self.drafter, self.lengths = drafter, lengths
        self.runner = PagedAutoregressiveRunner(drafter, num_pages=1 + max(map(max, pages)), page_size=4)
        self.memories = [self.runner.new_memory(PageTable(own, 4)) for own in pages]
        self.ids: list[list[int]] = [[] for _ in pages]
        self.features: list[list[Tensor]] = [[] for _ in pages]
        self._generator = torch.Generator().manual_seed(0)
        self.grow(prompts, is_prompt=True)

    def grow(self, counts: Sequence[int], *, is_prompt: bool = False) -> None:
        for i, count in enumerate(counts):
            hidden = torch.randn(count, self.drafter.config.feature_size, generator=self._generator).bfloat16()
            ids = torch.randint(0, 60, (count + is_prompt,), generator=self._generator).tolist()
            self.runner.extend(self.memories[i], ids, hidden)
            self.ids[i] += ids
            self.features[i].append(hidden)

    def requests(self, temperatures: Sequence[float], **options: Any) -> list[DraftRequest]:
        return [
            DraftRequest(
                memory, self.ids[i][-1], self.lengths[i], temperatures[i], torch.Generator().manual_seed(i), **options
            )
            for i, memory in enumerate(self.memories)
        ]

    @torch.inference_mode()
    def logits(self, drafter: Any, request: int, drafted: Sequence[int]) -> Tensor:
        """A drafter's own logits of every slot behind the request's whole context, told these tokens: [l, V']."""
        hidden = torch.cat(self.features[request]).to(drafter.backbone.lm_head.weight.dtype)
        context, ids = drafter.backbone.context_states(hidden)[None], [*self.ids[request], *drafted]
        num_tokens = context.shape[1]
        unroll = drafter._unroll(context, torch.tensor([[num_tokens - 1]]))
        steps = [unroll.step(torch.tensor([ids[1 + step : 1 + step + num_tokens]])) for step in range(len(drafted))]
        return torch.stack([drafter.backbone.base_logits(h)[0, 0] for h in steps])


@pytest.mark.parametrize("changes", FUSED.values(), ids=FUSED)
def test_drafts_are_as_exact_in_one_call_as_pass_by_pass(changes: dict[str, Any]) -> None:
    wide = drafter_of(changes)
    drafting = Drafting(packed(wide))
    assert drafting.runner._fused is not None
    for growth in ((0, 0, 0), (1, 2, 4), (3, 0, 1)):
        drafting.grow(growth)
        found = drafting.runner.propose(drafting.requests((0.8, 0.0, 1.3)))
        for i, (proposal, temperature) in enumerate(zip(found, (0.8, 0.0, 1.3), strict=True)):
            drafted = proposal.token_ids.tolist()
            exact = drafting.logits(wide, i, drafted)
            eager = drafting.logits(drafting.drafter, i, drafted)
            if temperature == 0:
                columns = torch.searchsorted(drafting.drafter.backbone.d2t, proposal.token_ids)
                chosen = exact.gather(1, columns[:, None])[:, 0]
                assert bool((chosen >= exact.amax(1) - 0.02 * exact.std()).all())
                continue
            exact_probs, eager_probs = (torch.softmax(logits / temperature, -1) for logits in (exact, eager))
            assert proposal.probs is not None
            error, their_error = (float((p - exact_probs).norm()) for p in (proposal.probs, eager_probs))
            assert error < 0.02
            assert error < 1.5 * their_error + 1e-3
            if proposal.support is not None:
                assert torch.equal(proposal.support[proposal.columns], proposal.token_ids)


@pytest.mark.parametrize("changes", FUSED.values(), ids=FUSED)
def test_what_is_stored_is_what_is_stored_pass_by_pass(changes: dict[str, Any]) -> None:
    drafter = packed(drafter_of(changes))
    fused, twin = Drafting(drafter), Drafting(drafter)
    twin.runner._fused = None
    for drafting in (fused, twin):
        for growth in ((0, 0, 0), (1, 2, 4)):
            drafting.grow(growth)
            drafting.runner.propose(drafting.requests((0.0, 0.0, 0.0)))
    for own, other in zip(fused.memories, twin.memories, strict=True):
        assert own.num_stored == other.num_stored
        assert own.pending.num_rows == other.pending.num_rows == 0
        assert float((own.newest_state - other.newest_state).float().norm() / other.newest_state.norm()) < 0.02
        slots = torch.tensor(own.table.slots(0, own.num_stored))
        for name in ("keys", "values"):
            one, two = (getattr(d.runner.kv_cache, name)[0][:, slots].float() for d in (fused, twin))
            assert float((one - two).norm() / two.norm()) < 0.02


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("changes", [FUSED["eagle3"], FUSED["mtp"]], ids=["eagle3", "mtp"])
def test_a_request_drafts_the_same_alone_and_beside_others(changes: dict[str, Any], temperature: float) -> None:
    drafter = packed(drafter_of(changes))
    together = Drafting(drafter)
    found = together.runner.propose(together.requests((temperature,) * 3))
    for i in range(3):
        apart = Drafting(drafter)
        (alone,) = apart.runner.propose(apart.requests((temperature,) * 3)[i : i + 1])
        assert torch.equal(alone.token_ids, found[i].token_ids)
        if alone.probs is not None:
            assert torch.equal(alone.probs, found[i].probs)


@pytest.fixture
def on_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("changes", [FUSED["eagle3"], FUSED["mtp"]], ids=["eagle3", "mtp"])
def test_two_threads_draft_what_one_does(changes: dict[str, Any], on_threads: Callable[[int], None]) -> None:
    found: list[list[Proposal]] = []
    for num_threads in (1, 2):
        on_threads(num_threads)
        drafting = Drafting(packed(drafter_of(changes)))
        found.append(drafting.runner.propose(drafting.requests((0.0, 0.7, 0.0))))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.token_ids, other.token_ids)
        assert one.probs is None or torch.equal(one.probs, other.probs)


@pytest.mark.parametrize("changes", [FUSED["eagle3"], FUSED["mtp"]], ids=["eagle3", "mtp"])
def test_among_many_some_of_which_draft_nothing_each_drafts_what_it_drafts_alone(changes: dict[str, Any]) -> None:
    drafter, number = packed(drafter_of(changes)), 14  # more rows than the kernels multiply at once
    options: dict[str, Any] = {
        "pages": [range(6 * i, 6 * i + 6) for i in range(number)],
        "prompts": [3 + 5 * i % 14 for i in range(number)],
        "lengths": [(4, 0, 3, 1, 2)[i % 5] for i in range(number)],
    }
    temperatures = [(0.0, 0.9, 1.2)[i % 3] for i in range(number)]
    together = Drafting(drafter, **options)
    found = together.runner.propose(together.requests(temperatures))
    assert [proposal.num_tokens for proposal in found] == options["lengths"]
    apart = Drafting(drafter, **options)
    for i, request in enumerate(apart.requests(temperatures)):
        (alone,) = apart.runner.propose([request])
        assert torch.equal(alone.token_ids, found[i].token_ids)
        assert alone.probs is None or torch.equal(alone.probs, found[i].probs)


@pytest.mark.parametrize("is_seeded", [False, True])
def test_drafting_nothing_stores_the_context(is_seeded: bool) -> None:
    drafting = Drafting(packed(drafter_of(FUSED["eagle3"])))
    noise: dict[str, Any] = {"noise_key": 7, "position": 3} if is_seeded else {}
    requests = [DraftRequest(memory, 0, 0, 1.0, None, **noise) for memory in drafting.memories]
    assert [proposal.num_tokens for proposal in drafting.runner.propose(requests)] == [0, 0, 0]
    assert [memory.num_stored for memory in drafting.memories] == list(PROMPTS)
    assert len(drafting.runner.propose(drafting.requests((0.0, 0.0, 0.0)))) == 3


@pytest.mark.parametrize("options", [{"noise_key": 7, "position": 3}, {"top_k": 8}], ids=["seeded", "sparse"])
def test_requests_of_other_kinds_go_pass_by_pass(options: dict[str, Any]) -> None:
    drafting = Drafting(packed(drafter_of(FUSED["mtp"])))
    fused: Any = drafting.runner._fused
    assert fused.draws(drafting.requests((0.0, 0.0, 0.0), **options))
    assert not fused.draws(drafting.requests((0.0, 0.9, 0.0), **options))
    found = drafting.runner.propose(drafting.requests((0.0, 0.9, 0.0), **options))
    twin = Drafting(drafting.drafter)
    twin.runner._fused = None
    expected = twin.runner.propose(twin.requests((0.0, 0.9, 0.0), **options))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.token_ids, other.token_ids)


@pytest.mark.parametrize("changes", PASS_BY_PASS.values(), ids=PASS_BY_PASS)
def test_other_drafters_go_pass_by_pass(changes: dict[str, Any]) -> None:
    drafting = Drafting(packed(drafter_of(changes)))
    assert drafting.runner._fused is None
    assert len(drafting.runner.propose(drafting.requests((0.0, 0.0, 0.0)))) == 3


def test_in_float32_all_go_pass_by_pass() -> None:
    assert PagedAutoregressiveRunner(drafter_of(FUSED["mtp"]), num_pages=4, page_size=4)._fused is None


def test_many_rows_are_stored_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark.engine.paged_autoregressive_runner.MOST_ROWS", 4)
    drafting = Drafting(packed(drafter_of(FUSED["eagle3"])))
    rows: list[list[int]] = []

    def propose(self: Any, requests: Any, plan: Any, parts: Any, ids: Any, held: Any) -> Any:
        rows.append([len(own) for own in ids])
        return [None] * len(requests), torch.stack([one.clone() for one in held])

    monkeypatch.setattr(FusedChain, "propose", propose)
    drafting.runner.propose(drafting.requests((0.0, 0.0, 0.0)))
    assert rows == [[0, 0, 0]]
    assert [memory.num_stored for memory in drafting.memories] == list(PROMPTS)


@pytest.mark.parametrize("num_context", [FEWEST_ANGLES - 2, FEWEST_ANGLES + 30])
def test_positions_behind_the_table_of_angles_are_turned_as_others(num_context: int) -> None:
    wide = drafter_of(FUSED["mtp"])
    wide.backbone.embed_tokens.weight[:] = wide.backbone.embed_tokens.weight[:1]  # whatever is drawn, all goes on alike
    drafter = packed(wide)
    states, probs = [], []
    for is_fused in (True, False):
        runner = PagedAutoregressiveRunner(drafter, num_pages=200, page_size=4)
        runner._fused = runner._fused if is_fused else None
        memory = runner.new_memory(PageTable(range(200), 4))
        features = torch.randn(num_context, 128, generator=torch.Generator().manual_seed(3)).bfloat16()
        runner.extend(memory, [i % 50 for i in range(num_context + 1)], features)
        (proposal,) = runner.propose([DraftRequest(memory, 0, 4, 1.0, None, uniforms=[0.3] * 4)])
        states.append(memory.newest_state.float())
        probs.append(proposal.probs)
    assert float((states[0] - states[1]).norm() / states[1].norm()) < 0.02
    assert float((probs[0] - probs[1]).norm() / probs[1].norm()) < 0.05  # of the last slots too, behind the table
