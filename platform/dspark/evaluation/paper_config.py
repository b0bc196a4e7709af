"""What a set of the paper's experiments consists of: config files of other jobs, and what is changed in them."""

import json
from typing import Literal, TypeVar

import pydantic
from pydantic import Field

from dspark.config import Config, load_config
from dspark.data.answers import GenerateConfig
from dspark.data.capture import CacheConfig
from dspark.drafters.released import AdoptConfig
from dspark.evaluation.config import CalibrateConfig, EvaluateConfig, MeasurementConfig
from dspark.evaluation.findings import MAIN
from dspark.evaluation.load_config import ContestConfig
from dspark.evaluation.profiling import ProfileConfig
from dspark.evaluation.published import PublishedTarget
from dspark.evaluation.round_time import RoundTimeConfig
from dspark.evaluation.tasks import BENCHMARKS, benchmark_folder
from dspark.targets import TargetConfig
from dspark.tracking import TrackingConfig

C = TypeVar("C", bound=Config)
M = TypeVar("M", bound=MeasurementConfig)


class JobFile(Config):
    """A config file of another job, and overrides `key.path=value` as on its command line."""

    config: str
    changes: tuple[str, ...] = ()

    def load(self, config_class: type[C], *more: str) -> C:
        return load_config(config_class, self.config, [*self.changes, *more])


