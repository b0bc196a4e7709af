"""Random targets that bring MTP modules along, in the layouts in which real ones are published."""

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark.drafters.mtp import mtp_drafter, one_layer_config
from random_autoregressive import mtp_config

LAYERS, HIDDEN, VOCABULARY = 4, 32, 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}


def glm(num_modules: int = 1) -> transformers.PretrainedConfig:
    return transformers.Glm4MoeConfig(**SIZES, **EXPERTS, head_dim=8, num_mtp_layers=num_modules)


def deepseek(num_modules: int = 1) -> transformers.PretrainedConfig:
    sizes = SIZES | {"num_key_value_heads": 4}
    return transformers.DeepseekV3Config(**sizes, **EXPERTS, **LATENT, num_mtp_layers=num_modules)


def qwen() -> transformers.PretrainedConfig:
    return transformers.Qwen3_5TextConfig(
        **SIZES,
        head_dim=16,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
        },
        num_mtp_layers=1,
        mtp_layer_types=["full_attention"],
    )


TARGETS = {
    "glm": (glm, 1),
    "glm, two modules": (lambda: glm(2), 2),
    "deepseek": (deepseek, 1),
    "deepseek, two modules": (lambda: deepseek(2), 2),
    "qwen": (qwen, 1),
}


def module_tensors(config: transformers.PretrainedConfig, num_modules: int) -> dict[str, Tensor]:
    """Random modules under the names of `MTPBackbone`, experts fused as the library holds them."""
    shape = {"num_modules": num_modules, "block_size": max(num_modules, 1), "hidden_size": HIDDEN}
    drafter = mtp_drafter(mtp_config(**shape, vocab_size=VOCABULARY, block=one_layer_config(config)))
    generator = torch.Generator().manual_seed(2)
    tensors = {}
    for name, value in drafter.backbone.state_dict().items():
        if name.startswith("layers."):
            noise = torch.randn(value.shape, generator=generator)
            tensors[name] = 1.0 + 0.1 * noise if name.endswith("norm.weight") else 0.3 * noise
    return tensors


def published(tensors: dict[str, Tensor], *, qwen_layout: bool) -> dict[str, Tensor]:
    """The same tensors as a target's file names them, one tensor per expert."""
    inside, beside = ".decoder.layers.0.", {".decoder.norm.weight": ".shared_head.norm.weight"}
    names = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "decoder.norm": "norm"}
    stored: dict[str, Tensor] = {}
    for name, value in tensors.items():
        number, rest = name.removeprefix("layers.").split(".", 1)
        if inside in name:
            prefix = f"mtp.layers.{number}." if qwen_layout else f"model.layers.{LAYERS + int(number)}."
            new = prefix + rest.removeprefix("decoder.layers.0.")
        elif qwen_layout:
            new = f"mtp.{names[rest.removesuffix('.weight')]}.weight"
        else:
            new = f"model.layers.{LAYERS + int(number)}" + beside.get(f".{rest}", f".{rest}")
        if new.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(value):
                for kind, part in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    stored[new.replace("gate_up_proj", f"{expert}.{kind}.weight")] = part.contiguous()
        elif new.endswith("experts.down_proj"):
            for expert, part in enumerate(value):
                stored[new.replace("down_proj", f"{expert}.down_proj.weight")] = part.contiguous()
        else:
            stored[new] = value
    return stored


def write_mtp_target(folder: Path, kind: str, *, vocab_size: int = VOCABULARY) -> Any:
    """A target with its modules in its own file, as published ones have them; loaded again."""
    make, num_modules = TARGETS[kind]
    torch.manual_seed(1)
    config = make()
    config.vocab_size = vocab_size
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    path = folder / "model.safetensors"
    extra = published(module_tensors(config, num_modules), qwen_layout=kind == "qwen")
    if kind != "qwen":  # they carry copies of what they share with the target
        extra[f"model.layers.{LAYERS}.embed_tokens.weight"] = torch.zeros(vocab_size, HIDDEN)
        extra[f"model.layers.{LAYERS}.shared_head.head.weight"] = torch.zeros(vocab_size, HIDDEN)
    save_file(load_file(str(path)) | extra, str(path), metadata={"format": "pt"})
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
