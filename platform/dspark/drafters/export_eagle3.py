"""EAGLE-3 for vLLM's class with Qwen3 layers, which computes what ours does; the names of the tensors are the same.

Source: vLLM 0.32.0, speculators 0.9.0.
"""

from typing import Any

from torch import Tensor

from dspark.drafters.export_conversions import FrozenTarget
from dspark.drafters.stored import EMBEDDING, HEAD, StoredDrafter

VLLM_EAGLE3 = "Eagle3Qwen3ForCausalLM"
DRAFT_TOKENS = 3  # what engines are told to draft by default; chains of one layer seldom hold longer
# Where the state is normed: as in the public checkpoints, only for the layer's inputs. Defaults differ between formats.
UNNORMED = {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False}


def vllm_eagle3_content(stored: StoredDrafter) -> dict[str, Any]:
    """`config.json` for vLLM, which counts captured layers from 1: the embeddings are 0."""
    content = {name: value for name, value in stored.content.items() if name != "draft_vocab_size"}
    num_layers = len(content["target_layer_ids"])
    content |= {
        "architectures": [VLLM_EAGLE3],
        "eagle_aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in content["target_layer_ids"]],
        "num_aux_hidden_states": num_layers,
        "target_hidden_size": content["hidden_size"],
        **UNNORMED,
    }
    # vLLM takes all that is below its vocabulary for a reduced one
    return content | ({"draft_vocab_size": stored.content["draft_vocab_size"]} if stored.is_reduced else {})


def speculators_eagle3_content(stored: StoredDrafter, target: FrozenTarget) -> dict[str, Any]:
    """speculators' `config.json`: the layer as a nested config, the target named."""
    content = vllm_eagle3_content(stored)
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": min(DRAFT_TOKENS, content["ttt_length"]),
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    kept = ("eagle_aux_hidden_state_layer_ids", "target_hidden_size", *UNNORMED)
    return {name: content[name] for name in kept} | {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target.name, "architectures": list(target.architectures)},
        },
        "transformer_layer_config": {name: content[name] for name in content if name != "architectures"},
        "draft_vocab_size": content.get("draft_vocab_size", content["vocab_size"]),
    }


def vllm_eagle3_tensors(stored: StoredDrafter) -> dict[str, Tensor]:
    """Without those copies of the target's that vLLM takes from the target itself."""
    left_out = {EMBEDDING} if stored.is_reduced else {EMBEDDING, HEAD}
    return {name: value for name, value in stored.tensors.items() if name not in left_out}
