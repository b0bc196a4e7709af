"""KV memory is sized one way, and jobs that measure share no pages unless they are told to."""

import pytest

from dspark.config import build_config
from dspark.engine.config import EngineConfig, MeasuredEngineConfig
from dspark.evaluation.config import EvaluateConfig
from dspark.evaluation.load_config import BenchmarkConfig


def test_memory_is_given_in_tokens_or_in_bytes_and_has_a_size_without() -> None:
    assert EngineConfig().num_pages == 1024
    assert EngineConfig(kv_tokens=33, page_size=16).num_pages == 3
    with pytest.raises(ValueError, match=r"kv_tokens \(33\) and kv_memory_bytes \(99\) both size the KV memory"):
        build_config(EngineConfig, {"kv_tokens": 33, "kv_memory_bytes": 99})


def test_what_is_measured_does_not_depend_on_what_came_before_unless_asked_for() -> None:
    assert EngineConfig().prefix_cache
    assert not MeasuredEngineConfig().prefix_cache
    prompts = [{"path": "p.jsonl"}]
    evaluate = build_config(
        EvaluateConfig, {"drafter": "d", "output": "o", "prompts": prompts, "engine": {"kv_tokens": 64}}
    )
    benchmark = build_config(BenchmarkConfig, {"drafter": "d", "output": "o", "prompts": prompts})
    assert not evaluate.engine.prefix_cache
    assert not benchmark.engine.prefix_cache
    changed = {"drafter": "d", "output": "o", "prompts": prompts, "engine": {"prefix_cache": True}}
    assert build_config(BenchmarkConfig, changed).engine.prefix_cache
