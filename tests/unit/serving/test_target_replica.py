"""A replica from its config: what it loads, what it says is missing, what it refuses to start with."""

import asyncio
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from dspark.chat import ChatConfig
from dspark.errors import Mismatch
from dspark.provenance import read_json, write_json
from dspark.serving.openai_schema import CompletionRequest, Refusal
from dspark.serving.target_replica import TargetReplica
from dspark.serving.tokenization import DetokenizeRequest, TokenizeRequest
from tiny_drafter import make_tiny_drafter
from tiny_serving import MODEL, serve_config
from tiny_target import make_tiny_target


def samples(replica: TargetReplica) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for family in asyncio.run(replica.metrics()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def answer(replica: TargetReplica, **fields: Any) -> list[int]:
    request = CompletionRequest(model=MODEL, prompt=[1, 40, 77], temperature=0.0, max_tokens=20, **fields)

    async def run() -> list[int]:
        ids: list[int] = []
        async for delta in replica.generate("r", request):
            assert not isinstance(delta, Refusal), delta
            ids += delta.token_ids
        return ids

    return asyncio.run(run())


@pytest.fixture
def started() -> Any:
    replicas: list[TargetReplica] = []

    def start(*arguments: Any, **changes: Any) -> TargetReplica:
        replicas.append(TargetReplica(serve_config(*arguments, **changes)))
        return replicas[-1]

    yield start
    for replica in replicas:
        replica.close()


def test_without_a_trained_drafter_it_serves_with_ngrams_and_says_so(
    started: Any, tiny_target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        replica = started(tiny_target, drafter=str(tmp_path / "nothing"))
    lines = [record.message for record in caplog.records if "no trained drafter" in record.message]
    assert len(lines) == 1
    assert "python jobs/train.py" in lines[0]
    found = samples(replica)
    assert found["dspark_drafter_info"][0].labels["kind"] == "ngram"
    assert any("no trained drafter" in sample.labels["text"] for sample in found["dspark_notice"])
    assert len(answer(replica, ignore_eos=True)) == 20


def test_without_a_cost_curve_one_is_measured_at_the_start(
    started: Any, tiny_target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_tiny_drafter(tmp_path / "drafter", tiny_target)
    with caplog.at_level(logging.WARNING):
        replica = started(tiny_target, drafter=str(folder), profile_without_curve=True)
    assert any("jobs/profile_engine.py" in record.message for record in caplog.records)
    assert any("rough cost curve" in sample.labels["text"] for sample in samples(replica)["dspark_notice"])
    assert "dspark_fixed_verify_length" not in samples(replica)
    replica.loaded.engine.check()
    assert len(answer(replica, ignore_eos=True)) == 20


def test_without_a_cost_curve_the_length_is_fixed_and_shown(
    started: Any, tiny_target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_tiny_drafter(tmp_path / "drafter", tiny_target)
    with caplog.at_level(logging.WARNING):
        replica = started(tiny_target, drafter=str(folder), profile_without_curve=False, verify_length_without_curve=2)
    assert any("jobs/profile_engine.py" in record.message for record in caplog.records)
    found = samples(replica)
    assert found["dspark_fixed_verify_length"][0].value == 2
    assert found["dspark_drafter_info"][0].labels["kind"] == "dspark"
    answer(replica, ignore_eos=True)
    rounds = replica.loaded.engine.stats.rounds
    assert len(rounds.proposed) == 2


def test_a_drafter_without_a_confidence_head_is_told(
    started: Any, tiny_target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_tiny_drafter(
        tmp_path / "drafter", tiny_target, architecture="dflash", markov_rank=0, confidence_head=False
    )
    with caplog.at_level(logging.WARNING):
        replica = started(tiny_target, drafter=str(folder))
    assert any("no confidence head" in record.message for record in caplog.records)
    assert any("no confidence head" in sample.labels["text"] for sample in samples(replica)["dspark_notice"])


def test_a_drafter_of_another_target_is_refused_by_name(started: Any, tiny_target: Path, tmp_path: Path) -> None:
    other = make_tiny_target(tmp_path / "other", seed=1)
    folder = make_tiny_drafter(tmp_path / "drafter", other)
    with pytest.raises(Mismatch, match="use it with the target it was trained for"):
        started(tiny_target, drafter=str(folder))


def test_a_drafter_of_layers_the_target_lacks_is_refused(started: Any, tiny_target: Path, tmp_path: Path) -> None:
    folder = make_tiny_drafter(tmp_path / "drafter", tiny_target)
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", config | {"target_layer_ids": [0, 9]})
    with pytest.raises((ValueError, Mismatch), match="9"):
        started(tiny_target, drafter=str(folder))


def test_half_a_drafter_is_no_drafter(started: Any, tiny_target: Path, tmp_path: Path) -> None:
    folder = make_tiny_drafter(tmp_path / "drafter", tiny_target)
    shutil.copytree(folder, tmp_path / "half")
    (tmp_path / "half" / "model.safetensors").unlink()
    assert started(tiny_target, drafter=str(tmp_path / "half")).loaded.engine.drafter_kind == "ngram"


def test_every_drafter_gives_the_targets_own_answer(started: Any, tiny_target: Path, tmp_path: Path) -> None:
    folder = make_tiny_drafter(tmp_path / "drafter", tiny_target)
    answers = [answer(started(tiny_target, drafter=drafter)) for drafter in (None, "ngram", str(folder))]
    assert answers[0] == answers[1] == answers[2]


def test_what_the_drafter_was_trained_with_is_how_prompts_are_made(
    started: Any, tiny_target: Path, tmp_path: Path
) -> None:
    def prompt_of(replica: TargetReplica) -> str:
        asked = TokenizeRequest(messages=[{"role": "user", "content": "hello"}])
        tokens = asyncio.run(replica.tokenize(asked)).tokens
        return asyncio.run(replica.detokenize(DetokenizeRequest(tokens=tokens))).prompt

    folder = make_tiny_drafter(tmp_path / "drafter", tiny_target, chat=ChatConfig(system_prompt="the number"))
    assert "the number" in prompt_of(started(tiny_target, drafter=str(folder)))
    assert "another" in prompt_of(started(tiny_target, drafter=str(folder), chat={"system_prompt": "another"}))


def test_closing_twice_is_closing_once(started: Any, tiny_target: Path) -> None:
    replica = started(tiny_target)
    replica.close()
    replica.close()
    assert not replica._loop._thread.is_alive()
