"""An untrained drafter made from its target: shape, frozen embedding and head, warm start of the layers."""

from typing import Any, Literal

import pydantic
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from dspark.config import Config
from dspark.drafters import build_drafter
from dspark.drafters.backbone import Backbone
from dspark.drafters.checkpoint import rope_parameters
from dspark.drafters.config import DrafterConfig, HyperConnectionConfig, LayerType, MLPLayerType, MoEConfig
from dspark.drafters.dflash import DFlashDrafter
from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.layers import DraftLayer
from dspark.drafters.moe import MoE
from dspark.drafters.upcycling import upcycle
from dspark.target_head import TargetHead

INITIAL_STD = 0.02
DENSE_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
AUTOREGRESSIVE = ("eagle3", "mtp")
# What of a DrafterShape an autoregressive drafter and an MTP drafter alone have; a value that does nothing is refused.
SHARED = {"architecture", "block_size", "draft_vocab_size", "warm_start"}
ONLY_MTP = {"num_modules", "hidden_state", "from_target"}
MEANT_FOR = {"eagle3": SHARED | {"dropout"}, "mtp": SHARED | ONLY_MTP}


class DrafterShape(Config):
    """What a user chooses about a drafter; everything else follows from the target.

    draft_vocab_size: V' most frequent answer tokens, None for all. mask_token: text or id of the token whose
    embedding row feeds the mask slots; None takes the tokenizer's mask token. warm_start: draft layers copied
    from the target's last ones (experts from its feed-forward layers). dropout: for few answers, where training runs
    over them many times. anchor_fusion: learns faster on small budgets; other engines cannot load it.
    sliding_window: tokens a block looks back, which bounds its cost; None for all. layer_types, mlp_layer_types: which
    layers slide and which are mixtures of experts, when not all do. moe, hyper_connections: None to do without.
    markov_head_type: what makes the bias of a slot of the tokens before it; gated also looks at the slot's state, rnn
    at all tokens of the block (vLLM loads vanilla alone).
    MTP only: num_modules, 1 to serve all draft tokens or one each; hidden_state, what it reads of the target,
    "after_norm" as in DeepSeek-V3 or "before_norm" as in Qwen3.5; from_target, to start from the modules that the
    target brings along.
    """

    architecture: Literal["dspark", "dflash", "eagle3", "mtp"] = "dspark"
    num_layers: int = pydantic.Field(default=5, gt=0)
    block_size: int = pydantic.Field(default=7, gt=0)
    draft_vocab_size: int | None = pydantic.Field(default=None, gt=0)
    mask_token: str | int | None = None
    learned_mask_embedding: bool = False
    sliding_window: int | None = pydantic.Field(default=None, gt=0)
    layer_types: tuple[LayerType, ...] = ()
    mlp_layer_types: tuple[MLPLayerType, ...] = ()
    moe: MoEConfig | None = None
    hyper_connections: HyperConnectionConfig | None = None
    anchor_fusion: bool = False
    markov_rank: int = pydantic.Field(default=256, ge=0)
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    confidence_head: bool = True
    dropout: float = pydantic.Field(default=0.0, ge=0, lt=1)
    warm_start: bool = False
    num_modules: int = pydantic.Field(default=1, gt=0)
    hidden_state: Literal["after_norm", "before_norm"] = "after_norm"
    from_target: bool = False

    @pydantic.model_validator(mode="after")
    def _check(self) -> "DrafterShape":
        if self.from_target and self.architecture != "mtp":
            raise ValueError(f"from_target is for architecture mtp, not {self.architecture}; leave it out")
        fields = type(self).model_fields
        meant = MEANT_FOR.get(self.architecture, fields.keys() - ONLY_MTP)
        meant = meant - {"draft_vocab_size", "warm_start", *ONLY_MTP} | {"from_target"} if self.from_target else meant
        for name in fields.keys() - meant:
            if getattr(self, name) != fields[name].default:
                kind = f"architecture {self.architecture}" + (" from the target" if self.from_target else "")
                raise ValueError(f"{name} has no meaning for {kind}; leave it out")
        return self


