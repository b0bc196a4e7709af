"""An engine from what lies on disk: target, drafter, calibration and cost curve, checked against each other."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from dspark.drafters import TrainedDrafter
from dspark.drafters.autoregressive import AutoregressiveDrafter
from dspark.drafters.checkpoint import load_drafter
from dspark.drafters.mtp_weights import target_mtp_drafter
from dspark.drafters.ngram import NGramDrafter
from dspark.engine.capacity import with_capacity
from dspark.engine.config import EngineConfig
from dspark.engine.dense_target_runner import DenseTargetRunner, dense_bytes_per_token
from dspark.engine.draft_runner import DraftRunner, NGramDraftRunner
from dspark.engine.drafter_folder import (
    CALIBRATION,
    COST_CURVE,
    DRAFTER_FILES,
    NGRAM,
    TARGET_MTP,
    WITHOUT_FOLDER,
    check_drafter,
    draft_identity,
    drafter_sha256,
    is_drafter_folder,
)
from dspark.engine.engine import Engine
from dspark.engine.graphs import use_graphs, wants_graphs
from dspark.engine.hidden_states import check_layer_ids
from dspark.engine.paged_autoregressive_runner import PagedAutoregressiveRunner
from dspark.engine.paged_draft_runner import PagedDraftRunner
from dspark.engine.remote_draft_runner import RemoteDraftRunner
from dspark.engine.remote_drafts import RemoteDrafts
from dspark.engine.self_profile import profile
from dspark.engine.target import Target
from dspark.engine.target_runner import NotPageable, TargetRunner, kv_bytes_per_token
from dspark.errors import MissingInput
from dspark.numerics import pack_linears
from dspark.speculation.calibration import Calibration
from dspark.speculation.cost_curve import CostCurve, hardware_fingerprint, read_curves
from dspark.targets import (
    TargetConfig,
    load_target,
    load_target_config,
    load_tokenizer,
    stop_token_ids,
    vocabulary_size,
)
from dspark.transfer import local_folder

LENGTH_WITHOUT_CURVE = 3

log = logging.getLogger("dspark.engine")


@dataclass(frozen=True)
class LoadedEngine:
    """An engine ready to step, and what belongs to it. notes: what a user should know, a line each."""

    engine: Engine
    target: Target
    tokenizer: Any
    stop_ids: frozenset[int]
    provenance: dict[str, Any] | None
    notes: list[str] = field(default_factory=list)


def load_engine(
    target: TargetConfig,
    drafter: str | None,
    *,
    config: EngineConfig,
    num_threads: int = 1,
    length_without_curve: int = LENGTH_WITHOUT_CURVE,
    is_missing_drafter_ok: bool = False,
    profiles: bool = False,
    shared: LoadedEngine | None = None,
    remote: RemoteDrafts | None = None,
) -> LoadedEngine:
    """drafter: a folder made by jobs/train.py, "ngram" for prompt lookup, "mtp" for the MTP modules that the target
    brings along, or None for plain decoding.

    Its calibration.json and cost_curve.json are used where they are there, unless config.verify_length leaves them
    nothing to decide; what is missing is said in the notes. A curve is that of this hardware and this number of
    threads; profiles: where there is none, take the seconds to measure one. is_missing_drafter_ok: n-gram speculation
    instead of an error when the folder holds no drafter. shared: an engine on the same target, whose weights this one
    takes too; the two must not step at the same time. remote: the way to a draft replica that a trained drafter runs
    on, in place of this process.
    Raises: MissingInput without a drafter; Mismatch when drafter, target and calibration do not belong together.
    """
    torch.set_num_threads(num_threads)
    notes: list[str] = []
    drafter = _local_drafter(drafter, notes, is_missing_ok=is_missing_drafter_ok)
    provenance = None if drafter in WITHOUT_FOLDER else check_drafter(str(drafter), target)
    tokenizer, model, stop_ids = _load_target(target) if shared is None else _target_of(shared)
    drafts: DraftRunner | None
    if remote is not None and provenance is not None:
        config = _sized(config, model, None)
        identity = draft_identity(str(drafter), target)
        drafts = remote.runner(str(drafter), identity=identity, engine=config, dtype=model.dtype, device=model.device)
    else:
        loaded = _load_drafter(drafter, model, vocabulary_size(tokenizer))
        config = _sized(config, model, loaded)
        drafts = _draft_runner(loaded, config)
    if drafts is not None and drafts.target_layer_ids:
        check_layer_ids(drafts.target_layer_ids, load_target_config(target).num_hidden_layers)
    curve, calibration = None, None
    if provenance is not None and config.verify_length is None:  # a fixed length asks neither
        curve = _curve(Path(str(drafter)), model, num_threads, target.name, notes)
        calibration = _calibration(Path(str(drafter)), notes)
        if drafts is not None and not drafts.has_confidence:
            notes.append(f"drafter {drafter} has no confidence head: survival is estimated from past rounds")
    if isinstance(drafts, RemoteDraftRunner):
        drafts.curve = curve  # no guessed one: its deadline would drop what comes later than guessed
    runner = target_runner(model, drafts, config=config, vocabulary_size=vocabulary_size(tokenizer), notes=notes)
    if drafts is not None and curve is None and config.verify_length is None:
        if profiles:
            wanted = hardware_fingerprint(model.device, model.dtype, num_threads, target.name)
            curve = profile(runner, drafts, config, fingerprint=wanted)
        if curve is not None and isinstance(drafts, RemoteDraftRunner):
            curve = curve.with_guessed_drafting(read_curves(Path(str(drafter)) / COST_CURVE))
            notes.append("what drafting costs elsewhere is guessed, until steps have shown it")
        config = _with_length(config, curve, min(length_without_curve, drafts.block_size), notes)
    for note in notes:
        log.warning(note)
    engine = Engine(runner, drafts, tokenizer, config=config, curve=curve, calibration=calibration)
    return LoadedEngine(engine, runner, tokenizer, stop_ids, provenance, notes)


def _local_drafter(drafter: str | None, notes: list[str], *, is_missing_ok: bool) -> str | None:
    """The drafter, its folder on this machine; n-grams where it is not there and need not be."""
    if drafter in WITHOUT_FOLDER:
        return drafter
    if is_missing_ok and not is_drafter_folder(str(drafter)):
        notes.append(
            f"no trained drafter at {drafter}: n-gram speculation instead; train one with python jobs/train.py"
        )
        return NGRAM
    return str(local_folder(str(drafter), (*DRAFTER_FILES, CALIBRATION, COST_CURVE)))


def _with_length(config: EngineConfig, curve: CostCurve | None, length: int, notes: list[str]) -> EngineConfig:
    """The config where no curve was found: with one that was measured just now as it is, else with a fixed length."""
    if curve is not None:
        notes.append("a rough cost curve was measured at the start")
        return config
    notes.append(f"no cost curve: every step verifies {length} draft tokens, whatever the load")
    return config.with_changes(verify_length=length, lagged_capacity=False)


def target_runner(
    model: Any,
    drafts: DraftRunner | None = None,
    *,
    config: EngineConfig,
    vocabulary_size: int,
    notes: list[str] | None = None,
) -> Target:
    """The runner that serves a target: in pages, or where those do not fit, each request with a cache of its own.

    drafts: what captures its states and attends as it does. On CUDA decode steps are replayed as graphs where config
    lets them. notes: takes a line where there are no pages.
    Raises: ValueError naming the target's class where neither serves.
    """
    is_replayed = wants_graphs(config, model.device.type)
    shape: dict[str, Any] = {
        "vocabulary_size": vocabulary_size,
        "layer_ids": () if drafts is None else drafts.target_layer_ids,
        "num_pages": config.num_pages,
        "page_size": config.page_size,
    }
    # Entries of GPUs compute rows together, whose sums then depend on the company: the reference takes each alone.
    attention = "torch" if config.deterministic and model.device.type == "cuda" else None
    runner: Target
    try:
        runner = paged = TargetRunner(model, attention=attention, has_scratch_page=is_replayed, **shape)
        if isinstance(drafts, PagedDraftRunner | PagedAutoregressiveRunner):
            drafts.use_attention(paged.attention.name)
    except NotPageable as refusal:
        runner = DenseTargetRunner(model, **shape)
        if notes is not None:
            notes.append(
                f"{refusal.reason}: it does not run in pages; each request has a cache and a forward pass of its own "
                "instead, which is slower, and there is no prefix cache"
            )
    if is_replayed:
        use_graphs(runner, config, num_ahead=config.num_ahead(0 if drafts is None else drafts.block_size))
    return runner


def _load_target(target: TargetConfig) -> tuple[Any, Any, frozenset[int]]:
    tokenizer, model = load_tokenizer(target), load_target(target)
    stop_ids = frozenset(stop_token_ids(model.generation_config, tokenizer))
    model.generation_config = transformers.GenerationConfig()  # what the target recommends is the caller's business
    return tokenizer, model, stop_ids


def _target_of(shared: LoadedEngine) -> tuple[Any, Any, frozenset[int]]:
    return shared.tokenizer, shared.target.model, shared.stop_ids


def plain_twin(loaded: LoadedEngine) -> Engine:
    """The same target without a drafter, its weights shared, its KV memory its own: what speculation is timed against.

    The two must not step at the same time.
    """
    target, config = loaded.target, loaded.engine.config
    config = config.with_changes(verify_length=None, lookup=None)
    runner = target_runner(target.model, config=config, vocabulary_size=target.vocabulary_size)
    return Engine(runner, None, loaded.tokenizer, config=config)


def _load_drafter(drafter: str | None, model: Any, vocabulary: int) -> NGramDrafter | TrainedDrafter | None:
    if drafter is None:
        return None
    if drafter == NGRAM:
        return NGramDrafter()
    # The drafter computes in the target's type: its inputs are the target's own states.
    if drafter == TARGET_MTP:
        loaded = target_mtp_drafter(model, valid_vocab_size=vocabulary).to(model.device, model.dtype)
        pack_linears(loaded)
        return loaded
    return load_drafter(drafter, dtype=model.dtype, device=str(model.device))


def _sized(config: EngineConfig, model: Any, drafter: NGramDrafter | TrainedDrafter | None) -> EngineConfig:
    """The config with the KV memory's size in tokens."""
    if config.kv_memory_bytes is None:
        return config
    try:
        target_bytes = kv_bytes_per_token(model)
    except NotPageable:
        target_bytes = dense_bytes_per_token(model)
    if drafter is None or isinstance(drafter, NGramDrafter):
        return with_capacity(config, target_bytes=target_bytes)
    one_token = paged_runner(drafter, num_pages=1, page_size=1)
    return with_capacity(
        config,
        target_bytes=target_bytes,
        drafter_bytes=one_token.kv_cache.num_bytes,
        request_bytes=one_token.bytes_per_request,
    )


