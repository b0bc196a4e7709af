"""Load on an engine in this process: so many requests at once over the same prompts, plain or speculative.

Throughput counts tokens by usage, never by arrivals: one step, or one chunk of a stream, may hold several tokens.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import pydantic
from pydantic import Field

from dspark.chat import ChatConfig, render_prompt
from dspark.config import Config, build_config
from dspark.data.decoding import derive_seed
from dspark.data.prompts import Prompt, PromptSource
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.engine.loading import WITHOUT_FOLDER, drafter_target, load_engine, plain_twin
from dspark.engine.request import GenerationRequest
from dspark.evaluation.config import EvaluationMode
from dspark.speculation.statistics import AcceptanceCounts
from dspark.targets import TargetConfig
from dspark.tracking import TrackingConfig

Side = Literal["plain", "speculative"]

SERVER_DECIDES = ("target", "engine", "threads")


class BenchmarkConfig(Config):
    """The benchmark stage: tokens per second with and without speculation, by the number of concurrent requests."""

    drafter: str | None = None
    """Folder made by jobs/train.py, "ngram" or "mtp" (the target's own modules), for an engine in this process."""
    base_url: str | None = None
    """Measure a running server of ours instead, such as http://127.0.0.1:8000; drafter, target, engine are its own."""
    output: str
    """Gets `benchmark.json`, which grows as pairs finish."""
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
    pairs: int = Field(5, ge=1)
    """Runs of each side, in the order plain, speculative, speculative, plain, …: what slows the machine meets both."""
    max_tokens: int = Field(256, ge=1)
    """Of an answer, which ends earlier at the target's own stop tokens."""
    requests_per_place: int = Field(2, ge=1)
    """Requests of a run, times the concurrency: the more, the less the end counts, when places fall empty."""
    min_requests: int = Field(4, ge=1)
    """Requests of a run at least."""
    warmup_tokens: int = Field(32, ge=1)
    """Output tokens of two requests per side that come first and are not counted."""
    engine: EngineConfig = EngineConfig()
    threads: int = Field(2, ge=1)
    """CPU threads; the cost curve has to be measured with the same number."""
    seed: int = 0
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
        names = [mode.name for mode in self.modes]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"modes need one name each, got {names}")
        if min(self.concurrency) < 1 or len(set(self.concurrency)) < len(self.concurrency):
            raise ValueError(f"concurrency is {list(self.concurrency)}; give each number once, all of them 1 or more")
        most = self.engine.max_running_requests
        if self.base_url is None and max(self.concurrency) > most:
            raise ValueError(f"concurrency {max(self.concurrency)} is over engine.max_running_requests ({most})")
        return self

    def num_requests(self, concurrency: int) -> int:
        return max(self.min_requests, self.requests_per_place * concurrency)


@dataclass
class Answer:
    """What came back for one request. arrived_s: clock readings, one per step or chunk that brought text or tokens.

    num_tokens: by usage. output_ids: empty where they are not told.
    """

    sent_s: float
    arrived_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: str | None = None
    output_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class LoadRun:
    """All requests of one run, answers in their order. seconds: from the first request to the last token.

    full_load_*: the part in which every place was taken. counts: verified rounds; num_drafted of num_decodes steps of
    a request had a proposal made, num_copied had one looked up. None over HTTP, where it is not told.
    """

    answers: list[Answer]
    seconds: float
    full_load_s: float | None = None
    full_load_tokens: int | None = None
    counts: AcceptanceCounts | None = None
    num_decodes: int = 0
    num_drafted: int = 0
    num_copied: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def full_load_tokens_per_s(self) -> float | None:
        return self.full_load_tokens / self.full_load_s if self.full_load_tokens and self.full_load_s else None

    def figures(self) -> dict[str, Any]:
        """JSON-ready. first_token_ms: from sending to the first arrival; gap_ms: between arrivals of a request;
        token_ms: per request, from the first arrival to the last over the tokens after the first.
        """
        gaps = [gap for answer in self.answers for gap in np.diff(answer.arrived_s).tolist()]
        per_token = [
            (answer.arrived_s[-1] - answer.arrived_s[0]) / (answer.num_tokens - 1)
            for answer in self.answers
            if len(answer.arrived_s) > 1 and answer.num_tokens > 1
        ]
        first = [answer.arrived_s[0] - answer.sent_s for answer in self.answers if answer.arrived_s]
        return {
            "requests": len(self.answers),
            "output_tokens": self.num_tokens,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "full_load_tokens_per_s": self.full_load_tokens_per_s,
            "first_token_ms": _percentiles_ms(first),
            "gap_ms": _percentiles_ms(gaps),
            "token_ms": _percentiles_ms(per_token),
            "finished": dict(Counter(str(answer.finish_reason) for answer in self.answers)),
        } | self._round_figures()

    def _round_figures(self) -> dict[str, float | None]:
        """verify_length: draft tokens verified per step of a request, undrafted steps counted as 0."""
        if self.counts is None:
            names = ("accepted_length", "acceptance", "verify_length", "drafted_share", "copied_share", "round_tokens")
            return dict.fromkeys(names)
        c = self.counts
        num_rounds = c.rounds + c.plain_rounds
        return {
            "accepted_length": _ratio(c.committed_tokens, c.rounds),
            "acceptance": _ratio(c.accepted_tokens, c.proposed_tokens - c.after_stop_tokens),
            "verify_length": _ratio(c.proposed_tokens, num_rounds),
            "drafted_share": _ratio(self.num_drafted, self.num_decodes),
            "copied_share": _ratio(self.num_copied, self.num_decodes),
            "round_tokens": _ratio(c.committed_tokens + c.plain_committed_tokens, num_rounds),
        }


