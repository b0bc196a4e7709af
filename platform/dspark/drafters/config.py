"""The shape of a drafter: what `config.json` of its checkpoint holds, as one validated object."""

from typing import Any, Literal

import pydantic

from dspark.config import Config


class DrafterConfig(Config):
    """Shape of a DSpark or DFlash drafter. Names follow DeepSpec's `config.json`.

    valid_vocab_size: ids from here on are padding rows of the target's embedding, never proposed.
    draft_vocab_size: V'; equal to valid_vocab_size when the draft vocabulary is not reduced.
    dropout: in training only, on context features and on what each sublayer adds.
    anchor_fusion: our extension; block inputs also see the newest context feature (not readable by other engines).
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
    anchor_fusion: bool = False
    markov_rank: int = pydantic.Field(default=0, ge=0)
    markov_head_type: Literal["vanilla"] = "vanilla"
    dropout: float = pydantic.Field(default=0.0, ge=0, lt=1)
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False

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
        return self

    @property
    def has_reduced_vocabulary(self) -> bool:
        return self.draft_vocab_size < self.valid_vocab_size

    @property
    def feature_size(self) -> int:
        """m*d: width of the concatenated target states of one token."""
        return self.hidden_size * len(self.target_layer_ids)
