"""Seconds of target steps and of drafting on this machine, from which the cost curve is made.

Legend: B tokens in a batch, R requests in it, m captured layers, d hidden size.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pydantic
import torch
from pydantic import Field

from dspark.config import Config
from dspark.drafters.base import Drafter
from dspark.drafters.checkpoint import load_drafter
from dspark.engine.config import EngineConfig
from dspark.engine.drafter_folder import WITHOUT_FOLDER, check_drafter, drafter_sha256, drafter_target
from dspark.engine.loading import paged_runner, target_runner
from dspark.engine.step_samples import Samples, take_samples, usual_shape
from dspark.engine.step_timer import LONG_REQUESTS, NEW_TOKENS, BatchShape, StepTimer, batch_shapes, page_tables
from dspark.provenance import read_json
from dspark.speculation.cost_curve import CostCurve, hardware_fingerprint
from dspark.speculation.drafting_choice import choose_drafting
from dspark.targets import TargetConfig, load_target, load_target_config, load_tokenizer, vocabulary_size
from dspark.tracking import TrackingConfig

BATCH_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
DRAFT_REQUESTS = (1, 2, 4, 8, 16, 32)

log = logging.getLogger("dspark.profile")


class ProfileConfig(Config):
    """The profile stage: how long this machine takes for a step, by what is in it."""

    drafter: str | None = None
    """Folder made by jobs/train.py, which gets the curve; None, "ngram" or "mtp" measures the target alone."""
    output: str
    """Gets `profile.json`, and the curve where there is no drafter's folder for it."""
    target: TargetConfig | None = None
    """None takes what the drafter was trained for; another target than that is refused."""
    batch_tokens: tuple[int, ...] = Field(BATCH_TOKENS, min_length=1)
    """Batch sizes to measure. Beyond the largest the curve goes on in a straight line."""
    draft_requests: tuple[int, ...] = Field(DRAFT_REQUESTS, min_length=1)
    """Numbers of requests to measure drafting at."""
    context_tokens: int = Field(256, ge=1)
    """Tokens each request has in KV memory; take what is usual, since attention gets slower with it."""
    long_context_tokens: int = Field(2048, ge=0)
    """Tokens of context at which a step of few tokens is measured once more: what more context costs. Less where the
    target was made for less; 0, or not more than context_tokens, leaves it out."""
    tokens_per_request: int = Field(4, ge=1)
    """Tokens of each request in the batches of many requests, beside those of one token each."""
    max_requests: int = Field(32, ge=1)
    """Requests in a batch at most; KV memory is taken for all of them."""
    repeats: int = Field(7, ge=1)
    """Times each point is measured; the median counts. Below 7 it is a guess on a machine that others use too."""
    threads: int = Field(2, ge=1)
    """CPU threads, as the engine will have them: the curve is found again by this number."""
    page_size: int = Field(16, ge=1)
    evaluation: str | None = None
    """Folder made by jobs/evaluate.py; where it is there, the verify lengths that its survival leads to are shown."""
    seed: int = 0
    tracking: TrackingConfig = TrackingConfig()

    @pydantic.model_validator(mode="after")
    def _check(self) -> "ProfileConfig":
        for name, sizes in (("batch_tokens", self.batch_tokens), ("draft_requests", self.draft_requests)):
            if min(sizes) < 1 or len(set(sizes)) < len(sizes):
                raise ValueError(f"{name} is {list(sizes)}; give each size once, all of them 1 or more")
        if not self.has_drafter and self.target is None:
            raise ValueError("there is nothing to measure; give a drafter's folder or a target")
        return self

    @property
    def has_drafter(self) -> bool:
        """Whether there is a neural drafter to measure."""
        return self.drafter not in WITHOUT_FOLDER

    @property
    def shapes(self) -> list[BatchShape]:
        """The batches to time."""
        return batch_shapes(
            self.batch_tokens, tokens_per_request=self.tokens_per_request, max_requests=self.max_requests
        )

    def target_config(self) -> TargetConfig:
        """Raises: MissingInput without the drafter; Mismatch if it was trained for another target."""
        if not self.has_drafter:
            assert self.target is not None
            return self.target
        target = self.target or drafter_target(str(self.drafter))
        check_drafter(str(self.drafter), target)
        return target

    def request(self, target: TargetConfig) -> dict[str, Any]:
        """What decides the figures: they are used again only under the same."""
        settings = self.model_dump(mode="json", exclude={"drafter", "output", "target", "evaluation", "tracking"})
        digest = drafter_sha256(str(self.drafter)) if self.has_drafter else None
        return settings | {"fingerprint": fingerprint_of(target, self.threads), "drafter_sha256": digest}


