"""The adopt job: a folder of another tool goes through profile, calibrate and the engine without any training."""

import json
from pathlib import Path
from typing import Any

import pytest

import adopt
import calibrate
import evaluate
import profile_engine
import runner
from dspark.config import build_config
from dspark.drafters.released import AdoptConfig
from dspark.engine.config import EngineConfig
from dspark.engine.loading import load_engine
from dspark.errors import Mismatch, MissingInput
from dspark.evaluation.config import CalibrateConfig
from dspark.evaluation.engine_worker import EngineWorker
from dspark.evaluation.profiling import ProfileConfig
from dspark.provenance import file_sha256, read_json, write_json
from dspark.speculation.calibration import Calibration
from dspark.targets import TargetConfig
from foreign_drafter import make_foreign_drafter
from tiny_engine import PROMPTS, greedy_continuations, ids_of, load, request
from tiny_engine import run as run_engine

NUM_NEW = 16


@pytest.fixture
def content(tmp_path: Path, tiny_target: Path) -> dict[str, Any]:
    return {
        "drafter": str(make_foreign_drafter(tmp_path / "foreign", tiny_target)),
        "target": {"name": str(tiny_target), "dtype": "float32", "device": "cpu"},
        "chat": {"system_prompt": "Be brief."},
        "output": str(tmp_path / "adopted"),
        "tracking": {"enabled": False},
    }


def run(content: dict[str, Any], **options: Any) -> dict[str, Any]:
    return adopt.run(build_config(AdoptConfig, content), **options)


def test_before_it_is_adopted_the_engine_names_the_job_that_does_it(content):
    target = build_config(TargetConfig, content["target"])
    with pytest.raises(MissingInput, match=r"provenance\.json is missing\); take it over with jobs/adopt\.py"):
        load_engine(target, content["drafter"], config=EngineConfig())


def test_an_adopted_drafter_is_profiled_calibrated_and_serves_losslessly(content, tmp_path, tiny_target, monkeypatch):
    result = run(content)
    assert result["target_layer_ids"] == [0, 2]
    drafter = content["output"]
    shared = {"drafter": drafter, "tracking": {"enabled": False}}
    profile = {"output": str(tmp_path / "profile"), "batch_tokens": [1, 4], "draft_requests": [1], "repeats": 1}
    profile |= {"context_tokens": 16, "max_requests": 2, "threads": 1}
    profile_engine.run(build_config(ProfileConfig, shared | profile))
    rows = [{"id": f"p{n}", "messages": [{"role": "user", "content": f"question {n}"}]} for n in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = [{"path": str(tmp_path / "prompts.jsonl"), "split": "heldout"}]
    monkeypatch.setattr(evaluate, "_results", _in_this_process)
    calibration = {"output": str(tmp_path / "calibration"), "prompts": prompts, "max_new_tokens": 12}
    calibrate.run(build_config(CalibrateConfig, shared | calibration))
    assert set(Calibration.load(Path(drafter) / "calibration.json").scales) == {"greedy", "sampled"}

    target = build_config(TargetConfig, content["target"])
    loaded = load_engine(target, drafter, config=EngineConfig(page_size=4, kv_tokens=2048), num_threads=1)
    assert loaded.notes == []  # the curve and the calibration are both there
    assert loaded.provenance is not None
    assert loaded.provenance["chat"]["system_prompt"] == "Be brief."
    requests = [request(prompt, str(i), max_tokens=NUM_NEW) for i, prompt in enumerate(PROMPTS)]
    outputs = run_engine(loaded.engine, requests)
    expected = greedy_continuations(load(tiny_target), PROMPTS, NUM_NEW)
    assert [ids_of(outputs[str(i)]) for i in range(len(PROMPTS))] == expected


def test_every_draft_token_of_an_adopted_drafter_can_be_verified(content, tiny_target):
    run(content)
    target = build_config(TargetConfig, content["target"])
    config = EngineConfig(page_size=4, kv_tokens=2048, verify_length=4)
    loaded = load_engine(target, content["output"], config=config, num_threads=1)
    outputs = run_engine(loaded.engine, [request(p, str(i), max_tokens=NUM_NEW) for i, p in enumerate(PROMPTS)])
    assert loaded.engine.stats.drafted > 0
    expected = greedy_continuations(load(tiny_target), PROMPTS, NUM_NEW)
    assert [ids_of(outputs[str(i)]) for i in range(len(PROMPTS))] == expected


def test_provenance_says_that_it_was_trained_elsewhere_and_which_files_it_was(content):
    run(content)
    provenance = read_json(Path(content["output"]) / "provenance.json")
    assert provenance["trained_elsewhere"] is True
    source = provenance["adopted"]["request"]["source"]
    assert source["name"] == content["drafter"]
    digests = {name: file_sha256(Path(content["drafter"]) / name) for name in ("config.json", "model.safetensors")}
    assert source["sha256"] == digests


def test_a_second_run_writes_nothing_and_another_drafter_needs_fresh(content, tmp_path, tiny_target):
    first = run(content)
    weights = Path(content["output"]) / "model.safetensors"
    written = weights.stat().st_mtime_ns
    assert run(content) == first | {"skipped": True}
    assert weights.stat().st_mtime_ns == written
    other = content | {"drafter": str(make_foreign_drafter(tmp_path / "other", tiny_target, block_size=3))}
    with pytest.raises(Mismatch, match="holds another drafter; use --fresh"):
        run(other)
    (Path(content["output"]) / "calibration.json").write_text("{}")
    assert run(other, fresh=True)["block_size"] == 3
    assert not (Path(content["output"]) / "calibration.json").exists()


def test_a_trained_drafter_is_never_overwritten(content):
    write_json(Path(content["output"]) / "provenance.json", {"training": {"steps": 4}})
    with pytest.raises(Mismatch, match="holds another drafter"):
        run(content)


def test_a_dry_run_writes_nothing(content, capsys):
    assert run(content, dry_run=True)["dry_run"]
    assert "adoption of" in capsys.readouterr().out
    assert not Path(content["output"]).exists()


def test_as_a_command_it_ends_with_one_line_of_json(content, tmp_path, capsys):
    write_json(tmp_path / "adopt.yaml", content)  # JSON is YAML
    assert runner.main(AdoptConfig, adopt.run, default_config="x", argv=["--config", str(tmp_path / "adopt.yaml")]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["stage"] == "adopt"


def _in_this_process(config, subject, items):
    worker = EngineWorker(config, subject)
    rows = worker.advance(items)
    while rows:
        yield from rows
        rows = worker.advance([])
