"""Benchmarks by name."""

import json
from dataclasses import replace

import pytest

from dspark.data.prompts import read_prompts
from dspark.errors import MissingInput
from dspark.evaluation import published
from dspark.evaluation.tasks import BENCHMARKS, FOLDER_VARIABLE, benchmark_sources, task_source


def write_turns(path, *turns):
    path.write_text("".join(json.dumps({"turns": list(one)}) + "\n" for one in turns))


def test_the_nine_benchmarks_are_the_papers_in_its_domains():
    domains = {name: benchmark.domain for name, benchmark in BENCHMARKS.items()}
    assert domains == {name: domain for domain, names in published.DOMAINS.items() for name in names}


def test_a_file_of_turns_is_read_whole_as_held_out_prompts_of_its_domain(tmp_path):
    path = tmp_path / "mt-bench.jsonl"
    path.write_text(json.dumps({"turns": ["Write a poem.", "Now without the letter e."]}) + "\n")
    found = read_prompts([task_source("mt-bench", str(path))], seed=0, heldout_fraction=0.0)
    (prompt,) = found.prompts
    assert (prompt.domain, prompt.split, prompt.num_turns) == ("chat/mt-bench", "heldout", 2)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="gsm8k"):
        task_source("gsm9k", "x.jsonl")


def test_benchmarks_are_files_of_a_folder_that_the_environment_may_name(tmp_path, monkeypatch):
    write_turns(tmp_path / "gsm8k.jsonl", ["2 + 2?"])
    write_turns(tmp_path / "alpaca-standin.jsonl", ["Say it shorter."])
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    named, given = (benchmark_sources(["gsm8k", "alpaca"], folder) for folder in (None, str(tmp_path)))
    assert named == given
    # a set that stands in for another is never called by the other's name
    assert [source.domain for source in given] == ["math/gsm8k", "chat/alpaca-standin"]
    assert [source.limit for source in given] == [500, 500]


def test_what_is_not_there_is_named_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    with pytest.raises(MissingInput, match=FOLDER_VARIABLE):
        benchmark_sources(["gsm8k"], None)
    with pytest.raises(MissingInput, match=r"has no gsm8k.jsonl .* benchmarks_from_hub"):
        benchmark_sources(["gsm8k"], str(tmp_path))


@pytest.mark.parametrize(
    ("name", "row", "turns"),
    [
        (
            "gsm8k",
            {"question": "2 + {2}?"},
            ["2 + {2}?\nPlease reason step by step, and put your final answer within \\boxed{}."],
        ),
        ("mt-bench", {"prompt": ["Write.", "Rewrite."]}, ["Write.", "Rewrite."]),
        ("alpaca", {"instruction": "Shorten.", "input": "A text."}, ["Shorten.\n\nInput:\nA text."]),
        ("alpaca", {"instruction": "Sing.", "input": ""}, ["Sing."]),
    ],
)
def test_rows_of_the_hub_become_turns(name, row, turns):
    assert BENCHMARKS[name].turns(row) == turns


def test_a_data_set_whose_form_has_changed_is_refused_by_its_column():
    with pytest.raises(ValueError, match=r"openai/gsm8k has no column 'question', but problem"):
        BENCHMARKS["gsm8k"].turns({"problem": "x"})


def test_a_benchmark_is_fetched_once_and_read_like_any_file(tmp_path, monkeypatch):
    hub = tmp_path / "hub"  # a data set's folder stands in for the hub: the same library reads it
    hub.mkdir()
    (hub / "test.jsonl").write_text(json.dumps({"prompt": ["Write.", "Rewrite."]}) + "\n")
    benchmark = replace(BENCHMARKS["mt-bench"], hub=str(hub), split="train", files="test.jsonl")
    monkeypatch.setitem(BENCHMARKS, "mt-bench", benchmark)
    (source,) = benchmark_sources(["mt-bench"], str(tmp_path / "files"), from_hub=True)
    (prompt,) = read_prompts([source], seed=0, heldout_fraction=0.0).prompts
    assert (prompt.domain, prompt.num_turns) == ("chat/mt-bench", 2)
    monkeypatch.setitem(BENCHMARKS, "mt-bench", replace(benchmark, hub="gone"))
    assert benchmark_sources(["mt-bench"], str(tmp_path / "files"), from_hub=True) == [source]
