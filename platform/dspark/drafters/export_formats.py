"""A stored drafter in the layout that another engine loads: `config.json` and tensors, or a refusal that says why.

"deepspec" is the public training code's own layout, which most engines read; "sglang" and "vllm" leave out what these
take from the target; "speculators" is for `vllm serve FOLDER` with no other argument.
Legend: V target vocabulary, V' draft vocabulary, d hidden, m captured layers.
Source: the loaders of DeepSpec (afdfa7c), SGLang 0.5.23, vLLM 0.32.0, speculators 0.9.0.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dspark.drafters.checkpoint import (
    EXCHANGE_ARCHITECTURE,
    EXTENDED_ARCHITECTURE,
    GEMMA4_ARCHITECTURE,
    from_deepspec,
)
from dspark.drafters.config import DrafterConfig
from dspark.drafters.eagle3 import EAGLE3_ARCHITECTURES
from dspark.drafters.export_conversions import (
    CannotExport,
    FrozenTarget,
    with_full_vocabulary,
    with_zero_markov_head,
)
from dspark.drafters.export_eagle3 import speculators_eagle3_content, vllm_eagle3_content, vllm_eagle3_tensors
from dspark.drafters.stored import EMBEDDING, HEAD, StoredDrafter, is_exchange_format

# Fields of a drafter that the layouts below have a place for, or that follow from others; others are ours alone.
EXPRESSED = {
    "architecture", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
    "num_key_value_heads", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "vocab_size",
    "valid_vocab_size", "draft_vocab_size", "target_layer_ids", "num_target_layers", "block_size", "mask_token_id",
    "learned_mask_embedding", "sliding_window", "layer_types", "markov_rank", "markov_head_type", "dropout",
    "enable_confidence_head", "confidence_head_with_markov", "mlp_layer_types",
}  # fmt: skip
# What the class for Gemma4 targets has a place for beside these.
EXPRESSED_BY_GEMMA4 = {"model_type", "attention_k_eq_v", "final_logit_softcapping"}
REMEDIES = {
    "anchor_fusion": "train one with drafter.anchor_fusion=false",
    "moe": "train one with drafter.moe=null",
    "hyper_connections": "train one with drafter.hyper_connections=null",
}
SPECULATORS_KEYS = (
    "block_size", "mask_token_id", "sample_from_anchor", "is_causal", "target_hidden_size", "markov_rank",
    "markov_head_type", "enable_confidence_head", "confidence_head_with_markov", "dtype", "tie_word_embeddings",
)  # fmt: skip
OWN_FORMAT = "the format dspark keeps everything"


@dataclass(frozen=True)
class Layout:
    """What one engine's loader takes.

    architectures: classes that it has beside the exchange format's, which every layout takes; drafters for Gemma4 keep
    both frozen parts, other classes' files are copied as they are.
    needs_markov_head: a drafter without one gets one that adds zero. takes_d2t: a reduced vocabulary stays reduced,
    with its own head rows. takes_eagle3: with query and key norms, as ours have them. frozen: which of embedding and
    head the file brings: both, neither, or only what differs from the target's. takes_sliding: with blocks that see
    each other both ways. takes_embeddings: layer id -1.
    """

    engine: str
    markov_head_types: frozenset[str]
    needs_markov_head: bool
    takes_d2t: bool
    frozen: str
    takes_sliding: bool
    takes_embeddings: bool
    takes_eagle3: bool = False
    architectures: frozenset[str] = frozenset()


_ANY_HEAD = frozenset({"vanilla", "gated", "rnn"})
_VLLM = Layout(
    "vLLM",
    frozenset({"vanilla"}),
    needs_markov_head=True,
    takes_d2t=True,
    frozen="changed",
    takes_sliding=True,
    takes_embeddings=True,
    takes_eagle3=True,
)
LAYOUTS = {
    "deepspec": Layout(
        "DeepSpec",
        _ANY_HEAD,
        needs_markov_head=False,
        takes_d2t=False,
        frozen="both",
        takes_sliding=False,
        takes_embeddings=True,
        architectures=frozenset({"Gemma4DSparkModel", "Qwen3Eagle3Model", "Gemma4Eagle3Model"}),
    ),
    "sglang": Layout(
        "SGLang",
        _ANY_HEAD,
        needs_markov_head=True,
        takes_d2t=False,
        frozen="neither",
        takes_sliding=False,
        takes_embeddings=False,
    ),
    "vllm": replace(_VLLM, architectures=frozenset({"Gemma4DSparkModel"})),
    "speculators": _VLLM,
}


@dataclass(frozen=True)
class Exported(StoredDrafter):
    """What goes into the files. notes: what a user of them should know, a line each."""

    notes: list[str] = field(default_factory=list)


def to_layout(name: str, stored: StoredDrafter, target: FrozenTarget, *, dtype: torch.dtype) -> Exported:
    """The drafter in the layout `name` of LAYOUTS, numbers in `dtype`; it drafts what the stored one drafts.

    Raises: CannotExport when the engine cannot load one that does.
    """
    layout = LAYOUTS[name]
    is_gemma4 = stored.architecture == GEMMA4_ARCHITECTURE
    if stored.architecture in layout.architectures and not is_gemma4:
        note = f"a {stored.architecture} is written as it is stored; nothing of it was checked against {layout.engine}"
        return Exported(stored.content | {"dtype": _name(dtype)}, _cast(stored.tensors, dtype), [note])
    if stored.architecture in EAGLE3_ARCHITECTURES and layout.takes_eagle3:
        return _eagle3(name, stored, target, dtype)
    if stored.architecture not in (EXCHANGE_ARCHITECTURE, GEMMA4_ARCHITECTURE, EXTENDED_ARCHITECTURE):
        raise CannotExport(f"{layout.engine} has no class for the architecture {stored.architecture}; {OWN_FORMAT}")
    config = from_deepspec(stored.content)
    assert isinstance(config, DrafterConfig), "all three have this shape"
    require_expressible(name, config)
    if not (is_gemma4 or is_exchange_format(stored)):
        raise CannotExport(f"{layout.engine} has no class for the architecture {stored.architecture}; {OWN_FORMAT}")
    has_to_be_widened = stored.is_reduced and not layout.takes_d2t
    notes = [f"a {stored.architecture} was not checked against {layout.engine}'s loader"] if is_gemma4 else []
    if not config.markov_rank and (layout.needs_markov_head or has_to_be_widened):
        stored = with_zero_markov_head(stored)
        notes.append(f"it has no Markov head and {layout.engine} needs one: a head that adds 0 is written")
    if has_to_be_widened:
        stored = with_full_vocabulary(stored, target, engine=layout.engine)
        notes.append(
            f"{layout.engine} has no reduced vocabulary: the head has all {config.vocab_size} rows, and the Markov "
            f"head keeps all but the {config.draft_vocab_size} from being drafted"
        )
    elif config.valid_vocab_size < config.vocab_size and not stored.is_reduced:
        notes.append(f"ids from {config.valid_vocab_size} on are padding; if one is drafted, the target rejects it")
    if not config.enable_confidence_head:
        notes.append("no confidence head: SGLang serves it in its static mode only, vLLM estimates acceptance itself")
    content = _explicit(stored) | {"dtype": _name(dtype)}
    if name == "speculators":
        content = _speculators_content(content, target)
    return Exported(content, _cast(_frozen_parts(layout, stored), dtype), notes)


def require_expressible(name: str, config: DrafterConfig) -> None:
    """Raises: CannotExport when the layout has no place for something of this shape."""
    layout = LAYOUTS[name]
    expressed = _expressed(layout, config)
    for field_name, declared in DrafterConfig.model_fields.items():
        value = getattr(config, field_name)
        if field_name not in expressed and value != declared.get_default(call_default_factory=True):
            raise _refusal(layout, field_name, value)
    if config.markov_rank and config.markov_head_type not in layout.markov_head_types:
        known = ", ".join(sorted(layout.markov_head_types))
        raise _refusal(layout, "markov_head_type", config.markov_head_type, f"it knows {known}; train one of these")
    if config.sliding_window is not None and (config.is_gemma4 or not layout.takes_sliding):
        reason = "a block's slots would not see each other both ways"
        reason = "Gemma4's draft layers have no window" if config.is_gemma4 else reason
        remedy = f"there {reason}; train one with drafter.sliding_window=null"
        raise _refusal(layout, "sliding_window", config.sliding_window, remedy)
    if config.target_layer_ids[0] < 0 and not layout.takes_embeddings:
        reason = "there ids start at 0; make the cache without -1 and train on it"
        raise _refusal(layout, "target_layer_ids", list(config.target_layer_ids), reason)
    if config.learned_mask_embedding and layout.frozen == "neither":
        reason = "there the mask's row is the target's own; train one with drafter.learned_mask_embedding=false"
        raise _refusal(layout, "learned_mask_embedding", True, reason)


def _eagle3(name: str, stored: StoredDrafter, target: FrozenTarget, dtype: torch.dtype) -> Exported:
    notes = ["EAGLE-3 has no confidence head: vLLM estimates acceptance itself"]
    content = speculators_eagle3_content(stored, target) if name == "speculators" else vllm_eagle3_content(stored)
    return Exported(content | {"dtype": _name(dtype)}, _cast(vllm_eagle3_tensors(stored), dtype), notes)


def _expressed(layout: Layout, config: DrafterConfig) -> set[str]:
    """Fields that the layout's class for this drafter has a place for."""
    if not config.is_gemma4 or GEMMA4_ARCHITECTURE not in layout.architectures:
        return EXPRESSED
    implied = {"embedding_scale"} if config.embedding_scale == math.sqrt(config.hidden_size) else set()
    return EXPRESSED | EXPRESSED_BY_GEMMA4 | implied


