"""What is asked for under load, by whom, and how often: the configs of everything that measures tokens per second."""

import pydantic
from pydantic import Field

from dspark.config import Config
from dspark.data.prompts import PromptSource
from dspark.engine.config import MeasuredEngineConfig
from dspark.engine.loading import WITHOUT_FOLDER
from dspark.engine.lookup import LookupConfig
from dspark.evaluation.config import EvaluationMode
from dspark.targets import TargetConfig
from dspark.tracking import TrackingConfig

SERVER_DECIDES = ("target", "engine", "threads")


class LoadConfig(Config):
    """The requests: which prompts, how many at once, how long."""

    prompts: list[PromptSource] = Field(min_length=1)
    """Only the first turn of their held-out rows is used."""
    domains: tuple[str, ...] = ()
    """Use these domains only, an equal number of prompts of each; empty takes all there are."""
    heldout_fraction: float = Field(0.05, ge=0, lt=1)
    """Of sources that do not name a split; the same as in the generate stage, or trained prompts are measured."""
    target: TargetConfig | None = None
    """None takes what the drafter was trained for; another target than that is refused."""
    modes: list[EvaluationMode] = [EvaluationMode(name="greedy")]
    concurrency: tuple[int, ...] = Field((1, 4, 16), min_length=1)
    """Numbers of requests at once; where one ends the next begins."""
    max_tokens: int = Field(256, ge=1)
    """Of an answer, which ends earlier at the target's own stop tokens."""
    requests_per_place: int = Field(2, ge=1)
    """Requests of a run, times the concurrency: the more, the less the end counts, when places fall empty."""
    min_requests: int = Field(4, ge=1)
    """Requests of a run at least."""
    warmup_tokens: int = Field(32, ge=1)
    """Output tokens of two requests per side that come first and are not counted."""
    engine: MeasuredEngineConfig = MeasuredEngineConfig()
    threads: int = Field(2, ge=1)
    """CPU threads; the cost curve has to be measured with the same number."""
    seed: int = 0

    @pydantic.model_validator(mode="after")
    def _check_load(self) -> "LoadConfig":
        names = [mode.name for mode in self.modes]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"modes need one name each, got {names}")
        if min(self.concurrency) < 1 or len(set(self.concurrency)) < len(self.concurrency):
            raise ValueError(f"concurrency is {list(self.concurrency)}; give each number once, all of them 1 or more")
        return self

    def num_requests(self, concurrency: int) -> int:
        return max(self.min_requests, self.requests_per_place * concurrency)

    def require_places(self) -> None:
        """Raises: ValueError when an engine of this config would not run so many requests at once."""
        most = self.engine.max_running_requests
        if max(self.concurrency) > most:
            raise ValueError(f"concurrency {max(self.concurrency)} is over engine.max_running_requests ({most})")


class BenchmarkConfig(LoadConfig):
    """The benchmark stage: tokens per second with and without speculation, by the number of concurrent requests."""

    drafter: str | None = None
    """Folder made by jobs/train.py, "ngram" or "mtp" (the target's own modules), for an engine in this process."""
    base_url: str | None = None
    """Measure a running server of ours instead, such as http://127.0.0.1:8000; drafter, target, engine are its own. It
    had best be started with engine.prefix_cache off: both sides ask the same prompts, and only the first would read."""
    output: str
    """Gets `benchmark.json`, which grows as pairs finish."""
    pairs: int = Field(5, ge=1)
    """Runs of each side, in the order plain, speculative, speculative, plain, …: what slows the machine meets both."""
    tracking: TrackingConfig = TrackingConfig()

    @pydantic.model_validator(mode="after")
    def _check(self) -> "BenchmarkConfig":
        if (self.drafter is None) == (self.base_url is None):
            raise ValueError("give a drafter for an engine in this process, or the base_url of a server")
        changed = [name for name in SERVER_DECIDES if getattr(self, name) != type(self).model_fields[name].default]
        if self.base_url is not None and changed:
            raise ValueError(f"the server at base_url has its own {', '.join(changed)}; leave them out")
        if self.drafter in WITHOUT_FOLDER and self.base_url is None and self.target is None:
            raise ValueError(f"drafter {self.drafter!r} has no folder that names its target: it needs a target")
        if self.base_url is None:
            self.require_places()
        return self


class Entrant(Config):
    """One way of decoding."""

    drafter: str | None = None
    """Folder made by jobs/train.py, "ngram", "mtp" (the target's own modules), or None for plain decoding."""
    verify_length: int | None = Field(None, ge=0)
    """Draft tokens of every step; None lets the scheduler decide, which needs the drafter's cost curve."""
    lookup: LookupConfig | None = None
    """Copy what the text repeats before the drafter is asked."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "Entrant":
        if self.drafter is None and (self.verify_length is not None or self.lookup is not None):
            raise ValueError("verify_length and lookup have no effect without a drafter; leave them out")
        if self.drafter in WITHOUT_FOLDER[1:] and self.verify_length is None:
            raise ValueError(f"drafter {self.drafter!r} has no cost curve; give its verify_length")
        return self


class ContestConfig(LoadConfig):
    """Several ways of decoding under the same load."""

    entrants: dict[str, Entrant] = Field(min_length=1)
    """By name. Throughputs are given as ratios to the first."""
    repeats: int = Field(3, ge=1)
    """Times that every setting is measured: all entrants in turn, in the other order the next time."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "ContestConfig":
        self.require_places()
        for name in ("verify_length", "lookup"):
            if getattr(self.engine, name) is not None:
                raise ValueError(f"engine.{name} has no effect here; give {name} to the entrants that are to have it")
        if self.target is None and all(entrant.drafter in WITHOUT_FOLDER for entrant in self.entrants.values()):
            raise ValueError("no entrant has a folder that names its target: give a target")
        return self
