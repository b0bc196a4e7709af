"""Whether a target's decode steps run as CUDA graphs, decided once and said in one line."""

import logging

from dspark.attention.choice import as_capturable
from dspark.engine.config import EngineConfig
from dspark.engine.target_runner import TargetRunner
from dspark.engine.token_buckets import Capture, TokenBuckets, most_decode_tokens
from dspark.errors import one_line

log = logging.getLogger("dspark.engine")


def wants_graphs(config: EngineConfig, device_type: str) -> bool:
    """Whether they are to be tried. Raises: ValueError where they are demanded of a device that has none."""
    if config.cuda_graphs and device_type != "cuda":
        raise ValueError(f"cuda_graphs is true, but the target is on {device_type}; leave it out, or use a CUDA device")
    return config.cuda_graphs is not False and device_type == "cuda"


def use_graphs(
    runner: TargetRunner,
    config: EngineConfig,
    *,
    num_ahead: int,
    capture: Capture | None = None,
) -> str | None:
    """Let the runner replay its decode steps; why it does not, None where it does.

    num_ahead: draft tokens of a request in a step, at most. capture: None takes CUDA graphs. The runner must have a
    scratch page.
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
    runner: TargetRunner,
    config: EngineConfig,
    num_ahead: int,
    capture: Capture | None,
) -> str | None:
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
    except RuntimeError as error:  # what a graph cannot hold: a target that looks at values on the host, …
        return f"{type(runner.model).__name__} cannot be captured ({one_line(error, max_chars=200)})"
    runner.use_buckets(buckets)
    return None
