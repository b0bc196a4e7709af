"""One drafter for several engines: together as alone, once though asked twice, never more than there is room for."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from draft_pool import IDENTITY, Ticks, make_server
from dspark.attention.page_pool import PageTable
from dspark.engine.draft_messages import ContextPart, DraftAsk, DraftMessage, DraftReply, to_array
from dspark.engine.draft_runner import DraftRequest
from dspark.engine.draft_server import DraftServer
from dspark.engine.loading import paged_runner
from random_autoregressive import random_autoregressive_drafter
from random_drafter import random_drafter

DRAFTERS: dict[str, Any] = {
    "dspark": lambda: random_drafter(),
    "windows": lambda: random_drafter(sliding_window=6),
    "reduced_vocabulary": lambda: random_drafter(draft_vocab_size=30),
    "eagle3": lambda: random_autoregressive_drafter(),
    "mtp_modules": lambda: random_autoregressive_drafter(architecture="mtp", num_modules=4),
}


@pytest.fixture(params=DRAFTERS)
def drafter(request: pytest.FixtureRequest) -> Any:
    return DRAFTERS[request.param]().eval().requires_grad_(False)


class Sender:
    """An engine with one request: knows its ids and features, and says what a test wants of them."""

    def __init__(self, name: str, drafter: Any, *, seed: int, num_tokens: int = 40) -> None:
        self.name, self.sequence = name, 0
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, 50, (num_tokens + 1,), generator=generator).tolist()
        self.features = torch.randn(num_tokens, drafter.config.feature_size, generator=generator)

    def message(self, start: int, stop: int, **changes: Any) -> DraftMessage:
        """Tokens start … stop - 1 with their features, the anchor behind them, and a request for three draft tokens."""
        self.sequence += 1
        ask = DraftAsk(0, stop, self.ids[stop], 3, 0.0, None, stop + 1, None, None)
        fields: dict[str, Any] = {
            "sender": self.name,
            "sequence": self.sequence,
            "identity": IDENTITY,
            "parts": (ContextPart(0, start, tuple(self.ids[start : stop + 1]), stop - start),),
            "asks": (ask,),
            "closed": (),
            "features": to_array(self.features[start:stop]),
            "dtype": "float32",
            "timeout_s": 1.0,
        }
        return DraftMessage(**fields | changes)

    def expected(self, drafter: Any, stop: int) -> list[int]:
        """What the drafter itself says behind so many tokens."""
        runner = paged_runner(drafter, num_pages=32, page_size=4)
        memory = runner.new_memory(PageTable(list(range(32)), 4))
        runner.extend(memory, self.ids[: stop + 1], self.features[:stop])
        (proposal,) = runner.propose([DraftRequest(memory, self.ids[stop], 3, 0.0, None)])
        return proposal.token_ids.tolist()


def reply_of(server: DraftServer, message: DraftMessage) -> DraftReply:
    (answer,) = server.serve([message])
    assert answer.refusal is None
    (reply,) = answer.replies
    return reply


def drafted(reply: DraftReply) -> list[int] | None:
    return None if reply.proposal is None else reply.proposal.proposal(torch.device("cpu")).token_ids.tolist()


def test_engines_that_ask_together_are_drafted_for_in_one_pass_as_alone(drafter):
    server = make_server(drafter)
    senders = [Sender(f"engine {k}", drafter, seed=k) for k in range(3)]
    for starts, stops in pairwise([(0, 0, 0), (5, 9, 12), (6, 12, 14), (10, 13, 15)]):
        messages = [s.message(start, stop) for s, start, stop in zip(senders, starts, stops, strict=True)]
        found = [drafted(answer.replies[0]) for answer in server.serve(messages)]
        assert found == [s.expected(drafter, stop) for s, stop in zip(senders, stops, strict=True)]
    assert server.stats.batches == server.calls.num_calls == 3
    assert server.stats.drafted == 9
    server.check()


def test_the_same_message_twice_gets_the_same_answer_and_is_drafted_once(drafter):
    server, sender = make_server(drafter), Sender("engine", drafter, seed=0)
    message = sender.message(0, 7)
    first = server.serve([message, message])
    again = reply_of(server, message)
    assert [drafted(answer.replies[0]) for answer in first] == [sender.expected(drafter, 7)] * 2
    assert drafted(again) == sender.expected(drafter, 7)
    assert (server.stats.drafted, server.stats.context_tokens) == (1, 7)
    assert drafted(reply_of(server, sender.message(7, 9))) == sender.expected(drafter, 9)


def test_what_comes_once_more_is_passed_over_and_what_is_missing_is_said(drafter):
    server, sender = make_server(drafter), Sender("engine", drafter, seed=0)
    assert reply_of(server, sender.message(4, 6)) == DraftReply(0, 0)
    reply_of(server, sender.message(0, 6))
    gap = reply_of(server, sender.message(8, 10))
    assert (gap.num_context, gap.proposal) == (6, None)
    assert drafted(reply_of(server, sender.message(2, 10))) == sender.expected(drafter, 10)
    late = sender.message(10, 12)
    assert drafted(reply_of(server, sender.message(10, 13))) == sender.expected(drafter, 13)
    stale = reply_of(server, late)
    assert (stale.num_context, stale.proposal) == (13, None)
    assert drafted(reply_of(server, sender.message(13, 14))) == sender.expected(drafter, 14)


def test_a_message_that_the_closing_overtook_opens_its_context_for_nobody(drafter):
    server, sender = make_server(drafter), Sender("engine", drafter, seed=0)
    reply_of(server, sender.message(0, 6))
    late = sender.message(0, 9)
    server.serve([sender.message(0, 0, parts=(), asks=(), features=to_array(torch.empty(0, 0)), closed=(0,))])
    assert reply_of(server, late).num_context == 0
    assert server.num_contexts == 0
    server.check()


def test_a_long_context_is_handed_on_between_batches_and_not_drafted_for_before(drafter):
    server = make_server(drafter)
    sender = Sender("engine", drafter, seed=0, num_tokens=110)
    first = reply_of(server, sender.message(0, 100))
    assert (first.num_context, first.proposal) == (100, None)
    assert server.hand_on()
    assert not server.hand_on()
    assert drafted(reply_of(server, sender.message(100, 103))) == sender.expected(drafter, 103)


def test_another_identity_is_refused_and_keeps_nothing(drafter):
    server, sender = make_server(drafter), Sender("engine", drafter, seed=0)
    (answer,) = server.serve([sender.message(0, 5, identity="another")])
    assert answer.refusal is not None
    assert "another" in answer.refusal
    assert answer.replies == ()
    assert server.num_contexts == 0


def test_closed_contexts_give_their_pages_back(drafter):
    server, sender = make_server(drafter), Sender("engine", drafter, seed=0)
    reply_of(server, sender.message(0, 20))
    assert server.pool.num_free < server.pool.num_pages
    empty = np.zeros((0, 0), dtype=np.float32)
    server.serve([sender.message(0, 0, parts=(), asks=(), closed=(0, 7), features=empty)])
    assert server.pool.num_free == server.pool.num_pages
    assert reply_of(server, sender.message(20, 21)).num_context == 0


def test_beyond_its_memory_it_refuses_and_takes_idle_ones_place_only(drafter):
    clock = Ticks(0.0)
    server = make_server(drafter, kv_tokens=64, idle_s=5.0, clock=clock)
    first, second = Sender("first", drafter, seed=0), Sender("second", drafter, seed=1)
    assert drafted(reply_of(server, first.message(0, 38))) is not None
    refused = reply_of(server, second.message(0, 30))
    assert (refused.is_refused, refused.num_context, refused.proposal) == (True, 0, None)
    assert server.stats.refused == 1
    server.check()
    assert drafted(reply_of(server, first.message(38, 39))) == first.expected(drafter, 39)
    clock.now = 6.0
    assert drafted(reply_of(server, second.message(0, 30))) == second.expected(drafter, 30)
    assert server.stats.evicted == 1
    assert reply_of(server, first.message(39, 40)).num_context == 0
    server.check()


def test_sparse_probabilities_are_what_the_tokens_were_drawn_from(drafter):
    """The twin draws from the dense distribution cut to its most likely tokens."""
    server, sender = make_server(drafter), Sender("engine", drafter, seed=0)
    asked = replace(sender.message(0, 9).asks[0], temperature=0.8, uniforms=(0.05, 0.5, 0.95))
    sparse = reply_of(server, sender.message(0, 9, asks=(replace(asked, top_k=5),)))
    dense = reply_of(make_server(drafter), sender.message(0, 9, asks=(replace(asked, top_k=1000),)))
    assert sparse.proposal is not None
    assert dense.proposal is not None
    few, all_ = (sent.proposal(torch.device("cpu")) for sent in (sparse.proposal, dense.proposal))
    assert few.probs is not None
    assert few.support is not None
    assert few.columns is not None
    assert all_.probs is not None
    assert few.probs.shape[1] <= 15
    assert few.support.unique().numel() == few.support.numel()
    assert torch.equal(few.support[few.columns], few.token_ids)
    torch.testing.assert_close(few.probs.sum(-1), torch.ones(3))
    assert ((few.probs > 0).sum(-1) == 5).all()
    expected = all_.probs[0].topk(5)
    expected_ids = expected.indices if all_.support is None else all_.support[expected.indices]
    own = few.probs[0, (few.support[None] == expected_ids[:, None]).nonzero()[:, 1]]
    torch.testing.assert_close(own, expected.values / expected.values.sum(), atol=1e-6, rtol=1e-5)
    assert (few.drawn_probs() > 0).all()
