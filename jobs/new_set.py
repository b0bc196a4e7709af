"""Write the configs and the deployment of a new target and its prompts: one folder that jobs/pipeline.py runs."""

import logging
import math
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pydantic
import yaml
from pydantic import Field

import runner
from dspark.config import Config
from dspark.data.prompts import PromptSource, read_prompts
from dspark.errors import Mismatch
from dspark.targets import TargetConfig, load_target_config, load_tokenizer, stop_token_ids

STAGES = ("generate", "cache", "train", "evaluate", "calibrate", "profile_engine", "benchmark", "ask")
ENOUGH_ANSWERS = 1_200  # fewer prompts are answered several times: more answers are worth more than more steps
MOST_ANSWERS_PER_PROMPT = 5
HELDOUT_PROMPTS = 60  # wanted for figures, as long as they are no more than a quarter
PASSES = ((10_000, 7), (100_000, 4), (math.inf, 2))  # over the training answers, by how many there are
REDUCED_VOCABULARY = 8_192
TOKENS_PER_ANSWER = 400  # prompt included, for the size of the cache

log = logging.getLogger("dspark.new_set")


class NewSetConfig(Config):
    """A target, its prompts, and a name for what is made of them."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Of the folders configs/NAME and runs/NAME and of deployments/NAME.yaml."""
    target: TargetConfig
    prompts: list[PromptSource] = Field(min_length=1)
    """Files of prompts as users ask them; jobs/generate.py has the target answer them. A bare path is a source whose
    `split` is decided by a hash of each id: a share is held out for all figures, and never trained on."""
    answers_per_prompt: int | None = Field(None, ge=1)
    """None: as many as make a thousand answers or so of few prompts, at most five."""
    steps: int | None = Field(None, ge=1)
    """Training steps; None goes over the answers two to seven times, the fewer the more there are."""
    based_on: str = "configs/demo"
    """The set that everything else is taken from."""
    deployment: str = "deployments/colocated.yaml"
    """The same for the deployment."""
    seed: int = 0

    @pydantic.field_validator("prompts", mode="before")
    @classmethod
    def _paths_are_sources(cls, value: Any) -> Any:
        """A bare path in the place of a source."""
        listed = [value] if isinstance(value, str) else value
        return [{"path": one} if isinstance(one, str) else one for one in listed] if isinstance(listed, list) else value


def run(config: NewSetConfig, *, fresh: bool = False, dry_run: bool = False) -> dict[str, Any]:
    """Write the set; returns what was chosen. Raises: Mismatch if there is one of that name and not `fresh`."""
    folder, deployment = Path("configs", config.name), Path("deployments", f"{config.name}.yaml")
    chosen = choose(config)
    for name, value in chosen.items():
        print(f"{name:24}{value}", flush=True)
    files = {folder / f"{stage}.yaml": changed(config, chosen, stage) for stage in STAGES}
    files[folder / "pipeline.yaml"] = {"output": f"runs/{config.name}"} | {
        stage: str(folder / f"{stage}.yaml") for stage in STAGES
    }
    files[deployment] = changed_deployment(config, chosen)
    result = {"stage": "new_set", "files": [str(path) for path in files], **chosen}
    if dry_run:
        return result | {"dry_run": True}
    texts = {path: _text(path, content, config) for path, content in files.items()}
    if not fresh and (other := [p for p, text in texts.items() if p.exists() and p.read_text("utf-8") != text]):
        raise Mismatch(f"{other[0]} is there and differs; use --fresh to replace the set, or another name")
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    print(f"\nnext:  python jobs/pipeline.py --config {folder / 'pipeline.yaml'}\nthen:  serve run {deployment}\n")
    return result


