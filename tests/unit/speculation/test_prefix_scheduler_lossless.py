"""Sampled output stays the target's own, because no length depends on the draft tokens it decides about."""

import functools
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence

import pytest
import torch

from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.prefix_scheduler import PrefixScheduler
from dspark.speculation.proposal import Proposal
from dspark.speculation.rejection import verify
from scheduling_toys import Rows, full_search, random_curve, random_rows

Policy = Callable[[Rows, CostCurve], list[int]]
SurvivalOf = Callable[[int, Sequence[int]], list[float]]

APPENDIX_CURVE = CostCurve((1, 2, 3), (1.0, 1 / 0.5, 1 / 0.45))
STAIRS = CostCurve((1, 2, 4), (1.0, 2.0, 2.4), buckets=(1, 2, 4))
TARGET, DRAFT = (0.7, 0.3), (0.5, 0.5)  # tokens A and B
A = 0
allocate = PrefixScheduler().allocate


def output_law(drafts: Sequence[int], length: int) -> dict[tuple[int, ...], float]:
    """Distribution of the next len(drafts) output tokens when `length` of the drafts are verified, calculated."""
    law: dict[tuple[int, ...], float] = defaultdict(float)
    residual = [max(0.0, t - d) for t, d in zip(TARGET, DRAFT, strict=True)]

    def walk(output: tuple[int, ...], chance: float, still_drafts: bool) -> None:
        if len(output) == len(drafts):
            law[output] += chance
        elif still_drafts and len(output) < length:
            token = drafts[len(output)]
            accept = min(1.0, TARGET[token] / DRAFT[token])
            walk((*output, token), chance * accept, True)
            for other, mass in enumerate(residual):
                walk((*output, other), chance * (1 - accept) * mass / sum(residual), False)
        else:
            for token, mass in enumerate(TARGET):
                walk((*output, token), chance * mass, False)

    walk((), 1.0, True)
    return law


def joint_law(num_requests: int, num_slots: int, survival_of: SurvivalOf, policy: Callable[[Rows], list[int]]) -> dict:
    """Distribution of all requests' outputs, over every draft that can be drawn. policy: survival -> lengths."""
    law: dict[tuple, float] = defaultdict(float)
    every_draft = list(itertools.product(range(2), repeat=num_slots))
    for drafts in itertools.product(every_draft, repeat=num_requests):
        chance = math.prod(DRAFT[token] for row in drafts for token in row)
        lengths = policy([survival_of(r, row) for r, row in enumerate(drafts)])
        outputs = [output_law(row, length).items() for row, length in zip(drafts, lengths, strict=True)]
        for combination in itertools.product(*outputs):
            law[tuple(tokens for tokens, _ in combination)] += chance * math.prod(p for _, p in combination)
    return law


def distance_from_target(law: dict) -> float:
    """Total variation from independent draws of the target."""
    assert sum(law.values()) == pytest.approx(1.0)
    exact = {outputs: math.prod(TARGET[token] for row in outputs for token in row) for outputs in law}
    return 0.5 * (sum(abs(law[o] - p) for o, p in exact.items()) + 1 - sum(exact.values()))


def appendix_survival(_request: int, drafts: Sequence[int]) -> list[float]:
    return [0.8, 0.8 * (0.9 if drafts[0] == A else 0.0)]


def chance_of_a(law: dict) -> float:
    return sum(p for outputs, p in law.items() if outputs[0][0] == A)


def test_the_papers_example_yields_the_targets_own_frequency_and_retrospective_search_does_not() -> None:
    exact = joint_law(1, 2, appendix_survival, lambda survival: allocate(survival, APPENDIX_CURVE))
    leaking = joint_law(1, 2, appendix_survival, lambda survival: full_search(survival, APPENDIX_CURVE))
    assert chance_of_a(exact) == pytest.approx(0.7)
    assert chance_of_a(leaking) == pytest.approx(0.85)


@pytest.mark.parametrize(
    ("policy", "curve", "expected"),
    [
        (allocate, APPENDIX_CURVE, 0.7),
        (allocate, STAIRS, 0.7),
        (lambda survival, curve: allocate(survival, curve, prefill_tokens=1), STAIRS, 0.7),
        (full_search, APPENDIX_CURVE, 0.85),
    ],
    ids=["appendix", "stairs", "filled stairs", "retrospective"],
)
def test_the_papers_example_drawn_through_the_verifier(policy: Policy, curve: CostCurve, expected: float) -> None:
    generator = torch.Generator().manual_seed(0)
    target, draft = torch.tensor([TARGET] * 3), torch.tensor([DRAFT] * 2)
    num_a, num_draws = 0, 4000
    for _ in range(num_draws):
        token_ids = torch.multinomial(draft, 1, generator=generator).squeeze(1)
        length = policy([appendix_survival(0, token_ids.tolist())], curve)[0]
        verdict = verify(target[: length + 1], Proposal(token_ids[:length], draft[:length], None), generator)
        num_a += (int(token_ids[0]) if verdict.num_accepted else verdict.next_id) == A
    assert num_a / num_draws == pytest.approx(expected, abs=0.03)  # four standard deviations


