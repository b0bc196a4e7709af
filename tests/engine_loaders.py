"""What the loaders of other engines ask of a drafter's folder, written down from their documentation and sources.

Each function raises AssertionError for what the engine would refuse or silently read as something else. Nothing here
comes from our exporter. SGLang 0.5.23, vLLM 0.32.0, speculators 0.9.0, DeepSpec afdfa7c.
"""

from typing import Any

from torch import Tensor

Content, Tensors = dict[str, Any], dict[str, Tensor]

QWEN3_KEYS = {
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "rope_parameters", "max_position_embeddings", "vocab_size", "hidden_act", "attention_bias",
    "tie_word_embeddings",
}  # fmt: skip
DRAFT_KEYS = {"block_size", "target_layer_ids", "mask_token_id", "markov_rank", "num_target_layers", "layer_types"}
# Their defaults differ between engines, or between formats of one engine: never left out.
ALWAYS_WRITTEN = {"sample_from_anchor", "confidence_head_with_markov", "markov_head_type", "is_causal", "layer_types"}
GEMMA4 = "Gemma4DSparkModel"
GEMMA4_KEYS = {
    "global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "final_logit_softcapping", "hidden_activation",
    "enable_moe_block", "hidden_size_per_layer_input",
}  # fmt: skip
VLLM_ARCHITECTURES = {"Qwen3DSparkModel", "Qwen3OmniDSparkModel", GEMMA4, "K3DSparkModel"}
SGLANG_ARCHITECTURES = {"Qwen3DSparkModel", "LingDSparkModel", "DSparkDraftModel", "Lfm2DSparkDraftModel"}
SPECULATORS_KEYS = {
    "architectures", "speculators_model_type", "speculators_version", "speculators_config", "transformer_layer_config",
    "draft_vocab_size", "target_hidden_size", "block_size", "aux_hidden_state_layer_ids", "mask_token_id",
    "sample_from_anchor", "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
}  # fmt: skip


def deepspec_loads(content: Content, tensors: Tensors, *, target_vocab_size: int) -> None:
    assert content["architectures"] == [GEMMA4 if _is_gemma4(content) else "Qwen3DSparkModel"]
    assert content.keys() >= _layer_keys(content) | DRAFT_KEYS | ALWAYS_WRITTEN
    assert content["layer_types"] == ["full_attention"] * content["num_hidden_layers"]
    assert "draft_vocab_size" not in content
    wanted = _backbone(content) | _heads(content, target_vocab_size)
    size = [target_vocab_size, content["hidden_size"]]
    _require_exactly(wanted | {"embed_tokens.weight": size, "lm_head.weight": size}, tensors)


def sglang_loads(content: Content, tensors: Tensors, *, target_vocab_size: int) -> None:
    assert set(content["architectures"]) <= SGLANG_ARCHITECTURES
    assert "speculators_model_type" not in content
    assert content.keys() >= QWEN3_KEYS | DRAFT_KEYS | ALWAYS_WRITTEN
    assert content["markov_rank"] > 0
    assert content["markov_head_type"] in ("vanilla", "gated", "rnn")
    assert 0 <= content["mask_token_id"] < target_vocab_size
    assert all(0 <= layer_id < content["num_target_layers"] for layer_id in content["target_layer_ids"])
    assert content["layer_types"] == ["full_attention"] * content["num_hidden_layers"]  # a sliding one is causal there
    # Skipped where they are there, and then the target's are used: neither may be needed.
    assert not {"embed_tokens.weight", "lm_head.weight", "d2t"} & tensors.keys()
    assert "draft_vocab_size" not in content
    _require_exactly(_backbone(content) | _heads(content, target_vocab_size), tensors)


