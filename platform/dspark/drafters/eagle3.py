"""EAGLE-3: one causal layer over a token's embedding and a fused state of the target, then over its own states.

Legend: m captured target layers, d hidden size, H query heads, K key/value heads, D head width, V' draft vocabulary.
Source: EAGLE-3; names and shapes of DeepSpec's checkpoints.
"""

from typing import Any, Literal, cast

import pydantic
import torch
from torch import Tensor, nn

from dspark.config import Config
from dspark.drafters.autoregressive import Attend, AutoregressiveDrafter, head_logits
from dspark.drafters.config import DrafterConfig
from dspark.drafters.layers import RMSNorm, RotaryEmbedding, SwiGLU, rotate
from dspark.target_head import TargetHead

EAGLE3_ARCHITECTURES = ("Qwen3Eagle3Model", "Eagle3DraftModel")  # the first is what is written


class Eagle3Config(Config):
    """Shape of an EAGLE-3 drafter. Names follow DeepSpec's `config.json`, block_size being its `ttt_length`.

    block_size: steps unrolled in training, and the most that is drafted. step_loss_decay: weight of a step's loss
    against that of the step before, as it was trained. draft_vocab_size, valid_vocab_size, dropout: as in
    DrafterConfig.
    """

    architecture: Literal["eagle3"] = "eagle3"
    hidden_size: int = pydantic.Field(gt=0)
    intermediate_size: int = pydantic.Field(gt=0)
    num_attention_heads: int = pydantic.Field(gt=0)
    num_key_value_heads: int = pydantic.Field(gt=0)
    head_dim: int = pydantic.Field(gt=0)
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any]
    max_position_embeddings: int = pydantic.Field(gt=0)
    vocab_size: int = pydantic.Field(gt=0)
    valid_vocab_size: int = pydantic.Field(gt=0)
    draft_vocab_size: int = pydantic.Field(gt=0)
    target_layer_ids: tuple[int, ...]
    num_target_layers: int = pydantic.Field(gt=1)
    block_size: int = pydantic.Field(gt=0)
    step_loss_decay: float = pydantic.Field(default=0.8, gt=0, le=1)
    dropout: float = pydantic.Field(default=0.0, ge=0, lt=1)

    @pydantic.model_validator(mode="after")
    def _check(self) -> "Eagle3Config":
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        if not self.draft_vocab_size <= self.valid_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab_size} <= valid_vocab_size {self.valid_vocab_size} <= "
                f"vocab_size {self.vocab_size} does not hold"
            )
        return self

    @property
    def num_modules(self) -> int:
        return 1

    @property
    def enable_confidence_head(self) -> bool:
        return False

    @property
    def widest_window(self) -> None:
        """All context is seen."""
        return

    @property
    def has_reduced_vocabulary(self) -> bool:
        return self.draft_vocab_size < self.valid_vocab_size

    @property
    def feature_size(self) -> int:
        """m*d: width of the concatenated target states of one token."""
        return self.hidden_size * len(self.target_layer_ids)


class Eagle3Attention(nn.Module):
    """Attention whose queries, keys and values come from [embedding; state], 2d wide."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        inputs = 2 * config.hidden_size
        width, kv_width = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(inputs, width, bias=False)
        self.k_proj = nn.Linear(inputs, kv_width, bias=False)
        self.v_proj = nn.Linear(inputs, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, u: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """[B, T, d]. u: [B, T, 2d]; cos, sin: [B, T, D]."""
        queries = rotate(self.q_norm(self._split(self.q_proj(u))), cos.unsqueeze(-2), sin.unsqueeze(-2))
        keys = rotate(self.k_norm(self._split(self.k_proj(u))), cos.unsqueeze(-2), sin.unsqueeze(-2))
        values = self._split(self.v_proj(u))
        queries, keys, values = (x.transpose(1, 2) for x in (queries, keys, values))  # heads first
        return self.o_proj(attend(queries, keys, values, self.head_dim**-0.5).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class Eagle3Layer(nn.Module):
    """Pre-norm layer over [norm(embedding); norm(state)]; its residual is the raw state."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Eagle3Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(cast("DrafterConfig", config))  # both configs name a layer's sizes alike
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, embedded: Tensor, states: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """[B, T, d]. embedded, states: [B, T, d]; cos, sin: [B, T, D]."""
        u = torch.cat([self.input_layernorm(embedded), self.hidden_norm(states)], dim=-1)
        h = states + self.dropout(self.self_attn(u, cos, sin, attend))
        return h + self.dropout(self.mlp(self.post_attention_layernorm(h)))