class Load(Protocol):
    """Something that answers the same requests plainly or speculatively; never both at once."""

    notes: list[str]

    def run(self, side: Side, mode: EvaluationMode, *, concurrency: int, num_requests: int, max_tokens: int) -> LoadRun:
        """The first requests, `concurrency` of them at a time."""
        ...


def closed_loop(
    engine: Engine,
    requests: Sequence[GenerationRequest],
    *,
    concurrency: int,
    clock: Callable[[], float] = time.perf_counter,
) -> LoadRun:
    """Step the engine until all requests are answered, with `concurrency` of them in it as long as there are more."""
    waiting = deque(requests)
    answers: dict[str, Answer] = {}
    num_open = num_tokens = full_load_tokens = 0
    decodes, drafted, copied = engine.stats.decodes, engine.stats.drafted, engine.stats.copied
    counts = AcceptanceCounts()
    now = started = clock()
    full_load_s = 0.0
    while waiting or num_open:
        while waiting and num_open < concurrency:
            request = waiting.popleft()
            engine.add(request)
            answers[request.request_id] = Answer(sent_s=clock())
            num_open += 1
        is_full = num_open == concurrency
        outputs = engine.step()
        now = clock()
        for output in outputs:
            answer = answers[output.request_id]
            answer.arrived_s.append(now)
            answer.output_ids += output.token_ids
            answer.num_tokens = output.num_output_tokens
            num_tokens += len(output.token_ids)
            answer.finish_reason = output.finish_reason
            num_open -= output.finish_reason is not None
            if output.round is not None:
                counts.add_round(output.round.num_proposed, output.round.num_accepted, output.round.num_committed)
        if is_full:
            full_load_s, full_load_tokens = now - started, num_tokens
    engine.check()
    return LoadRun(
        answers=[answers[request.request_id] for request in requests],
        seconds=now - started,
        full_load_s=full_load_s,
        full_load_tokens=full_load_tokens,
        counts=counts,
        num_decodes=engine.stats.decodes - decodes,
        num_drafted=engine.stats.drafted - drafted,
        num_copied=engine.stats.copied - copied,
    )


class EngineLoad:
    """Two engines on one model in this process, of which one steps at a time."""

    def __init__(self, config: BenchmarkConfig, prompts: Sequence[Prompt]) -> None:
        """Raises: ValueError when no prompt fits the target, or the KV memory does not hold what is to run at once."""
        target = config.target or drafter_target(str(config.drafter))
        loaded = load_engine(target, config.drafter, config=config.engine, num_threads=config.threads)
        self.notes = list(loaded.notes)
        self._engines: dict[Side, Engine] = {"plain": plain_twin(loaded), "speculative": loaded.engine}
        self._stop_ids, self._seed = loaded.stop_ids, config.seed
        recorded = {} if loaded.provenance is None else loaded.provenance["chat"]
        chat = build_config(ChatConfig, recorded, source=f"{config.drafter}/provenance.json")
        rendered = [(prompt.id, tuple(render_prompt(loaded.tokenizer, prompt.opening, chat))) for prompt in prompts]
        limit = loaded.engine.max_context_tokens
        self._prompts = [
            (name, ids) for name, ids in rendered if limit is None or len(ids) + config.max_tokens <= limit
        ]
        if not self._prompts:
            raise ValueError(f"no prompt and max_tokens ({config.max_tokens}) fit the target's context of {limit}")
        if len(self._prompts) < len(prompts):
            self.notes.append(f"{len(prompts) - len(self._prompts)} of {len(prompts)} prompts are too long: left out")
        self._require_memory(config)

    def run(self, side: Side, mode: EvaluationMode, *, concurrency: int, num_requests: int, max_tokens: int) -> LoadRun:
        requests = []
        for number in range(num_requests):
            name, ids = self._prompts[number % len(self._prompts)]
            seed = derive_seed(self._seed, name, number)
            requests.append(GenerationRequest(str(number), ids, mode.sampling, max_tokens, self._stop_ids, seed=seed))
        return closed_loop(self._engines[side], requests, concurrency=concurrency)

    def _require_memory(self, config: BenchmarkConfig) -> None:
        """A run that waits for pages would measure another concurrency than it says."""
        engine, most = self._engines["speculative"], max(config.concurrency)
        longest = max(len(ids) for _, ids in self._prompts) + config.max_tokens + engine.block_size
        needed = most * -(-longest // config.engine.page_size)
        if needed > engine.num_pages:
            raise ValueError(
                f"{most} requests of up to {longest} tokens need {needed * config.engine.page_size} tokens of KV "
                f"memory; raise engine.kv_tokens ({config.engine.kv_tokens})"
            )


def _percentiles_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    if not len(seconds):
        return None
    values = (1000.0 * np.quantile(seconds, [0.5, 0.9, 0.99])).tolist()
    return dict(zip(("p50", "p90", "p99"), values, strict=True))


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