def _refusal(layout: Layout, name: str, value: Any, remedy: str | None = None) -> CannotExport:
    remedy = remedy or REMEDIES.get(name, OWN_FORMAT)
    return CannotExport(f"{layout.engine} cannot load a drafter with {name} = {value!r}: {remedy}")


def _explicit(stored: StoredDrafter) -> dict[str, Any]:
    """The config with all said that engines have defaults for: their defaults differ."""
    content = stored.content
    num_layers = content["num_hidden_layers"]
    explicit = content | {
        "architectures": [stored.architecture],
        "model_type": content.get("model_type") or "qwen3",
        "sample_from_anchor": True,
        "is_causal": False,
        "layer_types": content.get("layer_types") or ["full_attention"] * num_layers,
        "markov_rank": content.get("markov_rank") or 0,
        "markov_head_type": content.get("markov_head_type") or "vanilla",
        "enable_confidence_head": bool(content.get("enable_confidence_head")),
        "confidence_head_with_markov": bool(content.get("confidence_head_with_markov")),
        "target_hidden_size": content["hidden_size"],
        "tie_word_embeddings": False,
    }
    if not stored.is_reduced:
        explicit.pop("draft_vocab_size", None)  # vLLM takes all that is below its vocabulary for a reduced one
    return explicit


