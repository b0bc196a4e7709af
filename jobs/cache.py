"""Capture the target's hidden states along its own answers into the target cache (Ray Data)."""

import json
import logging
import sys
import time
from dataclasses import asdict
from typing import Any

import runner
from dspark.data.capture import CacheConfig, CachePlan, CaptureWorker, plan_cache
from dspark.data.capture_request import require_supervised, resolve_capture
from dspark.data.target_cache import MANIFEST, TargetCacheWriter
from dspark.errors import DsparkError
from dspark.provenance import read_json
from dspark.run_contents import DatasetRecord
from dspark.storage import Location, absolute, locate
from dspark.targets import TargetConfig

log = logging.getLogger("dspark.cache")


def run(config: CacheConfig, *, fresh: bool = False, dry_run: bool = False) -> dict[str, Any]:
    """Write what is missing of the cache; returns its counts."""
    capture = resolve_capture(config.answers, config)
    target, layer_ids = capture.target, capture.layer_ids
    request = capture.record | config.model_dump(include={"max_cache_bytes", "shard_tokens", "seed"})
    folder = locate(absolute(config.output))
    writer = TargetCacheWriter(folder)
    if not fresh and not dry_run and (folder / MANIFEST).is_file():
        writer.begin(request, fresh=False)
        if writer.is_finished():
            log.info("target cache %s is complete", folder)
            return read_json(folder / MANIFEST)["result"] | {"skipped": True}
        log.warning("target cache %s has shards that are missing or corrupt; they are written again", folder)
    require_supervised(capture, max_length=config.max_length)
    plan = plan_cache(
        capture.answers, config, hidden_size=capture.hidden_size, num_layers=len(layer_ids), request=request
    )
    _print_plan(plan, layer_ids, config.max_cache_bytes)
    if dry_run:
        return _counts(plan, config) | {"dry_run": True, "target_layer_ids": list(layer_ids)}
    if not plan.shards:
        raise DsparkError(f"nothing to cache: all {plan.rows_in} answers were rejected: {plan.rejected}")
    writer.begin(request, fresh=fresh)
    missing = [shard for shard in range(len(plan.shards)) if not writer.is_complete(shard)]
    writer.check_space(plan.disk_bytes * len(missing) // len(plan.shards))
    log.info("%d of %d shards to write", len(missing), len(plan.shards))
    with runner.track(config, "cache", target=target.name) as tracked:
        started = time.monotonic()
        answers = {"answers": plan.rows_in, "samples": sum(len(shard) for shard in plan.shards)}
        digest = str(request["answers_fingerprint"])
        tracked.log_datasets([DatasetRecord("answers", digest, str(config.answers), "capture", answers)])
        tokens = _capture(config, target, layer_ids, plan, missing, folder) if missing else 0
        result = _result(config, plan, writer.num_samples(len(plan.shards)), tokens, time.monotonic() - started)
        writer.finish(request, len(plan.shards), {"target_config": target.model_dump(), "result": result})
        tracked.log_metrics(runner.figures(result), step=0)
    return result


def _capture(
    config: CacheConfig,
    target: TargetConfig,
    layer_ids: tuple[int, ...],
    plan: CachePlan,
    missing: list[int],
    folder: Location,
) -> int:
    """Tokens captured."""
    import ray  # heavy, and not needed for --dry-run

    runner.start_ray()
    rows = [
        {"shard": shard, "samples": json.dumps([asdict(sample) for sample in plan.shards[shard]])} for shard in missing
    ]
    done = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
        CaptureWorker,
        fn_constructor_args=(
            target.model_dump(),
            layer_ids,
            str(folder),
            config.batch_tokens,
            config.threads_per_worker,
        ),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(config.num_workers, len(missing)), max_tasks_in_flight_per_actor=1),
        num_cpus=1,
        num_gpus=runner.gpus_per_worker(config.gpus_per_worker),
    )
    tokens, progress = 0, runner.Progress(len(missing))
    for number, counts in enumerate(done.iter_rows(), start=1):
        tokens += int(counts["tokens"])
        log.info("shard %d written: %s", counts["shard"], progress.said(number))
        if counts["non_finite"]:
            log.warning("shard %d: %d samples left out, not finite", counts["shard"], counts["non_finite"])
    return tokens


def _result(config: CacheConfig, plan: CachePlan, written: int, tokens: int, seconds: float) -> dict[str, Any]:
    """The stage's counts. Raises: DsparkError when no sample could be written."""
    counts = _counts(plan, config)
    if not written:
        raise DsparkError(
            f"the target's states are not finite in any of {counts['samples']} samples; set dtype=float32"
        )
    return counts | {
        "samples": written,
        "non_finite": counts["samples"] - written,  # from what is on disk: earlier runs left some out too
        "shards": len(plan.shards),
        "seconds": round(seconds, 1),
        "tokens_per_s": round(tokens / seconds, 1) if tokens else 0.0,
    }


def _print_plan(plan: CachePlan, layer_ids: tuple[int, ...], max_cache_bytes: int) -> None:
    samples = sum(len(shard) for shard in plan.shards)
    print(
        f"target cache: {samples:,} samples, {plan.num_tokens:,} tokens ({plan.num_supervised:,} supervised), "
        f"layers {list(layer_ids)}, {len(plan.shards)} shards, projected size {plan.projected_bytes / 1e9:.3f} GB"
    )
    print(
        f"  {samples:,} of {plan.num_usable:,} samples fit into max_cache_bytes ({max_cache_bytes:,}), "
        f"all files together at most {plan.disk_bytes:,} bytes"
    )
    for reason, count in sorted(plan.rejected.items()):
        print(f"  left out: {count:,} answers ({reason})")
    sys.stdout.flush()


def _counts(plan: CachePlan, config: CacheConfig) -> dict[str, Any]:
    return {
        "stage": "cache",
        "output": config.output,
        "answers": plan.rows_in,
        "answers_kept": plan.rows_kept,
        "rejected": plan.rejected,
        "samples": sum(len(shard) for shard in plan.shards),
        "samples_usable": plan.num_usable,
        "tokens": plan.num_tokens,
        "supervised_tokens": plan.num_supervised,
        "bytes": plan.projected_bytes,
        "max_disk_bytes": plan.disk_bytes,
    }


if __name__ == "__main__":
    sys.exit(runner.main(CacheConfig, run, default_config="cache.yaml"))
