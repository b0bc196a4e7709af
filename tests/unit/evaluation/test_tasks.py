"""Benchmarks by name."""

import json

import pytest

from dspark.data.prompts import read_prompts
from dspark.evaluation.tasks import DOMAINS, task_source


def test_the_nine_benchmarks_have_a_domain_each():
    names = [name for group in DOMAINS.values() for name in group]
    assert len(names) == len(set(names)) == 9


def test_a_file_of_turns_is_read_whole_as_held_out_prompts_of_its_domain(tmp_path):
    path = tmp_path / "mt-bench.jsonl"
    path.write_text(json.dumps({"turns": ["Write a poem.", "Now without the letter e."]}) + "\n")
    found = read_prompts([task_source("mt-bench", str(path))], seed=0, heldout_fraction=0.0)
    (prompt,) = found.prompts
    assert (prompt.domain, prompt.split, prompt.num_turns) == ("chat/mt-bench", "heldout", 2)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="gsm8k"):
        task_source("gsm9k", "x.jsonl")
