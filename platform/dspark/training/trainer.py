"""The driver's side of training: prepare the initial drafter, run Ray Train, publish the result."""

import logging
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import Tensor

from dspark.config import build_config
from dspark.data.sample_source import SampleSource
from dspark.drafters import TrainedDrafter
from dspark.drafters.base import final_state_id
from dspark.drafters.checkpoint import load_drafter, save_drafter
from dspark.drafters.initialize import AUTOREGRESSIVE, DrafterShape, drafter_config, new_drafter
from dspark.drafters.initialize_autoregressive import autoregressive_config, new_autoregressive_drafter
from dspark.drafters.moe import num_idle_parameters
from dspark.drafters.mtp_weights import target_mtp_drafter
from dspark.drafters.released import find_drafter, take_drafter
from dspark.errors import DsparkError, MissingInput
from dspark.provenance import git_revision, read_json, require_same, write_json
from dspark.storage import Location, locate, remove_tree
from dspark.targets import TargetConfig, load_target, load_tokenizer, target_identity, vocabulary_size
from dspark.training.config import TrainConfig
from dspark.training.loop import FINAL, train_worker
from dspark.training.samples import shared_samples, split_indices, with_layers
from dspark.transfer import staged

log = logging.getLogger("dspark.train")

REQUEST, RESULT, INITIAL, CHECKPOINTS = "request.json", "result.json", "initial", "checkpoints"
SOURCE = "source.json"  # in INITIAL: the drafter that training goes on from
# glibc gives freed tensors back to the system and faults them in again: a tenth of a step's time on a CPU.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "17179869184"}
# What a config may say of a drafter that training goes on from, and the field of its own that must agree.
KEPT_SHAPE = {
    "architecture": "architecture",
    "num_layers": "num_hidden_layers",
    "block_size": "block_size",
    "draft_vocab_size": "draft_vocab_size",
    "learned_mask_embedding": "learned_mask_embedding",
    "sliding_window": "sliding_window",
    "layer_types": "layer_types",
    "mlp_layer_types": "mlp_layer_types",
    "moe": "moe",
    "hyper_connections": "hyper_connections",
    "anchor_fusion": "anchor_fusion",
    "markov_rank": "markov_rank",
    "markov_head_type": "markov_head_type",
    "confidence_head": "enable_confidence_head",
    "dropout": "dropout",
    "num_modules": "num_modules",
}
# What may change between a run and its continuation without changing the result.
FREE_TO_CHANGE = {"tracking", "log_every", "max_worker_failures", "threads_per_worker", "keep_checkpoints"}


def train_request(config: TrainConfig, cache: SampleSource) -> dict[str, Any]:
    """What a run's result depends on; a continuation must ask for the same."""
    left_out = FREE_TO_CHANGE | {"output", "data"} | (set() if config.domains else {"domains"})
    return config.model_dump(mode="json", exclude=left_out) | {
        "cache_request": cache.request,
        "cache_samples": len(cache),
    }


def prepare(config: TrainConfig, cache: SampleSource, *, fresh: bool) -> Location:
    """Claim the output folder and write the initial drafter; returns its folder. Resumes what is there.

    Raises: Mismatch by field name when the folder holds another run.
    """
    output = locate(config.output)
    if fresh:
        for name in (CHECKPOINTS, INITIAL):
            remove_tree(output / name)
        for name in (REQUEST, RESULT, "history.jsonl", "mlflow_run.json"):
            (output / name).unlink(missing_ok=True)
    request = train_request(config, cache)
    if (output / REQUEST).is_file():
        require_same(
            f"training run {output}", request, read_json(output / REQUEST), remedy="use --fresh or another output"
        )
    else:
        # The request is written last: one that fails, by a wrong mask token for instance, claims no folder.
        _write_initial(config, cache, output / INITIAL)
        write_json(output / REQUEST, request)
    return output / INITIAL


def fit(
    config: TrainConfig, cache: SampleSource, initial: Location, *, tracking_uri: str, run_id: str | None
) -> dict[str, Any]:
    """Train through Ray; returns rank 0's closing figures. The drafter lies in `config.output` afterwards."""
    output = locate(config.output)
    run = {"initial": str(initial), "output": str(output), "tracking_uri": tracking_uri, "run_id": run_id}
    with shared_samples(config, cache) as samples:
        result: Any = _trainer(config, run | {"samples": samples}).fit()
    if result.return_value is None or result.checkpoint is None:
        raise DsparkError(f"training ended without a result; see the log above and {output / CHECKPOINTS}")
    with result.checkpoint.as_directory() as folder:
        return publish(config, cache, Path(folder) / FINAL, result.return_value)


