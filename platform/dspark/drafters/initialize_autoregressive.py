"""An untrained EAGLE-3 or MTP drafter made from its target: shape, frozen embedding and head, warm start."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from dspark.drafters.autoregressive import AutoregressiveDrafter
from dspark.drafters.checkpoint import rope_parameters
from dspark.drafters.eagle3 import Eagle3Backbone, Eagle3Config, Eagle3Layer, eagle3_drafter
from dspark.drafters.initialize import DENSE_PROJECTIONS, INITIAL_STD, DrafterShape, is_rescaled, require_sizes
from dspark.drafters.mtp import MTPBackbone, MTPConfig, MTPModule, mtp_drafter, one_layer_config
from dspark.target_head import TargetHead


def autoregressive_config(
    shape: DrafterShape,
    target: PretrainedConfig,
    *,
    target_layer_ids: tuple[int, ...],
    valid_vocab_size: int,
    position_decay: float,
) -> Eagle3Config | MTPConfig:
    """The drafter's full shape. position_decay: that of training, exp(-1 / it) being EAGLE-3's weight of a step.

    Raises: ValueError for a target without the sizes that a draft layer needs, or with a head of another form than
    that of the public checkpoints: products with a matrix.
    """
    target = target.get_text_config(decoder=True)
    require_sizes(target, "rms_norm_eps")
    head = plain_head(shape.architecture, target, valid_vocab_size)
    if shape.architecture == "mtp":
        return _mtp_config(shape, target, target_layer_ids, head.valid_vocab_size)
    heads, valid = target.num_attention_heads, head.valid_vocab_size
    return Eagle3Config(
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(target, "num_key_value_heads", None) or heads,
        head_dim=getattr(target, "head_dim", None) or target.hidden_size // heads,
        rms_norm_eps=target.rms_norm_eps,
        rope_parameters=rope_parameters(target.to_dict()),
        max_position_embeddings=target.max_position_embeddings,
        vocab_size=target.vocab_size,
        valid_vocab_size=valid,
        draft_vocab_size=min(shape.draft_vocab_size or valid, valid),
        target_layer_ids=target_layer_ids,
        num_target_layers=target.num_hidden_layers,
        block_size=shape.block_size,
        step_loss_decay=round(math.exp(-1.0 / position_decay), 4),
        dropout=shape.dropout,
    )


def plain_head(architecture: str, target: PretrainedConfig, valid_vocab_size: int) -> TargetHead:
    """The target's head. target: its text config. Raises: ValueError when it is more than products with a matrix."""
    head = TargetHead.of(target, valid_vocab_size=valid_vocab_size)
    if head != TargetHead(head.vocab_size, head.valid_vocab_size):
        raise ValueError(
            f"target of type {target.model_type!r} scales, soft-caps or adds to its embeddings or logits; "
            f"{architecture} drafters do not, use dspark or dflash"
        )
    return head


def _mtp_config(
    shape: DrafterShape, target: PretrainedConfig, target_layer_ids: tuple[int, ...], valid: int
) -> MTPConfig:
    (state_id,) = target_layer_ids
    return MTPConfig(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        valid_vocab_size=valid,
        draft_vocab_size=min(shape.draft_vocab_size or valid, valid),
        target_layer_ids=(state_id,),
        num_target_layers=target.num_hidden_layers,
        block_size=shape.block_size,
        num_modules=shape.num_modules,
        block=one_layer_config(target),
    )


def new_autoregressive_drafter(
    config: Eagle3Config | MTPConfig,
    target: Any,
    *,
    draft_to_target: Tensor,
    sample_features: Tensor,
    warm_start: bool,
    seed: int,
) -> AutoregressiveDrafter:
    """A drafter ready to be trained; arguments as those of `initialize.new_drafter`."""
    torch.manual_seed(seed)
    drafter = eagle3_drafter(config) if isinstance(config, Eagle3Config) else mtp_drafter(config)
    backbone = drafter.backbone
    assert isinstance(backbone, Eagle3Backbone | MTPBackbone)
    for module in backbone.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=INITIAL_STD)
    with torch.no_grad():
        copy_frozen(backbone, target, draft_to_target)
        if warm_start and isinstance(backbone, MTPBackbone):
            _warm_start_modules(backbone, target)
        elif warm_start and isinstance(backbone, Eagle3Backbone):
            _warm_start(backbone, target, sample_features)
    return drafter


