"""Our figures once more under vLLM's names, so that dashboards made for it show them. Only where both mean the same.

Not here: inter_token_latency_seconds, which vLLM counts once per step and we once per token.
"""

from collections.abc import Mapping, Sequence

from prometheus_client import Metric

NAMES = {
    "num_requests_running": "dspark_requests_running",
    "num_requests_waiting": "dspark_requests_waiting",
    "prefix_cache_queries": "dspark_prefix_cache_queries",
    "prefix_cache_hits": "dspark_prefix_cache_hits",
    "num_preemptions": "dspark_num_preemptions",
    "generation_tokens": "dspark_output_tokens",
    "request_success": "dspark_requests",
    "time_to_first_token_seconds": "dspark_time_to_first_token_seconds",
    "spec_decode_num_drafts": "dspark_rounds",
    "spec_decode_num_draft_tokens": "dspark_verified_tokens",
    "spec_decode_num_accepted_tokens": "dspark_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos": "dspark_position_accepted",
}
"""vLLM's name, without its prefix, and ours."""
LABELS = {"finish_reason": "finished_reason"}
SUCCESSES = ("stop", "length")


def vllm_families(families: Sequence[Metric], model_name: str) -> list[Metric]:
    """Those of our families that vLLM has too, named and labelled as there."""
    ours = {family.name: family for family in families}
    renamed = [_renamed(ours[own], f"vllm:{name}", model_name) for name, own in NAMES.items() if own in ours]
    pages, free = (_value(ours, f"dspark_kv_pages{part}") for part in ("", "_free"))
    usage = Metric("vllm:kv_cache_usage_perc", "Share of the pages of KV memory that requests need.", "gauge")
    usage.add_sample(usage.name, _labels({}, model_name), 1.0 - free / pages if pages else 0.0)
    read = _value(ours, "dspark_prompt_tokens") + _value(ours, "dspark_prefix_cache_hits")
    prompts = Metric("vllm:prompt_tokens", "Prompt tokens, read or found in the prefix cache.", "counter")
    prompts.add_sample("vllm:prompt_tokens_total", _labels({}, model_name), read)
    return [*renamed, usage, prompts]


def _renamed(family: Metric, name: str, model_name: str) -> Metric:
    copy = Metric(name, family.documentation, family.type)
    for sample in family.samples:
        ending = sample.labels.get("finish_reason")
        if ending is None or ending in SUCCESSES:
            ending_of_name = sample.name.removeprefix(family.name)
            copy.add_sample(f"{name}{ending_of_name}", _labels(sample.labels, model_name), sample.value)
    return copy


def _labels(labels: Mapping[str, str], model_name: str) -> dict[str, str]:
    return {"model_name": model_name, "engine": "0"} | {LABELS.get(key, key): value for key, value in labels.items()}


def _value(families: Mapping[str, Metric], name: str) -> float:
    return families[name].samples[0].value
