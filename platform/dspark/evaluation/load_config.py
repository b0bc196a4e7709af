"""What is asked for under load, by whom, and how often: the configs of everything that measures tokens per second."""

from typing import Any

import pydantic
from pydantic import Field

from dspark.config import Config
from dspark.data.prompts import PromptSource
from dspark.engine.config import MeasuredEngineConfig
from dspark.engine.drafter_folder import WITHOUT_FOLDER
from dspark.engine.lookup import LookupConfig
from dspark.evaluation.config import EvaluationMode
from dspark.targets import TargetConfig
from dspark.tracking import TrackingConfig

SERVER_DECIDES = ("target", "engine", "threads")
LOAD_DECIDES = ("model", "messages", "max_tokens", "temperature", "top_p", "top_k", "seed", "stream", "n")


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
        if any(number < 1 for number in self.concurrency) or len(set(self.concurrency)) < len(self.concurrency):
            raise ValueError(f"concurrency is {list(self.concurrency)}; give each number once, all of them 1 or more")
        return self

    def num_requests(self, concurrency: int) -> int:
        return max(self.min_requests, self.requests_per_place * concurrency)

    def require_places(self) -> None:
        """Raises: ValueError when an engine of this config would not run so many requests at once."""
        most = self.engine.max_running_requests
        if max(self.concurrency) > most:
            raise ValueError(f"concurrency {max(self.concurrency)} is over engine.max_running_requests ({most})")


class Endpoint(Config):
    """A running server that speaks OpenAI's API, ours or anybody's: it is sent OpenAI's fields and `body` alone."""

    base_url: str
    """With its version, such as http://127.0.0.1:8000/v1. Where /metrics beside that holds our counters, what the
    server drafted and verified is told too; it had best serve nobody else meanwhile."""
    model: str | None = None
    """None takes the first one that /models lists."""
    api_key_env: str | None = None
    """Name of the environment variable with its key; the key itself would be recorded with the config."""
    body: dict[str, Any] = {}
    """Fields to add to every request, such as {verify_length: 0} for a server of ours to decode plainly."""
    stream: bool = True
    """False asks for whole answers: no figures of first tokens and of gaps then."""
    send_seed: bool = False
    """Sampled requests carry a seed of their own, which fixes their text, at the price of acceptance on a server of
    ours: leave it out to measure how a server does without being asked for that."""
    timeout_s: float = Field(600.0, gt=0)
    """A request that takes longer, or says nothing for so long, has failed."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "Endpoint":
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url is {self.base_url!r}; it must start with http:// or https://")
        taken = [name for name in LOAD_DECIDES if name in self.body]
        if taken:
            raise ValueError(f"body holds {', '.join(taken)}, which the load decides; leave them out")
        return self


class BenchmarkConfig(LoadConfig):
    """The benchmark stage: tokens per second by the load, with and without a drafter here, or of running servers."""

    drafter: str | None = None
    """Folder made by jobs/train.py, "ngram" or "mtp" (the target's own modules), for an engine in this process."""
    endpoints: dict[str, Endpoint] = {}
    """By name: running servers to measure instead, each in turn under the same load; drafter, target and engine are
    their own. They had best be started without a prefix cache: all are asked the same prompts, again and again."""
    concurrency: tuple[int, ...] = (1, 4, 16)
    """Closed loop, as above; may be empty where there are request_rates."""
    request_rates: tuple[float, ...] = ()
    """Open loop, endpoints only: requests per second that arrive whether or not earlier ones have ended, at random
    times (Poisson) that the seed decides. Latency counts from the time a request was to arrive."""
    rate_s: float = Field(60.0, gt=0)
    """Seconds that requests arrive for at each rate."""
    output: str
    """Gets `benchmark.json`, which grows as pairs finish."""
    pairs: int = Field(5, ge=1)
    """Runs of each side, in the order plain, speculative, speculative, plain, …: what slows the machine meets both. Of
    endpoints: runs of each, in their order and then in the other."""
    tracking: TrackingConfig = TrackingConfig()

    @pydantic.model_validator(mode="after")
    def _check(self) -> "BenchmarkConfig":
        if (self.drafter is None) == (not self.endpoints):
            raise ValueError("give a drafter for an engine in this process, or the endpoints of running servers")
        if not self.concurrency and not self.request_rates:
            raise ValueError("there is no load; give concurrency or request_rates")
        if self.endpoints:
            self._check_endpoints()
            return self
        if self.request_rates:
            raise ValueError("request_rates are for endpoints; an engine in this process is measured by concurrency")
        if not self.concurrency:
            raise ValueError("concurrency is empty; give one number at least")
        if self.drafter in WITHOUT_FOLDER and self.target is None:
            raise ValueError(f"drafter {self.drafter!r} has no folder that names its target: it needs a target")
        self.require_places()
        return self

    def _check_endpoints(self) -> None:
        changed = [name for name in SERVER_DECIDES if getattr(self, name) != type(self).model_fields[name].default]
        if changed:
            raise ValueError(f"the servers at the endpoints have their own {', '.join(changed)}; leave them out")
        if any(mode.seeded == "invariant" for mode in self.modes):
            raise ValueError("the servers at the endpoints judge draft tokens as they do; leave seeded 'invariant' out")
        rates = self.request_rates
        if any(rate <= 0 for rate in rates) or len(set(rates)) < len(rates):
            raise ValueError(f"request_rates is {list(rates)}; give each rate once, all of them over 0")

    def num_arrivals(self, request_rate: float) -> int:
        """Requests of a run at this rate."""
        return max(self.min_requests, round(request_rate * self.rate_s))


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
