"""Ways of decoding side by side: who is measured when, against whom, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from dspark.config import build_config
from dspark.data.prompts import Prompt
from dspark.errors import Mismatch, MissingInput
from dspark.evaluation.contest import (
    Contest,
    contest_target,
    format_contest,
    key_of,
    measure,
    run_keys,
    summarize_contest,
    whole_groups,
)
from dspark.evaluation.load_config import ContestConfig
from dspark.provenance import read_json, write_json
from tiny_drafter import make_tiny_drafter

PROMPTS = [
    Prompt(name, "math", "heldout", [{"role": "user", "content": text}])
    for name, text in (("a", "hello"), ("b", "a question"), ("c", "the number"))
]


def config_of(folder: Path, entrants: dict[str, dict[str, Any]], **changes: Any) -> ContestConfig:
    content = {
        "prompts": [{"path": "p.jsonl"}],
        "target": {"name": str(folder), "dtype": "float32", "device": "cpu"},
        "entrants": entrants,
        "repeats": 2,
        "concurrency": [1, 2],
        "max_tokens": 8,
        "min_requests": 2,
        "requests_per_place": 1,
        "warmup_tokens": 2,
        "engine": {"kv_tokens": 512, "page_size": 8, "max_running_requests": 2},
        "threads": 1,
    }
    return build_config(ContestConfig, content | changes)


@pytest.fixture
def entrants(tmp_path: Path, tiny_target: Path) -> dict[str, dict[str, Any]]:
    dspark = str(make_tiny_drafter(tmp_path / "dspark", tiny_target))
    eagle3 = str(make_tiny_drafter(tmp_path / "eagle3", tiny_target, architecture="eagle3"))
    return {
        "none": {},
        "n-gram": {"drafter": "ngram", "verify_length": 2},
        "dspark": {"drafter": dspark, "verify_length": 3},
        "dspark short": {"drafter": dspark, "verify_length": 1},
        "eagle3": {"drafter": eagle3, "verify_length": 2},
    }


def test_every_entrant_gives_the_same_answers_on_one_copy_of_the_target(tiny_target, entrants):
    config = config_of(tiny_target, entrants)
    contest = Contest(config, PROMPTS)
    models = {id(engine._target.model) for engine in contest._engines.values()}
    assert len(models) == 1
    rows = list(measure(contest, config, run_keys(config)))
    assert [key_of(row) for row in rows] == run_keys(config)
    summary = summarize_contest(rows, config)["greedy"]
    for by_entrant in summary.values():
        for figures in by_entrant.values():
            assert figures["identical"] == figures["compared"] == 4  # two requests, two repeats; float32: exactly
    lengths = {name: figures["verify_length"] for name, figures in summary["2"].items()}
    assert lengths["none"] == 0.0
    assert 0 < lengths["dspark short"] <= 1 < lengths["dspark"] <= 3
    table = format_contest(summarize_contest(rows, config))
    assert all(name in table for name in entrants)


def test_runs_that_are_compared_stand_next_to_each_other_and_the_order_turns():
    config = config_of(Path("t"), {"none": {}, "other": {"drafter": "ngram", "verify_length": 1}})
    assert run_keys(config) == [
        *(("greedy", 1, 0, "none"), ("greedy", 1, 0, "other"), ("greedy", 2, 0, "none"), ("greedy", 2, 0, "other")),
        *(("greedy", 1, 1, "other"), ("greedy", 1, 1, "none"), ("greedy", 2, 1, "other"), ("greedy", 2, 1, "none")),
    ]


def test_a_setting_that_was_cut_short_is_measured_again_as_a_whole():
    config = config_of(Path("t"), {"none": {}, "other": {"drafter": "ngram", "verify_length": 1}}, repeats=1)
    keys = run_keys(config)
    rows = [
        {"mode": mode, "concurrency": concurrency, "repeat": repeat, "entrant": entrant}
        for mode, concurrency, repeat, entrant in keys
    ]
    assert whole_groups(rows, config) == rows
    assert whole_groups(rows[:3], config) == rows[:2]  # the third has nobody beside it
    assert whole_groups(rows, config.with_changes(concurrency=(2,))) == rows[2:]


def test_copies_need_room_too(tiny_target, entrants):
    """Lookup copies up to 15 tokens, more than a drafter's block: memory that is just enough without is not with it."""
    most = {"kv_tokens": 64, "page_size": 8, "max_running_requests": 2}
    entrant = entrants["dspark"]
    alone = config_of(tiny_target, {"a": entrant}, engine=most)
    Contest(alone, PROMPTS)
    with pytest.raises(ValueError, match=r"raise engine\.kv_tokens"):
        Contest(config_of(tiny_target, {"a": entrant | {"lookup": {}}}, engine=most), PROMPTS)


