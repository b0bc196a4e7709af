"""The lagged form: how many slots is decided by step t - 2 alone, which ones by the present step; nothing is lost."""

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dspark.config import build_config
from dspark.drafters.checkpoint import load_drafter
from dspark.engine.config import EngineConfig
from dspark.engine.estimates import PriorEstimate
from dspark.engine.lagged_capacity import LaggedCapacity, Members, Picture
from dspark.engine.loading import paged_runner
from dspark.engine.policy import SpeculationPolicy
from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.prefix_scheduler import PrefixScheduler, best_total
from scheduling_toys import Rows, random_curve, random_rows, sunk_seconds
from tiny_drafter import make_tiny_drafter
from tiny_engine import PROMPTS, greedy_continuations, ids_of, load, make_engine, request, run

STAIRS = CostCurve((1, 2, 4, 8, 16, 64), (1.0, 1.1, 1.4, 2.0, 3.6, 16.0), (1, 8), (0.1, 0.3), buckets=(4, 8, 16))
BLOCK = 4
PRIOR = [0.5, 0.25, 0.125, 0.0625]


def best_total_slowly(survival: Rows, curve: CostCurve, *, prefill_tokens: int = 0, draft_s: float = 0.0) -> int:
    """Every number of slots, the best ones first, at what their bucket costs."""
    slots = sorted((a for row in survival for a in row if a > 0), reverse=True)
    tokens = len(survival) + prefill_tokens
    draft_s -= sunk_seconds(curve, tokens, prefill_tokens)

    def rate(number: int) -> float:
        seconds = curve.verify_seconds(tokens + number) + (len(survival) - 1) * curve.request_s + draft_s
        return (len(survival) + sum(slots[:number])) / seconds

    return max(range(len(slots) + 1), key=rate)


@pytest.mark.parametrize("seed", range(60))
def test_the_total_is_the_best_of_all_on_the_curves_stairs(seed: int) -> None:
    rng = random.Random(seed)
    survival = random_rows(rng, rng.randint(1, 5), 5)
    curve = random_curve(rng, 30, buckets=rng.choice([(), (2, 4, 8, 16), (3, 7)]))
    options = {"prefill_tokens": rng.choice([0, 3]), "draft_s": rng.choice([0.0, 0.25])}
    found, slow = (find(survival, curve, **options) for find in (best_total, best_total_slowly))
    slots = sorted((a for row in survival for a in row if a > 0), reverse=True)
    tokens = len(survival) + options["prefill_tokens"]
    others_s = options["draft_s"] - sunk_seconds(curve, tokens, options["prefill_tokens"])
    rates = [(len(survival) + sum(slots[:n])) / (curve.verify_seconds(tokens + n) + others_s) for n in (found, slow)]
    assert rates[0] == pytest.approx(rates[1])
    assert best_total([], curve) == 0


class Guarded(Sequence[float]):
    """A row that may be read once it is two steps old."""

    def __init__(self, row: Sequence[float], clock: list[int]) -> None:
        self._row, self._clock, self._born = row, clock, clock[0]
        self.num_reads = 0

    def _opened(self) -> Sequence[float]:
        assert self._clock[0] - self._born >= 2, f"survival of step {self._born} was read in step {self._clock[0]}"
        self.num_reads += 1
        return self._row

    def __len__(self) -> int:
        return len(self._opened())

    def __iter__(self) -> Iterator[float]:
        return iter(self._opened())

    def __getitem__(self, index: Any) -> Any:
        return self._opened()[index]


@pytest.mark.parametrize("seed", range(20))
def test_nothing_newer_than_two_steps_is_read_and_what_is_newer_changes_nothing(seed: int) -> None:
    rng = random.Random(seed)
    names, clock = [f"r{i}" for i in range(4)], [0]
    guarded, poisoned = (LaggedCapacity(STAIRS, block_size=BLOCK) for _ in range(2))
    history: list[Rows] = []
    for step in range(12):
        clock[0] = step
        present = rng.sample(names, rng.randint(1, 4))
        members = Members({name: rng.random() < 0.8 for name in present}, rng.choice([0, 8]))
        total = guarded.total(members)
        if step >= 2:
            old = dict(zip(names, history[step - 2], strict=True))
            rows = [old[name] or PRIOR if drafted else [] for name, drafted in members.is_drafted.items()]
            draft_s = STAIRS.draft_seconds(sum(members.is_drafted.values()))
            assert total == best_total(rows, STAIRS, prefill_tokens=members.other_tokens, draft_s=draft_s)
        # The twin has seen the same up to step t - 2, and something else since.
        poisoned._pictures.clear()
        for age in (2, 1):
            noted = history[step - age] if step >= age else None
            if age == 1:
                noted = [[0.99] * BLOCK for _ in names]
            prior = PRIOR if step >= age else PriorEstimate().survival(BLOCK)
            rows_of = {} if noted is None else dict(zip(names, noted, strict=True))
            poisoned._pictures.append(Picture(rows_of, prior))
        poisoned._prepared = None
        assert poisoned.total(members) == total
        history.append(random_rows(rng, len(names), BLOCK))
        rows_now = {name: Guarded(row, clock) for name, row in zip(names, history[-1], strict=True)}
        guarded.note(Picture(rows_now, Guarded(PRIOR, clock)))
        clock[0] = step + 1  # what is prepared while a step computes belongs to the next one
        guarded.prepare()