def random_confidences(rng: random.Random) -> SurvivalOf:
    """Confidence of a slot as any function of request and draft tokens before it, often 1 (a tie) or 0."""
    first: dict[int, float] = defaultdict(lambda: rng.choice([0.75, 0.875, 1.0]))
    later: dict[tuple, float] = defaultdict(lambda: rng.choice([0.0, 0.5, 0.875, 1.0, 1.0]))

    def survival_of(request: int, drafts: Sequence[int]) -> list[float]:
        confidences = [later[request, tuple(drafts[:k])] if k else first[request] for k in range(len(drafts))]
        return list(itertools.accumulate(confidences, lambda a, c: a * c))

    return survival_of


def tempting_curve(rng: random.Random, num_requests: int, buckets: Sequence[int] = ()) -> CostCurve:
    """Cheap and dear tokens in any order: what follows a dear one often decides whether it would have paid."""
    rises = [rng.choice([1 / 32, 3 / 4, 7 / 8]) / num_requests for _ in range(11)]
    sizes = range(num_requests, num_requests + 12)
    return CostCurve(tuple(sizes), tuple(itertools.accumulate(rises, initial=1.0)), buckets=tuple(buckets))


@pytest.mark.parametrize("seed", range(40))
def test_a_batch_of_requests_with_ties_on_stairs_outputs_independent_targets(seed: int) -> None:
    rng = random.Random(seed)
    num_requests, num_slots = rng.choice([(1, 3), (2, 2)])
    survival_of = random_confidences(rng)
    curve = tempting_curve(rng, num_requests, rng.choice([(), (2, 4, 8), (3, 6)]))
    options = {"floor": rng.choice([0, 0, 1]), "capacity": rng.choice([None, None, 2])}
    if seed % 4 == 3:  # the lagged form: a number that was settled before
        options = dict.fromkeys(("floor", "capacity"), rng.randint(1, 5))
    law = joint_law(num_requests, num_slots, survival_of, lambda survival: allocate(survival, curve, **options))
    assert distance_from_target(law) < 1e-12


def ranked_search(survival: Rows, curve: CostCurve) -> list[int]:
    """The best number of slots in the order of admission, over the whole ranking instead of to the first stop."""
    lengths = [allocate(survival, curve, capacity=n, floor=n) for n in range(sum(map(len, survival)) + 1)]

    def rate(candidate: list[int]) -> float:
        tau = len(survival) + sum(sum(row[:length]) for row, length in zip(survival, candidate, strict=True))
        return tau / curve.verify_seconds(len(survival) + sum(candidate))

    return max(lengths, key=rate)


@pytest.mark.parametrize("policy", [full_search, ranked_search])
def test_a_batch_decided_by_retrospective_search_does_not(policy: Policy) -> None:
    distances = []
    for seed in range(40):
        rng = random.Random(seed)
        num_requests, num_slots = rng.choice([(1, 3), (2, 2)])
        survival_of, curve = random_confidences(rng), tempting_curve(rng, num_requests)
        decide = functools.partial(policy, curve=curve)
        distances.append(distance_from_target(joint_law(num_requests, num_slots, survival_of, decide)))
    assert sum(distance > 0.01 for distance in distances) >= 4


def changes_admission(policy: Callable[[Rows, CostCurve], list[int]], seed: int) -> bool:
    """Whether what follows a slot, and so may depend on its token, changes whether the slot is admitted."""
    rng = random.Random(seed)
    survival = random_rows(rng, rng.randint(1, 4), 4)
    curve = random_curve(rng, 24, buckets=rng.choice([(), (2, 4, 8, 16), (3, 7)]))
    lengths = policy(survival, curve)
    for r, row in enumerate(survival):
        for k in range(len(row)):
            following = random_rows(rng, 1, len(row) - k - 1, ragged=False)[0]
            other = [*row[: k + 1], *(row[k] * a for a in following)]
            changed = policy([*survival[:r], other, *survival[r + 1 :]], curve)
            if (changed[r] > k) != (lengths[r] > k):
                return True
    return False


def test_no_slot_is_admitted_or_left_by_what_follows_it() -> None:
    assert not any(changes_admission(allocate, seed) for seed in range(150))
    assert any(changes_admission(full_search, seed) for seed in range(20))