def _trainer(config: TrainConfig, run: dict[str, Any]) -> TorchTrainer:
    return TorchTrainer(
        train_worker,  # type: ignore[arg-type]  # the hint forgets that rank 0's return value is kept
        train_loop_config={
            "config": config.model_dump(mode="json"),
            "run": run,
        },
        torch_config=TorchConfig(backend="nccl" if config.use_gpu else "gloo", timeout_s=600),
        scaling_config=ScalingConfig(
            num_workers=config.num_workers,
            use_gpu=config.use_gpu,
            resources_per_worker={"CPU": 1} | ({"GPU": 1} if config.use_gpu else {}),
        ),
        run_config=RunConfig(
            name=CHECKPOINTS,
            storage_path=str(locate(config.output)),
            failure_config=FailureConfig(max_failures=config.max_worker_failures),
            checkpoint_config=CheckpointConfig(num_to_keep=config.keep_checkpoints),
            worker_runtime_env={"env_vars": KEEP_FREED_MEMORY},  # type: ignore[call-arg]  # the hint is of Train's v1
        ),
    )


def publish(config: TrainConfig, cache: SampleSource, final: Path, figures: dict[str, Any]) -> dict[str, Any]:
    """Copy the trained drafter into the output folder with its provenance; returns the stage's result."""
    output = locate(config.output)
    write_json(
        output / "provenance.json",
        {
            "target": cache.request["target"],
            "target_config": cache.target_config,
            "chat": cache.request["chat"],
            "answers_fingerprint": cache.request["answers_fingerprint"],
            "git_revision": git_revision(),
            "training": config.model_dump(mode="json"),
        }
        | ({"initialized_from": read_json(source)} if (source := output / INITIAL / SOURCE).is_file() else {}),
    )
    for name in ("model.safetensors", "config.json"):
        with staged(output / name) as temporary:
            shutil.copyfile(final / name, temporary)
    parameters = count_parameters(output)
    result = {"stage": "train", "output": config.output} | cache.origin | figures | parameters
    write_json(output / RESULT, result)
    return result


def count_parameters(folder: Location) -> dict[str, int]:
    """Trainable and frozen (embedding, head) parameters of a stored drafter.

    active_parameters: the trainable ones that a token passes through, of all experts those it chooses.
    """
    drafter = load_drafter(folder, trainable=True)
    trainable = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in drafter.parameters()) - trainable
    return {
        "parameters": trainable,
        "active_parameters": trainable - num_idle_parameters(drafter),
        "frozen_parameters": frozen,
    }


def _write_initial(config: TrainConfig, cache: SampleSource, folder: Location) -> None:
    if config.initialize_from is not None:
        _go_on_from(config, cache, folder)
        return
    target_config = build_config(TargetConfig, cache.target_config)
    require_same(
        f"target {target_config.name} of the {cache.description}",
        target_identity(target_config),
        cache.request["target"],
        remedy="make the cache again with jobs/cache.py --fresh",
    )
    train = split_indices(config, cache, "train")
    if not train:
        raise DsparkError(f"{cache.description} has no samples to train on; check the prompts' splits and domains")
    save_drafter(_new_drafter(config, cache, target_config), folder, dtype=torch.float32)


def _new_drafter(config: TrainConfig, cache: SampleSource, target_config: TargetConfig) -> TrainedDrafter:
    """An untrained drafter of the shape that was asked for, for the layers of the target that it reads."""
    target, tokenizer = load_target(target_config), load_tokenizer(target_config)
    train = split_indices(config, cache, "train")
    num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
    if config.drafter.from_target:
        asked = config.drafter.block_size if "block_size" in config.drafter.model_fields_set else None
        drafter = target_mtp_drafter(target, valid_vocab_size=vocabulary_size(tokenizer), block_size=asked)
        require_final_states(cache, drafter.target_layer_ids, num_layers)
        with_layers(cache, drafter.target_layer_ids)
        return drafter
    layer_ids = training_layer_ids(config.drafter, cache, num_layers)
    options: dict[str, Any] = {"target_layer_ids": layer_ids, "valid_vocab_size": vocabulary_size(tokenizer)}
    shape: Any
    if config.drafter.architecture in AUTOREGRESSIVE:
        shape = autoregressive_config(config.drafter, target.config, position_decay=config.position_decay, **options)
    else:
        shape = drafter_config(config.drafter, target.config, tokenizer, **options)
    captured = with_layers(cache, layer_ids)
    captured.expect([train[:4]])
    build = new_autoregressive_drafter if config.drafter.architecture in AUTOREGRESSIVE else new_drafter
    return build(
        shape,
        target,
        draft_to_target=most_frequent_tokens(cache, train, shape.draft_vocab_size, shape.valid_vocab_size),
        sample_features=torch.cat([captured.load(index).hidden for index in train[:4]]).float(),
        warm_start=config.drafter.warm_start,
        seed=config.seed,
    )