def choose(config: NewSetConfig) -> dict[str, Any]:
    """What depends on the target, the number of prompts and this machine."""
    fraction = heldout_fraction(config)
    found = read_prompts(config.prompts, seed=config.seed, heldout_fraction=fraction)
    num_train = sum(prompt.split == "train" for prompt in found.prompts)
    if num_train in (0, len(found.prompts)):
        kind = "train" if num_train == 0 else "held out"
        raise ValueError(
            f"none of the {len(found.prompts)} prompts is {kind}; leave prompts[].split out, or name files of both"
        )
    wanted = max(1, min(MOST_ANSWERS_PER_PROMPT, ENOUGH_ANSWERS // num_train))
    repeats = config.answers_per_prompt or wanted
    answers = num_train * repeats
    passes = next(number for limit, number in PASSES if answers <= limit)
    per_step = _read(Path(config.based_on, "train.yaml"))["sequences_per_step"]
    target = load_target_config(config.target)
    layers = spread_layers(target.num_hidden_layers)
    has_gpu = runner.has_gpu()
    cores = os.cpu_count() or 1
    token_bytes = (len(layers) + 1) * target.hidden_size * 2 + 16
    return {
        "prompts": len(found.prompts),
        "rejected": found.rejected_by_reason,
        "held out": len(found.prompts) - num_train,
        "heldout_fraction": fraction,
        "answers_per_prompt": repeats,
        "steps": config.steps or max(20, round(passes * answers / per_step)),
        "target_layer_ids": layers,
        "mask_token": unused_token(config.target, target.vocab_size),
        "draft_vocab_size": None if has_gpu or target.vocab_size <= 2 * REDUCED_VOCABULARY else REDUCED_VOCABULARY,
        "max_cache_bytes": cache_bytes(answers * TOKENS_PER_ANSWER * token_bytes),
        "max_length": min(2048, int(getattr(target, "max_position_embeddings", 2048))),
        "num_workers": _num_gpus() if has_gpu else min(2, cores),
        "threads": max(1, cores),
    }


def heldout_fraction(config: NewSetConfig) -> float:
    """A twentieth of the prompts, more of few, but no more than a quarter."""
    num_prompts = len(read_prompts(config.prompts, seed=config.seed, heldout_fraction=0.0).prompts)
    return round(min(0.25, max(0.05, HELDOUT_PROMPTS / max(1, num_prompts))), 4)


def spread_layers(num_layers: int) -> list[int]:
    """Five layers from the second to the third from the end, as the released drafters read; fewer of a short target."""
    last = max(1, num_layers - 3)
    return sorted({round(1 + (last - 1) * i / 4) for i in range(5)} & set(range(num_layers - 1))) or [0]


def unused_token(target: TargetConfig, vocab_size: int) -> str | int:
    """A token that the target never writes: its mask token, another special one, a row beyond the tokenizer's tokens,
    or else the last token of all.
    """
    tokenizer = load_tokenizer(target)
    if tokenizer.mask_token is not None:
        return str(tokenizer.mask_token)
    template = str(tokenizer.chat_template or "")
    taken = {*stop_token_ids(target, tokenizer), tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id}
    for token_id, token in sorted(tokenizer.added_tokens_decoder.items(), reverse=True):
        if token.special and token_id not in taken and token.content not in template and token_id < vocab_size:
            return str(token.content)
    return (
        len(tokenizer)
        if len(tokenizer) < vocab_size
        else next(i for i in reversed(range(vocab_size)) if i not in taken)
    )


def cache_bytes(expected: int) -> int:
    """Half as much again as is expected, at most half of what the disk has free."""
    return int(max(100_000_000, min(1.5 * expected, shutil.disk_usage(".").free / 2)))


def changed(config: NewSetConfig, chosen: dict[str, Any], stage: str) -> dict[str, Any]:
    """A stage's config of the set that this one is based on, for the new target and prompts."""
    content = _read(Path(config.based_on, f"{stage}.yaml"))
    content = _with_paths(content, f"runs/{Path(config.based_on).name}", f"runs/{config.name}")
    content |= {"tracking": {"experiment": f"dspark-{config.name}", "run_name": stage}}
    if "target" in content:
        content["target"] = content["target"] | config.target.model_dump(exclude_unset=True)
    for name in ("num_workers", "threads"):
        if name in content:
            content[name] = chosen[name]
    return CHANGES.get(stage, _with_heldout)(config, chosen, content)


def _generate(config: NewSetConfig, chosen: dict[str, Any], content: dict[str, Any]) -> dict[str, Any]:
    sources = [_source(one) for one in config.prompts]
    again = [
        one | {"id_suffix": f"{one.get('id_suffix', '')}~{number}"}
        for number in range(2, chosen["answers_per_prompt"] + 1)
        for one in sources
        if one.get("split") != "heldout"
    ]
    return content | {
        "prompts": sources + again,
        "heldout_fraction": chosen["heldout_fraction"],
        "limit": None,
        "seed": config.seed,
    }


def _cache(config: NewSetConfig, chosen: dict[str, Any], content: dict[str, Any]) -> dict[str, Any]:
    return content | {name: chosen[name] for name in ("target_layer_ids", "max_cache_bytes", "max_length")}


def _train(config: NewSetConfig, chosen: dict[str, Any], content: dict[str, Any]) -> dict[str, Any]:
    drafter = content["drafter"] | {name: chosen[name] for name in ("mask_token", "draft_vocab_size")}
    quarter = max(1, chosen["steps"] // 4)
    every = {"steps": chosen["steps"], "checkpoint_every": quarter, "validate_every": quarter}
    return content | {"drafter": drafter} | every


def _with_heldout(config: NewSetConfig, chosen: dict[str, Any], content: dict[str, Any]) -> dict[str, Any]:
    """Stages that measure: on the held-out prompts of all domains."""
    if "prompts" in content:
        content["prompts"] = [_source(one) for one in config.prompts]
        content["heldout_fraction"] = chosen["heldout_fraction"]
    content.pop("domains", None)
    return content


def _ask(config: NewSetConfig, chosen: dict[str, Any], content: dict[str, Any]) -> dict[str, Any]:
    found = read_prompts(config.prompts, seed=config.seed, heldout_fraction=chosen["heldout_fraction"]).prompts
    asked = [prompt for prompt in found if prompt.split == "heldout"][:3]
    questions = [next(m["content"] for m in one.messages if m["role"] == "user") for one in asked]
    return content | {"deployment": f"deployments/{config.name}.yaml", "questions": questions}


CHANGES: dict[str, Callable[..., dict[str, Any]]] = {
    "generate": _generate,
    "cache": _cache,
    "train": _train,
    "ask": _ask,
}


def changed_deployment(config: NewSetConfig, chosen: dict[str, Any]) -> dict[str, Any]:
    """The deployment for the new target and its drafter."""
    content = _read(Path(config.deployment))
    (application,) = content["applications"]
    arguments = application["args"]
    arguments["target"] = arguments["target"] | config.target.model_dump(exclude_unset=True)
    arguments |= {
        "drafter": f"runs/{config.name}/drafter",
        "served_model_name": config.target.name.rstrip("/").rpartition("/")[2],
        "threads": chosen["threads"],
    }
    return content


def _source(source: PromptSource) -> dict[str, Any]:
    return source.model_dump(exclude_unset=True, mode="json")


def _with_paths(value: Any, old: str, new: str) -> Any:
    """The content with one folder in place of another in every path."""
    if isinstance(value, dict):
        return {key: _with_paths(one, old, new) for key, one in value.items()}
    if isinstance(value, list):
        return [_with_paths(one, old, new) for one in value]
    is_inside = isinstance(value, str) and (value == old or value.startswith(f"{old}/"))
    return new + value[len(old) :] if is_inside else value


def _text(path: Path, content: dict[str, Any], config: NewSetConfig) -> str:
    title = f"{path.stem} of {config.name}: {config.target.name}. Written by jobs/new_set.py, to be changed by you."
    return f"# {title}\n{yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=110)}"


def _read(path: Path) -> dict[str, Any]:
    """Raises: ValueError where the set to start from has no such file."""
    if not path.is_file():
        raise ValueError(f"{path} not found; set based_on and deployment to what is to be started from")
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content


def _num_gpus() -> int:
    import torch  # heavy, and must not load before the environment is set

    return torch.cuda.device_count()


if __name__ == "__main__":
    sys.exit(runner.main(NewSetConfig, run, default_config="new_set.yaml"))
