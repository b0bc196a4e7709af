"""The generate job on a local cluster: complete, resumed after a kill, extended, refused, started over."""

import json
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import generate
from dspark.config import build_config
from dspark.data.answers import GenerateConfig, read_answers
from dspark.errors import Mismatch
from local_cluster import start_job

pytestmark = pytest.mark.ray

REFUSED = {"role": "system", "content": "x" * 4000}  # longer than the tiny target's context


def write_prompts(path: Path, count: int, *, num_bad: int = 0) -> Path:
    rows: list[Any] = [
        {"id": f"p{i}", "domain": "math", "turns": [f"question {i}"] * (1 + i % 2)} for i in range(count)
    ]
    rows += [{"id": f"long{i}", "messages": [REFUSED, {"role": "user", "content": "hi"}]} for i in range(num_bad)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_config(target: Path, prompts: Path, output: Path, **changes: Any) -> GenerateConfig:
    content = {
        "prompts": [{"path": str(prompts)}],
        "target": {"name": str(target), "dtype": "float32"},
        "output": str(output),
        "sampling": {"max_new_tokens": 10},
        "batch_size": 4,
        "rows_per_part": 3,
        "num_workers": 2,
        "tracking": {"enabled": False},
    }
    return build_config(GenerateConfig, content | changes)


def stored_ids(folder: Path) -> Counter[str]:
    paths = (folder / "parts").glob("part-*.parquet")
    return Counter(row_id for path in paths for row_id in pq.read_table(path, columns=["id"])["id"].to_pylist())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> tuple[GenerateConfig, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("generate")
    prompts = write_prompts(folder / "prompts.jsonl", 12, num_bad=2)
    with prompts.open("a") as stream:
        stream.write('{"id": "p0", "prompt": "again"}\nno json\n')
    config = make_config(tiny_target, prompts, folder / "deep" / "answers", heldout_fraction=0.3)
    return config, generate.run(config)


def test_every_row_read_is_accounted_for(finished: tuple[GenerateConfig, dict[str, Any]]) -> None:
    config, result = finished
    counts = read_answers(config.output).manifest["counts"]
    assert counts["read"] == 16
    assert (result["prompts"], result["errors"], result["rejected"]) == (14, 2, 2)
    assert result["ok"] + result["empty"] + result["errors"] + result["rejected"] == counts["read"]
    rejected = [json.loads(line) for line in (Path(config.output) / "rejected.jsonl").read_text().splitlines()]
    assert [row["reason"] for row in rejected] == ["duplicate id", "not a JSON object"]


def test_error_rows_say_why(finished: tuple[GenerateConfig, dict[str, Any]]) -> None:
    errors = list(read_answers(finished[0].output).rows(statuses=["error"]))
    assert {row["id"] for row in errors} == {"long0", "long1"}
    assert all("fills the target's context" in row["error"] for row in errors)


def test_rows_keep_their_prompt_and_split(finished: tuple[GenerateConfig, dict[str, Any]]) -> None:
    rows = {row["id"]: row for row in read_answers(finished[0].output).rows()}
    assert rows["p3"]["messages"][0] == {"role": "user", "content": "question 3"}
    assert {row["split"] for row in rows.values()} == {"train", "heldout"}


def test_a_second_run_does_nothing_and_says_the_same(finished: tuple[GenerateConfig, dict[str, Any]]) -> None:
    config, result = finished
    changed = config.with_changes(num_workers=1, batch_size=2)  # how it is made is no part of what is asked
    assert generate.run(changed) == result | {"skipped": True}


def test_other_settings_are_refused_by_name(finished: tuple[GenerateConfig, dict[str, Any]]) -> None:
    config, _ = finished
    with pytest.raises(Mismatch, match="sampling is"):
        generate.run(config.with_changes(sampling={"temperature": 0.3, "max_new_tokens": 10}))


def test_a_run_starts_over_and_is_extended(tiny_target: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 9)
    config = make_config(tiny_target, prompts, tmp_path / "answers", limit=4, num_workers=1)
    generate.run(config)
    (tmp_path / "answers" / "notes.txt").write_text("mine")

    shorter = config.with_changes(sampling={"temperature": 0.0, "max_new_tokens": 5})
    generate.run(shorter, fresh=True)
    before = {row["id"]: row for row in read_answers(config.output).rows()}
    assert max(len(turn["output_ids"]) for row in before.values() for turn in row["turns"]) <= 5
    assert (tmp_path / "answers" / "notes.txt").exists()

    result = generate.run(shorter.with_changes(limit=None))
    after = {row["id"]: row for row in read_answers(config.output).rows()}
    assert (len(before), len(after), result["prompts"]) == (4, 9, 9)
    assert before.items() <= after.items()


def test_a_killed_run_goes_on_and_has_each_row_once(tiny_target: Path, tmp_path: Path) -> None:
    config = make_config(
        tiny_target, write_prompts(tmp_path / "p.jsonl", 50), tmp_path / "answers", sampling={"max_new_tokens": 150}
    )
    path = tmp_path / "generate.yaml"
    path.write_text(config.model_dump_json())  # JSON is YAML
    job = start_job("generate", "--config", str(path), "batch_size=8", log=tmp_path / "log.txt")
    try:
        deadline = time.monotonic() + 120
        while sum(stored_ids(tmp_path / "answers").values()) < 15:
            assert job.poll() is None, (tmp_path / "log.txt").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        job.send_signal(signal.SIGKILL)
        job.wait()
    at_kill = stored_ids(tmp_path / "answers")
    assert 15 <= len(at_kill) < 50
    # And with another concurrency.
    again = start_job("generate", "--config", str(path), "num_workers=1", log=tmp_path / "again.txt")
    assert again.wait(timeout=180) == 0, (tmp_path / "again.txt").read_text()[-3000:]
    lines = (tmp_path / "again.txt").read_text().splitlines()
    result = json.loads([line for line in lines if line.startswith("{")][-1])
    assert (result["stage"], result["prompts"]) == ("generate", 50)
    assert stored_ids(tmp_path / "answers") == Counter(f"p{i}" for i in range(50))
    assert at_kill.items() <= stored_ids(tmp_path / "answers").items()
