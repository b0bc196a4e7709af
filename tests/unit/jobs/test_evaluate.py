"""The evaluate job without a cluster: what is planned, read back, and refused."""

import json
from pathlib import Path

import pytest

import evaluate
from dspark.config import build_config
from dspark.errors import DsparkError
from dspark.evaluation.config import EvaluateConfig
from dspark.provenance import fingerprint
from tiny_drafter import make_tiny_drafter


@pytest.fixture
def config(tmp_path: Path, tiny_target: Path) -> EvaluateConfig:
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"id": "a", "turns": ["hello", "and then?"]}) + "\n")
    content = {
        "drafter": str(make_tiny_drafter(tmp_path / "drafter", tiny_target)),
        "output": str(tmp_path / "evaluation"),
        "prompts": [{"path": str(tmp_path / "prompts.jsonl"), "split": "heldout"}],
        "modes": [{"name": "greedy"}],
        "max_new_tokens": 10,
        "tracking": {"enabled": False},
    }
    return build_config(EvaluateConfig, content)


def test_a_dry_run_says_what_is_to_do_and_writes_nothing(config, capsys):
    result = evaluate.run(config, dry_run=True)
    assert (result["to_do"], result["prompts"], result["turns"]) == (1, 1, 2)
    assert "at most 20 tokens" in capsys.readouterr().out
    assert not Path(config.output).exists()


def test_when_no_prompt_can_be_measured_the_job_fails_with_the_reason(config, monkeypatch):
    def failed(config, subject, items):
        for item in items:
            yield {
                "id": item.prompt.id,
                "domain": item.prompt.domain,
                "prompt": fingerprint(item.prompt.messages),
                "mode": item.mode.name,
                "request": item.request,
                "error": "the template says no",
                "turns": [],
            }

    monkeypatch.setattr(evaluate, "_results", failed)
    with pytest.raises(DsparkError, match=r"greedy.*the template says no"):
        evaluate.run(config)


def test_a_line_cut_short_by_a_kill_is_removed_and_the_others_are_kept(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(b'{"id": "a"}\n{"id": "b"}\n{"id": "c\xc3')
    assert [row["id"] for row in evaluate.read_rows(path)] == ["a", "b"]
    assert path.read_bytes() == b'{"id": "a"}\n{"id": "b"}\n'


def test_without_earlier_results_there_are_no_rows(tmp_path):
    assert evaluate.read_rows(tmp_path / "rollouts.jsonl") == []