def row_of(entrant: str, repeat: int, speed: float, outputs: list[str]) -> dict[str, Any]:
    figures = {"tokens_per_s": speed, "accepted_length": None, "verify_length": 0.0, "token_ms": None}
    return {"mode": "greedy", "concurrency": 1, "repeat": repeat, "entrant": entrant, "outputs": outputs} | figures


def test_ratios_are_of_the_same_repeat():
    config = config_of(Path("t"), {"none": {}, "other": {"drafter": "ngram", "verify_length": 1}}, concurrency=[1])
    rows = [
        *(row_of("none", 0, 10.0, ["x", "y"]), row_of("other", 0, 20.0, ["x", "y"])),
        *(row_of("other", 1, 30.0, ["x", "z"]), row_of("none", 1, 5.0, ["x", "y"])),
    ]
    figures = summarize_contest(rows, config)["greedy"]["1"]["other"]
    assert figures["ratio"] == {"median": 4.0, "low": 2.0, "high": 6.0, "values": [2.0, 6.0]}
    assert (figures["identical"], figures["compared"]) == (3, 4)
    alone = summarize_contest(rows[1:2], config)["greedy"]["1"]["other"]  # the first entrant is not measured yet
    assert (alone["ratio"]["median"], alone["compared"]) == (None, 0)
    assert "20.0" in format_contest(summarize_contest(rows[1:2], config))


def test_sampled_answers_are_not_compared():
    config = config_of(Path("t"), {"none": {}}, modes=[{"name": "greedy", "temperature": 1.0}], concurrency=[1])
    assert summarize_contest([row_of("none", 0, 1.0, ["x"])], config)["greedy"]["1"]["none"]["identical"] is None


def test_a_drafter_that_is_to_be_scheduled_needs_its_cost_curve(tiny_target, entrants):
    entrants = {"none": {}, "adaptive": {"drafter": entrants["dspark"]["drafter"]}}
    with pytest.raises(MissingInput, match=r"entrant adaptive .* no cost curve .* jobs/profile_engine\.py"):
        Contest(config_of(tiny_target, entrants), PROMPTS)


def test_drafters_of_another_chat_are_refused(tiny_target, entrants):
    path = Path(entrants["eagle3"]["drafter"]) / "provenance.json"
    content = read_json(path)
    write_json(path, content | {"chat": content["chat"] | {"system_prompt": "Be brief."}})
    with pytest.raises(Mismatch, match="entrants eagle3 and dspark: system_prompt"):
        Contest(config_of(tiny_target, entrants), PROMPTS)


def test_the_target_is_that_of_the_first_drafter(tiny_target, entrants):
    assert contest_target(config_of(tiny_target, entrants, target=None)).name == str(tiny_target)


@pytest.mark.parametrize(
    ("entrants", "changes", "reason"),
    [
        ({"a": {"verify_length": 2}}, {}, "no effect without a drafter"),
        ({"a": {"drafter": "ngram"}}, {}, "has no cost curve; give its verify_length"),
        ({}, {}, "entrants"),
        ({"a": {}}, {"target": None}, "give a target"),
        ({"a": {}}, {"concurrency": [3]}, "max_running_requests"),
        ({"a": {}}, {"engine": {"verify_length": 2}}, "engine.verify_length has no effect here"),
        ({"a": {}}, {"engine": {"lookup": {}}}, "engine.lookup has no effect here"),
    ],
)
def test_a_contest_that_makes_no_sense_is_refused(entrants, changes, reason):
    with pytest.raises(ValueError, match=reason):
        config_of(Path("t"), entrants, **changes)
