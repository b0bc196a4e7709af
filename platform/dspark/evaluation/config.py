"""The evaluate stage's config."""

import pydantic
from pydantic import Field

from dspark.config import Config
from dspark.data.prompts import PromptSource
from dspark.engine.sampling import SamplingParams
from dspark.evaluation.tasks import task_source
from dspark.targets import TargetConfig
from dspark.tracking import TrackingConfig


class EvaluationMode(Config):
    """One way of decoding that every prompt is measured with."""

    name: str
    """Labels its figures."""
    temperature: float = Field(0.0, ge=0)
    top_k: int | None = Field(None, ge=1)
    top_p: float = Field(1.0, gt=0, le=1)

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)


class EvaluateConfig(Config):
    """The evaluate stage. The chat settings are those the drafter was trained with, from its `provenance.json`."""

    drafter: str
    """Folder made by jobs/train.py."""
    output: str
    """Gets `rollouts.jsonl` as prompts finish, and `metrics.json` at the end."""
    prompts: list[PromptSource] = []
    """Only their held-out rows are measured."""
    tasks: dict[str, str] = {}
    """Benchmarks of the paper: name to the path of its `{"turns": […]}` file."""
    target: TargetConfig | None = None
    """None takes what the drafter was trained for; another target than that is refused."""
    prompts_per_domain: int | None = Field(None, ge=1)
    """Measure a seeded sample of so many prompts of each domain."""
    heldout_fraction: float = Field(0.05, ge=0, lt=1)
    """Of sources that do not name a split; the same as in the generate stage, or trained prompts are measured."""
    max_new_tokens: int = Field(128, ge=1)
    verify_length: int | None = Field(None, ge=0)
    """Draft tokens per round; None proposes whole blocks."""
    modes: list[EvaluationMode] = [
        EvaluationMode(name="greedy"),
        EvaluationMode(name="sampled", temperature=1.0),
    ]
    seed: int = 0
    num_workers: int = Field(2, ge=1)
    threads_per_worker: int = Field(1, ge=1)
    gpus_per_worker: float | None = Field(None, ge=0)
    """None gives each worker one GPU where the cluster has any."""
    compare_with_generate: int = Field(0, ge=0)
    """Prompts whose greedy output is compared with the library's own `generate`, token for token."""
    time_plain: int = Field(0, ge=0)
    """Prompts of each domain that are also decoded without the drafter, for the speed-up."""
    tracking: TrackingConfig = TrackingConfig()

    @property
    def sources(self) -> list[PromptSource]:
        """`prompts` and `tasks` together."""
        return [*self.prompts, *(task_source(name, path) for name, path in self.tasks.items())]

    @pydantic.model_validator(mode="after")
    def _check(self) -> "EvaluateConfig":
        if not self.sources:
            raise ValueError("there is nothing to measure on; give prompts or tasks")
        names = [mode.name for mode in self.modes]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"modes need one name each, got {names}")
        if self.compare_with_generate and all(mode.temperature > 0 for mode in self.modes):
            raise ValueError(
                "compare_with_generate has no effect without a mode of temperature 0; add one or set it to 0"
            )
        return self
