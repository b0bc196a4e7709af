"""A cost curve in seconds, measured by an engine on itself where none was measured for its hardware.

Coarser than that of jobs/profile_engine.py, and so held to what steps are seen to take later on (`CurveCorrection`).
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from dspark.attention.page_pool import PagePool, PageTable
from dspark.engine.config import EngineConfig
from dspark.engine.draft_runner import DraftRunner
from dspark.engine.paged_autoregressive_runner import PagedAutoregressiveRunner
from dspark.engine.paged_draft_runner import PagedDraftRunner
from dspark.engine.step_samples import take_samples
from dspark.engine.step_timer import LONG_REQUESTS, NEW_TOKENS, USUAL_TOKENS, BatchShape, StepTimer
from dspark.engine.target import Target
from dspark.speculation.cost_curve import CostCurve

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
REPEATS = 3
CONTEXT_TOKENS = 128
LONG_CONTEXT_TOKENS = 1024
MOST_SECONDS = 0.5  # of one step or call of the drafter: larger ones are left to the curve's last slope
FEWEST_SIZES = 3

S = TypeVar("S")

log = logging.getLogger("dspark.engine")


def profile(
    target: Target, drafts: DraftRunner | None, config: EngineConfig, *, fingerprint: Mapping[str, Any]
) -> CostCurve | None:
    """The curve of the sizes that fit into the engine's memory, which must be in nobody's use; None if none does.

    What is written there belongs to no request and stays unread.
    """
    started = time.perf_counter()
    neural = drafts if isinstance(drafts, PagedDraftRunner | PagedAutoregressiveRunner) else None
    block_size = 0 if drafts is None else drafts.block_size
    limit = target.max_context_tokens or CONTEXT_TOKENS + SIZES[-1]
    most_tokens = min(config.max_batch_tokens, config.max_running_requests * (1 + block_size), limit - CONTEXT_TOKENS)
    sizes = [size for size in SIZES if size <= most_tokens]
    drafted = 0 if neural is None else block_size + NEW_TOKENS * (REPEATS + 3) * len(SIZES)
    most = config.max_running_requests
    first, other = max([drafted, *sizes]), max(1, drafted)
    tables = _tables(target, most, [first], other)
    if not sizes or not tables:
        return None
    long_context = min(LONG_CONTEXT_TOKENS, limit - USUAL_TOKENS)
    behind = max(other, long_context + USUAL_TOKENS - CONTEXT_TOKENS)
    with_long = _tables(target, most, [max(first, behind), *[behind] * (min(LONG_REQUESTS, most) - 1)], other)
    if len(with_long) == len(tables):
        tables = with_long
    else:
        long_context = 0
    timer = StepTimer(target, neural, tables, context_tokens=CONTEXT_TOKENS, seed=0, long_context_tokens=long_context)
    shapes = _up_to_the_time([BatchShape((size,)) for size in sizes], timer.verify_s)
    counts = [size for size in sizes if size <= len(tables)]
    counts = [] if neural is None else _up_to_the_time(counts, timer.draft_s)
    shapes += [BatchShape((1,) * shape.num_tokens) for shape in shapes if 1 < shape.num_tokens <= len(tables)]
    samples = take_samples(timer, shapes, counts, repeats=REPEATS)
    curve = samples.curve(fingerprint)
    log.info("measured a cost curve of %d points in %.1f s", len(shapes), time.perf_counter() - started)
    # One without a rise would call every draft token free.
    return curve if len(curve.batch_tokens) >= FEWEST_SIZES and curve.verify_s[-1] > curve.verify_s[0] else None


def _up_to_the_time(sizes: list[S], seconds: Callable[[S], float]) -> list[S]:
    """The sizes up to the first that takes too long, twice measured: the first time may have something to prepare."""
    kept = []
    for size in sizes:
        kept.append(size)
        seconds(size)
        if seconds(size) > MOST_SECONDS:
            break
    return kept


def _tables(target: Target, most: int, first: Sequence[int], other: int) -> list[PageTable]:
    """Pages for up to so many requests, as many as there is memory for: none without room for the first ones.

    first, other: tokens behind the contexts of the first few and of all others.
    """
    pool, size = PagePool(target.num_pages), target.page_size
    *pages, rest = (-(-(CONTEXT_TOKENS + tokens) // size) for tokens in (*first, other))
    if sum(pages) > target.num_pages:
        return []
    number = min(most, len(pages) + (target.num_pages - sum(pages)) // rest)
    pages += [rest] * (number - len(pages))
    return [PageTable(pool.allocate(count), size) for count in pages]
