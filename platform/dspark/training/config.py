"""The train stage's config."""

from typing import Literal

import pydantic

from dspark.config import Config
from dspark.data.online import DataConfig
from dspark.drafters.initialize import DrafterShape
from dspark.tracking import TrackingConfig
from dspark.training.losses import LossWeights


class LossPhase(LossWeights):
    """Factors in force until the given fraction of all steps."""

    until: float = pydantic.Field(gt=0, le=1)

    @property
    def weights(self) -> LossWeights:
        return LossWeights(**self.model_dump(exclude={"until"}))


class TrainConfig(Config):
    """The train stage.

    cache: folder made by jobs/cache.py; None with data.mode online. output: becomes the drafter's folder. domains: of
    the samples to train and validate on ("math" takes "math/gsm8k" too); () takes all.
    initialize_from: a drafter to go on from, a folder or a hub id such as deepseek-ai/dspark_qwen3_4b_block7 at
    initialize_revision (its shape and its vocabulary mapping are kept: what `drafter` says must agree, {} says
    nothing); None starts from the target. sequences_per_step: the global batch, whatever the number of workers.
    loss_phases: the TV gradient vanishes while the drafter is far from the target, so a first phase heavy on CE saves
    steps. position_decay: w_j = exp(-j / it). precision: of the backbone's products; weights, optimiser, logits and
    losses are float32 always. max_skipped: micro-batches with a non-finite loss that are tolerated before the run
    stops. expert_parallel_size: workers that share one set of experts, for mixtures too large for one device; it
    changes no result.
    """

    cache: str | None = None
    data: DataConfig = DataConfig()
    output: str
    domains: tuple[str, ...] = ()
    drafter: DrafterShape
    initialize_from: str | None = None
    initialize_revision: str | None = None
    anchors_per_sequence: int = pydantic.Field(default=512, gt=0)
    sequences_per_step: int = pydantic.Field(default=512, gt=0)
    sequences_per_micro_batch: int = pydantic.Field(default=1, gt=0)
    steps: int = pydantic.Field(gt=0)
    learning_rate: float = pydantic.Field(default=6e-4, gt=0)
    warmup_ratio: float = pydantic.Field(default=0.04, ge=0, lt=1)
    weight_decay: float = pydantic.Field(default=0.0, ge=0)
    max_grad_norm: float = pydantic.Field(default=1.0, gt=0)
    position_decay: float = pydantic.Field(default=4.0, gt=0)
    loss_phases: tuple[LossPhase, ...] = (LossPhase(until=1.0, ce=0.1, tv=0.9, confidence=1.0),)
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    zero_stage: Literal[0, 1, 2] = 1
    expert_parallel_size: int = pydantic.Field(default=1, gt=0)
    num_workers: int = pydantic.Field(default=1, gt=0)
    threads_per_worker: int = pydantic.Field(default=1, gt=0)
    use_gpu: bool = False
    max_worker_failures: int = pydantic.Field(default=2, ge=0)
    checkpoint_every: int = pydantic.Field(default=1000, gt=0)
    keep_checkpoints: int = pydantic.Field(default=2, gt=0)
    validate_every: int = pydantic.Field(default=500, gt=0)
    validation_samples: int = pydantic.Field(default=64, ge=0)
    log_every: int = pydantic.Field(default=10, gt=0)
    max_skipped: int = pydantic.Field(default=20, ge=0)
    seed: int = 0
    tracking: TrackingConfig = TrackingConfig()

    @pydantic.model_validator(mode="after")
    def _check(self) -> "TrainConfig":
        self.data.require_consistent(self.cache)
        ends = [phase.until for phase in self.loss_phases]
        if not ends or ends != sorted(ends) or ends[-1] != 1.0:
            raise ValueError(f"loss_phases must ascend in `until` and end at 1.0, got {ends}")
        if self.initialize_revision is not None and self.initialize_from is None:
            raise ValueError(
                f"initialize_revision {self.initialize_revision!r} has no effect without initialize_from; leave it out"
            )
        if self.initialize_from is not None and self.drafter.from_target:
            raise ValueError(
                f"initialize_from {self.initialize_from!r} and drafter.from_target are two starts; use one"
            )
        if self.expert_parallel_size > 1 and self.zero_stage == 0:
            raise ValueError(f"expert_parallel_size {self.expert_parallel_size} needs zero_stage 1 or 2, not 0")
        if self.num_workers % self.expert_parallel_size:
            raise ValueError(
                f"expert_parallel_size {self.expert_parallel_size} does not divide num_workers {self.num_workers}"
            )
        return self

    def loss_weights(self, step: int) -> LossWeights:
        """Factors in force at a step."""
        for phase in self.loss_phases:
            if step < phase.until * self.steps:
                return phase.weights
        return self.loss_phases[-1].weights