def training_layer_ids(shape: DrafterShape, cache: SampleSource, num_layers: int) -> tuple[int, ...]:
    """What a drafter reads of the captured states: MTP one at the final norm, the others all layers."""
    if shape.architecture == "mtp":
        wanted = (final_state_id(shape.hidden_state, num_layers),)
    else:
        captured = cache.request["target_layer_ids"]
        wanted = tuple(i for i in captured if i < num_layers)
        if not wanted:
            raise MissingInput(
                f"{cache.description} holds states {captured} of the target, none of which is that of a decoder layer; "
                f"set target_layer_ids in jobs/cache.py's config for architecture {shape.architecture}"
            )
    require_final_states(cache, wanted, num_layers)
    return wanted


def require_final_states(cache: SampleSource, layer_ids: tuple[int, ...], num_layers: int) -> None:
    """Raises: MissingInput when the state at the final norm that MTP reads is not captured."""
    for name in ("before_norm", "after_norm"):
        state_id = final_state_id(name, num_layers)
        if state_id in layer_ids and state_id not in cache.request["target_layer_ids"]:
            raise MissingInput(
                f"{cache.description} comes without the target's state {name.replace('_', ' the final ')} at every "
                f"token, which MTP reads; set final_states=[{name}] in jobs/cache.py's config and capture again, or "
                "online in data"
            )


def _go_on_from(config: TrainConfig, cache: SampleSource, folder: Location) -> None:
    """Write the drafter of `initialize_from` as the initial one. Raises: Mismatch where it does not fit the states."""
    source = find_drafter(str(config.initialize_from), config.initialize_revision)
    target_config = build_config(TargetConfig, cache.target_config)
    shape = take_drafter(source, target_config, cache.request["target"], folder)
    captured = list(cache.request["target_layer_ids"])
    if config.cache is None or not set(shape.target_layer_ids) <= set(captured):
        require_same(
            f"drafter {source.name} and {cache.description}",
            {"target_layer_ids": captured},
            {"target_layer_ids": list(shape.target_layer_ids)},
            remedy="make the cache again, or capture online, with the drafter's target_layer_ids",
        )
    given = config.drafter.model_dump(include=config.drafter.model_fields_set & KEPT_SHAPE.keys())
    given = {name: value for name, value in given.items() if value != ()}  # no layer is named
    kept = shape.model_dump()
    found = {name: kept.get(KEPT_SHAPE[name]) for name in given}
    if "hidden_state" in config.drafter.model_fields_set:
        num_layers = shape.num_target_layers
        given["target_layer_ids"] = [final_state_id(config.drafter.hidden_state, num_layers)]
        found["target_layer_ids"] = list(shape.target_layer_ids)
    if given.get("draft_vocab_size", 0) is None:
        given["draft_vocab_size"] = shape.valid_vocab_size
    require_same(
        f"drafter {source.name} and the config's drafter", given, found, remedy="leave it out: its shape is kept"
    )
    write_json(folder / SOURCE, source.to_dict())
    log.warning(
        "training goes on from %s; confidences change with it, so calibrations of that drafter do not hold for the new "
        "one: run jobs/calibrate.py afterwards",
        source.name,
    )


def most_frequent_tokens(cache: SampleSource, indices: list[int], count: int, vocabulary: int) -> Tensor:
    """Ascending ids of the `count` most frequent answer tokens: [count] int64. Says how much they cover.

    Ties and unseen tokens go by id, so the map depends on the data alone.
    """
    seen: Counter[int] = Counter()
    for index in indices:
        input_ids, loss_mask = cache.tokens(index)
        seen.update(input_ids[loss_mask.bool()].tolist())
    ranked = sorted(range(vocabulary), key=lambda token: (-seen[token], token))[:count]
    covered = sum(seen[token] for token in ranked) / max(1, sum(seen.values()))
    log.info("draft vocabulary: %d of %d tokens cover %.2f %% of the answers", count, vocabulary, 100 * covered)
    return torch.tensor(sorted(ranked))