def fingerprint_of(target: TargetConfig, num_threads: int) -> dict[str, Any]:
    """The hardware fingerprint that the target will have once it is loaded."""
    device = target.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: Any = load_target_config(target).dtype if target.dtype == "auto" else target.dtype
    return hardware_fingerprint(device, dtype or torch.float32, num_threads, target.name)


def open_timer(config: ProfileConfig, target_config: TargetConfig) -> StepTimer:
    """Load target and drafter and fill the contexts.

    Raises: ValueError when context and batch are longer than what the target was made for.
    """
    torch.set_num_threads(config.threads)
    limit = getattr(load_target_config(target_config), "max_position_embeddings", None)
    longest = config.context_tokens + max(config.batch_tokens)
    if limit is not None and longest > limit:
        raise ValueError(
            f"context_tokens ({config.context_tokens}) and the largest of batch_tokens make {longest} positions, but "
            f"the target was made for {limit}; lower one of them"
        )
    model: Any = load_target(target_config)
    drafter: Any = None
    if config.has_drafter:  # it computes in the target's type: its inputs are the target's own states
        drafter = load_drafter(str(config.drafter), dtype=model.dtype, device=str(model.device))
    long_context = config.long_context_tokens
    most_long = max(usual_shape(config.shapes, LONG_REQUESTS).lengths)
    if limit is not None:
        long_context = min(long_context, limit - most_long)
    longest = max(longest, long_context + most_long)
    tables = page_tables(request_tokens(config, drafter, long_context + most_long), config.page_size)
    engine = EngineConfig(  # timed as it will run
        page_size=config.page_size,
        kv_tokens=config.page_size * sum(len(table.pages) for table in tables),
        max_running_requests=len(tables),
        max_batch_tokens=longest,
        max_context_tokens=longest,
    )
    drafts = None
    if drafter is not None:
        drafts = paged_runner(drafter, num_pages=engine.num_pages, page_size=engine.page_size)
    vocabulary = vocabulary_size(load_tokenizer(target_config))
    target = target_runner(model, drafts, config=engine, vocabulary_size=vocabulary)
    return StepTimer(
        target,
        drafts,
        tables,
        context_tokens=config.context_tokens,
        seed=config.seed,
        long_context_tokens=long_context,
    )


def request_tokens(config: ProfileConfig, drafter: Drafter | None, with_long: int = 0) -> list[int]:
    """Tokens of memory each request needs: the context, and the longest piece or all that is drafted behind it.

    with_long: tokens that each of the first LONG_REQUESTS needs at least.
    """
    shapes = config.shapes
    number = max(shape.num_requests for shape in shapes)
    drafted = 0
    if drafter is not None:
        number = max(number, *config.draft_requests)
        drafted = drafter.block_size + NEW_TOKENS * (config.repeats + 1) * len(config.draft_requests)
    pieces = [[shape.lengths[i] for shape in shapes if i < shape.num_requests] for i in range(number)]
    needed = [config.context_tokens + max([drafted, *lengths]) for lengths in pieces]
    return [max(with_long, tokens) for tokens in needed[:LONG_REQUESTS]] + needed[LONG_REQUESTS:]


def measure(timer: StepTimer, config: ProfileConfig) -> Samples:
    """Every point `repeats` times."""
    draft_requests = config.draft_requests if config.has_drafter else ()
    return take_samples(timer, config.shapes, draft_requests, repeats=config.repeats, seed=config.seed)


def measured_survival(folder: str | Path) -> list[float]:
    """Survival by position in an evaluation, over all prompts of its first mode; [] where there is none."""
    path = Path(folder) / "metrics.json"
    modes = read_json(path)["modes"] if path.is_file() else {}
    survival = next(iter(modes.values()))["overall"]["survival"] if modes else []
    end = survival.index(None) if None in survival else len(survival)
    return list(survival[:end])


def verify_budgets(
    curve: CostCurve, survival: Sequence[float], num_requests: Sequence[int]
) -> list[dict[str, int | float]]:
    """What the scheduler would do with so many requests of this survival each, a row per number of requests.

    {"requests", "drafted", "verify_length" (mean per request), "batch_tokens", "speedup" (expected, over plain steps)}.
    """
    rows = []
    for number in num_requests:
        drafted, lengths = choose_drafting([survival] * number, curve)
        draft_s = curve.draft_seconds(sum(drafted))
        batch_tokens = number + sum(lengths)
        tau = number + sum(sum(survival[:length]) for length in lengths)
        plain_s = curve.step_seconds(number, num_requests=number)
        step_s = curve.step_seconds(batch_tokens, num_requests=number) + draft_s
        rows.append(
            {
                "requests": number,
                "drafted": sum(drafted),
                "verify_length": sum(lengths) / number,
                "batch_tokens": batch_tokens,
                "speedup": (tau / step_s) / (number / plain_s),
            }
        )
    return rows