def _frozen_parts(layout: Layout, stored: StoredDrafter) -> dict[str, Tensor]:
    """The tensors without those copies of the target's that the engine takes from the target itself."""
    tensors = dict(stored.tensors)
    if layout.frozen == "both" or stored.architecture == GEMMA4_ARCHITECTURE:
        return tensors
    if layout.frozen == "neither" or not stored.content.get("learned_mask_embedding"):
        del tensors[EMBEDDING]
    if layout.frozen == "neither" or not stored.is_reduced:
        del tensors[HEAD]
    return tensors


def _speculators_content(content: dict[str, Any], target: FrozenTarget) -> dict[str, Any]:
    """speculators' `config.json`: the draft layers as a nested config, the target named, layer ids counted from 1."""
    layers = {name: value for name, value in content.items() if name not in ("architectures", "draft_vocab_size")}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": content["block_size"],
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {name: content[name] for name in SPECULATORS_KEYS} | {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "dspark",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target.name, "architectures": list(target.architectures)},
        },
        "transformer_layer_config": layers,
        "draft_vocab_size": content.get("draft_vocab_size", content["vocab_size"]),
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in content["target_layer_ids"]],
    }


def _cast(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Floating-point tensors in `dtype`; maps of ids stay whole numbers."""
    return {
        name: (value.to(dtype) if value.is_floating_point() else value).contiguous() for name, value in tensors.items()
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
