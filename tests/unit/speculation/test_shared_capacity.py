"""Options within a shared capacity: the best of all combinations for few takers, nearly so for many."""

import itertools

import numpy as np
import pytest

from dspark.speculation.shared_capacity import Floats, choose_within


def random_options(rng: np.random.Generator, num_takers: int, num_options: int) -> tuple[Floats, Floats]:
    """Options that gain ever less, or jump, and one of each taker's that uses nothing."""
    usage = np.sort(rng.uniform(0, 5, (num_takers, num_options)), axis=1)
    usage[:, 0] = 0.0
    value = np.sort(rng.uniform(0, 3, (num_takers, num_options)) * rng.choice([0.2, 1.0, 4.0], (num_takers, 1)), axis=1)
    mixed = rng.permuted(np.arange(num_options)[None].repeat(num_takers, 0), axis=1)
    return np.take_along_axis(value, mixed, 1), np.take_along_axis(usage, mixed, 1)


def total(table: Floats, chosen: np.ndarray) -> float:
    return float(table[np.arange(len(table)), chosen].sum())


@pytest.mark.parametrize("seed", range(60))
def test_few_takers_get_the_best_of_all_combinations(seed: int) -> None:
    rng = np.random.default_rng(seed)
    value, usage = random_options(rng, int(rng.integers(1, 5)), int(rng.integers(1, 7)))
    capacity = float(rng.uniform(0, usage.max(axis=1).sum()))
    chosen, _ = choose_within(value, usage, capacity)
    every = itertools.product(range(value.shape[1]), repeat=len(value))
    best = max(total(value, np.array(one)) for one in every if total(usage, np.array(one)) <= capacity)
    assert total(usage, chosen) <= capacity * (1 + 1e-9)
    assert total(value, chosen) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(5))
def test_many_takers_are_within_a_step_of_the_bound_that_any_price_gives(seed: int) -> None:
    value, usage = random_options(np.random.default_rng(seed), 300, 12)
    capacity = 0.3 * float(usage.max(axis=1).sum())
    chosen, price = choose_within(value, usage, capacity)
    bound = float((value - price * usage).max(axis=1).sum()) + price * capacity  # weak duality
    assert total(usage, chosen) <= capacity * (1 + 1e-9)
    assert bound - 0.05 * value.max() <= total(value, chosen) <= bound * (1 + 1e-9)


def test_where_there_is_enough_everyone_has_the_best_at_no_price() -> None:
    value, usage = random_options(np.random.default_rng(0), 20, 6)
    chosen, price = choose_within(value, usage, float(usage.sum()))
    assert price == 0.0
    assert (chosen == value.argmax(axis=1)).all()


def test_of_equal_options_the_thriftier_is_taken() -> None:
    chosen, _ = choose_within(np.array([[1.0, 1.0]]), np.array([[3.0, 2.0]]), 10.0)
    assert chosen.tolist() == [1]


@pytest.mark.parametrize("capacity", [0.0, 2.0, 10.0])
@pytest.mark.parametrize("value", [[1.0, 4.0, 2.0], [4.0, 2.0, 1.0], [1.0, 2.0, 4.0]])
def test_of_equally_thrifty_options_the_better_is_taken_however_little_there_is(
    value: list[float], capacity: float
) -> None:
    chosen, _ = choose_within(np.array([value]), np.array([[2.0, 2.0, 2.0]]), capacity)
    assert value[chosen[0]] == 4.0


def test_too_little_for_anybody_leaves_the_thriftiest() -> None:
    chosen, price = choose_within(np.array([[5.0, 1.0], [5.0, 1.0]]), np.array([[3.0, 2.0], [1.0, 0.5]]), 1.0)
    assert chosen.tolist() == [1, 1]
    assert price == np.inf


def test_an_option_that_is_none_is_never_taken() -> None:
    chosen, _ = choose_within(np.array([[-np.inf, 1.0, -np.inf]]), np.array([[0.0, 2.0, 0.0]]), 9.0)
    assert chosen.tolist() == [1]
    assert choose_within(np.zeros((0, 3)), np.zeros((0, 3)), 1.0)[0].tolist() == []
