"""The configs of the stages that decode held-out prompts: evaluate and calibrate."""

from typing import Any, Literal

import pydantic
from pydantic import Field

from dspark.config import Config
from dspark.data.prompts import PromptSource
from dspark.engine.config import MeasuredEngineConfig
from dspark.engine.sampling import SamplingParams
from dspark.evaluation.tasks import benchmark_sources, require_known, task_source
from dspark.speculation.calibration_error import NUM_BINS
from dspark.targets import TargetConfig
from dspark.tracking import TrackingConfig

CONCURRENCY = 8
SAMPLE = "~"  # "sampled~2" is the mode of each prompt's second sample


class EvaluationMode(Config):
    """One way of decoding that every prompt is measured with."""

    name: str
    """Labels its figures."""
    temperature: float = Field(0.0, ge=0)
    top_k: int | None = Field(None, ge=1)
    top_p: float = Field(1.0, gt=0, le=1)
    seeded: Literal["rejection", "invariant"] = "rejection"
    """How draft tokens are judged. Every answer has a seed, so that runs repeat: "rejection" leaves acceptance what it
    is for a request without one, "invariant" makes it what it is for a request that asks for one. Running servers judge
    as they do."""

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seeded=self.seeded)

    def identity(self) -> dict[str, Any]:
        """What an answer depends on. As before there was `seeded` where it is not used, so that results stay in use."""
        return self.model_dump(exclude={"seeded"} if self.seeded == "rejection" else None)

    @pydantic.model_validator(mode="after")
    def _check(self) -> "EvaluationMode":
        if self.seeded == "invariant" and self.temperature == 0:
            raise ValueError(f"seeded 'invariant' has no effect in mode {self.name!r}, whose temperature is 0")
        return self


class MeasurementConfig(Config):
    """What both stages need to know. The chat settings are those the drafter was trained with."""

    drafter: str
    """Folder made by jobs/train.py."""
    output: str
    """Gets `rollouts.jsonl` as prompts finish, and the stage's figures at the end."""
    prompts: list[PromptSource] = []
    """Only their held-out rows are measured."""
    tasks: dict[str, str] = {}
    """Benchmarks of the paper: name to the path of its `{"turns": […]}` file."""
    benchmarks: list[str] = []
    """Benchmarks of the paper by name: `<name>.jsonl` of a folder, as many prompts of each as the paper takes."""
    benchmarks_folder: str | None = None
    """None takes the folder that the environment variable DSPARK_BENCHMARKS names."""
    benchmarks_from_hub: bool = False
    """Fetch what that folder lacks, and keep it there."""
    target: TargetConfig | None = None
    """None takes what the drafter was trained for; another target than that is refused."""
    prompts_per_domain: int | None = Field(None, ge=1)
    """Measure a seeded sample of so many prompts of each domain."""
    heldout_fraction: float = Field(0.05, ge=0, lt=1)
    """Of sources that do not name a split; the same as in the generate stage, or trained prompts are measured."""
    seed: int = 0
    num_workers: int = Field(2, ge=1)
    threads_per_worker: int = Field(1, ge=1)
    gpus_per_worker: float | None = Field(None, ge=0)
    """None gives each worker one GPU where the cluster has any."""
    concurrency: int = Field(CONCURRENCY, ge=1)
    """Conversations in a worker's engine at once. More are faster until the processor is busy, and need more memory."""
    engine: MeasuredEngineConfig = MeasuredEngineConfig()
    """Memory and step sizes of each worker's engine; how many requests run is `concurrency`."""
    tracking: TrackingConfig = TrackingConfig()

    @property
    def sources(self) -> list[PromptSource]:
        """`prompts`, `tasks` and `benchmarks` together. Raises: MissingInput for a benchmark that is not there."""
        named: list[PromptSource] = []
        if self.benchmarks:
            named = benchmark_sources(self.benchmarks, self.benchmarks_folder, from_hub=self.benchmarks_from_hub)
        return [*self.prompts, *(task_source(name, path) for name, path in self.tasks.items()), *named]

    @pydantic.model_validator(mode="after")
    def _check_measurement(self) -> "MeasurementConfig":
        if not (self.prompts or self.tasks or self.benchmarks):
            raise ValueError("there is nothing to measure on; give prompts, tasks or benchmarks")
        require_known([*self.tasks, *self.benchmarks])
        for name, default in (("benchmarks_folder", None), ("benchmarks_from_hub", False)):
            if not self.benchmarks and getattr(self, name) != default:
                raise ValueError(f"{name} has no effect without benchmarks; leave it out")
        defaults = MeasuredEngineConfig()
        for name, instead in (("verify_length", "verify_length"), ("max_running_requests", "concurrency")):
            if getattr(self.engine, name) != getattr(defaults, name):
                raise ValueError(f"engine.{name} has no effect here; set {instead} of the stage")
        return self


