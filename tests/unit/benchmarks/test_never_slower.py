"""What the scheduler is held to: the best length that was chosen on other runs, and budgets that fall with the load."""

import json
from pathlib import Path
from typing import Any

import pytest

LOADS, REPEATS = (1, 4, 16), 4


@pytest.fixture
def never_slower(script: Any) -> Any:
    return script("never_slower")


@pytest.fixture
def drafter(tmp_path: Path, never_slower: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder that says of its drafter no more than that its block has 5."""
    monkeypatch.setattr(never_slower, "from_deepspec", lambda content: type("Config", (), content))
    (tmp_path / "config.json").write_text(json.dumps({"block_size": 5}))
    return str(tmp_path)


def parsed(never_slower: Any, monkeypatch: pytest.MonkeyPatch, drafter: str, *more: str) -> Any:
    line = ["never_slower.py", "--drafter", drafter, "--prompts", "p.jsonl", "--output", "out", "--repeats", "4"]
    monkeypatch.setattr("sys.argv", [*line, "--concurrency", *map(str, LOADS), *more])
    return never_slower.parsed()


def rows(budgets: dict[int, list[float]], speeds: dict[str, float]) -> list[dict[str, Any]]:
    return [
        {
            "key": ["greedy", load, repeat, name],
            "full_load_tokens_per_s": speed,
            "verify_length": budgets[load][repeat] if name == "scheduled" else 0.0,
        }
        for load in LOADS
        for repeat in range(REPEATS)
        for name, speed in speeds.items()
    ]


SPEEDS = {"plain": 100.0, "length 1": 120.0, "scheduled": 118.0}


def config(never_slower: Any, monkeypatch: pytest.MonkeyPatch, drafter: str) -> Any:
    return never_slower.contest_config(parsed(never_slower, monkeypatch, drafter, "--lengths", "1"))


def test_all_lengths_of_the_drafter_are_compared_unless_some_are_named(never_slower, monkeypatch, drafter):
    every = parsed(never_slower, monkeypatch, drafter)
    assert every.lengths == [1, 2, 3, 4, 5]
    assert list(never_slower.contest_config(every).entrants)[1] == "length 1"
    assert parsed(never_slower, monkeypatch, drafter, "--lengths", "1", "3").lengths == [1, 3]
    with pytest.raises(SystemExit):
        parsed(never_slower, monkeypatch, drafter, "--lengths", "6")


def test_places_are_taken_again_at_every_load(never_slower, monkeypatch, drafter):
    built = config(never_slower, monkeypatch, drafter)
    assert all(built.num_requests(load) >= 2 * load for load in LOADS)
    with pytest.raises(SystemExit):
        parsed(never_slower, monkeypatch, drafter, "--per-place", "1")


def test_a_budget_that_rises_with_the_load_is_named_also_over_several_loads(never_slower, monkeypatch, drafter):
    budgets = {1: [1.0, 1.0, 1.02, 1.0], 4: [1.08] * 4, 16: [1.16, 1.16, 1.17, 1.16]}
    (rise,) = never_slower.rises(rows(budgets, SPEEDS), config(never_slower, monkeypatch, drafter))
    assert (rise["lower"], rise["higher"], rise["resolution"]) == (1, 16, 0.1)
    assert rise["by"] == pytest.approx(0.1575)


def test_what_falls_and_what_rises_within_the_noise_are_no_rises(never_slower, monkeypatch, drafter):
    budgets = {1: [2.0] * 4, 4: [1.0, 1.4, 0.9, 1.1], 16: [1.3, 1.1, 1.5, 1.2]}
    assert never_slower.rises(rows(budgets, SPEEDS), config(never_slower, monkeypatch, drafter)) == []


def test_ratios_are_of_the_speeds_at_full_load(never_slower, monkeypatch, drafter):
    budgets = {load: [0.0] * 4 for load in LOADS}
    for row in never_slower.compared(rows(budgets, SPEEDS), config(never_slower, monkeypatch, drafter)):
        assert row["best"] == "length 1"
        assert row["of best"] == pytest.approx(118 / 120)
        assert row["of plain"] == pytest.approx(1.18)
