"""The kernel's decisions against those of its slow twins."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dspark import native
from dspark.speculation import drafting_choice, prefix_scheduler
from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.drafting_choice import choose_drafting
from dspark.speculation.prefix_scheduler import PrefixScheduler
from dspark.speculation.quick_scheduler import quick_allocate, quick_choice
from scheduling_toys import random_curve, random_rows

allocate = PrefixScheduler().allocate

pytestmark = pytest.mark.skipif(native.kernels() is None, reason="the kernels cannot be built here")


def random_step(seed: int) -> tuple[list[list[float]], CostCurve, dict[str, Any]]:
    """A step with the options of both searches; one in five has more requests than the search tries one by one."""
    rng = random.Random(seed)
    survival = random_rows(rng, rng.randint(33, 80) if seed % 5 == 0 else rng.randint(1, 8), 7)
    curve = random_curve(rng, 30, buckets=rng.choice([(), (2, 4, 8, 16), (3, 7, 20, 100)]))
    lengths = [rng.choice([None, None, rng.randint(0, len(row))]) for row in survival]
    curve = replace(curve, context_s=rng.choice([0.0, 0.5]), context_tokens=100)
    options = {"prefill_tokens": rng.choice([0, 5]), "fixed": rng.choice([None, lengths])}
    options |= {"context_tokens": rng.choice([None, 100 * len(survival), 500 * len(survival)])}
    weights = [rng.choice([0.5, 1.0, 2.0]) for _ in survival]  # exact, so that ties stay ties
    return survival, curve, options | {"weights": rng.choice([None, weights])}


def by_both(monkeypatch: pytest.MonkeyPatch, decide: Callable[[], Any]) -> tuple[Any, Any]:
    """What the kernel decides, and what its twin does."""
    fast = decide()
    with monkeypatch.context() as patch:
        patch.setattr(prefix_scheduler, "quick_allocate", lambda *args, **options: None)
        patch.setattr(drafting_choice, "quick_choice", lambda *args, **options: None)
        return fast, decide()


@pytest.mark.parametrize("seed", range(200))
def test_lengths_equal_those_of_the_twin(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    survival, curve, options = random_step(seed)
    rng = random.Random(seed)
    options |= {
        "draft_s": rng.choice([0.0, 0.25]),
        "floor": rng.choice([0, 0, 3]),
        "capacity": rng.choice([None, 0, 6]),
    }
    fast, slow = by_both(monkeypatch, lambda: allocate(survival, curve, **options))
    assert fast == slow


@pytest.mark.parametrize("seed", range(200))
def test_who_is_drafted_equals_the_twins_choice(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    survival, curve, options = random_step(seed)
    rng = random.Random(seed)
    is_free = [bool(row) and rng.random() < 0.2 for row in survival] if seed % 2 else None
    options |= {"is_free": is_free, "min_gain": rng.choice([0.0, 0.05])}
    options |= {
        "max_drafted": rng.choice([None, 0, 3]),
        "floor": rng.choice([0, 0, 3]),
        "capacity": rng.choice([None, 0, 6]),
    }
    fast, slow = by_both(monkeypatch, lambda: choose_drafting(survival, curve, **options))
    assert fast == slow


def test_what_is_not_sound_is_left_to_the_twin_which_says_why() -> None:
    flat = CostCurve((1,), (1.0,))
    options: dict[str, Any] = {"prefill_tokens": 0, "context_tokens": None, "fixed": None, "weights": None}
    for row in ([0.5, 0.6], [1.5], [-0.1], [float("nan")]):
        assert quick_allocate([row], flat, draft_s=0.0, capacity=None, floor=0, **options) is None
        search: dict[str, Any] = {"is_free": None, "min_gain": 0.0, "max_drafted": None, "most_tried": 32}
        search |= {"capacity": None, "floor": 0}
        assert quick_choice([row], flat, **search, **options) is None
        with pytest.raises(ValueError, match="cumulative product"):
            allocate([row], flat)
    for fixed in ([2], [-1], [1, 1]):
        options |= {"fixed": fixed}
        assert quick_allocate([[0.5]], flat, draft_s=0.0, capacity=None, floor=0, **options) is None
        with pytest.raises(ValueError, match="fixed length"):
            allocate([[0.5]], flat, fixed=fixed)