def _draft_runner(drafter: NGramDrafter | TrainedDrafter | None, config: EngineConfig) -> DraftRunner | None:
    if drafter is None:
        return None
    if isinstance(drafter, NGramDrafter):
        return NGramDraftRunner(drafter)
    return paged_runner(drafter, num_pages=config.num_pages, page_size=config.page_size)


def paged_runner(
    drafter: TrainedDrafter, *, num_pages: int, page_size: int
) -> PagedDraftRunner | PagedAutoregressiveRunner:
    """The runner of a drafter's kind, its context in pages."""
    if isinstance(drafter, AutoregressiveDrafter):
        return PagedAutoregressiveRunner(drafter, num_pages=num_pages, page_size=page_size)
    return PagedDraftRunner(drafter, num_pages=num_pages, page_size=page_size)


def _curve(folder: Path, model: Any, num_threads: int, target: str, notes: list[str]) -> CostCurve | None:
    wanted = hardware_fingerprint(model.device, model.dtype, num_threads, target)
    try:
        return CostCurve.load(folder / COST_CURVE, wanted)
    except MissingInput as missing:
        notes.append(str(missing))
        return None


def _calibration(folder: Path, notes: list[str]) -> Calibration | None:
    if not (folder / CALIBRATION).is_file():
        notes.append(f"{folder} has no {CALIBRATION}: confidences are used as they are; make it with jobs/calibrate.py")
        return None
    return Calibration.load(folder / CALIBRATION, drafter_sha256=drafter_sha256(folder))
