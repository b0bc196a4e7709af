"""Tests of reading prompts: forms, roles, rejections, samples and splits."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dspark.data.prompts import PromptSet, PromptSource, read_prompts, split_of


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(*paths: Path, **options: Any) -> PromptSet:
    settings = {"seed": 0, "heldout_fraction": 0.0} | options
    return read_prompts([PromptSource(path=str(path)) for path in paths], **settings)


def plain(count: int, prefix: str = "row") -> list[dict[str, str]]:
    return [{"id": f"{prefix}-{i}", "prompt": f"question {i}"} for i in range(count)]


def chat(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


FORMS = [
    {"id": "a", "prompt": "hi"},
    {"id": "a", "prompt": [{"role": "user", "content": "hi"}]},
    {"id": "a", "turns": ["hi"]},
    {"id": "a", "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "old"}]},
    {"id": "a", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "old"}]},
]


@pytest.mark.parametrize("row", FORMS)
def test_all_forms_of_a_prompt_read_alike(tmp_path: Path, row: dict[str, Any]) -> None:
    (prompt,) = read(write_rows(tmp_path / "p.jsonl", [row])).prompts
    assert (prompt.id, prompt.messages) == ("a", [{"role": "user", "content": "hi"}])


def test_only_the_domains_asked_for_are_kept_and_the_others_counted(tmp_path: Path) -> None:
    rows = [{"id": str(i), "prompt": f"q{i}", "domain": ("math", "code", "chat")[i % 3]} for i in range(9)]
    path = str(write_rows(tmp_path / "p.jsonl", rows))
    sources = [PromptSource(path=path), PromptSource(path=path, id_suffix="~2", domains=("code", "math"), limit=4)]
    found = read_prompts(sources, seed=0, heldout_fraction=0.0)
    assert Counter(prompt.domain for prompt in found.prompts if prompt.id.endswith("~2")).keys() <= {"code", "math"}
    assert (found.num_read, len(found.prompts), found.num_over_limit) == (18, 13, 5)


def test_turns_of_a_list_are_user_turns(tmp_path: Path) -> None:
    (prompt,) = read(write_rows(tmp_path / "p.jsonl", [{"turns": ["one", "two"]}])).prompts
    assert [message["role"] for message in prompt.messages] == ["user", "user"]
    assert prompt.num_turns == 2


def test_parquet_reads_as_jsonl_does(tmp_path: Path) -> None:
    rows = [chat(("system", "s"), ("user", f"q{i}")) | {"id": str(i), "domain": "math"} for i in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    assert read(tmp_path / "p.parquet").prompts == read(write_rows(tmp_path / "p.jsonl", rows)).prompts


def test_a_folder_is_all_its_files(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", plain(2, "a"))
    pq.write_table(pa.Table.from_pylist(plain(3, "b")), tmp_path / "b.parquet")
    (tmp_path / "README.md").write_text("no prompts")
    assert len(read(tmp_path).prompts) == 5


def test_a_missing_id_is_a_hash_of_the_content(tmp_path: Path) -> None:
    first = read(write_rows(tmp_path / "a.jsonl", [{"prompt": "x"}, {"prompt": "y"}])).prompts
    second = read(write_rows(tmp_path / "b.jsonl", [{"prompt": "y"}, {"turns": ["x"]}])).prompts
    assert first[0].id != first[1].id
    assert {prompt.id for prompt in first} == {prompt.id for prompt in second}


@pytest.mark.parametrize("role", ["gpt", "chatgpt", "bing", "bard", "model", "assistant"])
def test_known_names_of_the_assistant_are_mapped(tmp_path: Path, role: str) -> None:
    rows = [chat(("human", "one"), (role, "old"), ("user", "two"))]
    (prompt,) = read(write_rows(tmp_path / "p.jsonl", rows)).prompts
    assert [message["content"] for message in prompt.messages] == ["one", "two"]


BAD_ROWS = [
    (chat(("user", "hi"), ("smollm", "old")), "unknown role 'smollm'"),
    (chat(("assistant", "hello"), ("user", "hi")), "begins with an assistant turn"),
    (chat(("system", "s"), ("assistant", "hello"), ("user", "hi")), "begins with an assistant turn"),
    (chat(("system", "s")), "no user turn to answer"),
    (chat(("user", "  ")), "empty user turn"),
    ({"messages": [{"role": "user", "content": None}]}, "content is not text"),
    ({"messages": ["hi"]}, "message is not an object"),
    ({"text": "hi"}, "no messages, prompt or turns"),
    (["hi"], "not a JSON object"),
    ({"prompt": "half a pair: \ud800"}, "text is not valid Unicode"),
]


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS)
def test_a_bad_row_is_rejected_with_its_reason_and_line(tmp_path: Path, row: Any, reason: str) -> None:
    path = write_rows(tmp_path / "p.jsonl", [*plain(2), row])
    prompt_set = read(path)
    assert [(rejected.place, rejected.reason) for rejected in prompt_set.rejected] == [(f"{path}:3", reason)]
    assert prompt_set.num_read == 3


def test_a_line_that_is_no_json_is_rejected_by_number(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": \n{"prompt": "b"}\n{"prompt": "c"}\n\xff\n')
    prompt_set = read(path)
    assert [row.place for row in prompt_set.rejected] == [f"{path}:2", f"{path}:5"]
    assert prompt_set.rejected_by_reason == {"not a JSON object": 2}


def test_duplicate_ids_are_rejected_across_sources(tmp_path: Path) -> None:
    prompt_set = read(write_rows(tmp_path / "a.jsonl", plain(3)), write_rows(tmp_path / "b.jsonl", plain(4)))
    assert prompt_set.rejected_by_reason == {"duplicate id": 3}
    assert len(prompt_set.prompts) == 4


def test_an_empty_file_is_an_error_that_says_zero_rows(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").touch()
    with pytest.raises(ValueError, match="0 rows"):
        read(tmp_path / "p.jsonl")


def test_an_empty_file_beside_a_full_one_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    assert len(read(tmp_path / "a.jsonl", write_rows(tmp_path / "b.jsonl", plain(2))).prompts) == 2


def test_blank_lines_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('\n{"prompt": "a"}\n\n   \n{"prompt": "b"}\n\n')
    assert read(tmp_path / "p.jsonl").num_read == 2


def test_a_rewritten_file_is_read_anew_whatever_its_time(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "p.jsonl", [{"prompt": "old"}])
    stat = path.stat()
    read(path)
    write_rows(path, [{"prompt": "new"}])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert read(path).prompts[0].messages[0]["content"] == "new"


def test_mostly_rejected_rows_stop_with_counts_by_reason(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "p.jsonl", [*plain(2), {"text": "x"}, {"text": "y"}, chat(("system", "s"))])
    with pytest.raises(ValueError, match=r"3 of 5 rows rejected.*2 x no messages, prompt or turns, 1 x no user turn"):
        read(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not found: .*nowhere\.jsonl"):
        read(tmp_path / "nowhere.jsonl")


def test_a_source_needs_one_place() -> None:
    with pytest.raises(ValueError, match="either path or hub"):
        PromptSource()


def test_a_limit_samples_all_sources_in_proportion(tmp_path: Path) -> None:
    paths = [write_rows(tmp_path / f"{name}.jsonl", plain(count, name)) for name, count in (("a", 300), ("b", 100))]
    prompt_set = read(*paths, limit=100)
    assert Counter(prompt.id[0] for prompt in prompt_set.prompts) == {"a": 75, "b": 25}
    assert prompt_set.num_over_limit == 300
    assert read(*paths, limit=100).prompts == prompt_set.prompts
    assert read(*paths, limit=100, seed=1).prompts != prompt_set.prompts


def test_a_larger_limit_adds_rows_and_removes_none(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "p.jsonl", plain(50))
    small = {prompt.id for prompt in read(path, limit=10).prompts}
    assert small < {prompt.id for prompt in read(path, limit=20).prompts}


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.05, 0.1, 0.2, 0.25, 1 / 3, 0.5, 0.7, 0.9, 0.99])
def test_splits_are_disjoint_and_complete(fraction: float) -> None:
    ids = [f"row-{i}" for i in range(12_501)]
    heldout = {row_id for row_id in ids if split_of(row_id, fraction) == "heldout"}
    train = {row_id for row_id in ids if split_of(row_id, fraction) == "train"}
    assert not train & heldout
    assert train | heldout == set(ids)
    assert abs(len(heldout) / len(ids) - fraction) < 0.02


def test_a_source_decides_the_split_of_its_rows(tmp_path: Path) -> None:
    source = PromptSource(path=str(write_rows(tmp_path / "p.jsonl", plain(5))), split="heldout", domain="math")
    prompts = read_prompts([source], seed=0, heldout_fraction=0.0).prompts
    assert {(prompt.split, prompt.domain) for prompt in prompts} == {("heldout", "math")}


def test_a_source_named_again_with_a_suffix_gets_its_prompts_answered_once_more(tmp_path: Path) -> None:
    path = str(write_rows(tmp_path / "p.jsonl", plain(40)))
    sources = [PromptSource(path=path), PromptSource(path=path, id_suffix="~2", limit=10)]
    prompt_set = read_prompts(sources, seed=0, heldout_fraction=0.5)
    once = {prompt.id: prompt for prompt in prompt_set.prompts if not prompt.id.endswith("~2")}
    again = [prompt for prompt in prompt_set.prompts if prompt.id.endswith("~2")]
    assert (len(once), len(again), prompt_set.rejected) == (40, 10, [])
    for prompt in again:
        first = once[prompt.id.removesuffix("~2")]
        assert (prompt.messages, prompt.split) == (first.messages, first.split)
