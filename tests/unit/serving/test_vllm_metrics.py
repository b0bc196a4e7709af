"""Figures under vLLM's names: the same numbers, its labels, and only what it has too."""

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dspark.drafters.ngram import NGramDrafter
from dspark.engine.draft_runner import NGramDraftRunner
from dspark.serving.metrics import ReplicaMetrics, engine_families, render, with_label
from dspark.serving.vllm_metrics import NAMES, vllm_families
from tiny_engine import PROMPTS, load, make_engine, request, run


@pytest.fixture(scope="module")
def samples(tiny_target: Path) -> dict:
    engine = make_engine(load(tiny_target), NGramDraftRunner(NGramDrafter()), verify_length=3)
    run(engine, [request(prompt, str(i), max_tokens=60) for i, prompt in enumerate(PROMPTS)])
    metrics = ReplicaMetrics()
    metrics.count_tokens(1, 0.3, is_first=True)
    metrics.count_ending("stop")
    metrics.count_ending("abort")
    ours = [*metrics.families(), *engine_families(engine)]
    text = render(with_label([*ours, *vllm_families(ours, "m")], "replica", "a")).decode()
    families = text_string_to_metric_families(text)
    return {(s.name, s.labels.get("position", s.labels.get("finished_reason", s.labels.get("le", "")))): s
            for family in families for s in family.samples}  # fmt: skip


def test_every_name_is_there_with_vllms_labels(samples: dict) -> None:
    names = {name for name, _ in samples}
    for name in NAMES:
        assert any(found.startswith(f"vllm:{name}") for found in names), name
    sample = samples["vllm:num_requests_running", ""]
    assert sample.labels == {"model_name": "m", "engine": "0", "replica": "a"}


def test_numbers_are_ours(samples: dict) -> None:
    pairs = {
        "vllm:generation_tokens_total": "dspark_output_tokens_total",
        "vllm:spec_decode_num_drafts_total": "dspark_rounds_total",
        "vllm:spec_decode_num_draft_tokens_total": "dspark_verified_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total": "dspark_accepted_tokens_total",
    }
    for theirs, ours in pairs.items():
        assert samples[theirs, ""].value == samples[ours, ""].value > 0
    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total", "0"
    assert samples[per_position].value == samples["dspark_position_accepted_total", "0"].value
    assert samples["vllm:prompt_tokens_total", ""].value == sum(map(len, PROMPTS))
    assert samples["vllm:time_to_first_token_seconds_sum", ""].value == 0.3
    assert samples["vllm:kv_cache_usage_perc", ""].value == 0.0


def test_only_a_whole_answer_is_a_success(samples: dict) -> None:
    reasons = {reason for name, reason in samples if name == "vllm:request_success_total"}
    assert reasons == {"stop", "length"}
    assert samples["vllm:request_success_total", "stop"].value == 1
