"""Tests of the answers on disk: parts, resume, and what a complete set is."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from dspark.data.answers import AnswerSampling, AnswerStore, GenerateConfig, read_answers, resolve_sampling
from dspark.data.prompts import Prompt, PromptSet, PromptSource, RejectedRow
from dspark.errors import DsparkError, Mismatch, MissingInput
from dspark.targets import TargetConfig

REQUEST: dict[str, Any] = {
    "target": {"name": "t"},
    "dtype": "float32",
    "chat": {},
    "sampling": {"temperature": 0},
    "seed": 0,
}


def prompt(prompt_id: str, text: str = "hi") -> Prompt:
    return Prompt(prompt_id, "math", "train", [{"role": "user", "content": text}])


def row(prompt_id: str, *, status: str = "ok", reason: str = "stop", text: str = "hi") -> dict[str, Any]:
    turn = {"prompt_ids": [5, 6], "output_ids": [7, 2], "finish_reason": reason}
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]
    return {
        "id": prompt_id,
        "domain": "math",
        "split": "train",
        "status": status,
        "error": "broken" if status == "error" else None,
        "messages": messages,
        "turns": [] if status == "error" else [turn],
    }


def finish(store: AnswerStore, prompts: list[Prompt], *, rejected: int = 0) -> dict[str, Any]:
    prompt_set = PromptSet(prompts, [RejectedRow(f"p.jsonl:{i}", None, "bad") for i in range(rejected)])
    return store.finish(REQUEST, prompt_set, {"seconds": 1.0, "tokens_per_s": 2.0, "target": {"name": "t"}})


def test_a_row_reads_back_as_it_was_written(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path / "new" / "folder")
    store.write_part([row("a")], run=store.begin(REQUEST))
    finish(store, [prompt("a")])
    answers = read_answers(store.folder)
    assert list(answers.rows()) == [row("a")]
    assert (answers.target, answers.target_identity, answers.chat) == ({"name": "t"}, {"name": "t"}, {})


def test_counts_add_up_and_tell_cut_answers(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path)
    run = store.begin(REQUEST)
    store.write_part([row("a", reason="length"), row("b", status="empty"), row("c"), row("d", status="error")], run=run)
    counts = finish(store, [prompt(name) for name in "abcd"], rejected=2)["counts"]
    assert (counts["ok"], counts["empty"], counts["error"], counts["rejected"]) == (2, 1, 1, 2)
    assert counts["read"] == counts["ok"] + counts["empty"] + counts["error"] + counts["rejected"]
    assert (counts["finish_length"], counts["tokens"]) == (1, 6)


def test_rows_can_be_picked_by_outcome(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path)
    store.write_part([row("a"), row("b", status="empty")], run=store.begin(REQUEST))
    finish(store, [prompt("a"), prompt("b")])
    answers = read_answers(tmp_path)
    assert [found["id"] for found in answers.rows(statuses=["ok"])] == ["a"]
    assert len(list(answers.rows())) == 2


def test_an_unfinished_set_is_missing_input_that_names_the_job(tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match=r"not found.*jobs/generate\.py"):
        read_answers(tmp_path)
    AnswerStore(tmp_path).begin(REQUEST)
    with pytest.raises(MissingInput, match=r"incomplete.*jobs/generate\.py"):
        read_answers(tmp_path)


def test_a_missing_answer_keeps_the_set_from_being_complete(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path)
    store.write_part([row("a")], run=store.begin(REQUEST))
    with pytest.raises(DsparkError, match="1 prompts have no answer"):
        finish(store, [prompt("a"), prompt("b")])
    assert store.manifest is None


def test_two_answers_to_one_prompt_are_refused(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path)
    run = store.begin(REQUEST)
    store.write_part([row("a"), row("b")], run=run)
    store.write_part([row("b"), row("c")], run=run)
    with pytest.raises(DsparkError, match="two answers to prompt 'b'"):
        finish(store, [prompt(name) for name in "abc"])


def test_mostly_errors_fail_with_the_first_reason(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path)
    store.write_part([row("a", status="error"), row("b", status="error"), row("c")], run=store.begin(REQUEST))
    with pytest.raises(DsparkError, match="2 of 3 prompts ended with an error, mostly: broken"):
        finish(store, [prompt(name) for name in "abc"])
    assert store.manifest is None


def test_another_request_is_refused_by_field_name(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path)
    store.begin(REQUEST)
    store.check_request(REQUEST)
    with pytest.raises(Mismatch, match=r"sampling is .*--fresh"):
        store.check_request(REQUEST | {"sampling": {"temperature": 1}})


def test_a_prompt_that_changed_under_its_id_is_refused(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path)
    store.write_part([row("a")], run=store.begin(REQUEST))
    store.check_unchanged([prompt("a"), prompt("new")])
    with pytest.raises(Mismatch, match=r"prompt 'a'.*messages"):
        store.check_unchanged([prompt("a", "other")])


def test_unreadable_parts_and_leftovers_are_removed_on_resume(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path)
    good = store.write_part([row("a")], run=store.begin(REQUEST))
    torn = good.with_name("part-0123456789abcdef.parquet")
    torn.write_bytes(good.read_bytes()[:-100])
    leftover = good.with_name(".tmp-1-abcd-part-0.parquet")
    leftover.write_bytes(b"half")
    store.begin(REQUEST)
    assert store.done_ids() == {"a"}
    assert sorted(store.parts.iterdir()) == [good]


def test_a_run_that_was_overtaken_cannot_write(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path)
    old = store.begin(REQUEST)
    store.begin(REQUEST)
    with pytest.raises(DsparkError, match="another run has taken over"):
        store.write_part([row("a")], run=old)
    assert not list(store.parts.iterdir())


def test_a_smaller_selection_leaves_surplus_rows_on_disk_but_not_in_the_set(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path)
    store.write_part([row("a"), row("b")], run=store.begin(REQUEST))
    assert finish(store, [prompt("a")])["counts"]["surplus"] == 1
    assert [found["id"] for found in read_answers(tmp_path).rows()] == ["a"]
    assert store.done_ids() == {"a", "b"}


def test_clearing_removes_own_files_only(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path)
    store.write_part([row("a")], run=store.begin(REQUEST))
    finish(store, [prompt("a")])
    (tmp_path / "notes.txt").write_text("mine")
    (store.parts / "other.parquet").write_text("mine")
    store.clear()
    left = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["notes.txt", "other.parquet"]


def test_the_fingerprint_changes_with_one_token(tmp_path: Path) -> None:
    prints = []
    for name, last in (("one", 2), ("two", 3)):
        store = AnswerStore(tmp_path / name)
        changed = row("a")
        changed["turns"][0]["output_ids"] = [7, last]
        store.write_part([changed], run=store.begin(REQUEST))
        prints.append(finish(store, [prompt("a")])["fingerprint"])
    assert prints[0] != prints[1]


def test_parts_have_the_documented_columns(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path)
    path = store.write_part([row("a")], run=store.begin(REQUEST))
    assert pq.read_schema(path).names == ["id", "domain", "split", "status", "error", "messages", "turns"]


def test_sampling_defaults_are_the_targets_own(tiny_target: Path) -> None:
    config = GenerateConfig(
        prompts=(PromptSource(path="p.jsonl"),), target=TargetConfig(name=str(tiny_target)), output="o"
    )
    asked_for = {"temperature", "top_k", "top_p"}
    assert resolve_sampling(config).model_dump(include=asked_for) == {"temperature": 0.8, "top_k": 20, "top_p": 0.9}
    asked = config.with_changes(sampling=AnswerSampling(temperature=0.5, top_k=0).model_dump())
    assert resolve_sampling(asked).model_dump(include=asked_for) == {"temperature": 0.5, "top_k": None, "top_p": 0.9}
