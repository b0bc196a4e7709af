"""Load on an engine in this process: so many requests at once over the same prompts, plain or speculative."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from dspark.chat import ChatConfig, render_prompt
from dspark.config import build_config
from dspark.data.decoding import derive_seed
from dspark.data.prompts import Prompt
from dspark.engine.drafter_folder import drafter_target
from dspark.engine.engine import Engine
from dspark.engine.loading import LoadedEngine, load_engine, plain_twin
from dspark.engine.request import GenerationRequest
from dspark.evaluation.config import EvaluationMode
from dspark.evaluation.load_config import BenchmarkConfig, LoadConfig
from dspark.evaluation.load_run import Answer, LoadRun
from dspark.speculation.statistics import AcceptanceCounts

Side = Literal["plain", "speculative"]


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


class EngineRequests:
    """The same requests for whichever engine is asked. notes: what a user should know, a line each."""

    def __init__(
        self, loaded: LoadedEngine, prompts: Sequence[Prompt], chat: ChatConfig, config: LoadConfig, *, num_ahead: int
    ) -> None:
        """num_ahead: the most tokens of a step that are not committed, see `Engine`.

        Raises: ValueError when no prompt fits the target, or the KV memory does not hold what is to run at once.
        """
        self.notes: list[str] = []
        self._stop_ids, self._seed = loaded.stop_ids, config.seed
        rendered = [(prompt.id, tuple(render_prompt(loaded.tokenizer, prompt.opening, chat))) for prompt in prompts]
        limit = loaded.engine.max_context_tokens
        self._prompts = [
            (name, ids) for name, ids in rendered if limit is None or len(ids) + config.max_tokens <= limit
        ]
        if not self._prompts:
            raise ValueError(f"no prompt and max_tokens ({config.max_tokens}) fit the target's context of {limit}")
        if len(self._prompts) < len(prompts):
            self.notes.append(f"{len(prompts) - len(self._prompts)} of {len(prompts)} prompts are too long: left out")
        self._require_memory(config, loaded.engine.num_pages, num_ahead)

    def first(self, number: int, mode: EvaluationMode, *, max_tokens: int) -> list[GenerationRequest]:
        """So many requests, the same ones whenever they are asked for."""
        requests = []
        for place in range(number):
            name, ids = self._prompts[place % len(self._prompts)]
            seed = derive_seed(self._seed, name, place)
            requests.append(GenerationRequest(str(place), ids, mode.sampling, max_tokens, self._stop_ids, seed=seed))
        return requests

    def _require_memory(self, config: LoadConfig, num_pages: int, num_ahead: int) -> None:
        """A run that waits for pages would measure another concurrency than it says."""
        most = max(config.concurrency)
        longest = max(len(ids) for _, ids in self._prompts) + config.max_tokens + num_ahead
        needed = most * -(-longest // config.engine.page_size)
        if needed > num_pages:
            raise ValueError(
                f"{most} requests of up to {longest} tokens need {needed * config.engine.page_size} tokens of KV "
                f"memory; raise engine.kv_tokens ({num_pages * config.engine.page_size})"
            )


class EngineLoad:
    """Two engines on one model in this process, of which one steps at a time."""

    def __init__(self, config: BenchmarkConfig, prompts: Sequence[Prompt]) -> None:
        """Raises: ValueError as `EngineRequests` does."""
        target = config.target or drafter_target(str(config.drafter))
        loaded = load_engine(target, config.drafter, config=config.engine, num_threads=config.threads)
        self._engines: dict[Side, Engine] = {"plain": plain_twin(loaded), "speculative": loaded.engine}
        chat = chat_of(loaded, source=f"{config.drafter}/provenance.json")
        self._requests = EngineRequests(loaded, prompts, chat, config, num_ahead=loaded.engine.most_ahead)
        self.notes = loaded.notes + self._requests.notes

    def run(self, side: Side, mode: EvaluationMode, *, concurrency: int, num_requests: int, max_tokens: int) -> LoadRun:
        requests = self._requests.first(num_requests, mode, max_tokens=max_tokens)
        return closed_loop(self._engines[side], requests, concurrency=concurrency)


def chat_of(loaded: LoadedEngine, *, source: str) -> ChatConfig:
    """How the answers were asked for that the drafter was trained on; the defaults of one without a folder."""
    recorded = {} if loaded.provenance is None else loaded.provenance["chat"]
    return build_config(ChatConfig, recorded, source=source)