class Eagle3Backbone(nn.Module):
    """Answers to `autoregressive.AutoregressiveBackbone`; `embed_tokens` and `lm_head` are the target's, frozen."""

    d2t: Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        d = config.hidden_size
        head_rows = config.draft_vocab_size if config.has_reduced_vocabulary else config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, d)
        self.lm_head = nn.Linear(d, head_rows, bias=False)
        self.embed_tokens.requires_grad_(False)
        self.lm_head.requires_grad_(False)
        self.target_head = TargetHead(config.vocab_size, config.valid_vocab_size)
        self.fc = nn.Linear(config.feature_size, d, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        self.norm = RMSNorm(d, config.rms_norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.rotary = RotaryEmbedding(cast("DrafterConfig", config))
        self.register_buffer("d2t", torch.arange(config.draft_vocab_size), persistent=False)

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """What a row stores: key/value heads, width of a key, width of a value."""
        return self.config.num_key_value_heads, self.config.head_dim, self.config.head_dim

    def head_weight(self) -> Tensor:
        """[V', d]: rows of the frozen head that can be proposed."""
        return self.lm_head.weight[: self.config.draft_vocab_size]

    def head_bias(self) -> None:
        """Heads that add one are refused."""
        return

    def base_logits(self, h: Tensor) -> Tensor:
        """[..., V'] float32. h: [..., d], after the final norm."""
        return head_logits(self.lm_head, h, self.config.draft_vocab_size)

    def context_states(self, target_hidden: Tensor) -> Tensor:
        """W [H^l1; …; H^lm], without a norm: [..., d]. target_hidden: [..., m*d]."""
        return self.dropout(self.fc(target_hidden.to(self.fc.weight.dtype)))

    def advance(self, module: int, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """States after the layer, before the final norm: what the next step goes on from. [B, T, d]."""
        cos, sin = self.rotary(positions)
        embedded = self.embed_tokens(token_ids).to(states.dtype)
        return self.layers[module](embedded, states, cos, sin, attend)

    def head_inputs(self, states: Tensor) -> Tensor:
        """After the final norm: [..., d]."""
        return self.norm(states)


def eagle3_drafter(config: Eagle3Config) -> AutoregressiveDrafter:
    """An untrained EAGLE-3 drafter."""
    return AutoregressiveDrafter(config, Eagle3Backbone(config))


def eagle3_content(config: Eagle3Config, *, dtype: str) -> dict[str, Any]:
    """The `config.json` content, as DeepSpec writes it."""
    shared = config.model_dump(exclude={"architecture", "block_size"}, mode="json")
    return shared | {
        "architectures": [EAGLE3_ARCHITECTURES[0]],
        "model_type": "qwen3",
        "num_hidden_layers": 1,
        "draft_num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "ttt_length": config.block_size,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": dtype,
    }


def eagle3_config(content: dict[str, Any]) -> Eagle3Config:
    """The shape from a `config.json` of ours or of DeepSpec, its `rope_parameters` in the nested form.

    Raises: ValueError naming what is missing or not understood.
    """
    supported = {"attention_bias": False, "hidden_act": "silu", "draft_num_hidden_layers": 1, "num_hidden_layers": 1}
    for name, value in supported.items():
        if content.get(name, value) != value:
            raise ValueError(f"drafter config has {name} {content[name]!r}; EAGLE-3 drafters have {value!r}")
    valid = content.get("valid_vocab_size", content.get("vocab_size"))
    content = content | {
        "valid_vocab_size": valid,
        "draft_vocab_size": content.get("draft_vocab_size") or valid,
        "block_size": content.get("ttt_length"),
    }
    for name, field in Eagle3Config.model_fields.items():
        if field.is_required() and content.get(name) is None:
            missing = "ttt_length" if name == "block_size" else name
            raise ValueError(f"drafter config has no {missing}; take it from the checkpoint it belongs to")
    kept = {name: content[name] for name in Eagle3Config.model_fields if name in content and name != "architecture"}
    return Eagle3Config(**kept | {"target_layer_ids": tuple(content["target_layer_ids"])})
