"""A drafter on disk: DeepSpec's `config.json` and `model.safetensors`, read by other engines where no extension is on.

Tensor names and config keys: DeepSpec; `d2t` holds offsets (target id - draft id), as EAGLE-3 and vLLM read it.
"""

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark.drafters import AnyDrafterConfig, TrainedDrafter, build_drafter
from dspark.drafters.config import FULL, SLIDING, DrafterConfig, HyperConnectionConfig, MoEConfig
from dspark.drafters.eagle3 import EAGLE3_ARCHITECTURES, Eagle3Config, eagle3_config, eagle3_content
from dspark.drafters.gemma4 import gemma4_content, gemma4_sizes
from dspark.drafters.mhc import Float32Module
from dspark.drafters.mtp import MTP_ARCHITECTURE, MTPConfig, mtp_config, mtp_content
from dspark.errors import Mismatch, MissingInput
from dspark.numerics import pack_linears
from dspark.provenance import read_json, write_json
from dspark.storage import Location, locate
from dspark.transfer import local_folder, staged

EXCHANGE_ARCHITECTURE = "Qwen3DSparkModel"
GEMMA4_ARCHITECTURE = "Gemma4DSparkModel"
EXTENDED_ARCHITECTURE = "DSparkFusionModel"
BACKBONE = "backbone."
REQUIRED = tuple(
    name
    for name, field in DrafterConfig.model_fields.items()
    if field.is_required() and name not in ("architecture", "rope_parameters", "valid_vocab_size", "draft_vocab_size")
)
EXTENSIONS = ("anchor_fusion", "moe", "hyper_connections")
HEAD_FIELDS = (
    "attention_k_eq_v",
    "embedding_scale",
    "logit_scale",
    "final_logit_softcapping",
    "lm_head_bias",
)  # written only where they say something
SUPPORTED = {"attention_bias": False, "hidden_act": "silu", "sample_from_anchor": True}


