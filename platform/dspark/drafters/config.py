"""The shape of a drafter: what `config.json` of its checkpoint holds, as one validated object."""

from typing import Any, Literal

import pydantic

from dspark.config import Config
from dspark.target_head import TargetHead

FULL, SLIDING = "full_attention", "sliding_attention"
DENSE, SPARSE = "dense", "sparse"
LayerType = Literal["full_attention", "sliding_attention"]
MLPLayerType = Literal["dense", "sparse"]


class MoEConfig(Config):
    """Shape of a mixture-of-experts layer. Names follow DeepSeek's `config.json`.

    num_experts_per_tok: k; the k chosen experts' scores are the weights, made to sum to one if norm_topk_prob, times
    routed_scaling_factor. topk_method: noaux_tc adds a bias per expert when choosing (never when weighing), moved by
    bias_update_speed after every step; greedy chooses by score. aux_loss_alpha: factor of the balancing loss.
    """

    n_routed_experts: int = pydantic.Field(gt=0)
    n_shared_experts: int = pydantic.Field(default=1, ge=0)
    num_experts_per_tok: int = pydantic.Field(gt=0)
    moe_intermediate_size: int = pydantic.Field(gt=0)
    scoring_func: Literal["sigmoid", "softmax"] = "sigmoid"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = pydantic.Field(default=1.0, gt=0)
    topk_method: Literal["noaux_tc", "greedy"] = "noaux_tc"
    bias_update_speed: float = pydantic.Field(default=0.001, ge=0)
    aux_loss_alpha: float = pydantic.Field(default=0.0, ge=0)

    @pydantic.model_validator(mode="after")
    def _check(self) -> "MoEConfig":
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} is more than n_routed_experts {self.n_routed_experts}"
            )
        return self


class HyperConnectionConfig(Config):
    """Shape of manifold-constrained hyper-connections. Names follow DeepSeek's `config.json`.

    hc_mult: residual streams. hc_sinkhorn_iters: rounds that make the streams' mixing doubly stochastic.
    """

    hc_mult: int = pydantic.Field(default=4, gt=1)
    hc_sinkhorn_iters: int = pydantic.Field(default=20, gt=0)
    hc_eps: float = pydantic.Field(default=1e-6, gt=0)