def copy_frozen(backbone: Eagle3Backbone | MTPBackbone, target: Any, draft_to_target: Tensor) -> None:
    """Embedding and head rows of the target, whether the target ties them or not."""
    backbone.embed_tokens.weight.copy_(target.get_input_embeddings().weight.float())
    head = target.get_output_embeddings().weight.float()
    reduced = backbone.config.has_reduced_vocabulary
    backbone.lm_head.weight.copy_(head[draft_to_target] if reduced else head)
    if reduced:
        backbone.d2t = draft_to_target.clone()


def _warm_start(backbone: Eagle3Backbone, target: Any, sample_features: Tensor) -> None:
    """The layer = the target's last one, reading its newest captured state; the embedding's half starts small.

    The target has no head norms: theirs start at the scale its queries and keys have on real features, so that
    attention starts about as sharp as in the target.
    """
    decoder, size = target.get_decoder(), backbone.config.hidden_size
    source, layer = decoder.layers[-1], backbone.layers[0]
    assert isinstance(layer, Eagle3Layer)
    _require_same_form(layer, source, size)
    backbone.fc.weight.zero_()
    backbone.fc.weight[:, -size:] = torch.eye(size)
    backbone.norm.weight.copy_(decoder.norm.weight.float())
    layer.hidden_norm.weight.copy_(source.input_layernorm.weight.float())
    layer.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight.float())
    attention = layer.self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(attention, name).weight[:, size:] = getattr(source.self_attn, name).weight.float()
    attention.o_proj.weight.copy_(source.self_attn.o_proj.weight.float())
    for name in DENSE_PROJECTIONS:
        getattr(layer.mlp, name).weight.copy_(getattr(source.mlp, name).weight.float())
    normed = layer.hidden_norm(sample_features[:, -size:])
    for norm_name, projection in (("q_norm", attention.q_proj), ("k_norm", attention.k_proj)):
        norm, given = getattr(attention, norm_name), getattr(source.self_attn, norm_name, None)
        if given is not None:
            norm.weight.copy_(given.weight.float())
        else:
            heads = (normed @ projection.weight[:, size:].T).unflatten(-1, (-1, attention.head_dim))
            norm.weight.fill_(float(heads.square().mean(dim=-1).sqrt().mean()))


def _warm_start_modules(backbone: MTPBackbone, target: Any) -> None:
    """Every module = the target's last layer and final norm, reading the state; the embedding's half starts small.

    Raises: ValueError when that layer is of another form than the module's.
    """
    decoder, size = target.get_decoder(), backbone.config.hidden_size
    source = {name: value.float() for name, value in decoder.layers[-1].state_dict().items()}
    for module in backbone.layers:
        assert isinstance(module, MTPModule)
        module.eh_proj.weight[:, size:] = torch.eye(size)
        module.decoder.norm.weight.copy_(decoder.norm.weight.float())
        layer = module.decoder.layers[0]
        wanted = layer.state_dict()
        wrong = [name for name in wanted.keys() | source.keys() if _shape(wanted, name) != _shape(source, name)]
        if wrong:
            raise ValueError(
                f"an MTP module cannot start from {type(decoder.layers[-1]).__name__}: its {min(wrong)} is "
                f"{_shape(source, min(wrong))}, not {_shape(wanted, min(wrong))}; set drafter.warm_start false"
            )
        layer.load_state_dict(source)


def _shape(tensors: dict[str, Tensor], name: str) -> list[int] | None:
    return list(tensors[name].shape) if name in tensors else None


def _require_same_form(layer: Eagle3Layer, source: Any, size: int) -> None:
    """Raises: ValueError when the target's layer is not what the draft layer is made from, piece for piece."""
    wanted = {name: list(value.shape) for name, value in layer.named_parameters() if name != "hidden_norm.weight"}
    for name in ("q_proj", "k_proj", "v_proj"):
        wanted[f"self_attn.{name}.weight"][1] = size  # the other half reads the embedding
    given = {name: list(value.shape) for name, value in source.named_parameters()}
    head_norms = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
    names = sorted(n for n in wanted.keys() | given.keys() if given.get(n) != wanted.get(n))
    if is_rescaled(source) or not (names == [] or (set(names) == head_norms and not head_norms & given.keys())):
        found = f": its {names[0]} is {given.get(names[0], 'absent')}" if names else " with its scaled attention"
        raise ValueError(
            f"a draft layer cannot start from {type(source).__name__}{found}; set drafter.warm_start false"
        )
