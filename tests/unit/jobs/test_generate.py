"""Tests of what the generate job does before it needs a cluster."""

from pathlib import Path
from typing import Any

import pytest

import generate
from dspark.config import build_config
from dspark.data.answers import GenerateConfig


def make_config(target: Path, folder: Path, **changes: Any) -> GenerateConfig:
    prompts = folder / "prompts.jsonl"
    if not prompts.exists():
        prompts.write_text('{"id": "a", "domain": "math", "turns": ["one", "two"]}\n{"text": "?"}\n{"prompt": "x"}\n')
    content = {
        "prompts": [{"path": str(prompts), "split": "train"}],
        "target": {"name": str(target), "dtype": "float32"},
        "output": str(folder / "answers"),
        "sampling": {"max_new_tokens": 16},
    }
    return build_config(GenerateConfig, content | changes)


def test_a_dry_run_returns_the_plan_and_writes_nothing(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = generate.run(make_config(tiny_target, tmp_path), dry_run=True)
    assert plan["by_domain_and_split"] == {"default/train": 1, "math/train": 1}
    assert (plan["read"], plan["prompts"], plan["turns"], plan["max_tokens"]) == (3, 2, 3, 48)
    assert plan["rejected"] == {"no messages, prompt or turns": 1}
    assert "rejected: 1 (no messages, prompt or turns)" in capsys.readouterr().out
    assert not (tmp_path / "answers").exists()


def test_a_template_that_takes_no_prompt_stops_before_the_cluster_starts(tiny_target: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hi"}\n')
    options = {"template_options": {"messages": 3}}  # hides the conversation from the template
    with pytest.raises(ValueError, match="takes none of the first prompts"):
        generate.run(make_config(tiny_target, tmp_path, chat=options))


def test_a_missing_prompt_file_is_one_clear_error(tiny_target: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="prompt file not found"):
        generate.run(make_config(tiny_target, tmp_path, prompts=[{"path": str(tmp_path / "nowhere.jsonl")}]))
