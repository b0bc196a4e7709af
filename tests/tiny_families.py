"""Random targets of other families than the tiny target's, in folders with its tokenizer."""

from pathlib import Path
from typing import Any

import torch
import transformers

from tiny_target import make_tiny_target

# What makes a family's head, embedding or attention other than Llama's. Initialised wide: soft-caps bend, outputs vary.
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma4_text": {
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 8,
        "final_logit_softcapping": 2.0,
    },
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 12.0, "residual_multiplier": 0.5},
    "cohere": {"logit_scale": 0.25},
    "bloom": {},
    "phimoe": {"lm_head_bias": True, "num_local_experts": 2, "num_experts_per_tok": 1},
}


def make_family_target(folder: Path, kind: str, **options: Any) -> Path:
    """Write a random float32 target of a family of FAMILIES into `folder`; its head has 7 padding rows."""
    make_tiny_target(folder)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    sizes = {"vocab_size": 327, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    common = sizes | heads | {"pad_token_id": 2, "eos_token_id": 2, "initializer_range": 0.2}
    if kind == "gemma4_text":
        common["vocab_size_per_layer_input"] = sizes["vocab_size"]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **common, **FAMILIES[kind] | options)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if model.get_output_embeddings().bias is not None:
        torch.nn.init.normal_(model.get_output_embeddings().bias)
    model.save_pretrained(folder)
    return folder