class EvaluateConfig(MeasurementConfig):
    """The evaluate stage."""

    max_new_tokens: int = Field(128, ge=1)
    through: Literal["engine", "reference"] = "engine"
    """What decodes: the serving engine, many conversations at once, or the reference loop, one at a time."""
    lengths: Literal["fixed", "scheduled"] = "fixed"
    """Who decides how many draft tokens are verified: `verify_length`, or the engine's scheduler, which needs the
    drafter's cost curve. Accepted lengths of drafters compare under "fixed" only."""
    verify_length: int | None = Field(None, ge=0)
    """Draft tokens per round; None proposes whole blocks."""
    modes: list[EvaluationMode] = [
        EvaluationMode(name="greedy"),
        EvaluationMode(name="sampled", temperature=1.0),
    ]
    compare_with_generate: int = Field(0, ge=0)
    """Prompts whose greedy output is compared with the library's own `generate`, token for token."""
    time_plain: int = Field(0, ge=0)
    """Prompts of each domain that the reference loop also decodes without the drafter, for its speed-up."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "EvaluateConfig":
        names = [mode.name for mode in self.modes]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"modes need one name each, got {names}")
        if self.compare_with_generate and all(mode.temperature > 0 for mode in self.modes):
            raise ValueError(
                "compare_with_generate has no effect without a mode of temperature 0; add one or set it to 0"
            )
        if self.lengths == "scheduled" and self.verify_length is not None:
            raise ValueError(
                f"verify_length {self.verify_length} has no effect with lengths 'scheduled'; leave one of them out"
            )
        return self._check_engine() if self.through == "engine" else self._check_reference()

    def _check_engine(self) -> "EvaluateConfig":
        if self.time_plain:
            raise ValueError(
                f"time_plain {self.time_plain} needs through 'reference', which decodes one request at a time; the "
                "engine's speed is measured by jobs/benchmark.py"
            )
        return self

    def _check_reference(self) -> "EvaluateConfig":
        if self.lengths == "scheduled":
            raise ValueError("lengths 'scheduled' needs through 'engine'; the reference loop has no scheduler")
        if any(mode.seeded == "invariant" for mode in self.modes):
            raise ValueError("seeded 'invariant' needs through 'engine'; the reference loop knows rejection alone")
        for name, default in (("concurrency", CONCURRENCY), ("engine", MeasuredEngineConfig())):
            if getattr(self, name) != default:
                raise ValueError(f"{name} has no effect with through 'reference'; leave it out")
        return self


class CalibrateConfig(MeasurementConfig):
    """The calibrate stage: decodes with whole uncalibrated blocks, fits scales on half of the prompts."""

    max_new_tokens: int = Field(512, ge=1)
    """Long enough that most answers end by themselves: what a cut leaves out is never calibrated for."""
    samples_per_prompt: int = Field(1, ge=1)
    """Sampled answers to each prompt, each from its own seed. There is one greedy answer."""
    seeded_samples: int = Field(1, ge=0)
    """Answers to each prompt as requests with a seed get them. 0: such requests go by the scales of sampled ones, which
    promise them more than they get."""
    fit_domains: list[str] | None = None
    """Domains whose prompts the scales are fitted on; None takes all. All are reported on."""
    num_bins: int = Field(NUM_BINS, ge=2)
    """Bins of equal width that calibration error is measured over, in fitting and in the report."""
    shift: bool = True
    """Fit a shift of each slot's logit beside its temperature, so that the mean prediction is right too. False is the
    paper's scaling by temperatures alone: to compare with its figures."""

    from_traffic: str | None = None
    """Folder of rounds that a server recorded (`traffic.folder` of a deployment): they are fitted on in place of
    prompts, and nothing is decoded. Also `--from-traffic FOLDER`."""
    max_rounds: int = Field(200_000, ge=1)
    """Newest recorded rounds that are read."""

    @pydantic.model_validator(mode="after")
    def _check_traffic(self) -> "CalibrateConfig":
        if self.from_traffic is not None and self.fit_domains is not None:
            raise ValueError(f"fit_domains {self.fit_domains} has no effect with from_traffic, which knows no domains")
        return self

    @property
    def modes(self) -> list[EvaluationMode]:
        sampled = [EvaluationMode(name=name, temperature=1.0) for name in _names("sampled", self.samples_per_prompt)]
        seeded = [
            EvaluationMode(name=name, temperature=1.0, seeded="invariant")
            for name in _names("seeded", self.seeded_samples)
        ]
        return [EvaluationMode(name="greedy"), *sampled, *seeded]

    @property
    def measurement(self) -> EvaluateConfig:
        """The same prompts, decoded as the evaluate stage would."""
        shared = {name: getattr(self, name) for name in MeasurementConfig.model_fields}
        return EvaluateConfig(**shared, max_new_tokens=self.max_new_tokens, modes=self.modes)


def _names(mode: str, number: int) -> list[str]:
    """Of a mode for each of so many samples."""
    return [mode if sample == 1 else f"{mode}{SAMPLE}{sample}" for sample in range(1, number + 1)]