class DrafterFile(JobFile):
    """A drafter: a config file of jobs/train.py, or of jobs/adopt.py with `adopted`, which needs no data at all."""

    cache: str | None = None
    """Name of the cache it trains on."""
    adopted: bool = False
    seeds: int | None = Field(None, ge=1)
    """Train with the first so many seeds only; None takes all."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "DrafterFile":
        if self.adopted == (self.cache is not None):
            raise ValueError("a drafter is either adopted or trained on a cache; give one of adopted and cache")
        return self


class PaperConfig(Config):
    """A set of the paper's experiments on one target, in pieces that resume.

    Drafters are found by what they are, not by their names: the one called "dspark" is the one that others stand
    beside, and a claim about, say, depth looks for a DSpark drafter of 2 layers and a DFlash drafter of 5.
    """

    output: str
    """Gets a folder of each piece, pieces.jsonl, report.html, summary.json, claims.md and figures/."""
    size: Literal["quick", "full"]
    """What the report calls the set."""
    target: TargetConfig
    published: PublishedTarget = "qwen3_4b"
    """Whose figures of the paper stand beside those measured."""
    seeds: tuple[int, ...] = Field((0,), min_length=1)
    """Of training: each drafter is trained and measured once for each. Claims about order rest on several."""
    generate: JobFile | None = None
    caches: dict[str, JobFile] = {}
    """By name. Answers and caches lie where their files say: a set can start from those of another."""
    drafters: dict[str, DrafterFile] = Field(min_length=1)
    training: tuple[str, ...] = ()
    """Overrides of every train config: the same budget for all."""
    evaluate: JobFile
    """The prompts and the mode of sampling that every drafter is measured with."""
    benchmarks_folder: str | None = None
    """With `<name>.jsonl` of the nine benchmarks; None takes the folder that DSPARK_BENCHMARKS names. Without either
    the prompts of `evaluate` stand in, and the report says so."""
    benchmarks_from_hub: bool = False
    """Fetch what that folder lacks."""
    prompts_per_benchmark: int | None = Field(None, ge=1)
    """At most; a piece's own file may say fewer, as `prompts_per_domain`. Where neither says so, as many as the paper's
    code takes."""
    calibrate: JobFile | None = None
    profile_engine: JobFile | None = None
    contest: ContestConfig | None = None
    """Ways of decoding under load. An entrant's drafter may be the name of one of `drafters`."""
    round_time: RoundTimeConfig | None = None
    budget: JobFile | None = None
    """An evaluation with scheduled lengths in which prompts of all domains run at once."""
    lossless: JobFile | None = None
    """An evaluation with greedy decoding that is compared with the library's own."""
    rates: dict[str, float] = {}
    """Units a second by kind of piece, for the projected times before anything was measured."""
    tracking: TrackingConfig = TrackingConfig()

    @pydantic.model_validator(mode="after")
    def _check(self) -> "PaperConfig":
        if MAIN not in self.drafters:
            raise ValueError(f"drafters need one called {MAIN!r}, that the others stand beside")
        for name, drafter in self.drafters.items():
            if drafter.cache is not None and drafter.cache not in self.caches:
                raise ValueError(
                    f"drafter {name} trains on cache {drafter.cache!r}, but caches are {list(self.caches)}"
                )
        if self.caches and self.generate is None:
            raise ValueError("caches are made of answers; give generate")
        if self.budget is not None and (self.calibrate is None or self.profile_engine is None):
            raise ValueError("budget is scheduled, which needs calibrate and profile_engine of the main drafter")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds are {list(self.seeds)}; give each once")
        return self

    @property
    def uses_benchmarks(self) -> bool:
        """Whether the paper's own benchmarks are measured on."""
        return benchmark_folder(self.benchmarks_folder) is not None

    def drafter_folder(self, name: str, seed: int) -> str:
        adopted = self.drafters[name].adopted
        return f"{self.output}/{'adopted' if adopted else f'seed{seed}'}/{name}"

    def seeds_of(self, name: str) -> tuple[int, ...]:
        """An adopted drafter was trained once, whatever the number of seeds."""
        drafter = self.drafters[name]
        return self.seeds[:1] if drafter.adopted else self.seeds[: drafter.seeds]

    def generate_config(self) -> GenerateConfig:
        assert self.generate is not None
        return self.generate.load(GenerateConfig, self.tracking_override("generate"))

    def cache_config(self, name: str) -> CacheConfig:
        return self.caches[name].load(
            CacheConfig, f"answers={self.generate_config().output}", self.tracking_override(f"cache {name}")
        )

    def adopt_config(self, name: str) -> AdoptConfig:
        return self.drafters[name].load(
            AdoptConfig, f"output={self.drafter_folder(name, 0)}", self.tracking_override(f"adopt {name}")
        )

    def evaluate_config(self, name: str, seed: int) -> EvaluateConfig:
        place = [f"drafter={self.drafter_folder(name, seed)}", f"output={self.output}/evaluation/seed{seed}/{name}"]
        tracking = self.tracking_override(f"evaluate {name}, seed {seed}")
        return self._on_benchmarks(self.evaluate.load(EvaluateConfig, *place, tracking))

    def calibrate_config(self) -> CalibrateConfig:
        assert self.calibrate is not None
        place = [*self._place("calibration"), "seeded_samples=0"]  # no figure here is of seeded decoding
        return self._on_benchmarks(self.calibrate.load(CalibrateConfig, *place))

    def profile_config(self) -> ProfileConfig:
        assert self.profile_engine is not None
        return self.profile_engine.load(ProfileConfig, *self._place("profile"))

    def budget_config(self) -> EvaluateConfig:
        assert self.budget is not None
        return self.budget.load(EvaluateConfig, *self._place("budget"))

    def lossless_config(self) -> EvaluateConfig:
        """GSM8K where it is there."""
        assert self.lossless is not None
        config = self.lossless.load(EvaluateConfig, *self._place("lossless"))
        return self._on_benchmarks(config, ("gsm8k",))

    def contest_config(self) -> ContestConfig:
        """With the entrants' folders."""
        assert self.contest is not None
        entrants = {
            name: entrant.with_changes(drafter=self.drafter_folder(str(entrant.drafter), self.seeds[0]))
            if entrant.drafter in self.drafters
            else entrant
            for name, entrant in self.contest.entrants.items()
        }
        changed = {name: entrant.model_dump() for name, entrant in entrants.items()}
        return self.contest.with_changes(entrants=changed, target=self.target.model_dump())

    def _place(self, what: str) -> list[str]:
        drafter = self.drafter_folder(MAIN, self.seeds[0])
        return [f"drafter={drafter}", f"output={self.output}/{what}", self.tracking_override(what)]

    def tracking_override(self, what: str) -> str:
        """The pieces' runs stand in the set's own experiment."""
        return f"tracking={json.dumps(self.tracking.model_dump(mode='json') | {'run_name': what})}"

    def _on_benchmarks(self, config: M, names: tuple[str, ...] = tuple(BENCHMARKS)) -> M:
        if not self.uses_benchmarks:
            return config
        limits = [most for most in (self.prompts_per_benchmark, config.prompts_per_domain) if most is not None]
        return config.with_changes(
            prompts=[],
            tasks={},
            benchmarks=list(names),
            benchmarks_folder=self.benchmarks_folder,
            benchmarks_from_hub=self.benchmarks_from_hub,
            prompts_per_domain=min(limits, default=None),
        )
