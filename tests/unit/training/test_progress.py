"""The record of a run, also when the run was killed and goes on."""

import json
from pathlib import Path
from typing import Any

from dspark.training.progress import History, read_history

METRICS = {
    "loss": 1.0,
    "ce": 1.0,
    "tv": 1.0,
    "expected_accepted_length": 1.5,
    "learning_rate": 0.1,
    "blocks": 3.0,
    "supervised_slots": 10.0,
    "tokens": 40.0,
    "samples": 4.0,
    "step_s": 0.5,
}


def history_of(folder: Path, *, start_step: int = 0) -> History:
    run: dict[str, Any] = {"output": str(folder), "tracking_uri": "", "run_id": None}
    return History(run, start_step=start_step)


def add_steps(history: History, first: int, last: int) -> None:
    for step in range(first, last + 1):
        history.add_step(step, 10, METRICS, log_line=True)


def steps_of(folder: Path) -> list[tuple[int, str]]:
    return [(row["step"], "heldout" if "heldout" in row else "train") for row in read_history(folder)]


def test_every_step_and_every_validation_is_a_line(tmp_path: Path):
    history = history_of(tmp_path)
    history.add_validation(0, {"expected_accepted_length": 1.0})
    add_steps(history, 1, 2)
    history.close()
    assert steps_of(tmp_path) == [(0, "heldout"), (1, "train"), (2, "train")]
    assert read_history(tmp_path)[1]["loss"] == 1.0


def test_steps_after_the_checkpoint_are_dropped_when_a_run_goes_on(tmp_path: Path):
    first = history_of(tmp_path)
    first.add_validation(0, {"expected_accepted_length": 1.0})
    add_steps(first, 1, 5)
    again = history_of(tmp_path, start_step=3)
    add_steps(again, 4, 6)
    assert steps_of(tmp_path) == [(0, "heldout"), *[(step, "train") for step in range(1, 7)]]


def test_a_run_that_starts_over_has_one_first_validation(tmp_path: Path):
    first = history_of(tmp_path)
    first.add_validation(0, {"expected_accepted_length": 1.0})
    add_steps(first, 1, 2)
    again = history_of(tmp_path, start_step=0)
    again.add_validation(0, {"expected_accepted_length": 1.0})
    assert steps_of(tmp_path) == [(0, "heldout")]


def test_totals_and_seconds_run_on_over_a_restart(tmp_path: Path):
    first = history_of(tmp_path)
    add_steps(first, 1, 4)
    rows = [row | {"elapsed_s": 100.0 * row["step"]} for row in read_history(tmp_path)]
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    again = history_of(tmp_path, start_step=2)
    add_steps(again, 3, 3)
    counted = {"blocks": 9.0, "supervised_slots": 30.0, "tokens": 120.0, "samples": 12.0, "step_s": 1.5}
    assert {name: value for name, value in again.totals.items() if value} == counted
    assert 200.0 <= again.seconds < 210.0


def test_the_latest_held_out_figures_are_known_after_a_restart_at_the_end(tmp_path: Path):
    first = history_of(tmp_path)
    add_steps(first, 1, 2)
    first.add_validation(2, {"expected_accepted_length": 1.7})
    assert history_of(tmp_path, start_step=2).validation == {"expected_accepted_length": 1.7}


def test_a_half_written_last_line_is_left_out(tmp_path: Path):
    add_steps(history_of(tmp_path), 1, 2)
    with open(tmp_path / "history.jsonl", "a", encoding="utf-8") as stream:
        stream.write('{"step": 3, "lo')
    assert steps_of(tmp_path) == [(1, "train"), (2, "train")]
    add_steps(history_of(tmp_path, start_step=2), 3, 3)
    assert steps_of(tmp_path) == [(1, "train"), (2, "train"), (3, "train")]


def test_no_run_has_no_history(tmp_path: Path):
    assert read_history(tmp_path) == []
