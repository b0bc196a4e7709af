"""The GPU's checks on a CPU with a tiny target: the same functions, and what is wrong is found."""

import dataclasses
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dspark.evaluation import gpu_check
from dspark.evaluation.attention_check import SHAPES
from dspark.evaluation.gpu_subject import Subject
from dspark.targets import TargetConfig
from tiny_drafter import make_tiny_drafter

CPU = torch.device("cpu")
FEW = ((20, 1), (3, 18))
SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu_check.py"


@pytest.fixture(scope="module")
def subject(tiny_target: Path) -> Subject:
    prompts = [[1, 40, 77, 130, 2, 25, 61], list(range(30, 55))]
    return Subject(
        TargetConfig(name=str(tiny_target), device="cpu"),
        CPU,
        prompts,
        num_tokens=6,
        concurrency=(1, 3),
        batch_tokens=(1, 4),
        context_tokens=20,
        repeats=1,
    )


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def findings_of(check: Any) -> dict[str, tuple[bool | None, str]]:
    return {detail: (is_right, said) for detail, is_right, said in check}


def test_every_entry_agrees_with_the_reference():
    found = findings_of(gpu_check.check_attention(CPU, [torch.float32, torch.bfloat16], lengths=FEW))
    assert {name.split()[0] for name in found} == {"cpu", "flex", "torch"}
    assert all(is_right is not False for is_right, _ in found.values()), found
    assert found["flex bfloat16"][0]
    assert found["torch float32"][1].startswith("12 problems, largest error")


def test_an_entry_that_computes_something_else_is_found(monkeypatch):
    monkeypatch.setattr("dspark.attention.flex._capped", lambda softcap: lambda score, *_: score)
    capped = {"soft cap": SHAPES["soft cap"]}
    found = findings_of(gpu_check.check_attention(CPU, [torch.float32], shapes=capped, lengths=FEW))
    assert found["flex float32"][0] is False
    assert found["torch float32"][0] is True


def test_engines_write_what_generate_writes_with_a_fresh_drafter_and_with_a_trained_one(subject, tiny_target, tmp_path):
    trained = dataclasses.replace(subject, drafter=str(make_tiny_drafter(tmp_path / "drafter", tiny_target)))
    assert not subject.has_trained_drafter
    assert trained.has_trained_drafter
    for one in (subject, trained):
        found = findings_of(gpu_check.check_greedy(one))
        assert {name.split(", ")[1] for name in found} == {"plain", "drafted"}
        assert all(is_right and said.startswith("2 of 2 answers") for is_right, said in found.values()), found


def test_an_answer_that_differs_without_a_tie_is_found(subject, monkeypatch):
    monkeypatch.setattr(gpu_check, "greedy_continuation", lambda model, prompt, n: [9] * n)
    found = findings_of(gpu_check.check_greedy(subject))
    assert all(is_right is False for is_right, _ in found.values())


def test_replays_are_compared_with_their_twins_where_attention_can_be_captured(subject, monkeypatch):
    assert findings_of(gpu_check.check_buckets(subject))[""][0] is None  # the CPU's cannot
    new_runner = gpu_check.new_runner
    monkeypatch.setattr(gpu_check, "new_runner", lambda *args: new_runner(*args, attention="flex"))
    found = findings_of(gpu_check.check_buckets(subject))
    assert list(found) == ["1 requests", "3 requests"]
    assert all(is_right and "bit for bit" in said for is_right, said in found.values()), found


def test_costs_and_speeds_are_measured(subject):
    costs = findings_of(gpu_check.check_cost(subject))
    assert costs["without buckets"][0]
    assert "1: " in costs["without buckets"][1]
    speeds = findings_of(gpu_check.check_speed(subject))
    assert list(speeds) == ["1 at once", "3 at once"]
    assert all(is_right and "a fresh drafter" in said for is_right, said in speeds.values()), speeds


def test_the_script_ends_with_a_table_of_all_checks(script, tiny_target, tmp_path, capsys, monkeypatch):
    rows = [{"id": str(n), "prompt": f"hello {n}"} for n in range(3)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made: list[Subject] = []

    def few(subject: Subject) -> Any:
        made.append(subject)
        return [check for check in checks_of(subject) if check.name in ("device", "memory")]

    checks_of = script.checks_of
    monkeypatch.setattr(script, "checks_of", few)
    arguments = ["--target", str(tiny_target), "--prompts", str(tmp_path / "prompts.jsonl"), "--device", "cpu"]
    assert script.main([*arguments, "--drafter", str(tmp_path / "none")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "all of 2 passed"
    assert len(made[0].prompts) == 3
    names = ["device", "attention", "greedy as generate", "graphs", "cost of a step", "speed", "memory"]
    assert [check.name for check in checks_of(made[0])] == names


def test_without_a_gpu_the_script_says_so_in_one_line_and_fails(script, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script.main([]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "no CUDA device: gpu-check needs one; on a machine without, `make test` is all there is"
    ]


def test_on_a_cpu_device_and_memory_are_not_judged():
    assert [is_right for _, is_right, _ in gpu_check.check_device(CPU)] == [None]
    assert [is_right for _, is_right, _ in gpu_check.check_memory(CPU)] == [None]
