"""What is asked of logits before the temperature: the rows of a step at once are as one row after another by hand."""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from dspark.engine.logit_rules import LogitRules, penalise
from dspark.engine.sampling import SamplingParams
from plain_sampling import ruled_row
from tiny_engine import request

VOCABULARY = 24
STOPS = frozenset({2, 5})
CPU = torch.device("cpu")
PARAMS = {
    "repetition": SamplingParams(repetition_penalty=1.7),
    "less_than_one": SamplingParams(repetition_penalty=0.6),
    "presence": SamplingParams(presence_penalty=0.8),
    "frequency": SamplingParams(frequency_penalty=-0.5),
    "bias": SamplingParams(logit_bias={3: 4.0, 9: -100.0}),
    "allowed": SamplingParams(allowed_token_ids=(2, 3, 4, 9), banned_token_ids=(4,)),
    "banned": SamplingParams(banned_token_ids=(0, 7)),
    "min_tokens": SamplingParams(min_tokens=5),
    "all": SamplingParams(
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.7,
        logit_bias={1: 2.5, 6: -3.0},
        allowed_token_ids=tuple(range(15)),
        banned_token_ids=(11,),
        min_tokens=4,
    ),
}


class Asked:
    """A request with its rules, as the engine has it, and as the plain rows need it."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int]) -> None:
        self.params, self.prompt, self.output = params, list(prompt), [prompt[-1]]
        self.rules = LogitRules(request(prompt, sampling=params, stop_ids=STOPS), CPU)

    def plain(self, rows: torch.Tensor, drafts: Sequence[int]) -> torch.Tensor:
        return torch.stack(
            [
                ruled_row(row, self.params, self.prompt, self.output + list(drafts[:k]), STOPS)
                for k, row in enumerate(rows)
            ]
        )


def apply(asked: Sequence[Asked], drafts: Sequence[Sequence[int]], logits: torch.Tensor) -> None:
    first, penalties = 0, []
    for one, own in zip(asked, drafts, strict=True):
        one.rules.mask_and_bias(logits[first : first + len(own) + 1], len(one.output))
        found = one.rules.penalties(one.output, own)
        if found is not None:
            penalties.append((first, found))
        first += len(own) + 1
    penalise(logits, penalties)


@pytest.mark.parametrize("names", [*([name] for name in PARAMS), list(PARAMS)], ids=lambda names: "+".join(names))
def test_a_step_of_many_requests_is_row_after_row_by_hand(names: list[str]):
    """Drafts are rejected at random places on the way, and must leave no trace in the history."""
    draw = random.Random(0)
    asked = [Asked(PARAMS[name], [draw.randrange(VOCABULARY) for _ in range(6)]) for name in names]
    for _ in range(6):
        drafts = [[draw.randrange(VOCABULARY) for _ in range(draw.choice([0, 1, 4]))] for _ in asked]
        num_rows = sum(len(own) + 1 for own in drafts)
        logits = torch.randn(num_rows, VOCABULARY, generator=torch.Generator().manual_seed(draw.randrange(99))) * 3
        parts = logits.clone().split([len(own) + 1 for own in drafts])
        apply(asked, drafts, logits)
        expected = torch.cat([one.plain(rows, own) for one, rows, own in zip(asked, parts, drafts, strict=True)])
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
        for one, own in zip(asked, drafts, strict=True):
            one.output += [*own[: draw.randrange(len(own) + 1)], draw.randrange(VOCABULARY)]


def test_repetition_penalty_is_the_librarys():
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 3
    one = Asked(SamplingParams(repetition_penalty=1.4), [3, 3, 8, 20])
    one.output = [8, 1]
    library = transformers.RepetitionPenaltyLogitsProcessor(1.4)
    expected = library(torch.tensor([[*one.prompt, *one.output]]), logits.clone())
    apply([one], [[]], logits)
    torch.testing.assert_close(logits, expected)


def test_penalties_by_hand_in_their_order():
    """Bias first, then the division, then what is taken off: (4 + 2) / 2 - 2 * 0.5 - 0.25."""
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25, logit_bias={1: 2.0})
    one = Asked(params, [7, 3])
    one.output = [1, 1]
    logits = torch.tensor([[4.0] * VOCABULARY])
    logits[0, 3] = -4.0
    apply([one], [[]], logits)
    assert logits[0, [1, 3, 7, 9]].tolist() == [1.75, -8.0, 2.0, 4.0]


def test_what_was_rejected_is_not_in_the_history():
    one = Asked(PARAMS["repetition"], [1, 2])
    one.rules.penalties(one.output, [9, 9])
    found = one.rules.penalties(one.output, [4])
    assert found is not None
    by_token = dict(zip(found.token_ids.tolist(), found.divisors.T.tolist(), strict=True))
    assert by_token[9] == [1.0, 1.0]
    assert by_token[4] == pytest.approx([1.0, 1.7])
    assert by_token[1] == pytest.approx([1.7, 1.7])


def test_an_output_that_is_there_from_the_start_counts_like_one_that_grew():
    """A request that is read again after it was put aside."""
    grown, late = Asked(PARAMS["all"], [1, 6, 3]), Asked(PARAMS["all"], [1, 6, 3])
    for token_id in (4, 4, 8):
        grown.rules.penalties(grown.output, [token_id])
        grown.output.append(token_id)
    late.output = list(grown.output)
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(2))
    other = logits.clone()
    apply([grown], [[]], logits)
    apply([late], [[]], other)
    assert torch.equal(logits, other)


def test_plain_requests_cost_nothing(monkeypatch: pytest.MonkeyPatch):
    """Their logits are not touched, and nothing is made for them."""
    from dspark.engine import judging

    def fail(*_: Any) -> None:
        raise AssertionError("a plain request has no rules")

    monkeypatch.setattr(judging, "LogitRules", fail)
    params = SamplingParams(temperature=0.5, top_p=0.9, min_p=0.1)
    running = SimpleNamespace(request=SimpleNamespace(sampling=params))
    logits = torch.randn(2, VOCABULARY)
    before = logits.clone()
    judging.apply_rules([SimpleNamespace(running=running, yields_token=True)], SimpleNamespace(), logits)
    assert torch.equal(logits, before)
