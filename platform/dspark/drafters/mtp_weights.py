"""The MTP modules that a target brings along, read from its own files by tensor name: the library drops them.

    DeepSeek-V3, GLM-4.5     model.layers.<N + k>.{enorm, hnorm, eh_proj, shared_head.norm}, and the layer's own names
    Qwen3.5, Qwen3-Next      mtp.{pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm}, mtp.layers.<k>.<layer's names>

N: layers of the target; k: module. Embedding and head are the target's; copies of them in the file are left out.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PretrainedConfig
from transformers.utils import cached_file

from dspark.drafters.autoregressive import AutoregressiveDrafter
from dspark.drafters.base import final_state_id
from dspark.drafters.initialize_autoregressive import copy_frozen, plain_head
from dspark.drafters.mtp import MTPBackbone, MTPConfig, mtp_drafter, one_layer_config
from dspark.errors import Mismatch, MissingInput
from dspark.provenance import read_json

MAX_REUSED = 5  # draft tokens of a single module that goes on from its own states
LAYER = re.compile(r"^(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.(.+)$")
MTP_LAYER = re.compile(r"^mtp\.layers\.(\d+)\.(.+)$")
EXPERT = re.compile(r"^(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")
SHARED = ("embed_tokens.weight", "shared_head.head.weight")
OUTSIDE_LAYER = {  # of a module in DeepSeek's layout
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "shared_head.norm.weight": "decoder.norm.weight",
}
ONE_LEVEL_UP = {  # in Qwen3.5's layout
    "mtp.pre_fc_norm_embedding.weight": "layers.0.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "layers.0.hnorm.weight",
    "mtp.fc.weight": "layers.0.eh_proj.weight",
    "mtp.norm.weight": "layers.0.decoder.norm.weight",
}


class TargetModules(NamedTuple):
    """tensors: by the names of `MTPBackbone`; hidden_state: what of the target they were trained on."""

    tensors: dict[str, Tensor]
    num_modules: int
    hidden_state: str


def own_name(name: str, num_layers: int) -> str | None:
    """A tensor's name in `MTPBackbone`; None when it belongs to no MTP module."""
    if name in ONE_LEVEL_UP:
        return ONE_LEVEL_UP[name]
    found = MTP_LAYER.match(name)
    if found:
        return f"layers.{found[1]}.decoder.layers.0.{found[2]}"
    found = LAYER.match(name)
    if found is None or int(found[1]) < num_layers or found[2] in SHARED:
        return None
    return f"layers.{int(found[1]) - num_layers}.{OUTSIDE_LAYER.get(found[2], 'decoder.layers.0.' + found[2])}"


