"""Train a drafter on the target cache (Ray Train + DeepSpeed), tracked in MLflow, resumable."""

import logging
import sys
from typing import Any

import runner
from dspark.data.sample_source import SampleSource
from dspark.engine.drafter_folder import DRAFTER_FILES, drafter_sha256
from dspark.provenance import read_json, write_json
from dspark.run_contents import DatasetRecord, log_drafter, register
from dspark.storage import Location, absolute, locate
from dspark.tracking import Run
from dspark.tracking_config import resolve_uri
from dspark.training.config import TrainConfig
from dspark.training.samples import open_samples, plan_of, split_indices
from dspark.transfer import local_file, local_folder

log = logging.getLogger("dspark.train")


def run(config: TrainConfig, *, fresh: bool = False, dry_run: bool = False) -> dict[str, Any]:
    """Train to the last step, or go on from the last checkpoint; returns the figures."""
    cache_folder = None if config.cache is None else absolute(config.cache)
    config = config.with_changes(cache=cache_folder, output=absolute(config.output))
    cache = open_samples(config)
    samples = len(split_indices(config, cache, "train"))
    plan = {
        "stage": "train",
        "data": config.data.mode,
        "train_samples": samples,
        "heldout_samples": len(split_indices(config, cache, "heldout")),
        "steps": config.steps,
        "epochs": round(config.steps * config.sequences_per_step / max(samples, 1), 2),
        "max_anchors": config.steps * config.sequences_per_step * config.anchors_per_sequence,
    } | plan_of(config, cache)
    print("training: " + ", ".join(f"{name} {value}" for name, value in plan.items() if name != "stage"), flush=True)
    if dry_run:
        return plan | {"dry_run": True}
    from dspark.training.trainer import RESULT, fit, prepare  # imports Ray Train, slow

    output = locate(config.output)
    initial = prepare(config, cache, fresh=fresh)
    if (output / RESULT).is_file():
        log.info("training run %s is complete", output)
        return read_json(output / RESULT) | {"skipped": True}
    earlier = read_json(output / "mlflow_run.json")["run_id"] if (output / "mlflow_run.json").is_file() else None
    with runner.track(config, "train", run_id=earlier, architecture=config.drafter.architecture) as tracked:
        write_json(output / "mlflow_run.json", {"run_id": tracked.run_id, "uri": tracked.uri})
        runner.start_ray()
        tracked.log_datasets([_dataset(config, cache, plan)])
        uri = tracked.uri or resolve_uri(config.tracking)
        result = fit(config, cache, initial, tracking_uri=uri, run_id=tracked.run_id)
        tracked.log_artifact(local_file(output / "history.jsonl"), "drafter")
        _record(config, tracked, output)
    return result


def _dataset(config: TrainConfig, samples: SampleSource, plan: dict[str, Any]) -> DatasetRecord:
    """What the run trains on, as it records it."""
    digest = str(samples.request.get("answers_fingerprint"))
    profile = {name: plan[name] for name in ("data", "train_samples", "heldout_samples")}
    return DatasetRecord("samples", digest, config.cache or "online", "training", profile)


def _record(config: TrainConfig, tracked: Run, output: Location) -> None:
    """The drafter as a model of the run, and as a version of the registered one where that is asked for."""
    if tracked.run_id is None:
        return
    digest = drafter_sha256(local_folder(output, DRAFTER_FILES))
    files = [local_file(output / name) for name in DRAFTER_FILES]
    params = config.drafter.model_dump(mode="json") | {"steps": config.steps, "initialize_from": config.initialize_from}
    model = log_drafter(tracked, config.drafter.architecture, files, sha256=digest, params=params)
    if model is not None and config.tracking.register_as is not None:
        version = register(tracked, config.tracking.register_as, model, sha256=digest)
        log.info("the drafter is version %s of %s", version, config.tracking.register_as)


if __name__ == "__main__":
    sys.exit(runner.main(TrainConfig, run, default_config="train.yaml"))