def drafter_config(
    shape: DrafterShape,
    target: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    target_layer_ids: tuple[int, ...],
    valid_vocab_size: int,
) -> DrafterConfig:
    """The drafter's full shape.

    Raises: ValueError for a mask token that cannot be told apart from padding or EOS, or a target without the sizes
    that a draft layer needs.
    """
    target = target.get_text_config(decoder=True)
    require_sizes(target)
    assert shape.architecture in ("dspark", "dflash"), "the others have a config of their own"
    is_dspark = shape.architecture == "dspark"
    head = TargetHead.of(target, valid_vocab_size=valid_vocab_size)
    return DrafterConfig(
        architecture=shape.architecture,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=target.num_attention_heads,
        **_attention_sizes(target),
        rms_norm_eps=getattr(target, "rms_norm_eps", None) or getattr(target, "layer_norm_eps", 1e-6),
        rope_parameters=rope_parameters(target.to_dict()),
        max_position_embeddings=target.max_position_embeddings,
        vocab_size=head.vocab_size,
        valid_vocab_size=head.valid_vocab_size,
        embedding_scale=head.embedding_scale,
        logit_scale=head.logit_scale,
        final_logit_softcapping=head.softcap,
        lm_head_bias=head.has_bias,
        draft_vocab_size=min(shape.draft_vocab_size or head.valid_vocab_size, head.valid_vocab_size),
        target_layer_ids=target_layer_ids,
        num_target_layers=target.num_hidden_layers,
        block_size=shape.block_size,
        mask_token_id=resolve_mask_token(shape.mask_token, tokenizer, target.vocab_size),
        learned_mask_embedding=shape.learned_mask_embedding,
        sliding_window=shape.sliding_window,
        layer_types=shape.layer_types,
        mlp_layer_types=shape.mlp_layer_types,
        moe=shape.moe,
        hyper_connections=shape.hyper_connections,
        anchor_fusion=shape.anchor_fusion,
        dropout=shape.dropout,
        markov_rank=shape.markov_rank if is_dspark else 0,
        markov_head_type=shape.markov_head_type,
        enable_confidence_head=shape.confidence_head and is_dspark,
        confidence_head_with_markov=shape.confidence_head and is_dspark and shape.markov_rank > 0,
    )


def _attention_sizes(target: PretrainedConfig) -> dict[str, Any]:
    """Form and head sizes of the draft layers: those of the target's kind, of Gemma4's global layers."""
    if target.model_type in ("gemma4_text", "gemma4_unified_text"):
        last = target.per_layer_config[target.num_hidden_layers - 1]  # always a global one
        shares = bool(target.attention_k_eq_v)
        sizes = {"head_dim": last.head_dim, "num_key_value_heads": last.num_key_value_heads}
        return sizes | {"model_type": target.model_type, "attention_k_eq_v": shares}
    heads = target.num_attention_heads
    return {
        "num_key_value_heads": getattr(target, "num_key_value_heads", None) or heads,
        "head_dim": getattr(target, "head_dim", None) or target.hidden_size // heads,
    }


def require_sizes(target: PretrainedConfig, *more: str) -> None:
    """Raises: ValueError naming a size that a draft layer needs and the target does not have."""
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings", *more):
        if getattr(target, name, None) is None:
            raise ValueError(
                f"target of type {target.model_type!r} has no {name}; drafters need a target of Llama's kind"
            )


