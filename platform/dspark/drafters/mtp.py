"""MTP: modules of the target's own kind of decoder layer over [norm(embedding); norm(state)].

h'^k_i = M_k [norm(Emb(t_{i+k})); norm(h^{k-1}_i)], h^k = norm(TRM_k(h'^k)); the target's head predicts t_{i+k+1} from
h^k. TRM_k is a decoder layer of the target's class, whatever is in it (latent attention, experts, gates); its
attention goes through the library's interface, where the drafter says what a row sees. One module may take the place
of all: it then goes on from its own states, position by position.

Legend: d hidden size, T rows of a pass, H query heads, K key/value heads, D head width, V' draft vocabulary.
Source: DeepSeek-V3 §2.2, eq. 21-25; the norm of the main model's and every module's state is that of the next depth's
input, as DeepSeek's and Qwen3.5's public checkpoints are run.
"""

from collections.abc import Callable
from typing import Any, Literal

import pydantic
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModel, PretrainedConfig

from dspark.config import Config
from dspark.drafters.autoregressive import Attend, AutoregressiveDrafter, head_logits
from dspark.target_head import TargetHead

MTP_ARCHITECTURE = "DSparkMTPModel"
ATTENTION = "dspark_draft"
UNSUPPORTED = ("softcap", "s_aux", "sliding_window")
# Of the target's config, what is not about a decoder layer, or is about more of them than one.
ONE_LAYER = {
    "num_hidden_layers": 1,
    "vocab_size": 1,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
    "use_cache": False,
    "sliding_window": None,
}
NOT_OF_A_LAYER = (
    "architectures", "auto_map", "quantization_config", "torch_dtype", "dtype", "transformers_version", "_name_or_path",
    "per_layer_config", "max_window_layers", "use_sliding_window", "id2label", "label2id",
)  # fmt: skip


class MTPConfig(Config):
    """Shape of an MTP drafter.

    target_layer_ids: the one state of the target that it reads, see `engine.hidden_states`. num_modules: one per draft
    token, or a single one that goes on from its own states. block: config of one decoder layer of the target's kind.
    """

    architecture: Literal["mtp"] = "mtp"
    hidden_size: int = pydantic.Field(gt=0)
    vocab_size: int = pydantic.Field(gt=0)
    valid_vocab_size: int = pydantic.Field(gt=0)
    draft_vocab_size: int = pydantic.Field(gt=0)
    target_layer_ids: tuple[int]
    num_target_layers: int = pydantic.Field(gt=1)
    block_size: int = pydantic.Field(gt=0)
    num_modules: int = pydantic.Field(default=1, gt=0)
    block: dict[str, Any]

    @pydantic.model_validator(mode="after")
    def _check(self) -> "MTPConfig":
        if self.num_modules not in (1, self.block_size):
            raise ValueError(
                f"num_modules {self.num_modules} with block_size {self.block_size}; use 1, which serves every draft "
                "token, or as many as draft tokens"
            )
        if not self.draft_vocab_size <= self.valid_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab_size} <= valid_vocab_size {self.valid_vocab_size} <= "
                f"vocab_size {self.vocab_size} does not hold"
            )
        return self

    @property
    def enable_confidence_head(self) -> bool:
        return False

    @property
    def max_position_embeddings(self) -> int | None:
        """Positions its layer was made for; None when it does not say."""
        return self.block.get("max_position_embeddings")

    @property
    def widest_window(self) -> None:
        """All context is seen."""
        return

    @property
    def has_reduced_vocabulary(self) -> bool:
        return self.draft_vocab_size < self.valid_vocab_size

    @property
    def feature_size(self) -> int:
        """Width of the target's state of one token."""
        return self.hidden_size


def one_layer_config(target: PretrainedConfig) -> dict[str, Any]:
    """Config of a single decoder layer of the target's kind, with full attention; its last kind of MLP."""
    content = target.get_text_config(decoder=True).to_dict()
    content = {name: value for name, value in content.items() if name not in NOT_OF_A_LAYER}
    content |= {name: value for name, value in ONE_LAYER.items() if name in content}
    if content.get("layer_types") is not None:
        content["layer_types"] = ["full_attention"]
    if content.get("mlp_layer_types") is not None:
        content["mlp_layer_types"] = content["mlp_layer_types"][-1:]
    if "first_k_dense_replace" in content:
        content["first_k_dense_replace"] = 0
    return content


def build_block(content: dict[str, Any]) -> Any:
    """A decoder of one layer and its final norm, to be called on states. Raises: ValueError by the layer's class."""
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, _no_mask)
    decoder: Any = AutoModel.from_config(AutoConfig.for_model(**content), attn_implementation=ATTENTION)
    decoder.embed_tokens = None  # the states come from outside
    return decoder


