"""A drafter that was trained elsewhere or earlier: found, checked against a target, and written as one of ours.

Legend: V target vocabulary, d hidden.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dspark.chat import ChatConfig
from dspark.config import Config
from dspark.drafters import AnyDrafterConfig
from dspark.drafters.checkpoint import from_deepspec
from dspark.drafters.stored import CONFIG, EMBEDDING, HEAD, WEIGHTS, StoredDrafter, check_tensors, read_stored
from dspark.errors import MissingInput, one_line
from dspark.provenance import file_sha256, require_same, write_json
from dspark.storage import Location, is_remote
from dspark.targets import TargetConfig, load_target, load_tokenizer, vocabulary_size
from dspark.tracking import TrackingConfig
from dspark.transfer import local_folder, staged

SAFE_FILES = ("config.json", "model.safetensors")


class AdoptConfig(Config):
    """The adopt stage: a drafter trained elsewhere becomes one that can be profiled, calibrated and served."""

    drafter: str
    """A folder with `config.json` and `model.safetensors` in DeepSpec's form, or a hub id of one."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; None takes the hub's default."""
    target: TargetConfig
    """The target it was trained for."""
    chat: ChatConfig = ChatConfig()
    """How messages become a prompt: as in the drafter's training, or it will be accepted less."""
    output: str
    """Becomes the drafter's folder."""
    tracking: TrackingConfig = TrackingConfig()


@dataclass(frozen=True)
class Source:
    """Where a drafter was taken from. name: as it was asked for; revision: commit of a hub id, else None."""

    name: str
    folder: Path
    revision: str | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields, with the digests of what was read."""
        digests = {name: file_sha256(self.folder / name) for name in SAFE_FILES}
        return {"name": self.name, "revision": self.revision, "sha256": digests}


def find_drafter(name: str, revision: str | None = None) -> Source:
    """A folder, or a hub id such as deepseek-ai/dspark_qwen3_4b_block7, of which config and safetensors are fetched.

    Raises: MissingInput when it is neither, or cannot be fetched; ValueError for a revision of a folder.
    """
    if is_remote(name) and revision is None:
        return Source(name, local_folder(name, SAFE_FILES), None)
    folder = Path(name).expanduser()
    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") != 1
    if folder.is_dir() or looks_like_path:
        if revision is not None:
            raise ValueError(f"revision = {revision!r}, but {name!r} is no hub id; leave it out")
        return Source(name, folder, None)
    import huggingface_hub  # heavy, and not needed for a folder

    try:
        fetched = huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=list(SAFE_FILES))
    except (OSError, ValueError) as error:  # all of the hub's own are one of these
        raise MissingInput(
            f"no drafter {name}: no such folder, and the hub did not give it ({one_line(error, max_chars=160)}); "
            "check the name, or fetch it where there is a network and give its folder"
        ) from error
    # The hub's local folders are named for commits: snapshots/<commit>
    return Source(name, Path(fetched), Path(fetched).name)


def take_drafter(source: Source, target: TargetConfig, identity: dict[str, Any], folder: Location) -> AnyDrafterConfig:
    """Write `config.json` and `model.safetensors` of a drafter that fits the target into `folder`.

    Embedding and head that its file leaves to the target are filled in, ids that the tokenizer does not have are
    barred from being drafted. identity: as `target_identity` gives it.
    Raises: Mismatch by field name when it does not fit; ValueError for a form that is not known.
    """
    given = read_stored(source.folder)
    stored = _limit_vocabulary(given, vocabulary_size(load_tokenizer(target)))
    config = from_deepspec(stored.content)
    require_fit(config, identity, f"drafter {source.name} and target {target.name}")
    stored = _complete(stored, config, target)
    check_tensors(stored, source.folder)
    folder.mkdir(parents=True, exist_ok=True)
    with staged(folder / WEIGHTS) as temporary:
        save_file(stored.tensors, str(temporary), metadata={"format": "pt"})
        temporary.chmod(0o644)
    write_json(folder / CONFIG, stored.content)
    return config


def require_fit(config: AnyDrafterConfig, identity: dict[str, Any], what: str) -> None:
    """Raises: Mismatch naming the first size in which drafter and target differ."""
    found = {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_target_layers,
    }
    expected = {name: identity[name] for name in found}
    require_same(what, expected, found, remedy="use a drafter that was trained for this target")


def _limit_vocabulary(stored: StoredDrafter, num_tokens: int) -> StoredDrafter:
    """The public format has no word for rows that are padding; ours has."""
    vocab_size = stored.content.get("vocab_size", 0)
    if "valid_vocab_size" in stored.content or not num_tokens < vocab_size:
        return stored
    return StoredDrafter(stored.content | {"valid_vocab_size": num_tokens}, stored.tensors)


def _complete(stored: StoredDrafter, config: AnyDrafterConfig, target: TargetConfig) -> StoredDrafter:
    """With the target's own embedding and head where the file has none, as it may for vLLM and SGLang."""
    missing = {EMBEDDING, HEAD} - stored.tensors.keys()
    if not missing or (HEAD in missing and config.has_reduced_vocabulary):
        return stored  # the check of tensors names what cannot be filled in
    model: Any = load_target(target)
    dtype = next(iter(stored.tensors.values())).dtype
    frozen: dict[str, Tensor] = {}
    for name, module in ((EMBEDDING, model.get_input_embeddings()), (HEAD, model.get_output_embeddings())):
        if name in missing:
            # Cloned: where the target ties the two, the file may not hold one memory under two names.
            frozen[name] = module.weight.detach().to("cpu", dtype if dtype.is_floating_point else torch.float32).clone()
    return StoredDrafter(stored.content, stored.tensors | frozen)