def test_what_was_prepared_is_taken_when_the_same_requests_go_on_and_searched_anew_when_not() -> None:
    lagged, clock = LaggedCapacity(STAIRS, block_size=BLOCK), [0]
    both = Members({"a": True, "b": True})
    lagged.total(both)
    row = Guarded([0.9, 0.8, 0.7, 0.6], clock)
    lagged.note(Picture({"a": row, "b": row}, [0.1]))
    lagged.note(Picture({}, []))
    clock[0] = 2
    lagged.prepare()
    num_reads = row.num_reads
    assert lagged.total(both) == best_total([[0.9, 0.8, 0.7, 0.6]] * 2, STAIRS, draft_s=STAIRS.draft_seconds(2))
    assert row.num_reads == num_reads > 0
    one = lagged.total(Members({"a": True}))
    assert one == best_total([[0.9, 0.8, 0.7, 0.6]], STAIRS, draft_s=STAIRS.draft_seconds(1))
    new = lagged.total(Members({"a": True, "new": True}))
    assert new == best_total([[0.9, 0.8, 0.7, 0.6], [0.1]], STAIRS, draft_s=STAIRS.draft_seconds(2))


@pytest.mark.parametrize("total", range(7))
def test_so_many_slots_are_verified_whatever_the_present_confidences_say_those_that_rank_first(total: int) -> None:
    survival = [[0.9, 0.3, 0.2], [0.8, 0.7, 0.1]]
    lengths = PrefixScheduler().allocate(survival, STAIRS, capacity=total, floor=total)
    assert sum(lengths) == total
    ranked = sorted(itertools.chain.from_iterable(survival), reverse=True)
    assert sum(sum(row[:n]) for row, n in zip(survival, lengths, strict=True)) == pytest.approx(sum(ranked[:total]))


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Any:
    return load_drafter(make_tiny_drafter(tmp_path_factory.mktemp("drafter"), tiny_target))


def test_output_is_the_librarys_own_and_lengths_are_those_of_two_steps_before(
    drafter: Any, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = greedy_continuations(load(tiny_target), PROMPTS, 20)
    clock, totals, sums = [0], list[int](), list[int]()
    note, total, decide = LaggedCapacity.note, LaggedCapacity.total, SpeculationPolicy.verify_lengths

    def guarded_note(self: LaggedCapacity, picture: Picture) -> None:
        rows = {name: Guarded(row, clock) for name, row in picture.rows.items()}
        note(self, Picture(rows, Guarded(picture.prior, clock)))
        clock[0] += 1

    def counted_total(self: LaggedCapacity, members: Members) -> int:
        totals.append(total(self, members))
        return totals[-1]

    def watched(self: SpeculationPolicy, decoding: Any, proposals: Any, *, prefill_tokens: int) -> list[int]:
        before = len(totals)
        lengths = decide(self, decoding, proposals, prefill_tokens=prefill_tokens)
        assert len(totals) == before + 1
        sums.append(sum(lengths))
        assert sums[-1] == min(totals[-1], sum(proposal.num_tokens for proposal in proposals))
        return lengths

    monkeypatch.setattr(LaggedCapacity, "note", guarded_note)
    monkeypatch.setattr(LaggedCapacity, "total", counted_total)
    monkeypatch.setattr(SpeculationPolicy, "verify_lengths", watched)
    drafts = paged_runner(drafter, num_pages=512, page_size=4)
    curve = CostCurve((1, 8, 16, 64), (1.0, 1.02, 1.1, 1.5), (1, 8), (0.01, 0.02), buckets=(8, 16, 32))
    engine = make_engine(load(tiny_target), drafts, curve=curve, lagged_capacity=True, min_gain=0.0)
    outputs = run(engine, [request(prompt, str(i), max_tokens=20) for i, prompt in enumerate(PROMPTS)])
    assert [ids_of(outputs[str(i)]) for i in range(len(PROMPTS))] == truth
    assert engine.stats.scheduled_tokens == sum(sums) > 0


def test_a_fixed_length_leaves_it_nothing_to_decide() -> None:
    with pytest.raises(ValueError, match=r"lagged_capacity has no effect with verify_length \(3\)"):
        build_config(EngineConfig, {"lagged_capacity": True, "verify_length": 3})
