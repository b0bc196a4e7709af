"""What a target does between token ids and its first layer, and between its last hidden state and its logits.

Legend: V rows of the target's head, V' rows taken of it, d hidden size.

    embeddings = embedding_scale E[ids]
    logits z = cap(logit_scale (W h + b)), cap(x) = c tanh(x / c); dz/d(W h + b) = logit_scale (1 - (z / c)^2)
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SOFTCAP_NAMES = ("final_logit_softcapping", "logits_soft_cap")
LOGIT_FACTORS = ("logit_scale", "lm_head_multiplier")
LOGIT_DIVISORS = ("logits_scaling",)
SCALED_BY_WIDTH = ("gemma", "vaultgemma", "recurrent_gemma")  # model types whose embeddings are scaled by sqrt(d)


@dataclass(frozen=True)
class TargetHead:
    """A target's head and embedding apart from their weights.

    vocab_size: V; ids from valid_vocab_size on are padding rows, never proposed nor emitted. embedding_scale: factor
    on embeddings. logit_scale: factor on the products with the head. softcap: c, None without. has_bias: the head
    adds a vector b to its products.
    """

    vocab_size: int
    valid_vocab_size: int
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    has_bias: bool = False

    @staticmethod
    def of(config: "PretrainedConfig", *, valid_vocab_size: int) -> "TargetHead":
        """Read from a target's text config, whatever the family's names for it are."""
        model_type = str(config.model_type)
        factor = math.prod(float(_named(config, name, 1.0)) for name in LOGIT_FACTORS)
        divisor = math.prod(float(_named(config, name, 1.0)) for name in LOGIT_DIVISORS)
        softcap = next((value for name in SOFTCAP_NAMES if (value := _named(config, name, None))), None)
        by_width = math.sqrt(config.hidden_size) if model_type.startswith(SCALED_BY_WIDTH) else 1.0
        return TargetHead(
            vocab_size=config.vocab_size,
            valid_vocab_size=min(valid_vocab_size, config.vocab_size),
            embedding_scale=by_width * float(_named(config, "embedding_multiplier", 1.0)),
            logit_scale=factor / divisor,
            softcap=None if softcap is None else float(softcap),
            has_bias=bool(_named(config, "lm_head_bias", False)),
        )

    @property
    def is_linear(self) -> bool:
        """Whether the products W h + b are the logits."""
        return self.logit_scale == 1.0 and self.softcap is None

    def logits(self, products: Tensor) -> Tensor:
        """z: [..., V']. products: [..., V'], W h + b, left as they are. Differentiable."""
        if self.softcap is not None:
            return torch.tanh(products * (self.logit_scale / self.softcap)) * self.softcap
        return products * self.logit_scale if self.logit_scale != 1.0 else products

    def product_slope(self, slope: Tensor, logits: Tensor) -> Tensor:
        """A loss's slope in W h + b from its slope in z: [..., V'].

        slope, logits (z): [..., V'], both written over.
        """
        if self.softcap is not None:
            slope = slope.mul_(logits.div_(self.softcap).square_().neg_().add_(1.0))
        return slope.mul_(self.logit_scale) if self.logit_scale != 1.0 else slope


def _named(config: "PretrainedConfig", name: str, default: Any) -> Any:
    value = getattr(config, name, None)
    return default if value is None else value