def vllm_loads(content: Content, tensors: Tensors, *, target_vocab_size: int) -> None:
    assert set(content["architectures"]) <= VLLM_ARCHITECTURES
    assert _is_gemma4(content) == (content["architectures"] == [GEMMA4])
    assert _is_gemma4(content) or content["model_type"] == "qwen3"
    assert _layer_keys(content) | ALWAYS_WRITTEN | {"block_size", "target_layer_ids", "mask_token_id"} <= content.keys()
    assert content["sample_from_anchor"] is True
    assert content["is_causal"] is False
    assert content["markov_rank"] > 0
    assert content["markov_head_type"] == "vanilla"
    assert len(content["layer_types"]) == content["num_hidden_layers"]
    draft_vocab_size = content.get("draft_vocab_size") or content["vocab_size"]
    wanted = _backbone(content) | _heads(content, draft_vocab_size)
    hidden = content["hidden_size"]
    if draft_vocab_size < target_vocab_size:
        wanted |= {"lm_head.weight": [draft_vocab_size, hidden], "d2t": [draft_vocab_size]}
    elif "lm_head.weight" in tensors:
        wanted |= {"lm_head.weight": [draft_vocab_size, hidden]}
    if "embed_tokens.weight" in tensors:
        wanted |= {"embed_tokens.weight": [content["vocab_size"], hidden]}
    _require_exactly(wanted, tensors)


def speculators_loads(content: Content, tensors: Tensors, *, target_vocab_size: int) -> None:
    assert content.keys() >= SPECULATORS_KEYS
    assert content["speculators_config"]["algorithm"] == content["speculators_model_type"] == "dspark"
    assert content["architectures"] == ["DSparkSpeculator"]
    vllm_loads(vllm_reads_speculators(content), tensors, target_vocab_size=target_vocab_size)


def vllm_reads_speculators(content: Content) -> Content:
    """The drafter's config as vLLM makes it from a speculators one; what is left out gets vLLM's default."""
    methods = content["speculators_config"]["proposal_methods"]
    assert methods[0]["speculative_tokens"] <= content["block_size"]
    assert content["speculators_config"]["verifier"]["name_or_path"]
    assert isinstance(content["transformer_layer_config"], dict)
    return content["transformer_layer_config"] | {
        "architectures": ["Qwen3DSparkModel"],
        "draft_vocab_size": content.get("draft_vocab_size", 32000),
        "target_hidden_size": content["target_hidden_size"],
        "target_layer_ids": [layer_id - 1 for layer_id in content["aux_hidden_state_layer_ids"]],
        "mask_token_id": content["mask_token_id"],
        "block_size": content["block_size"],
        "sample_from_anchor": content.get("sample_from_anchor", False),
        "markov_rank": content["markov_rank"],
        "enable_confidence_head": content.get("enable_confidence_head", False),
        "confidence_head_with_markov": content.get("confidence_head_with_markov", False),
    }


def vllm_loads_eagle3(content: Content, tensors: Tensors, *, target_vocab_size: int) -> None:
    assert content["architectures"] == ["Eagle3Qwen3ForCausalLM"]
    assert content["model_type"] == "qwen3"
    assert content.keys() >= QWEN3_KEYS | {"eagle_aux_hidden_state_layer_ids", "target_hidden_size"}
    assert content["num_hidden_layers"] == 1
    assert not any(content.get(name, False) for name in ("norm_before_fc", "fc_norm", "norm_output"))
    assert content.get("norm_before_residual", False) is False
    # The number of states that are joined: the first of these that is there, 3 without.
    ids = content["eagle_aux_hidden_state_layer_ids"]
    num_states = content.get("num_aux_layers") or content.get("num_aux_hidden_states") or len(ids) or 3
    assert num_states == len(ids)
    assert all(layer_id >= 0 for layer_id in ids)
    d, width = content["hidden_size"], content["head_dim"]
    q, kv = content["num_attention_heads"] * width, content["num_key_value_heads"] * width
    ffn = content["intermediate_size"]
    of_layer = {
        "self_attn.q_proj": [q, 2 * d], "self_attn.k_proj": [kv, 2 * d], "self_attn.v_proj": [kv, 2 * d],
        "self_attn.o_proj": [d, q], "self_attn.q_norm": [width], "self_attn.k_norm": [width],
        "mlp.gate_proj": [ffn, d], "mlp.up_proj": [ffn, d], "mlp.down_proj": [d, ffn],
        "input_layernorm": [d], "hidden_norm": [d], "post_attention_layernorm": [d],
    }  # fmt: skip
    wanted = {f"layers.0.{name}.weight": shape for name, shape in of_layer.items()}
    wanted |= {"fc.weight": [d, d * num_states], "norm.weight": [d]}
    draft_vocab_size = content.get("draft_vocab_size") or content["vocab_size"]
    if draft_vocab_size < target_vocab_size:
        wanted |= {"lm_head.weight": [draft_vocab_size, d], "d2t": [draft_vocab_size]}
    _require_exactly(wanted, tensors)


