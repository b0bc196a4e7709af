"""Prometheus text of one and of several replicas."""

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from dspark.drafters.ngram import NGramDrafter
from dspark.engine.draft_runner import NGramDraftRunner
from dspark.serving.metrics import ReplicaMetrics, counter, engine_families, gauge, render, with_label
from tiny_engine import PROMPTS, load, make_engine, request, run


def test_families_of_one_name_become_one() -> None:
    families = [
        *with_label([counter("rounds", "R.", 3)], "replica", "a"),
        *with_label([counter("rounds", "R.", 4)], "replica", "b"),
    ]
    text = render(families).decode()
    assert text.count("# TYPE dspark_rounds_total counter") == 1
    assert 'dspark_rounds_total{replica="a"} 3.0' in text
    assert 'dspark_rounds_total{replica="b"} 4.0' in text


def test_rendering_twice_gives_the_same() -> None:
    families = with_label([gauge("x", "X.", 1, {"kind": 'a"b\nc'})], "replica", "a")
    assert render(families) == render(families)
    (family,) = text_string_to_metric_families(render(families).decode())
    assert family.samples[0].labels["kind"] == 'a"b\nc'


def test_latencies_are_counted_per_token() -> None:
    metrics = ReplicaMetrics()
    metrics.count_tokens(1, 0.3, is_first=True)
    metrics.count_tokens(4, 0.2, is_first=False)
    samples = {
        sample.name: sample.value for family in metrics.families() for sample in family.samples if not sample.labels
    }
    assert samples["dspark_time_to_first_token_seconds_sum"] == 0.3
    assert samples["dspark_inter_token_latency_seconds_count"] == 4
    assert abs(samples["dspark_inter_token_latency_seconds_sum"] - 0.2) < 1e-9


def test_every_ending_is_there_from_the_start() -> None:
    text = render(ReplicaMetrics().families()).decode()
    assert 'dspark_requests_total{finish_reason="timeout"} 0.0' in text


def test_no_times_of_creation() -> None:
    assert b"_created" not in render(with_label(ReplicaMetrics().families(), "replica", "a"))


def test_engine_counters_add_up(tiny_target: Path) -> None:
    engine = make_engine(load(tiny_target), NGramDraftRunner(NGramDrafter()), verify_length=3)
    run(engine, [request(prompt, str(i), max_tokens=60) for i, prompt in enumerate(PROMPTS)])
    values = {
        sample.name + str(sample.labels.get("position", "")): sample.value
        for family in engine_families(engine)
        for sample in family.samples
    }
    firsts = len(PROMPTS)
    assert values["dspark_output_tokens_total"] == 60 * len(PROMPTS)
    assert values["dspark_prompt_tokens_total"] == sum(len(prompt) for prompt in PROMPTS)
    assert values["dspark_committed_tokens_total"] + values["dspark_plain_rounds_total"] + firsts == 60 * len(PROMPTS)
    assert values["dspark_decodes_total"] == values["dspark_rounds_total"] + values["dspark_plain_rounds_total"]
    assert values["dspark_rounds_total"] == values["dspark_position_proposed_total0"] > 0
    assert values["dspark_verified_tokens_total"] <= values["dspark_drafted_tokens_total"]
    assert values["dspark_kv_pages_free"] == values["dspark_kv_pages"]
    assert 0 < values["dspark_verify_seconds_total"] < values["dspark_step_seconds_total"]


def test_what_was_found_in_pages_and_what_had_to_wait_again_is_counted(tiny_target: Path) -> None:
    engine = make_engine(load(tiny_target), kv_tokens=72)
    prompt = list(range(5, 35))
    run(engine, [request(prompt, str(i), max_tokens=20) for i in range(4)])
    values = {sample.name: sample.value for family in engine_families(engine) for sample in family.samples}
    hits, queries = values["dspark_prefix_cache_hits_total"], values["dspark_prefix_cache_queries_total"]
    assert 0 < hits < queries == 4 * len(prompt)
    assert values["dspark_num_preemptions_total"] > 0
    assert values["dspark_reread_tokens_total"] > 0
    assert values["dspark_requests_beyond_drafter_total"] == 0
    assert 0 < values["dspark_kv_pages_cached"] <= values["dspark_kv_pages_free"] == values["dspark_kv_pages"] == 18
