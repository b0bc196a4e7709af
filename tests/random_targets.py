"""Tiny random targets of many families, in memory: every kind of attention, position and feed-forward there is."""

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from tiny_engine import VOCABULARY

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,  # a random tied head says again what it has just read
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
} | EXPERTS
GEMMA = {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}
GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 6,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCABULARY,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
GPT = {"n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 128}


@dataclass(frozen=True)
class Family:
    """kind: its name in the library. has_pages: pages serve it, else each request has a cache of its own."""

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    has_pages: bool = True


PAGED: dict[str, Family] = {
    "llama": Family("llama", {"attention_bias": True}),
    "qwen2 with windows": Family("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": Family("qwen3", {"head_dim": 16}),
    "qwen3 experts": Family("qwen3_moe", {"head_dim": 8, "num_experts": 4} | EXPERTS),
    "gemma": Family("gemma", {"head_dim": 8, "num_key_value_heads": 1}),
    "gemma2": Family("gemma2", GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 9.0}),
    "gemma3": Family("gemma3_text", GEMMA | {"layer_types": GEMMA4["layer_types"]}),
    "gemma4": Family(
        "gemma4_text",
        GEMMA4 | {"num_global_key_value_heads": 1, "attention_k_eq_v": True, "final_logit_softcapping": 9.0},
    ),
    "gemma4 with shared keys": Family(
        "gemma4_text",
        GEMMA4
        | {
            "num_hidden_layers": 5,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
            "hidden_size_per_layer_input": 8,
        },
    ),
    "mistral with windows": Family("mistral", {"sliding_window": 6}),
    "mixtral": Family("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "phi": Family("phi", {"partial_rotary_factor": 0.5}),
    "phi3 with windows": Family("phi3", {"sliding_window": 6}),
    "olmo": Family("olmo", {"clip_qkv": 2.0}),
    "olmo2": Family("olmo2"),
    "olmo3": Family("olmo3", {"sliding_window": 6}),
    "granite": Family(
        "granite",
        {
            "logits_scaling": 4.0,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        },
    ),
    "cohere": Family("cohere", {"logit_scale": 0.25, "use_qk_norm": True}),
    "cohere2": Family("cohere2", {"logit_scale": 0.25, "sliding_window": 6, "layer_types": GEMMA4["layer_types"]}),
    "deepseek v3": Family("deepseek_v3", LATENT),
    "deepseek v2": Family("deepseek_v2", LATENT | {"q_lora_rank": None}),
    "gpt-oss": Family("gpt_oss", {"num_local_experts": 4, "head_dim": 8, "sliding_window": 6} | EXPERTS),
    "smollm3": Family("smollm3"),
    "gpt2": Family("gpt2", GPT),
    "gpt-j": Family("gptj", GPT | {"rotary_dim": 4}),
    "gpt-neox": Family("gpt_neox"),
    "opt": Family("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
}
DENSE: dict[str, Family] = {
    "bloom": Family("bloom", {"n_head": 4, "n_layer": 3}, has_pages=False),
    "mpt": Family("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 128}, has_pages=False),
    "falcon": Family("falcon", {"num_kv_heads": 2, "new_decoder_architecture": True}, has_pages=False),
    "gpt-neo with windows": Family(
        "gpt_neo",
        {"num_layers": 3, "num_heads": 4, "attention_types": [[["global", "local", "global"], 1]], "window_size": 6},
        has_pages=False,
    ),
    "xglm": Family("xglm", {"d_model": 32, "ffn_dim": 48, "num_layers": 3, "attention_heads": 4}, has_pages=False),
    "stablelm": Family("stablelm", has_pages=False),
    "nemotron": Family("nemotron", has_pages=False),
    "llama4 with chunks": Family(
        "llama4_text",
        {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 8},
        has_pages=False,
    ),
    "lfm2 with convolutions": Family(
        "lfm2", {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}, has_pages=False
    ),
}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 16,
}
REFUSED: dict[str, Family] = {
    "mamba": Family("mamba"),
    "jamba": Family(
        "jamba",
        {"num_experts": 2, "mamba_d_state": 8, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    ),
    "qwen3-next": Family(
        "qwen3_next",
        {"head_dim": 8, "num_experts": 4, "layer_types": ["linear_attention"] * 2 + ["full_attention"]}
        | EXPERTS
        | LINEAR,
    ),
    "rwkv": Family("rwkv"),
    "recurrent gemma": Family("recurrent_gemma"),
    "falcon-h1": Family("falcon_h1"),
    "minimax": Family("minimax", {"head_dim": 8, "num_local_experts": 2}),
}


def random_target(family: Family, **changes: Any) -> Any:
    """A float32 model with random weights; biases and norms, which the library starts at 0 and 1, are random too."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family.kind, **COMMON | family.options | changes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return model.eval().requires_grad_(False)
