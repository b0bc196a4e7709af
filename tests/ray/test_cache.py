"""The cache job on a local cluster: complete, killed and resumed, repaired, refused."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import cache
from dspark.config import build_config
from dspark.data.answers import read_answers
from dspark.data.capture import CacheConfig
from dspark.data.target_cache import TargetCache
from dspark.errors import DsparkError, Mismatch, MissingInput, OutOfSpace
from dspark.provenance import file_sha256
from local_cluster import start_job, start_local_cluster
from tiny_answers import make_tiny_answers
from tiny_target import make_tiny_target

pytestmark = pytest.mark.ray

NUM_OK, NUM_EMPTY, NUM_SHORT = 60, 2, 3


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    start_local_cluster()
    folder = tmp_path_factory.mktemp("answers")
    return make_tiny_answers(folder, tiny_target, ok=NUM_OK, empty=NUM_EMPTY, short=NUM_SHORT)


def config_for(answers: Path, output: Path, **changes: Any) -> CacheConfig:
    content = {
        "answers": str(answers),
        "output": str(output),
        "target_layer_ids": [0, 2],
        "shard_tokens": 200,
        "tracking": {"enabled": False},
    }
    return build_config(CacheConfig, content | changes)


@pytest.fixture(scope="module")
def finished(answers: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[CacheConfig, dict[str, Any]]:
    config = config_for(answers, tmp_path_factory.mktemp("cache") / "deep" / "cache")
    return config, cache.run(config)


def checksums(folder: str | Path) -> dict[str, str]:
    return {path.name: file_sha256(path) for path in sorted(Path(folder).glob("shard-*.safetensors"))}


def times(folder: str | Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in sorted(Path(folder).glob("shard-*.safetensors"))}


def test_every_answer_is_cached_or_accounted_for(finished, answers):
    config, result = finished
    assert result["answers"] == NUM_OK + NUM_EMPTY + NUM_SHORT
    assert result["rejected"] == {"answer empty": NUM_EMPTY, "under 14 supervised tokens": NUM_SHORT}
    assert result["answers_kept"] + sum(result["rejected"].values()) == result["answers"]
    assert (result["samples"], result["non_finite"]) == (NUM_OK, 0)
    written = TargetCache(config.output)
    written.verify()
    rows = {row["id"]: row for row in read_answers(answers).rows(statuses=["ok"])}
    for index, entry in enumerate(written.entries):
        [turn] = rows[entry.id]["turns"]
        sample = written.load(index)
        assert entry.split == rows[entry.id]["split"]
        assert sample.input_ids.tolist() == turn["prompt_ids"] + turn["output_ids"]
        assert sample.loss_mask.tolist() == [0] * 8 + [1] * len(turn["output_ids"])
        assert bool(sample.hidden.isfinite().all())


def test_a_second_run_captures_nothing_and_says_the_same(finished):
    config, result = finished
    before = times(config.output)
    assert cache.run(config.with_changes(num_workers=1, batch_tokens=100)) == result | {"skipped": True}
    assert times(config.output) == before


def test_another_request_is_refused_by_field_name(finished):
    config, _ = finished
    with pytest.raises(Mismatch, match=r"target_layer_ids is \[0, 2\] but \[0, 1\] is asked for; use --fresh"):
        cache.run(config.with_changes(target_layer_ids=(0, 1)))


def test_a_dry_run_tells_the_size_and_writes_nothing(finished, answers, tmp_path):
    plan = cache.run(config_for(answers, tmp_path / "cache"), dry_run=True)
    assert plan["dry_run"]
    assert not (tmp_path / "cache").exists()
    size = sum(path.stat().st_size for path in Path(finished[0].output).glob("*.safetensors"))
    assert 0 <= size - plan["bytes"] < 1000 * len(checksums(finished[0].output))  # headers


def test_a_killed_run_goes_on_and_keeps_the_shards_it_had(finished, answers, tmp_path):
    config = config_for(answers, tmp_path / "cache", num_workers=1)
    output = Path(config.output)
    path = tmp_path / "cache.yaml"
    path.write_text(config.model_dump_json())  # JSON is YAML
    job = start_job("cache", "--config", str(path), log=tmp_path / "log.txt")
    try:
        deadline = time.monotonic() + 120
        while len(list(output.glob("shard-*.json"))) < 2:
            assert job.poll() is None, (tmp_path / "log.txt").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        job.send_signal(signal.SIGKILL)
        job.wait()
    time.sleep(2.0)  # the cluster ends the dead driver's workers
    assert not (output / "manifest.json").exists()
    # The state that a kill between a shard and its sidecar leaves, whatever this one hit.
    sidecars = sorted(output.glob("shard-*.json"))
    sidecars[-1].unlink()
    kept = {json.loads(sidecar.read_text())["file"] for sidecar in sidecars[:-1]}
    before = times(output)

    result = cache.run(config)
    after = times(output)
    assert {name for name in after if after[name] == before.get(name)} == kept
    assert checksums(output) == checksums(finished[0].output)
    assert result["samples"] == NUM_OK
    TargetCache(output).verify()


def test_a_shard_that_was_harmed_is_written_again(finished):
    config, result = finished
    expected, before = checksums(config.output), times(config.output)
    harmed = Path(config.output) / "shard-00001.safetensors"
    harmed.write_bytes(harmed.read_bytes()[:-100])
    with pytest.raises(Mismatch, match=r"cut short; run jobs/cache\.py again"):
        TargetCache(config.output)
    repaired = cache.run(config)
    assert repaired["samples"] == result["samples"]
    assert checksums(config.output) == expected
    after = times(config.output)
    assert [name for name in after if after[name] != before[name]] == ["shard-00001.safetensors"]
    assert len(TargetCache(config.output)) == NUM_OK


def test_too_little_disk_is_said_before_the_target_is_loaded(answers, tmp_path, monkeypatch):
    monkeypatch.setattr(cache.TargetCacheWriter, "check_space", lambda *_: (_ for _ in ()).throw(OutOfSpace("full")))
    with pytest.raises(OutOfSpace, match="full"):
        cache.run(config_for(answers, tmp_path / "cache"))
    assert not (tmp_path / "cache" / "manifest.json").exists()


def test_a_byte_budget_is_kept_by_all_files_and_the_rest_is_counted(finished, answers, tmp_path, capsys):
    budget = finished[1]["bytes"] // 3
    result = cache.run(config_for(answers, tmp_path / "cache", max_cache_bytes=budget))
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= result["max_disk_bytes"] <= budget
    assert 0 < result["samples"] < result["samples_usable"] == NUM_OK
    said = f"{result['samples']} of {NUM_OK} samples fit into max_cache_bytes ({budget:,})"
    assert said in capsys.readouterr().out
    assert result["answers_kept"] + sum(result["rejected"].values()) == result["answers"]
    assert result["rejected"]["over max_cache_bytes"] == NUM_OK - result["answers_kept"]
    assert len(TargetCache(tmp_path / "cache")) == result["samples"]


def test_no_answers_name_the_job_that_makes_them(tmp_path):
    with pytest.raises(MissingInput, match=r"jobs/generate\.py"):
        cache.run(config_for(tmp_path / "none", tmp_path / "cache"))


def test_answers_that_are_all_too_short_are_an_error(answers, tmp_path):
    with pytest.raises(DsparkError, match="nothing to cache: all 65 answers were rejected"):
        cache.run(config_for(answers, tmp_path / "cache", min_loss_tokens=1000))


def test_a_target_that_is_not_the_one_that_answered_is_refused_by_field_name(tmp_path):
    folder = make_tiny_target(tmp_path / "target")
    answers = make_tiny_answers(tmp_path / "answers", folder, ok=2)
    make_tiny_target(folder, seed=1)
    with pytest.raises(Mismatch, match=r"weights_fingerprint is .* make the answers again with jobs/generate\.py"):
        cache.run(config_for(answers, tmp_path / "cache"))


def test_a_target_that_is_not_finite_is_an_error(tmp_path):
    import transformers

    folder = make_tiny_target(tmp_path / "target")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.fill_(torch.inf)
    model.save_pretrained(folder)
    answers = make_tiny_answers(tmp_path / "answers", folder, ok=4)
    with pytest.raises(DsparkError, match="not finite in any of 4 samples; set dtype=float32"):
        cache.run(config_for(answers, tmp_path / "cache", num_workers=1))
    assert not (tmp_path / "cache" / "manifest.json").exists()