def vllm_reads_eagle3_speculators(content: Content) -> Content:
    """The drafter's config as vLLM makes it from a speculators one; what is left out gets vLLM's default."""
    assert content["speculators_config"]["algorithm"] == content["speculators_model_type"] == "eagle3"
    assert content["architectures"] == ["Eagle3Speculator"]
    assert content["speculators_config"]["proposal_methods"][0]["speculative_tokens"] >= 1
    assert content["speculators_config"]["verifier"]["name_or_path"]
    layer = content["transformer_layer_config"]
    assert layer["model_type"] == "qwen3"  # decides the class
    return layer | {
        "architectures": ["Eagle3Qwen3ForCausalLM"],
        "draft_vocab_size": content.get("draft_vocab_size"),
        "target_hidden_size": content["target_hidden_size"],
        "norm_before_residual": content.get("norm_before_residual", True),
        "norm_before_fc": content.get("norm_before_fc", False),
        "fc_norm": content.get("fc_norm", False),
        "norm_output": content.get("norm_output", False),
        "eagle_aux_hidden_state_layer_ids": content["eagle_aux_hidden_state_layer_ids"],
    }


LOADERS = {
    "deepspec": deepspec_loads,
    "sglang": sglang_loads,
    "vllm": vllm_loads,
    "speculators": speculators_loads,
}


def _backbone(content: Content) -> dict[str, list[int]]:
    is_gemma4, d = _is_gemma4(content), content["hidden_size"]
    width, num_kv = (
        (content["global_head_dim"], content["num_global_key_value_heads"])
        if is_gemma4
        else (content["head_dim"], content["num_key_value_heads"])
    )
    q, kv = content["num_attention_heads"] * width, num_kv * width
    ffn = content["intermediate_size"]
    wanted = {"fc.weight": [d, d * len(content["target_layer_ids"])], "hidden_norm.weight": [d], "norm.weight": [d]}
    for layer in range(content["num_hidden_layers"]):
        of_layer = {
            "self_attn.q_proj": [q, d], "self_attn.k_proj": [kv, d], "self_attn.v_proj": [kv, d],
            "self_attn.o_proj": [d, q], "self_attn.q_norm": [width], "self_attn.k_norm": [width],
            "mlp.gate_proj": [ffn, d], "mlp.up_proj": [ffn, d], "mlp.down_proj": [d, ffn],
            "input_layernorm": [d], "post_attention_layernorm": [d],
        }  # fmt: skip
        if is_gemma4:
            of_layer |= {"pre_feedforward_layernorm": [d], "post_feedforward_layernorm": [d]}
            wanted[f"layers.{layer}.layer_scalar"] = [1]
        if is_gemma4 and content["attention_k_eq_v"]:
            del of_layer["self_attn.v_proj"]
        wanted |= {f"layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    return wanted


def _is_gemma4(content: Content) -> bool:
    return content["model_type"] in ("gemma4_text", "gemma4_unified_text")


def _layer_keys(content: Content) -> set[str]:
    return (QWEN3_KEYS - {"hidden_act"}) | GEMMA4_KEYS if _is_gemma4(content) else QWEN3_KEYS


def _heads(content: Content, rows: int) -> dict[str, list[int]]:
    d, rank = content["hidden_size"], content["markov_rank"]
    wanted: dict[str, list[int]] = {}
    if rank:
        wanted["markov_head.markov_w1.weight"] = [content["vocab_size"], rank]
        wanted["markov_head.markov_w2.weight"] = [rows, rank]
        if content["markov_head_type"] == "gated":
            wanted |= {"markov_head.gate_proj.weight": [rank, d + rank], "markov_head.gate_proj.bias": [rank]}
        if content["markov_head_type"] == "rnn":
            joint = {"weight": [3 * rank, 2 * rank + d], "bias": [3 * rank]}
            wanted |= {f"markov_head.joint_proj.{name}": shape for name, shape in joint.items()}
    if content["enable_confidence_head"]:
        width = d + (rank if content["confidence_head_with_markov"] else 0)
        wanted |= {"confidence_head.proj.weight": [1, width], "confidence_head.proj.bias": [1]}
    return wanted


def _require_exactly(wanted: dict[str, list[int]], tensors: Tensors) -> None:
    assert {name: list(value.shape) for name, value in tensors.items()} == wanted