def save_drafter(drafter: TrainedDrafter, folder: str | Location, *, dtype: torch.dtype) -> None:
    """Write `config.json` and `model.safetensors` (each whole or not at all) into `folder`."""
    folder = locate(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config: Any = drafter.config
    tensors = {name.removeprefix(BACKBONE): value.detach() for name, value in drafter.state_dict().items()}
    if isinstance(config, DrafterConfig):
        mask = tensors.pop("mask_embedding")
        embedding = tensors["embed_tokens.weight"].clone()
        embedding[config.mask_token_id] = mask
        tensors["embed_tokens.weight"] = embedding
    exact = _float32_names(drafter)
    stored = {
        name: value.to("cpu", torch.float32 if name in exact else dtype).contiguous() for name, value in tensors.items()
    }
    if config.has_reduced_vocabulary:
        stored["d2t"] = (drafter.backbone.d2t - torch.arange(config.draft_vocab_size)).to("cpu", torch.int64)
    with staged(folder / "model.safetensors") as temporary:
        save_file(stored, str(temporary), metadata={"format": "pt"})
        temporary.chmod(0o644)
    write_json(folder / "config.json", to_deepspec(config, dtype=str(dtype).removeprefix("torch.")))


def load_drafter(
    folder: str | Location, *, dtype: torch.dtype = torch.float32, device: str = "cpu", trainable: bool = False
) -> TrainedDrafter:
    """The drafter stored in `folder`; in eval mode and wholly frozen unless `trainable`.

    Raises: MissingInput without a checkpoint; Mismatch when config and tensors do not belong together.
    """
    named, folder = folder, local_folder(folder, ("config.json", "model.safetensors"))
    if not (folder / "config.json").is_file() or not (folder / "model.safetensors").is_file():
        raise MissingInput(f"no drafter at {named} (config.json and model.safetensors); make one with jobs/train.py")
    config = from_deepspec(read_json(folder / "config.json"))
    tensors = load_file(str(folder / "model.safetensors"))
    offsets = tensors.pop("d2t", None)
    tensors.pop("t2d", None)
    drafter = build_drafter(config)
    if config.has_reduced_vocabulary:
        drafter.backbone.d2t = _draft_to_target(offsets, config, folder)
    _load_tensors(drafter, tensors, folder)
    drafter = drafter.to(device=device, dtype=dtype)
    if not trainable:
        drafter.eval().requires_grad_(False)
        pack_linears(drafter)
    return drafter


def to_deepspec(config: AnyDrafterConfig, *, dtype: str) -> dict[str, Any]:
    """The `config.json` content of a drafter."""
    if isinstance(config, Eagle3Config):
        return eagle3_content(config, dtype=dtype)
    if isinstance(config, MTPConfig):
        return mtp_content(config, dtype=dtype)
    unset = {name for name in HEAD_FIELDS if getattr(config, name) == DrafterConfig.model_fields[name].default}
    shared = config.model_dump(exclude={"architecture", *EXTENSIONS, "mlp_layer_types"} | unset, mode="json")
    content = shared | {
        "architectures": [_architecture(config)],
        "use_sliding_window": config.sliding_window is not None,
        # Block slots see each other both ways; engines take sliding layers for causal ones without this.
        "is_causal": False,
        "target_hidden_size": config.hidden_size,
        "sample_from_anchor": True,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": dtype,
    }
    if config.is_gemma4:
        content |= gemma4_content(config)
        del content["hidden_act"]
        if config.embedding_scale == math.sqrt(config.hidden_size):
            del content["embedding_scale"]  # the type implies it
    if config.anchor_fusion:
        content["anchor_fusion"] = True
    if config.moe is not None:
        content |= config.moe.model_dump(mode="json") | {"mlp_layer_types": list(config.mlp_layer_types)}
    if config.hyper_connections is not None:
        content |= config.hyper_connections.model_dump(mode="json")
    if not config.markov_rank:
        del content["markov_head_type"]
    return content


def _architecture(config: DrafterConfig) -> str:
    """The public class that computes what this drafter does, else our own."""
    if config.is_gemma4:
        is_public = config.sliding_window is None and config.embedding_scale == math.sqrt(config.hidden_size)
        is_public = is_public and config.logit_scale == 1.0 and not config.lm_head_bias
    else:
        is_public = config.embedding_scale == 1.0 and config.target_head.is_linear and not config.lm_head_bias
    public = GEMMA4_ARCHITECTURE if config.is_gemma4 else EXCHANGE_ARCHITECTURE
    is_extended = any(getattr(config, name) for name in EXTENSIONS)
    return public if is_public and not is_extended else EXTENDED_ARCHITECTURE


def from_deepspec(content: dict[str, Any]) -> AnyDrafterConfig:
    """The drafter's shape from a `config.json` of ours or of DeepSpec.

    Raises: ValueError naming what is missing or not understood.
    """
    architectures = content.get("architectures") or []
    if set(architectures) & set(EAGLE3_ARCHITECTURES):
        return eagle3_config(content | {"rope_parameters": rope_parameters(content)})
    if MTP_ARCHITECTURE in architectures:
        return mtp_config(content)
    block_parallel = (EXCHANGE_ARCHITECTURE, GEMMA4_ARCHITECTURE, EXTENDED_ARCHITECTURE)
    if not set(architectures) & set(block_parallel):
        names = (*block_parallel, EAGLE3_ARCHITECTURES[0], MTP_ARCHITECTURE)
        raise ValueError(f"drafter architectures {architectures} are not known; known: {', '.join(names)}")
    for name, supported in SUPPORTED.items():
        if content.get(name, supported) != supported:
            raise ValueError(f"drafter config has {name} {content[name]!r}; only {supported!r} is supported")
    missing = [name for name in REQUIRED if name not in content]
    if missing:
        raise ValueError(f"drafter config has no {missing[0]}; take it from the checkpoint it belongs to")
    vocab_size = content["vocab_size"]
    valid = content.get("valid_vocab_size", vocab_size)
    is_dspark = bool(content.get("markov_rank") or content.get("enable_confidence_head"))
    known = {
        name: content[name]
        for name in DrafterConfig.model_fields
        if name in content and name not in ("sliding_window", "rope_parameters", "mlp_layer_types")
    }
    layer_types = content.get("layer_types") or []
    if EXTENDED_ARCHITECTURE in architectures:  # a plain drafter's config may repeat such keys of its target
        known |= _extensions(content)
    return DrafterConfig(
        **known
        | {
            "architecture": "dspark" if is_dspark else "dflash",
            "rope_parameters": rope_parameters(content),
            "sliding_window": content.get("sliding_window") if SLIDING in layer_types else None,
            "valid_vocab_size": valid,
            "draft_vocab_size": content.get("draft_vocab_size") or valid,
            "confidence_head_with_markov": content.get("confidence_head_with_markov", False),
            "target_layer_ids": tuple(content["target_layer_ids"]),
        }
        | (gemma4_sizes(content) if str(content.get("model_type")).startswith("gemma4") else {})
    )


def _extensions(content: dict[str, Any]) -> dict[str, Any]:
    """What only our own architecture has, from the flat keys of `config.json`."""
    found: dict[str, Any] = {}
    if "n_routed_experts" in content:
        found["moe"] = {name: content[name] for name in MoEConfig.model_fields if name in content}
        found["mlp_layer_types"] = tuple(content.get("mlp_layer_types") or ())
    if "hc_mult" in content:
        found["hyper_connections"] = {
            name: content[name] for name in HyperConnectionConfig.model_fields if name in content
        }
    return found


def rope_parameters(content: dict[str, Any]) -> dict[str, Any]:
    """{"rope_theta", "rope_type", …} from a config in the nested or in the old flat form.

    Raises: ValueError when no base is given: a default would silently be the wrong one.
    """
    nested = content.get("rope_parameters") or content.get("rope_scaling") or {}
    if isinstance(nested.get(FULL), dict):  # one entry per type of layer; draft layers are of the global type
        nested = nested[FULL]
    theta = nested.get("rope_theta", content.get("rope_theta"))
    if theta is None:
        raise ValueError("config has neither rope_parameters.rope_theta nor rope_theta; the rotary base is unknown")
    kind = nested.get("rope_type", nested.get("type", "default"))
    return {k: v for k, v in nested.items() if k != "type"} | {"rope_theta": theta, "rope_type": kind}


def _float32_names(drafter: TrainedDrafter) -> set[str]:
    """Stored names of the tensors that keep float32 in every checkpoint."""
    return {
        f"{prefix}.{name}".removeprefix(BACKBONE)
        for prefix, module in drafter.named_modules()
        if isinstance(module, Float32Module)
        for name in module.state_dict()
    }


def _draft_to_target(offsets: Tensor | None, config: AnyDrafterConfig, folder: Path) -> Tensor:
    if offsets is None or offsets.numel() != config.draft_vocab_size:
        found = "none" if offsets is None else offsets.numel()
        raise Mismatch(
            f"drafter {folder}: d2t has {found} entries but draft_vocab_size is {config.draft_vocab_size}; "
            "export it again"
        )
    target_ids = torch.arange(config.draft_vocab_size) + offsets.long()
    if int(target_ids.min()) < 0 or int(target_ids.max()) >= config.valid_vocab_size:
        raise Mismatch(
            f"drafter {folder}: d2t maps to ids {int(target_ids.min())}..{int(target_ids.max())} outside the "
            f"vocabulary of {config.valid_vocab_size}; it must hold offsets (target id - draft id)"
        )
    twice = target_ids[(target_ids.bincount()[target_ids] > 1)]
    if twice.numel():
        raise Mismatch(f"drafter {folder}: d2t maps two draft ids to target id {int(twice[0])}; export it again")
    return target_ids


def _load_tensors(drafter: TrainedDrafter, tensors: dict[str, Tensor], folder: Path) -> None:
    heads = ("markov_head.", "confidence_head.")
    named = {name if name.startswith(heads) else BACKBONE + name: value for name, value in tensors.items()}
    config, embedding = drafter.config, tensors.get("embed_tokens.weight")
    if isinstance(config, DrafterConfig) and embedding is not None and len(embedding) > config.mask_token_id:
        named[f"{BACKBONE}mask_embedding"] = embedding[config.mask_token_id].clone()
    expected = {name: value.shape for name, value in drafter.state_dict().items()}
    for name in sorted(expected.keys() ^ named.keys()):
        state = "missing from" if name in expected else "unknown in"
        raise Mismatch(f"drafter {folder}: tensor {name.removeprefix(BACKBONE)} is {state} model.safetensors")
    for name, shape in expected.items():
        if named[name].shape != shape:
            raise Mismatch(
                f"drafter {folder}: tensor {name.removeprefix(BACKBONE)} has shape {list(named[name].shape)}, "
                f"config.json asks for {list(shape)}"
            )
    drafter.load_state_dict(named)