def read_modules(source: str, num_layers: int, *, revision: str | None = None) -> TargetModules:
    """The modules in a target's folder or hub id at a revision. Raises: MissingInput when there are none."""
    tensors: dict[str, Tensor] = {}
    is_qwen = False
    for path in _files(source, num_layers, revision):
        with safe_open(path, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118  # no mapping
                own = own_name(name, num_layers)
                if own is not None:
                    tensors[own] = stored.get_tensor(name)
                    is_qwen |= name.startswith("mtp.")
    if not tensors:
        raise MissingInput(
            f"target {source} brings no MTP modules (no tensor mtp.* or model.layers.{num_layers}.*); train some with "
            "drafter.architecture=mtp"
        )
    numbers = {int(name.split(".")[1]) for name in tensors}
    return TargetModules(_join_experts(tensors), max(numbers) + 1, "before_norm" if is_qwen else "after_norm")


def target_mtp_drafter(target: Any, *, valid_vocab_size: int, block_size: int | None = None) -> AutoregressiveDrafter:
    """The target's own MTP modules as a drafter, with its whole vocabulary, frozen. target: the loaded HF causal LM.

    block_size: draft tokens of a single module, 5 unless given; several modules give one each.
    Raises: MissingInput when the target brings none; Mismatch by tensor name when they are not of its own layer's form;
    ValueError for a head that is more than a matrix, or a block_size that several modules do not have.
    """
    shape: PretrainedConfig = target.config.get_text_config(decoder=True)
    source, num_layers = str(target.config._name_or_path), shape.num_hidden_layers
    head = plain_head("mtp", shape, valid_vocab_size)
    modules = read_modules(source, num_layers, revision=getattr(target.config, "_commit_hash", None))
    if modules.num_modules > 1 and block_size not in (None, modules.num_modules):
        raise ValueError(
            f"block_size {block_size} does not fit target {source}, whose {modules.num_modules} MTP modules draft a "
            "token each; leave it out"
        )
    config = MTPConfig(
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        valid_vocab_size=head.valid_vocab_size,
        draft_vocab_size=head.valid_vocab_size,
        target_layer_ids=(final_state_id(modules.hidden_state, num_layers),),
        num_target_layers=num_layers,
        block_size=modules.num_modules if modules.num_modules > 1 else block_size or MAX_REUSED,
        num_modules=modules.num_modules,
        block=one_layer_config(shape),
    )
    drafter = mtp_drafter(config)
    load_modules(drafter, modules.tensors, source)
    backbone = drafter.backbone
    assert isinstance(backbone, MTPBackbone)
    with torch.no_grad():
        copy_frozen(backbone, target, torch.arange(head.valid_vocab_size))
    return drafter.eval().requires_grad_(False)


def load_modules(drafter: AutoregressiveDrafter, tensors: dict[str, Tensor], source: str) -> None:
    """Put the modules' tensors in. Raises: Mismatch by the first name or shape that does not fit."""
    backbone: Any = drafter.backbone
    expected = {name: value for name, value in backbone.state_dict().items() if name.startswith("layers.")}
    for name in sorted(expected.keys() ^ tensors.keys()):
        state = "missing from" if name in expected else "unknown in"
        raise Mismatch(f"target {source}: tensor {name} of its MTP modules is {state} its files; quantised files too")
    for name, value in expected.items():
        if value.shape != tensors[name].shape:
            raise Mismatch(
                f"target {source}: tensor {name} of its MTP modules has shape {list(tensors[name].shape)}, its decoder "
                f"layers have {list(value.shape)}"
            )
    backbone.load_state_dict(tensors, strict=False)


def _join_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of single experts as the library holds them: gate and up one above the other, all experts stacked."""
    joined: dict[str, Tensor] = {}
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, value in tensors.items():
        found = EXPERT.match(name)
        if found is None:
            joined[name] = value
        else:
            experts.setdefault(found[1], {}).setdefault(int(found[2]), {})[found[3]] = value
    for prefix, by_number in experts.items():
        ordered = [by_number[number] for number in sorted(by_number)]
        joined[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat([e["gate_proj"], e["up_proj"]]) for e in ordered])
        joined[f"{prefix}.down_proj"] = torch.stack([e["down_proj"] for e in ordered])
    return joined


def _files(source: str, num_layers: int, revision: str | None) -> list[str]:
    """The weight files of a folder or hub id that hold tensors of its MTP modules, as far as an index says so."""
    index = _find(source, "model.safetensors.index.json", revision)
    names = ["model.safetensors"]
    if index is not None:
        weight_map: dict[str, str] = read_json(Path(index))["weight_map"]
        names = sorted({file for name, file in weight_map.items() if own_name(name, num_layers) is not None})
    found = [_find(source, name, revision) for name in names]
    if None in found:
        raise MissingInput(
            f"target {source} has no {names[found.index(None)]}; MTP modules are read from safetensors only"
        )
    return [path for path in found if path is not None]


def _find(source: str, name: str, revision: str | None) -> str | None:
    if Path(source).is_dir():
        return str(Path(source) / name) if (Path(source) / name).is_file() else None
    found: str | None = cached_file(source, name, revision=revision, _raise_exceptions_for_missing_entries=False)
    return found
