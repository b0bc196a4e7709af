"""The README's way from a model and a file of prompts to a served drafter, as its reader would type it, at toy size."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from local_cluster import ROOT, start_local_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.ray]

TINY = ["based_on=configs/tiny", "deployment=deployments/dspark_tiny.yaml", "steps=8", "answers_per_prompt=1"]
NUM_PROMPTS = 40


def own_model_commands() -> list[list[str]]:
    """Of the README's section on it."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Your own model")[2]
    (block, *_) = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    return [shlex.split(line, comments=True) for line in block.splitlines()]


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """Prompts of the reader's own beside the repository's sets."""
    rows = [json.dumps({"prompt": f"question number {i}: what is {i} and {i + 1}?"}) for i in range(NUM_PROMPTS)]
    (tmp_path / "my_prompts.jsonl").write_text("\n".join(rows), encoding="utf-8")
    for folder, name in (("configs", "tiny"), ("deployments", "dspark_tiny.yaml")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).symlink_to(ROOT / folder / name)
    return tmp_path


def run_job(command: list[str], workplace: Path) -> dict[str, object]:
    environment = os.environ | {"RAY_ADDRESS": start_local_cluster(), "PYTHONPATH": str(ROOT / "platform")}
    words = [sys.executable, str(ROOT / command[1]), *command[2:]]
    done = subprocess.run(
        words, cwd=workplace, env=environment, capture_output=True, text=True, timeout=540, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_own_prompts_and_model_are_trained_and_served(workplace, tiny_target):
    install, new_set, pipeline, serve = own_model_commands()
    assert install == ["make", "install"]  # these tests run in what it makes
    command = [word.replace("path/or/hub-id", str(tiny_target)) for word in new_set]
    chosen = run_job([*command, "target.dtype=float32", *TINY], workplace)
    assert chosen["prompts"] == NUM_PROMPTS
    result = run_job(pipeline, workplace)
    assert (workplace / "runs/mine/report.html").is_file()
    summary = json.loads((workplace / "runs/mine/summary.json").read_text())
    assert summary, result
    asked = json.loads((workplace / "runs/mine/answers_served/answers.json").read_text())
    answers = asked["result"]["answers"]
    assert len(answers) == 3
    assert all(answer["completion_tokens"] > 0 for answer in answers)
    served = yaml.safe_load((workplace / serve[-1]).read_text())["applications"][0]["args"]["drafter"]
    assert (workplace / served / "calibration.json").is_file()
    assert (workplace / served / "cost_curve.json").is_file()
    assert run_job(pipeline, workplace) == result, "the second time everything is there"
