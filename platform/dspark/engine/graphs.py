"""Whether a target's decode steps run as CUDA graphs, decided once and said in one line."""

import logging

from dspark.attention.choice import as_capturable
from dspark.attention.flat_batch import Piece
from dspark.attention.page_pool import PageTable
from dspark.engine.config import EngineConfig
from dspark.engine.target import PROBE_TOKENS, Target, probe_difference, probe_ids
from dspark.engine.target_runner import TargetRunner
from dspark.engine.token_buckets import Capture, TokenBuckets, most_decode_tokens
from dspark.errors import one_line

log = logging.getLogger("dspark.engine")


def wants_graphs(config: EngineConfig, device_type: str) -> bool:
    """Whether they are to be tried: padded rows would change the bits of others, which `deterministic` rules out.

    Raises: ValueError where they are demanded of a device that has none.
    """
    if config.cuda_graphs and device_type != "cuda":
        raise ValueError(f"cuda_graphs is true, but the target is on {device_type}; leave it out, or use a CUDA device")
    return config.cuda_graphs is not False and device_type == "cuda" and not config.deterministic


def use_graphs(
    runner: Target,
    config: EngineConfig,
    *,
    num_ahead: int,
    capture: Capture | None = None,
) -> str | None:
    """Let the runner replay its decode steps, where these compute what others do; why it does not, else None.

    num_ahead: draft tokens of a request in a step, at most. capture: None takes CUDA graphs. A runner with pages must
    have a scratch page.
    Raises: ValueError when they are demanded and cannot be had.
    """
    reason = _use(runner, config, num_ahead, capture)
    if reason is None:
        log.info("CUDA graphs replay decode steps of up to %d tokens", most_tokens(config, num_ahead))
    elif config.cuda_graphs:
        raise ValueError(f"cuda_graphs is true, but {reason}; leave it out, or set it to false")
    else:
        log.warning("decode steps run without CUDA graphs: %s", reason)
    return reason


def most_tokens(config: EngineConfig, num_ahead: int) -> int:
    """Rows of the largest step that is replayed."""
    return most_decode_tokens(config.max_running_requests, num_ahead, config.max_batch_tokens)


def _use(
    runner: Target,
    config: EngineConfig,
    num_ahead: int,
    capture: Capture | None,
) -> str | None:
    name = type(runner.model).__name__
    if not isinstance(runner, TargetRunner):
        return f"{name} is served without pages"
    entry = as_capturable(runner.attention)
    if entry is None:
        return f"attention {runner.attention.name} cannot be captured"
    assert runner.scratch_slot is not None, "padding needs a scratch page"
    limits = (config.max_context_tokens, runner.max_context_tokens, runner.num_pages * runner.page_size)
    longest = min(limit for limit in limits if limit is not None) + num_ahead
    try:
        buckets = TokenBuckets(
            runner.compute_padded,
            entry,
            most_tokens=most_tokens(config, num_ahead),
            max_requests=config.max_running_requests,
            max_pages=-(-longest // runner.page_size),
            scratch_slot=runner.scratch_slot,
            device=runner.device,
            capture=capture,
        )
        difference = _difference(runner, buckets)
    except Exception as error:  # a target's own code may do anything that a graph, or a padded step, cannot hold
        return f"{name} cannot be captured ({one_line(error, max_chars=200)})"
    if difference is not None:
        return f"{name} computes something else in padded steps ({difference})"
    runner.use_buckets(buckets)
    return None


def _difference(runner: TargetRunner, buckets: TokenBuckets) -> str | None:
    """By how much a short step in a bucket is off from one as it comes; None where they agree."""
    num_tokens = min(PROBE_TOKENS, runner.page_size, buckets.sizes[-1])
    ids = probe_ids(runner.model)[0, :num_tokens].tolist()
    batch = runner.flatten([Piece(PageTable([0], runner.page_size), ids, num_logits=num_tokens)])
    expected = runner.run(batch).logits[:, : runner.vocabulary_size]
    found = buckets.run(batch)[0][:, : runner.vocabulary_size].float()
    buckets.num_runs = 0
    return probe_difference(found, expected, runner.dtype)