class MTPModule(nn.Module):
    """One depth: two norms, the projection that joins, a decoder layer with the norm behind it."""

    def __init__(self, config: MTPConfig) -> None:
        super().__init__()
        self.decoder = build_block(config.block)
        norm_class, eps = type(self.decoder.norm), self.decoder.config.rms_norm_eps
        self.enorm = norm_class(config.hidden_size, eps=eps)
        self.hnorm = norm_class(config.hidden_size, eps=eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def forward(self, embedded: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """[B, T, d], after the norm. embedded, states: [B, T, d]; positions: [B, T]."""
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(states)], dim=-1))
        output = self.decoder(inputs_embeds=joined, position_ids=positions, use_cache=False, attend=attend)
        return output.last_hidden_state

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "MTPModule":
        """As ever, but rotary frequencies stay float32: rounded to bf16 they turn far positions wrongly."""
        rotary = getattr(self.decoder, "rotary_emb", None)
        kept = {} if rotary is None else dict(rotary.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, value in kept.items():
            moved = getattr(rotary, name)
            setattr(rotary, name, value.to(moved.device) if value.dtype != moved.dtype else moved)
        return self


class MTPBackbone(nn.Module):
    """Answers to `autoregressive.AutoregressiveBackbone`; `embed_tokens` and `lm_head` are the target's, frozen.

    Raises: ValueError for a kind of decoder layer that keeps another state than keys and values.
    """

    d2t: Tensor

    def __init__(self, config: MTPConfig) -> None:
        super().__init__()
        self.config = config
        d = config.hidden_size
        head_rows = config.draft_vocab_size if config.has_reduced_vocabulary else config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, d)
        self.lm_head = nn.Linear(d, head_rows, bias=False)
        self.embed_tokens.requires_grad_(False)
        self.lm_head.requires_grad_(False)
        self.target_head = TargetHead(config.vocab_size, config.valid_vocab_size)
        self.layers = nn.ModuleList(MTPModule(config) for _ in range(config.num_modules))
        self.register_buffer("d2t", torch.arange(config.draft_vocab_size), persistent=False)
        self._kv_shape = self._observe()

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """What a row stores per module: key/value heads, width of a key, width of a value."""
        return self._kv_shape

    def head_weight(self) -> Tensor:
        """[V', d]: rows of the frozen head that can be proposed."""
        return self.lm_head.weight[: self.config.draft_vocab_size]

    def head_bias(self) -> None:
        """Heads that add one are refused."""
        return

    def base_logits(self, h: Tensor) -> Tensor:
        """[..., V'] float32. h: [..., d], after the norm."""
        return head_logits(self.lm_head, h, self.config.draft_vocab_size)

    def context_states(self, target_hidden: Tensor) -> Tensor:
        """The target's own state: [..., d]."""
        return target_hidden.to(self.lm_head.weight.dtype)

    def advance(self, module: int, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """States after a module and its norm: what its head reads, and what is passed on. [B, T, d]."""
        embedded = self.embed_tokens(token_ids).to(states.dtype)
        return self.layers[module](embedded, states, positions, attend)

    def head_inputs(self, states: Tensor) -> Tensor:
        """They are normed already."""
        return states

    @torch.no_grad()
    def _observe(self) -> tuple[int, int, int]:
        shapes = []

        def attend(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
            shapes.append((keys.shape[1], keys.shape[3], values.shape[3]))
            return queries.new_zeros(*queries.shape[:3], values.shape[3]).transpose(1, 2)

        rows = torch.zeros(1, 2, self.config.hidden_size)
        self.layers[0](rows, rows, torch.arange(2)[None], attend)
        if len(shapes) != 1:
            kind = type(self.layers[0].decoder.layers[0]).__name__  # type: ignore[union-attr, index]
            raise ValueError(
                f"{kind} does not go through the library's attention interface, so MTP cannot keep its state in pages; "
                "use another architecture for this target"
            )
        return shapes[0]


def mtp_drafter(config: MTPConfig) -> AutoregressiveDrafter:
    """An untrained MTP drafter."""
    return AutoregressiveDrafter(config, MTPBackbone(config))


def mtp_content(config: MTPConfig, *, dtype: str) -> dict[str, Any]:
    """The `config.json` content: a format of our own."""
    return config.model_dump(exclude={"architecture"}, mode="json") | {
        "architectures": [MTP_ARCHITECTURE],
        "model_type": "dspark_mtp",
        "dtype": dtype,
    }


def mtp_config(content: dict[str, Any]) -> MTPConfig:
    """The shape from such a `config.json`. Raises: ValueError naming what is missing."""
    for name, field in MTPConfig.model_fields.items():
        if field.is_required() and content.get(name) is None:
            raise ValueError(f"drafter config has no {name}; take it from the checkpoint it belongs to")
    return MTPConfig(**{name: content[name] for name in MTPConfig.model_fields if name in content})


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attend: Attend,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """What the drafter makes of it. Raises: ValueError for a kind of attention that it does not compute, by name."""
    for name in UNSUPPORTED:
        if options.get(name) is not None:
            raise ValueError(f"attention option {name} of {type(module).__name__} is not supported in MTP modules")
    return attend(query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling), None


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """`attend` knows what a row sees."""
