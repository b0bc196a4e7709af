"""The evaluate job on a local cluster: complete, resumed, started over, and when a worker dies."""

import json
import os
import shutil
from pathlib import Path

import pytest

import calibrate
import evaluate
from dspark.config import build_config
from dspark.evaluation.config import CalibrateConfig, EvaluateConfig, MeasurementConfig
from dspark.evaluation.engine_worker import EngineWorker
from dspark.provenance import read_json
from tiny_drafter import make_tiny_drafter

pytestmark = pytest.mark.ray

NUM_ITEMS = 10  # five prompts in two modes


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> EvaluateConfig:
    folder = tmp_path_factory.mktemp("evaluate")
    rows = [
        {"id": f"p{n}", "domain": ("math", "chat")[n % 2], "messages": [{"role": "user", "content": f"question {n}"}]}
        for n in range(4)
    ]
    rows += [{"id": "talk", "domain": "chat", "turns": ["hello", "and then?"]}, {"id": "bad", "turns": []}]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = {
        "drafter": str(make_tiny_drafter(folder / "drafter", tiny_target)),
        "output": str(folder / "evaluation"),
        "prompts": [{"path": str(folder / "prompts.jsonl"), "split": "heldout"}],
        "max_new_tokens": 12,
        "compare_with_generate": 2,
        "concurrency": 3,
        "tracking": {"enabled": False},
    }
    return build_config(EvaluateConfig, content)


@pytest.fixture(scope="module")
def result(config: EvaluateConfig) -> dict:
    return evaluate.run(config)


@pytest.fixture
def copied(config: EvaluateConfig, result: dict, tmp_path: Path) -> EvaluateConfig:
    """The finished evaluation in a folder that the test may harm."""
    shutil.copytree(config.output, tmp_path / "evaluation")
    return config.with_changes(output=str(tmp_path / "evaluation"), num_workers=1)


def test_every_row_is_measured_or_accounted_for(config, result):
    assert (result["read"], result["prompts"], result["turns"]) == (6, 5, 6)
    assert sum(result["left_out"].values()) == 1
    assert result["generate_comparison"] == {"checked": 2, "identical": 2, "dtype": "float32"}
    metrics = json.loads((Path(config.output) / "metrics.json").read_text())
    assert "bonus" in metrics["definition"]
    assert metrics["modes"]["greedy"]["overall"]["turns"] == 6
    assert metrics["modes"]["greedy"]["overall"]["multi_turn_prompts"] == 1


def test_a_second_run_measures_nothing_and_says_the_same(config, result):
    assert evaluate.run(config) == result | {"skipped": True}


def test_a_run_that_was_killed_goes_on_where_it_was_with_the_same_figures(copied, result):
    path = Path(copied.output) / "rollouts.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:7]) + lines[7][:30])  # the eighth was being written
    (Path(copied.output) / "metrics.json").unlink()
    assert evaluate.run(copied, dry_run=True)["to_do"] == NUM_ITEMS - 7
    assert evaluate.run(copied)["accepted_length"] == result["accepted_length"]
    found = path.read_text().splitlines(keepends=True)
    assert found[:7] == lines[:7]
    assert len(found) == NUM_ITEMS


def test_a_worker_that_dies_is_replaced_and_no_prompt_is_lost(copied, result, tmp_path, monkeypatch):
    mark = str(tmp_path / "mark")

    class DiesOnce(EngineWorker):
        """Ends its process once it has given rows and holds others, unless the mark says that one has done so."""

        def advance(self, items):
            if self._tasks and not os.path.exists(mark):
                open(mark, "w").close()
                os._exit(1)
            return super().advance(items)

    monkeypatch.setattr(evaluate, "EngineWorker", DiesOnce)
    assert evaluate.run(copied, fresh=True)["accepted_length"] == result["accepted_length"]
    assert os.path.exists(mark)
    assert len((Path(copied.output) / "rollouts.jsonl").read_text().splitlines()) == NUM_ITEMS


def test_what_is_wrong_in_a_worker_is_what_the_job_says(copied):
    with pytest.raises(ValueError, match="verify_length 9 is outside of the drafter's block"):
        evaluate.run(copied.with_changes(verify_length=9))


def test_the_reference_loop_finds_the_same_greedy_lengths_and_times_them(copied, result):
    changes = {"through": "reference", "time_plain": 1, "concurrency": 8}
    found = evaluate.run(copied.with_changes(**changes), fresh=True)
    assert found["accepted_length"]["greedy"] == result["accepted_length"]["greedy"]
    assert found["speedup"]["greedy"] > 0
    assert result["speedup"]["greedy"] is None


def test_the_same_cluster_calibrates_the_drafter(config, tmp_path):
    shared = config.model_dump(include=set(MeasurementConfig.model_fields))
    wanted = {"output": str(tmp_path / "calibration"), "max_new_tokens": 12, "num_workers": 1}
    result = calibrate.run(CalibrateConfig(**shared | wanted))
    assert result["rounds"]["greedy"]["test"] > 0
    stored = read_json(Path(config.drafter) / "calibration.json")
    assert stored["temperatures"] == {mode: result["temperatures"][mode] for mode in ("greedy", "sampled")}
