"""The generate job through this project's own server, over a real socket: the answers are those of the target here."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

import generate
from dspark.config import build_config
from dspark.data.answer_parts import read_rows
from dspark.data.answers import AnswerStore, GenerateConfig, read_answers
from dspark.data.prompts import read_prompts
from dspark.data.regeneration import AnswerWorker, task_json
from dspark.engine.sampling import SamplingParams
from dspark.errors import DsparkError, Mismatch
from dspark.serving.ingress import build_app
from dspark.serving.target_replica import TargetReplica
from scripted_server import ScriptedServer
from tiny_serving import MODEL, serve_config

NUM_PROMPTS = 6


@contextmanager
def served(target: Path) -> Iterator[str]:
    """Root of the API of a replica in this process."""
    config = serve_config(target)
    replica = TargetReplica(config)
    server = uvicorn.Server(uvicorn.Config(build_app(replica, config), port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=asyncio.run, args=(server.serve(),), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}/v1"
    server.should_exit = True
    thread.join()
    replica.close()


@pytest.fixture(scope="module")
def url(tiny_target: Path) -> Iterator[str]:
    with served(tiny_target) as root:
        yield root


def make_config(target: Path, folder: Path, *urls: str, **changes: Any) -> GenerateConfig:
    prompts = folder / "prompts.jsonl"
    rows = [{"id": f"p{n}", "turns": [f"question {n}", "and now?"]} for n in range(NUM_PROMPTS)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"text": "no prompt"}]))
    content: dict[str, Any] = {
        "prompts": [{"path": str(prompts)}],
        "target": {"name": str(target), "dtype": "float32"},
        "output": str(folder / "answers"),
        "sampling": {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 12},
        "tracking": {"enabled": False},
    }
    backend = {"kind": "openai", "base_urls": list(urls), "model": MODEL, "concurrency": 3, "backoff_s": 0.01}
    return build_config(GenerateConfig, content | ({"backend": backend} if urls else {}) | changes)


def by_id(rows: Iterator[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in rows}


def test_answers_through_the_own_server_are_the_targets_token_for_token(
    tiny_target: Path, tmp_path: Path, url: str
) -> None:
    config = make_config(tiny_target, tmp_path, url)
    result = generate.run(config)
    assert (result["ok"], result["errors"], result["rejected"]) == (NUM_PROMPTS, 0, 1)
    assert result["tokens"] > 0

    local = config.with_changes(output=str(tmp_path / "local"), backend={"kind": "local"})
    store = AnswerStore(local.output)
    worker = AnswerWorker(local.model_dump(), SamplingParams(temperature=0).model_dump(), store.begin({}))
    prompts = read_prompts(local.prompts, seed=0, heldout_fraction=local.heldout_fraction).prompts
    for _ in worker({"prompts": [task_json(prompts)]}):
        pass
    assert by_id(read_answers(config.output).rows()) == by_id(read_rows(store.parts))

    assert generate.run(config) == result | {"skipped": True}
    with pytest.raises(Mismatch, match="backend is"):
        generate.run(local.with_changes(output=config.output))


def test_a_chat_api_gives_the_same_answers_as_token_ids(tiny_target: Path, tmp_path: Path, url: str) -> None:
    rows = []
    for api in ("completions", "chat"):
        (tmp_path / api).mkdir()
        config = make_config(tiny_target, tmp_path / api, url)
        generate.run(config.with_changes(backend=config.backend.with_changes(api=api).model_dump()))
        rows.append(by_id(read_answers(config.output).rows()))
    assert rows[0] == rows[1]


def test_sampled_answers_repeat_by_the_rows_seed(tiny_target: Path, tmp_path: Path, url: str) -> None:
    rows = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        config = make_config(tiny_target, tmp_path / name, url, sampling={"temperature": 1.0, "max_new_tokens": 12})
        generate.run(config)
        rows.append(by_id(read_answers(config.output).rows()))
    assert rows[0] == rows[1]


def test_answers_go_to_a_store_and_a_stopped_run_goes_on_there(tiny_target: Path, tmp_path: Path, url: str) -> None:
    config = make_config(tiny_target, tmp_path, url, output=f"memory://{tmp_path.name}/answers", rows_per_part=2)
    with ScriptedServer([0.0] * 4 + [(503, {})] * 999, model=MODEL) as failing:
        broken = config.backend.with_changes(base_urls=(failing.url,), concurrency=1, max_failures=1)
        with pytest.raises(DsparkError, match="every endpoint fails"):
            generate.run(config.with_changes(backend=broken.model_dump()))
    before = by_id(read_rows(AnswerStore(config.output).parts))
    assert len(before) == 2
    result = generate.run(config)
    after = by_id(read_answers(config.output).rows())
    assert (result["ok"], len(after)) == (NUM_PROMPTS, NUM_PROMPTS)
    assert before.items() <= after.items()


def test_a_dry_run_names_the_endpoints(tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generate.run(make_config(tiny_target, tmp_path, "http://one:8000/v1", "http://two:8000/v1"), dry_run=True)
    out = capsys.readouterr().out
    assert "served as tiny at http://two:8000/v1, 3 requests at once" in out
