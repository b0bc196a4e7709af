"""Where a target model comes from: a Hugging Face hub id, a local folder, or a small model bundled as a wheel."""

import hashlib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import pydantic
import transformers  # lazy: torch loads at the first use of a model class, after a job has set its environment

from dspark.bundled_target import PREFIX, ensure_bundled, find_bundled
from dspark.config import Config
from dspark.provenance import file_sha256, fingerprint

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

SAMPLING_KEYS = ("temperature", "top_p", "top_k")

T = TypeVar("T")


class TargetConfig(Config):
    """Which target, and how it is loaded."""

    name: str
    """A hub id, a folder with a `config.json`, or `bundled:<name>` for a model that needs no hub."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; None takes the hub's default. An error for anything but a hub id."""
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "bfloat16"
    """Type of the weights in memory; "auto" takes the type they were saved in."""
    trust_remote_code: bool = False
    """Run Python code that lies beside the weights. Only for a source you trust."""
    device: str = "auto"
    """A torch device; "auto" takes cuda where there is one, else cpu."""
    device_map: Literal["auto"] | None = None
    """"auto" spreads the layers over all devices the process sees, for a target that one cannot hold."""

    @pydantic.model_validator(mode="after")
    def _has_one_placement(self) -> "TargetConfig":
        if self.device_map is not None and self.device != "auto":
            raise ValueError(f"device {self.device!r} has no effect with device_map; leave one of them out")
        return self


def resolve_target(config: TargetConfig) -> str:
    """A local folder or a hub id that `from_pretrained` takes; a bundled target is fetched and converted first.

    Raises: ValueError for an unknown bundled name, a folder without a model, or a revision of something that has none;
    DsparkError if a bundled target cannot be fetched.
    """
    if not _is_hub_id(config) and config.revision is not None:
        raise ValueError(f"target.revision = {config.revision!r}, but {config.name!r} is no hub id; leave it out")
    if config.name.startswith(PREFIX):
        return str(ensure_bundled(find_bundled(config.name)))
    if _is_hub_id(config):
        return config.name
    folder = Path(config.name).expanduser()
    if not folder.is_dir():
        raise ValueError(f"target folder not found: {folder}; set target.name to a hub id, folder or bundled name")
    if not (folder / "config.json").is_file():
        raise ValueError(f"target folder holds no config.json: {folder}; set target.name to a folder with a model")
    return str(folder)


