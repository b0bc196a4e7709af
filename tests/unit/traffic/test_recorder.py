"""From answers to files: nothing is waited for, what is too much is dropped and counted, and texts are told nowhere."""

import json
import logging
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dspark.data.prompts import PromptSource, read_prompts
from dspark.speculation.statistics import Round
from dspark.traffic.config import TrafficConfig
from dspark.traffic.recorder import AnswerRecord, Recorder
from dspark.traffic.rounds import Origin, decode
from dspark.traffic.shards import ROUNDS, TEXTS, shard_names

ORIGIN = Origin("d" * 16, "runs/drafter", {"name": "target"}, 4, "r1", None, None)
DONE = Round(2, 1, 2, [0.5, -0.5])
PROMPT = [{"role": "user", "content": "I am ada@mail.example.org, who am I?"}]


@pytest.fixture
def recorders() -> Iterator[Any]:
    made: list[Recorder] = []

    def make(folder: Path | str, **options: Any) -> Recorder:
        config = TrafficConfig(folder=str(folder), **options)
        made.append(Recorder(config, writer="r1", draw=random.Random(0)))
        return made[-1]

    yield make
    for recorder in made:
        recorder.close()


def begun(recorder: Recorder, *, mode: str = "greedy", origin: Origin = ORIGIN) -> AnswerRecord:
    record = recorder.begin(origin, mode, may_keep_text=True)
    assert record is not None
    return record


def rounds_in(folder: Path) -> list[tuple[Origin, int]]:
    return [(o, len(r)) for o, r in (decode((folder / n).read_bytes()) for n in shard_names(folder, ROUNDS))]


def test_rounds_are_written_by_number_by_time_and_at_the_end(recorders: Any, tmp_path: Path) -> None:
    recorder = recorders(tmp_path / "a", shard_rounds=10, flush_s=0.1)
    for _ in range(4):
        record = begun(recorder)
        record.rounds += [DONE] * 5
        recorder.finish(record)
    deadline = time.monotonic() + 30
    while recorder.counts.written_rounds < 20 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sum(number for _, number in rounds_in(tmp_path / "a")) == 20
    record = begun(recorder)
    record.rounds.append(DONE)
    recorder.finish(record)
    recorder.close()
    assert recorder.counts.written_rounds == sum(number for _, number in rounds_in(tmp_path / "a")) == 21


def test_a_file_holds_rounds_of_one_drafter_under_one_calibration(recorders: Any, tmp_path: Path) -> None:
    recorder = recorders(tmp_path)
    other = Origin("e" * 16, "runs/other", {"name": "target"}, 4, "r1", "c", None)
    for origin in (ORIGIN, ORIGIN, other, ORIGIN):
        record = begun(recorder, origin=origin)
        record.rounds.append(DONE)
        recorder.finish(record)
    assert recorder.flush()
    assert sorted((origin.drafter, number) for origin, number in rounds_in(tmp_path)) == [
        ("runs/drafter", 1),
        ("runs/drafter", 2),
        ("runs/other", 1),
    ]


def test_whoever_is_too_fast_for_the_writer_loses_records_and_no_time(
    recorders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = recorders(tmp_path, max_waiting=3, shard_rounds=1)
    gate, write = threading.Event(), recorder.folder.write
    monkeypatch.setattr(recorder.folder, "write", lambda *a: (gate.wait(10), write(*a))[1])
    started = time.monotonic()
    for _ in range(50):
        record = begun(recorder)
        record.rounds += [DONE, DONE]
        recorder.finish(record)
    assert time.monotonic() - started < 1.0
    gate.set()
    assert recorder.flush()
    counts = recorder.counts
    assert counts.written_rounds + counts.dropped_rounds == 100
    assert counts.dropped_rounds >= 90
    assert sum(number for _, number in rounds_in(tmp_path)) == counts.written_rounds


def test_a_folder_that_cannot_be_written_costs_the_rounds_and_is_said_once(
    recorders: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    recorder = recorders(tmp_path / "file", shard_rounds=1, texts={"prompts": True})
    for _ in range(5):
        record = begun(recorder)
        record.rounds.append(DONE)
        record.messages = PROMPT
        recorder.finish(record)
    assert recorder.flush()
    assert (recorder.counts.written_rounds, recorder.counts.lost_rounds, recorder.counts.failures) == (0, 5, 1)
    assert recorder.counts.lost_texts == 5
    assert "cannot be written" in caplog.text
    assert "ada" not in caplog.text


def test_a_share_of_the_answers_is_recorded(recorders: Any, tmp_path: Path) -> None:
    recorder = recorders(tmp_path, share=0.25, whole_blocks=0.5, texts={"prompts": True, "share": 0.5})
    records = [recorder.begin(ORIGIN, "greedy", may_keep_text=True) for _ in range(2000)]
    drawn = [record for record in records if record is not None]
    assert 400 < len(drawn) < 600
    assert 0.4 < sum(record.is_whole for record in drawn) / len(drawn) < 0.6
    assert 0.4 < sum(record.keeps_prompt for record in drawn) / len(drawn) < 0.6
    assert not any(record.keeps_answer for record in drawn)
    refused = [recorder.begin(ORIGIN, "greedy", may_keep_text=False) for _ in range(200)]
    assert not any(record.keeps_prompt for record in refused if record is not None)


def test_texts_are_kept_only_when_asked_for_without_what_is_personal(
    recorders: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    kept = recorders(tmp_path / "kept", texts={"prompts": True, "answers": True})
    bare = recorders(tmp_path / "bare")
    for recorder in (kept, bare):
        record = begun(recorder)
        record.rounds.append(DONE)
        record.messages = PROMPT
        record.pieces += ["You are ada@mail.", "example.org."]
        recorder.finish(record)
        assert recorder.flush()
    assert list(shard_names(tmp_path / "bare", TEXTS)) == []
    content = b"".join(path.read_bytes() for path in (tmp_path / "bare").iterdir())
    assert b"ada" not in content
    (name,) = shard_names(tmp_path / "kept", TEXTS)
    row = json.loads((tmp_path / "kept" / name).read_text())
    assert row["messages"] == [{"role": "user", "content": "I am [email], who am I?"}]
    assert row["answer"] == "You are [email]."
    assert kept.redactions["email"] == 2
    assert "ada" not in caplog.text
    prompts = read_prompts([PromptSource(path=str(tmp_path / "kept" / name))], seed=0, heldout_fraction=0.0).prompts
    assert [prompt.messages for prompt in prompts] == [row["messages"]]


def test_records_go_to_an_object_store(recorders: Any) -> None:
    from dspark.storage import locate

    uri = f"memory://recorded-{os.urandom(4).hex()}"
    recorder = recorders(uri)
    record = begun(recorder)
    record.rounds.append(DONE)
    recorder.finish(record)
    assert recorder.flush()
    (name,) = shard_names(locate(uri), ROUNDS)
    assert len(decode((locate(uri) / name).read_bytes())[1]) == 1