def resolve_mask_token(mask_token: str | int | None, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> int:
    """Id of the mask token. Raises: ValueError when there is none, or it is padding, EOS or unknown."""
    if mask_token is None:
        mask_id = tokenizer.mask_token_id
        if mask_id is None:
            raise ValueError(
                "the target's tokenizer has no mask token; set drafter.mask_token to an unused special token"
            )
    elif isinstance(mask_token, int):
        mask_id = mask_token
    else:
        mask_id = tokenizer.convert_tokens_to_ids(mask_token)
        if mask_id is None or mask_id == tokenizer.unk_token_id:
            raise ValueError(f"drafter.mask_token {mask_token!r} is not a token of the target's tokenizer")
    if mask_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        raise ValueError(
            f"drafter.mask_token {mask_token!r} is the padding or end token (id {mask_id}); use an unused one"
        )
    if not 0 <= mask_id < vocab_size:
        raise ValueError(f"drafter.mask_token id {mask_id} is outside the target's vocabulary of {vocab_size}")
    return int(mask_id)


def new_drafter(
    config: DrafterConfig, target: Any, *, draft_to_target: Tensor, sample_features: Tensor, warm_start: bool, seed: int
) -> DSparkDrafter | DFlashDrafter:
    """A drafter ready to be trained: frozen parts from the target, layers warm-started or random.

    target: the HF causal LM. draft_to_target: [V'] ascending target ids. sample_features: [n, m*d] float32, states
    from the cache that set the scale of the head norms in a warm start.
    """
    torch.manual_seed(seed)
    drafter = build_drafter(config)
    for module in drafter.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=INITIAL_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
    backbone = drafter.backbone
    if backbone.anchor_fusion is not None:
        nn.init.zeros_(backbone.anchor_fusion.anchor_proj.weight)
        nn.init.zeros_(backbone.anchor_fusion.mask_proj.weight)
    with torch.no_grad():
        _copy_frozen(backbone, target, draft_to_target)
        if warm_start:
            _warm_start(backbone, target, sample_features)
    return drafter


def _copy_frozen(backbone: Backbone, target: Any, draft_to_target: Tensor) -> None:
    """Embedding and head rows of the target, whether the target ties them or not."""
    embedding = target.get_input_embeddings().weight.float()
    head = target.get_output_embeddings().weight.float()
    backbone.embed_tokens.weight.copy_(embedding)
    kept = draft_to_target if backbone.config.has_reduced_vocabulary else slice(None)
    backbone.lm_head.weight.copy_(head[kept])
    if backbone.lm_head.bias is not None:
        backbone.lm_head.bias.copy_(target.get_output_embeddings().bias.float()[kept])
    backbone.mask_embedding.copy_(embedding[backbone.config.mask_token_id])
    if backbone.config.has_reduced_vocabulary:
        backbone.d2t = draft_to_target.clone()


def _warm_start(backbone: Backbone, target: Any, sample_features: Tensor) -> None:
    """Draft layers = the target's last layers; C = the last captured layer, normed.

    The context C has no norm of its own in a draft layer, so the weight of the target's input norm is folded into
    the projections and both norms start at one. The target has no head norms: theirs start at the scale its
    queries and keys have on real features, so that attention starts about as sharp as in the target.
    """
    decoder = target.model
    if len(decoder.layers) < len(backbone.layers):
        raise ValueError(
            f"drafter.num_layers {len(backbone.layers)} is more than the {len(decoder.layers)} layers of the target; "
            "set drafter.warm_start false or lower drafter.num_layers"
        )
    sources = decoder.layers[len(decoder.layers) - len(backbone.layers) :]
    size = backbone.config.hidden_size
    backbone.fc.weight.zero_()
    backbone.fc.weight[:, -size:] = torch.eye(size)
    backbone.norm.weight.copy_(decoder.norm.weight.float())
    normed = backbone.context_features(sample_features)
    for layer, source in zip(backbone.layers, sources, strict=True):
        _require_same_form(layer, source, backbone.config)
        assert isinstance(layer, DraftLayer)
        _copy_attention(layer, source, normed)
        if isinstance(layer.mlp, MoE):
            assert backbone.config.moe is not None
            inputs = normed * layer.post_attention_layernorm.weight
            upcycle(layer.mlp, backbone.config.moe, source.mlp, inputs)
        else:
            for name in DENSE_PROJECTIONS:
                getattr(layer.mlp, name).weight.copy_(getattr(source.mlp, name).weight.float())


def _is_rescaled(source: Any) -> bool:
    """Whether a target's layer has factors (Granite's) that a draft layer does not have."""
    scaling = getattr(source.self_attn, "scaling", None)
    is_other = scaling is not None and abs(scaling * source.self_attn.head_dim**0.5 - 1.0) > 1e-6
    return is_other or getattr(source, "residual_multiplier", 1.0) != 1.0


def _require_same_form(layer: nn.Module, source: Any, config: DrafterConfig) -> None:
    """Raises: ValueError when the target's layer is not what a draft layer is made from, piece for piece."""
    if not isinstance(layer, DraftLayer) or _is_rescaled(source):
        raise ValueError(f"draft layers cannot start from {type(source).__name__}; set drafter.warm_start false")
    ours = ("mlp.", "attn_hc.", "ffn_hc.")
    drafted = {name: value.shape for name, value in layer.named_parameters() if not name.startswith(ours)}
    wide, narrow = torch.Size((config.intermediate_size, config.hidden_size)), config.hidden_size
    dense = dict.fromkeys(DENSE_PROJECTIONS[:2], wide) | {DENSE_PROJECTIONS[2]: torch.Size((narrow, wide[0]))}
    drafted |= {f"mlp.{name}.weight": shape for name, shape in dense.items()}
    given = {name: value.shape for name, value in source.named_parameters()}
    without_head_norms = {n: s for n, s in drafted.items() if not n.endswith(("q_norm.weight", "k_norm.weight"))}
    if given in (drafted, without_head_norms):
        return
    names = sorted(n for n in drafted.keys() | given.keys() if given.get(n) != without_head_norms.get(n))
    found = list(given[names[0]]) if names[0] in given else "absent"
    raise ValueError(
        f"draft layers cannot start from {type(source).__name__}: its {names[0]} is {found}; "
        "set drafter.warm_start false"
    )


def _copy_attention(layer: DraftLayer, source: Any, normed: Tensor) -> None:
    attention, scale = layer.self_attn, source.input_layernorm.weight.float()
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(attention, name).weight.copy_(getattr(source.self_attn, name).weight.float() * scale)
    attention.o_proj.weight.copy_(source.self_attn.o_proj.weight.float())
    for norm_name, projection in (("q_norm", attention.q_proj), ("k_norm", attention.k_proj)):
        given = getattr(source.self_attn, norm_name, None)
        norm = getattr(attention, norm_name)
        if given is not None:
            norm.weight.copy_(given.weight.float())
        else:
            heads = projection(normed).unflatten(-1, (-1, attention.head_dim))
            norm.weight.fill_(float(heads.square().mean(dim=-1).sqrt().mean()))
    layer.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight.float())
