"""Where a run's samples come from, seen from the driver and from a rank. No other module asks for the mode."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from dspark.data.capture import usable_answers
from dspark.data.capture_request import require_supervised, resolve_capture
from dspark.data.online import OnlineSamples, OwnTarget, SampleTable
from dspark.data.sample_source import SampleSource
from dspark.data.target_cache import TargetCache, bytes_of
from dspark.errors import DsparkError
from dspark.provenance import require_same
from dspark.training.config import TrainConfig


def open_samples(config: TrainConfig) -> SampleSource:
    """The driver's view: the cache, or the plan of what target workers will capture.

    Raises: MissingInput naming the job that makes what is absent.
    """
    if config.cache is not None:
        return TargetCache(config.cache)
    data = config.data
    assert data.answers is not None
    capture = resolve_capture(data.answers, data)
    require_supervised(capture, max_length=data.max_length)
    usable = usable_answers(capture.answers, max_length=data.max_length, min_loss_tokens=data.min_loss_tokens)
    return OnlineSamples(
        SampleTable.of(sample for row in usable.rows for sample in row),
        OwnTarget(capture.target.model_dump(), capture.layer_ids, data.batch_tokens),
        folder=data.answers,
        request=capture.record,
        target_config=capture.target.model_dump(),
        origin={"answers": usable.rows_in, "answers_kept": len(usable.rows), "rejected": usable.rejected},
    )


def split_indices(config: TrainConfig, source: SampleSource, split: str) -> list[int]:
    """Numbers of a split's samples in the domains that are trained on. Raises: ValueError for an unknown domain."""
    indices = source.indices(split)
    if not config.domains:
        return indices
    known = {name for entry in source.entries for name in (entry.domain, entry.domain.split("/")[0])}
    missing = [domain for domain in config.domains if domain not in known]
    if missing:
        raise ValueError(f"domains {missing} are not in {source.description}; there are {sorted(known)}")
    wanted = set(config.domains)
    return [i for i in indices if wanted & {source.entries[i].domain, source.entries[i].domain.split("/")[0]}]


@contextlib.contextmanager
def shared_samples(config: TrainConfig, source: SampleSource) -> Iterator[dict[str, Any] | None]:
    """What the ranks need to open the same samples; online, the target workers are up inside the `with` block."""
    if not isinstance(source, OnlineSamples):
        yield None
        return
    import ray  # heavy, and not needed for --dry-run

    from dspark.data.target_pool import TargetPool

    if isinstance(source.targets, OwnTarget):
        source.targets.release()
    require_room(config, source, int(ray.cluster_resources().get("object_store_memory", 0)))
    with TargetPool(config.data, source.target_config, tuple(source.request["target_layer_ids"])) as pool:
        yield {
            "table": ray.put(source.table),
            "targets": pool.actors,
            "request": source.request,
            "target_config": source.target_config,
        }


def with_layers(source: SampleSource, layer_ids: Sequence[int]) -> SampleSource:
    """The same samples with the states of these layers alone, which is what a drafter reads.

    Raises: Mismatch naming a layer that was not captured, or that would be captured online for nothing.
    """
    if isinstance(source, TargetCache):
        return TargetCache(source.folder, layer_ids=layer_ids)
    require_same(
        f"layers that the drafter reads and the states of the {source.description}",
        {"target_layer_ids": list(layer_ids)},
        {"target_layer_ids": list(source.request["target_layer_ids"])},
        remedy="set data.target_layer_ids and data.final_states to what the drafter reads, and no more",
    )
    return source


def rank_samples(
    config: TrainConfig, shared: dict[str, Any] | None, *, rank: int, layer_ids: Sequence[int] | None = None
) -> SampleSource:
    """A rank's view of the same samples, in the same order. layer_ids: as in `with_layers`; None gives all."""
    if shared is None:
        assert config.cache is not None
        return TargetCache(config.cache, layer_ids=layer_ids)
    import ray

    from dspark.data.target_pool import RayTargets

    source = OnlineSamples(
        ray.get(shared["table"]),
        RayTargets(shared["targets"], rank=rank, by_id=config.data.keep_bytes > 0),
        folder=str(config.data.answers),
        request=shared["request"],
        target_config=shared["target_config"],
        steps_ahead=config.data.steps_ahead,
    )
    return source if layer_ids is None else with_layers(source, layer_ids)


def plan_of(config: TrainConfig, source: SampleSource) -> dict[str, Any]:
    """What a dry run says of the samples beside their number."""
    if not isinstance(source, OnlineSamples):
        return source.origin
    return source.origin | {"max_object_store_bytes": most_bytes_on_the_way(config, source)}


def require_room(config: TrainConfig, source: OnlineSamples, store_bytes: int) -> None:
    """Raises: DsparkError when the states on their way may exceed Ray's object store, which would spill to disk."""
    needed = most_bytes_on_the_way(config, source)
    if needed > store_bytes:
        raise DsparkError(
            f"online training has up to {needed:,} bytes of states on their way but the cluster's object store holds "
            f"{store_bytes:,}; lower data.steps_ahead ({config.data.steps_ahead}), sequences_per_step "
            f"({config.sequences_per_step}) or data.max_length ({config.data.max_length})"
        )


def most_bytes_on_the_way(config: TrainConfig, source: OnlineSamples) -> int:
    """Of states asked for and not yet loaded: the longest samples, for the steps ahead and the held-out ones."""
    hidden_size, num_layers = source.request["target"]["hidden_size"], len(source.request["target_layer_ids"])
    sizes = {
        split: sorted(
            bytes_of(e.num_tokens, e.num_supervised, hidden_size=hidden_size, num_layers=num_layers)
            for e in source.entries
            if e.split == split
        )
        for split in ("train", "heldout")
    }
    step = sum(sizes["train"][-config.sequences_per_step :])
    # A step of more sequences than there are goes through them several times.
    rounds = -(-config.sequences_per_step // max(1, len(sizes["train"])))
    heldout = sum(sizes["heldout"][-config.validation_samples :]) if config.validation_samples else 0
    return step * rounds * (1 + config.data.steps_ahead) + heldout