def load_tokenizer(config: TargetConfig) -> "PreTrainedTokenizerBase":
    """The target's tokenizer, padding on the left; EOS pads where the target names no padding token."""
    tokenizer = _load(config, transformers.AutoTokenizer.from_pretrained, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_target(config: TargetConfig, *, attn_implementation: str | None = None) -> "PreTrainedModel":
    """The target on its device or devices, in eval mode, its parameters frozen; weights come from safetensors only.

    attn_implementation: None takes the library's choice: PyTorch's attention where the class has it.
    Raises: ValueError if it cannot be loaded, or does not fit into the devices it is spread over.
    """
    from dspark.numerics import pack_linears  # torch is heavy, and must not load before a job has set its environment

    options = {"dtype": config.dtype, "attn_implementation": attn_implementation, "use_safetensors": True}
    if config.device_map is not None:
        _require_accelerate()
        options["device_map"] = config.device_map
    model: nn.Module = _load(config, transformers.AutoModelForCausalLM.from_pretrained, **options)
    if config.device_map is None:
        model = model.to(_device(config))
    _refuse_offloaded(model, config)
    model = model.eval().requires_grad_(False)
    pack_linears(model)
    return cast("PreTrainedModel", model)


def input_device(model: "nn.Module") -> "torch.device":
    """Where token ids go: to the embedding. The other layers may be elsewhere."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    device: torch.device = embedding.weight.device
    return device


def load_target_config(config: TargetConfig) -> "PreTrainedConfig":
    """The target's text config: of a multimodal target, that of its language model."""
    return _load_full_config(config).get_text_config(decoder=True)


def stop_token_ids(source: "TargetConfig | GenerationConfig", tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """Ids that end an answer: all that the generation config declares, else the tokenizer's EOS.

    `source` is a target's config or its loaded generation config. Raises: ValueError if there is none.
    """
    generation = _load_generation_config(source) if isinstance(source, TargetConfig) else source
    declared = generation.eos_token_id
    if declared is None:
        declared = tokenizer.eos_token_id
    ids = [declared] if isinstance(declared, int) else list(declared or [])
    if not ids:
        raise ValueError(
            f"target {tokenizer.name_or_path!r} declares no EOS token; "
            "add eos_token_id to its generation_config.json or eos_token to its tokenizer_config.json"
        )
    return tuple(dict.fromkeys(int(token_id) for token_id in ids))


def default_sampling(config: TargetConfig) -> dict[str, float | int]:
    """`temperature`, `top_p`, `top_k` that the target's generation config recommends; what it does not set is absent.

    The temperature is always there: 0 if the target does not sample by default, 1 if it samples and names none.
    """
    generation = _load_generation_config(config)
    if not generation.do_sample:
        return {"temperature": 0.0}
    found = {key: getattr(generation, key, None) for key in SAMPLING_KEYS}
    return {"temperature": 1.0} | {key: value for key, value in found.items() if value is not None}


def target_identity(config: TargetConfig) -> dict[str, Any]:
    """What tells this target from another, as plain JSON: recorded by each stage, compared by those after it.

    `revision` is the commit of a hub id, the wheel's SHA-256 of a bundled target, and None for a folder, which
    `config_sha256` and `weights_fingerprint` stand for instead.
    """
    source = resolve_target(config)
    text_config = load_target_config(config)
    tokenizer = load_tokenizer(config)
    is_folder = not config.name.startswith(PREFIX) and not _is_hub_id(config)
    return {
        "name": config.name,
        "revision": _revision(config),
        "config_sha256": file_sha256(Path(source) / "config.json") if is_folder else None,
        "weights_fingerprint": _weights_fingerprint(Path(source)) if is_folder else None,
        "tokenizer_sha256": _tokenizer_sha256(tokenizer),
        "chat_template_sha256": _chat_template_sha256(tokenizer),
        "vocab_size": text_config.vocab_size,
        "hidden_size": text_config.hidden_size,
        "num_hidden_layers": text_config.num_hidden_layers,
    }


def vocabulary_size(tokenizer: "PreTrainedTokenizerBase") -> int:
    """The highest token id in use, plus 1. A target may have more rows of logits: padding, and never emitted."""
    return max(tokenizer.get_vocab().values()) + 1


def _is_hub_id(config: TargetConfig) -> bool:
    """Anything that is neither bundled, nor written as a path, nor a folder that exists."""
    name = config.name
    looks_like_path = name.startswith(("/", "./", "../", "~")) or name in (".", "..") or name.count("/") > 1
    return not (name.startswith(PREFIX) or looks_like_path or Path(name).is_dir())


def _load_full_config(config: TargetConfig) -> "PreTrainedConfig":
    return _load(config, transformers.AutoConfig.from_pretrained)


def _load_generation_config(config: TargetConfig) -> "GenerationConfig":
    """What the target publishes, else what its model config implies, as `generate` itself would take it."""
    full_config = _load_full_config(config)
    try:
        return transformers.GenerationConfig.from_pretrained(resolve_target(config), revision=_git_name(config))
    except OSError:
        return transformers.GenerationConfig.from_model_config(full_config)


def _load(config: TargetConfig, from_pretrained: Callable[..., T], **options: Any) -> T:
    """`from_pretrained` of this target; its failures become one line that says what to change."""
    source = resolve_target(config)
    try:
        # Never None for trust_remote_code: transformers would ask on the terminal.
        return from_pretrained(
            source, revision=_git_name(config), trust_remote_code=config.trust_remote_code, **options
        )
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        if "trust_remote_code" in reason:
            raise ValueError(
                f"target {config.name!r} needs Python code from its own repository; "
                "set target.trust_remote_code=true if you trust it"
            ) from error
        raise ValueError(
            f"cannot load target {config.name!r}: {reason}; check target.name and target.revision"
        ) from error


def _require_accelerate() -> None:
    if importlib.util.find_spec("accelerate") is None:
        raise ValueError("target.device_map needs the accelerate package: pip install accelerate, or leave it out")


def _refuse_offloaded(model: "nn.Module", config: TargetConfig) -> None:
    """Raises: ValueError if weights were left in memory or on disk to be fetched for each step."""
    elsewhere = [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]
    if elsewhere:
        raise ValueError(
            f"target {config.name!r} does not fit into the devices it is spread over: {len(elsewhere)} weights, such "
            f"as {elsewhere[0]}, have no room; give each worker more devices (gpus_per_worker) or use a smaller dtype"
        )


def _git_name(config: TargetConfig) -> str:
    return config.revision or "main"


def _device(config: TargetConfig) -> str:
    import torch  # heavy: see load_target

    if config.device != "auto":
        return config.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _revision(config: TargetConfig) -> str | None:
    if config.name.startswith(PREFIX):
        return find_bundled(config.name).wheel_sha256
    if not _is_hub_id(config):
        return None
    # The hub's local folders are named for commits: snapshots/<commit>/config.json
    path = transformers.utils.cached_file(config.name, "config.json", revision=_git_name(config))
    return Path(path).parent.name if path else config.revision


def _tokenizer_sha256(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Of everything that decides which ids a text becomes; padding and truncation are the caller's, so left out."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        content: Any = [sorted(tokenizer.get_vocab().items()), tokenizer.special_tokens_map]
    else:
        content = json.loads(backend.to_str()) | {"padding": None, "truncation": None}
    return _sha256(json.dumps(content, sort_keys=True, default=str))


def _chat_template_sha256(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    template = tokenizer.chat_template
    if template is None:
        return None
    return _sha256(template if isinstance(template, str) else json.dumps(template, sort_keys=True))


def _weights_fingerprint(folder: Path) -> str:
    """Of the size of each weight file and a sample of its bytes, so that weights of any size take no time.

    Training changes nearly every number, so 64 pieces of 4 KiB spread over a file tell two checkpoints apart.
    """
    files = sorted(folder.glob("*.safetensors"))
    return fingerprint([[path.name, path.stat().st_size, _sampled_sha256(path)] for path in files])


def _sampled_sha256(path: Path, *, num_pieces: int = 64, piece_bytes: int = 4096) -> str:
    digest = hashlib.sha256()
    size = path.stat().st_size
    with open(path, "rb") as stream:
        for piece in range(num_pieces):
            stream.seek(size * piece // num_pieces)
            digest.update(stream.read(piece_bytes))
    return digest.hexdigest()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