class DrafterConfig(Config):
    """Shape of a DSpark or DFlash drafter. Names follow DeepSpec's `config.json`.

    valid_vocab_size: ids from here on are padding rows of the target's embedding, never proposed.
    draft_vocab_size: V'; equal to valid_vocab_size when the draft vocabulary is not reduced.
    dropout: in training only, on context features and on what each sublayer adds.
    anchor_fusion: our extension; block inputs also see the newest context feature (not readable by other engines).
    layer_types: which layers see the window only; all of them when there is a window and nothing is said.
    mlp_layer_types: which layers are mixtures of experts; all of them when there is `moe` and nothing is said.
    moe, hyper_connections: None for plain feed-forward layers and a plain residual stream.
    model_type: form of the draft layers. head_dim, num_key_value_heads: as the draft layers have them (of a Gemma4
    target: those of its global layers). attention_k_eq_v: values are the raw keys, without a projection of their own.
    embedding_scale, logit_scale, final_logit_softcapping, lm_head_bias: the target's head, see `TargetHead`.
    """

    architecture: Literal["dspark", "dflash"]
    hidden_size: int = pydantic.Field(gt=0)
    intermediate_size: int = pydantic.Field(gt=0)
    num_hidden_layers: int = pydantic.Field(gt=0)
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
    mask_token_id: int = pydantic.Field(ge=0)
    learned_mask_embedding: bool = False
    sliding_window: int | None = pydantic.Field(default=None, gt=0)
    layer_types: tuple[LayerType, ...] = ()
    mlp_layer_types: tuple[MLPLayerType, ...] = ()
    moe: MoEConfig | None = None
    hyper_connections: HyperConnectionConfig | None = None
    anchor_fusion: bool = False
    markov_rank: int = pydantic.Field(default=0, ge=0)
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    dropout: float = pydantic.Field(default=0.0, ge=0, lt=1)
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    model_type: Literal["qwen3", "gemma4_text", "gemma4_unified_text"] = "qwen3"
    attention_k_eq_v: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    final_logit_softcapping: float | None = pydantic.Field(default=None, gt=0)
    lm_head_bias: bool = False

    @pydantic.model_validator(mode="before")
    @classmethod
    def _name_every_layer(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        layers = content.get("num_hidden_layers")
        if not isinstance(layers, int):
            return content
        attention = FULL if content.get("sliding_window") is None else SLIDING
        mlp = DENSE if content.get("moe") is None else SPARSE
        return content | {
            "layer_types": content.get("layer_types") or (attention,) * layers,
            "mlp_layer_types": content.get("mlp_layer_types") or (mlp,) * layers,
        }

    @pydantic.model_validator(mode="after")
    def _check_layers(self) -> "DrafterConfig":
        for name in ("layer_types", "mlp_layer_types"):
            kinds = getattr(self, name)
            if len(kinds) != self.num_hidden_layers:
                raise ValueError(f"{name} names {len(kinds)} layers, the drafter has {self.num_hidden_layers}")
        if (SLIDING in self.layer_types) != (self.sliding_window is not None):
            raise ValueError(
                f"layer_types {list(self.layer_types)} and sliding_window {self.sliding_window} do not go together; "
                "sliding layers need a window, and a window needs a sliding layer"
            )
        if (SPARSE in self.mlp_layer_types) != (self.moe is not None):
            raise ValueError(
                f"mlp_layer_types {list(self.mlp_layer_types)} and moe ({'set' if self.moe else 'not set'}) do not go "
                "together; sparse layers need moe, and moe needs a sparse layer"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _check(self) -> "DrafterConfig":
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
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}")
        if self.confidence_head_with_markov and not (self.enable_confidence_head and self.markov_rank):
            raise ValueError("confidence_head_with_markov needs enable_confidence_head and markov_rank > 0")
        if self.architecture == "dflash" and (self.markov_rank or self.enable_confidence_head):
            raise ValueError("a dflash drafter has no Markov head and no confidence head; use architecture dspark")
        if self.attention_k_eq_v and not self.is_gemma4:
            raise ValueError(f"attention_k_eq_v is for gemma4 draft layers, model_type is {self.model_type}")
        for name in ("moe", "hyper_connections"):
            if self.is_gemma4 and getattr(self, name) is not None:
                raise ValueError(f"draft layers of type {self.model_type} cannot have {name}; set drafter.{name} null")
        return self

    @property
    def has_reduced_vocabulary(self) -> bool:
        return self.draft_vocab_size < self.valid_vocab_size

    @property
    def is_gemma4(self) -> bool:
        return self.model_type != "qwen3"

    @property
    def attention_scaling(self) -> float:
        """Factor on query-key products; Gemma4's norms keep them in range by themselves."""
        return 1.0 if self.is_gemma4 else self.head_dim**-0.5

    @property
    def target_head(self) -> TargetHead:
        return TargetHead(
            vocab_size=self.vocab_size,
            valid_vocab_size=self.valid_vocab_size,
            embedding_scale=self.embedding_scale,
            logit_scale=self.logit_scale,
            softcap=self.final_logit_softcapping,
            has_bias=self.lm_head_bias,
        )

    @property
    def feature_size(self) -> int:
        """m*d: width of the concatenated target states of one token."""
        return self.hidden_size * len(self.target_layer_ids)

    def window_of(self, layer: int) -> int | None:
        """The layer's sliding window in tokens; None where it sees all context."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    @property
    def widest_window(self) -> int | None:
        """How far back any layer sees, in tokens; None where one sees all context."""
        return self.sliding_window if FULL not in self.layer_types else None

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer is a mixture of experts."""
        return self.mlp_layer_types[layer] == SPARSE
