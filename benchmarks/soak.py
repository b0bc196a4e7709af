"""Mixed load on one engine for as long as asked: nothing is lost, nothing fails, greedy answers are the target's own.

    python benchmarks/soak.py --prompts prompts.jsonl --drafter runs/demo/drafter [--minutes 30] [--requests 20000]
                              [--num-prompts 60] [--tokens 48] [--kv-tokens 2048] [--seed 0]

Requests of all kinds come, are aborted at random, and preempt each other in a memory that is too small for all. Every
few hundred the engine runs empty: no page may be held then, and the process's memory is looked at. Greedy answers are
compared with those given alone and without speculation, seeded ones with what the same seed said before; float32. The
last line of stdout is one JSON object; the exit status is 1 if anything is wrong.
"""

import gc
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.engine.lookup import LookupConfig
from dspark.engine.request import GenerationRequest
from dspark.engine.sampling import SamplingParams
from dspark.engine.step import StepOutput
from served import NEAR_TIE, Setting, Subject, first_difference, parser_of, print_table, resident_bytes

GREEDY = SamplingParams(temperature=0.0)
PARAMS = (
    GREEDY,
    SamplingParams(temperature=0.0, repetition_penalty=1.2, logprobs=2),
    SamplingParams(temperature=0.0, banned_token_ids=(28, 30), min_tokens=6),
    SamplingParams(temperature=1.0, logprobs=0),
    SamplingParams(temperature=0.8, top_p=0.9, seeded="rejection"),
    SamplingParams(temperature=0.7, top_k=40, min_p=0.02),
    SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=0.4, frequency_penalty=0.2),
    SamplingParams(temperature=1.1, top_k=20, logit_bias={28: 2.0, 30: -3.0}, min_tokens=3),
    SamplingParams(temperature=0.9, allowed_token_ids=tuple(range(256))),
)
STOP_STRINGS = ((), (), (), (".",), ("\n\n", "the answer"), (" so", "?"))
MOST_OPEN = 24
DRAIN_EVERY = 250  # requests
ABORT_SHARE = 0.1  # of the steps
WARM_UP = 0.2  # of the run; what is allocated once is allocated by then
MOST_DRIFT = 0.02


class Mixture:
    """Random requests over the prompts of others, which are asked `alone`; `number` of them so far."""

    def __init__(self, alone: Sequence[GenerationRequest], block_size: int, rng: random.Random) -> None:
        self.number = 0
        self._alone, self._block_size, self._rng = alone, block_size, rng

    def draw(self) -> list[tuple[int, GenerationRequest]]:
        """The choices of one request, each with the place of its prompt."""
        rng, place = self._rng, self._rng.randrange(len(self._alone))
        alone = self._alone[place]
        sampling = rng.choice(PARAMS) if rng.random() < 0.6 else GREEDY
        asked: dict[str, Any] = {
            "prompt_ids": alone.prompt_ids,
            "sampling": sampling,
            "max_tokens": max(sampling.min_tokens, rng.randint(1, alone.max_tokens)),
            "stop_ids": alone.stop_ids,
            "stop_strings": rng.choice(STOP_STRINGS),
            "seed": rng.choice((None, 1, 2)),
            "priority": rng.choice((0, 0, 0, -1, 2)),
            "verify_length": rng.choice((None, None, None, rng.randint(0, self._block_size))),
        }
        num_choices = 1 if sampling.temperature == 0 or rng.random() < 0.9 else rng.randint(2, 4)
        requests = [
            (place, GenerationRequest(request_id=f"{self.number}-{choice}", choice=choice, **asked))
            for choice in range(num_choices)
        ]
        self.number += 1
        return requests


@dataclass
class Open:
    """A request in the engine, and what it has been told."""

    place: int
    request: GenerationRequest
    token_ids: list[int] = field(default_factory=list)
    text: str = ""


class Soak:
    """Keeps an engine busy. truth: the greedy answer to each prompt; wrong: requests that were not answered right."""

    def __init__(self, engine: Engine, mixture: Mixture, truth: Sequence[Sequence[int]], rng: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[tuple[GenerationRequest, list[int]]] = []
        self.resident: list[tuple[float, int]] = []  # after so many seconds, bytes
        self._engine, self._mixture, self._truth, self._rng = engine, mixture, truth, rng
        self._open: dict[str, Open] = {}
        self._said: dict[tuple[Any, ...], list[int]] = {}
        self._started = time.monotonic()

    def run(self, *, seconds: float, num_requests: int) -> None:
        """Until either is reached, and then until all are answered."""
        next_drain = DRAIN_EVERY
        while self.counts["asked"] < num_requests and time.monotonic() - self._started < seconds:
            while len(self._open) < self._rng.randint(1, MOST_OPEN):
                self._ask()
            self._step()
            if self._open and self._rng.random() < ABORT_SHARE:
                self._abort(self._rng.choice(list(self._open)))
            if self.counts["asked"] >= next_drain:
                self.drain()
                next_drain += DRAIN_EVERY
        self.drain()

    def drain(self) -> None:
        """Let the engine run empty: then nothing may be held."""
        while self._engine.has_work:
            self._step()
        assert not self._open, f"requests without an end: {list(self._open)}"
        self._engine.check()
        held = self._engine.num_pages - self._engine.num_free_pages
        assert not held, f"{held} pages are held by nobody"
        self.counts["checks"] += 1
        gc.collect()
        self.resident.append((time.monotonic() - self._started, resident_bytes()))

    def drift(self) -> float:
        """The largest change of memory after the warm-up, as a share."""
        ended = self.resident[-1][0]
        settled = [size for at, size in self.resident if at >= WARM_UP * ended] or [self.resident[-1][1]]
        return max(abs(size - settled[0]) for size in settled) / settled[0]

    def _ask(self) -> None:
        for place, request in self._mixture.draw():
            self._engine.add(request)
            self._open[request.request_id] = Open(place, request)
            self.counts["asked"] += 1

    def _abort(self, name: str) -> None:
        self._engine.abort(name)
        del self._open[name]
        self.counts["aborted"] += 1

    def _step(self) -> None:
        for output in self._engine.step():
            self._take(output)

    def _take(self, output: StepOutput) -> None:
        one = self._open[output.request_id]  # what was aborted gets nothing
        one.token_ids += output.token_ids
        one.text += output.text
        assert output.num_output_tokens == len(one.token_ids)
        assert (output.logprobs is None) == (one.request.sampling.logprobs is None)
        assert output.logprobs is None or len(output.logprobs) == len(output.token_ids)
        if output.finish_reason is not None:
            del self._open[output.request_id]
            self.counts[output.finish_reason] += 1
            self.counts["tokens"] += len(one.token_ids)
            self._judge(one, output.finish_reason)

    def _judge(self, one: Open, finish_reason: str) -> None:
        request, ids = one.request, one.token_ids
        fewest = request.max_tokens if finish_reason == "length" else 1
        assert fewest <= len(ids) <= request.max_tokens, f"{finish_reason} after {len(ids)} of {request.max_tokens}"
        early = request.sampling.min_tokens > 0  # nothing is searched there
        assert early or not any(stop in one.text for stop in request.stop_strings), f"a stop in {one.text!r}"
        if request.sampling == GREEDY:
            self.counts["greedy"] += 1
            self._compare(request, ids, self._truth[one.place])
        elif request.sampling.temperature == 0 or (request.seed and request.sampling.seeded == "invariant"):
            seed = request.seed if request.sampling.temperature else None
            key = (one.place, PARAMS.index(request.sampling), seed, request.choice)
            before = self._said.setdefault(key, ids)
            self.counts["repeated"] += before is not ids
            self._compare(request, ids, before)
            self._said[key] = max(before, ids, key=len)

    def _compare(self, request: GenerationRequest, ids: list[int], other: Sequence[int]) -> None:
        """Either may have been cut earlier; as far as both go they are the same."""
        length = min(len(ids), len(other))
        place = first_difference(ids[:length], other[:length])
        if place is not None:
            self.wrong.append((request, ids[:place]))


def main() -> None:
    parser = parser_of(__doc__, num_prompts=60, tokens=48)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--kv-tokens", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    subject = Subject(options, "float32")
    alone = [
        GenerationRequest(str(i), ids, GREEDY, options.tokens, subject.loaded.stop_ids)
        for i, ids in enumerate(subject.prompts())
    ]
    truth = [answer.output_ids for answer in subject.run(Setting("alone", None, 1), alone)[0].answers]
    config = EngineConfig(kv_tokens=options.kv_tokens, max_running_requests=16, lookup=LookupConfig())
    engine = subject.engine(options.drafter or "ngram", config)
    mixture = Mixture(alone, engine.block_size, random.Random(options.seed))
    soak = Soak(engine, mixture, truth, random.Random(options.seed + 1))
    soak.run(seconds=60.0 * options.minutes, num_requests=options.requests)
    result = _result(soak, engine, subject)
    print_table([{"": name, " ": value} for name, value in result.items()])
    print(json.dumps(result))
    sys.exit(not result["is_right"])


def _result(soak: Soak, engine: Engine, subject: Subject) -> dict[str, Any]:
    counts, stats, (seconds, last) = soak.counts, engine.stats, soak.resident[-1]
    adds_up = counts["asked"] == counts["stop"] + counts["length"] + counts["aborted"]
    adds_up &= (stats.finished["stop"], stats.finished["length"]) == (counts["stop"], counts["length"])
    leads = [subject.lead(request, ids) for request, ids in soak.wrong]
    not_ties = [lead for lead in leads if lead >= NEAR_TIE]
    mebibytes = [size / 2**20 for _, size in soak.resident]
    return {
        "seconds": round(seconds, 1),
        "requests": counts["asked"],
        "ended by a stop": counts["stop"],
        "ended by length": counts["length"],
        "aborted": counts["aborted"],
        "adds up": adds_up,
        "output tokens": counts["tokens"],
        "steps": stats.steps,
        "preemptions": stats.preemptions,
        "prompt tokens found": stats.prefix_cache_hits,
        "draft tokens accepted": stats.rounds.accepted_tokens,
        "greedy compared": counts["greedy"],
        "others asked again": counts["repeated"],
        "differing": len(leads),
        "differing, no near-tie": len(not_ties),
        "checks when idle": counts["checks"],
        "MiB after the first requests": round(mebibytes[0], 1),
        "MiB at the end": round(last / 2**20, 1),
        "drift after warm-up": round(soak.drift(), 4),
        "is_right": adds_up and not not_ties and soak.drift() <= MOST_DRIFT,
    }


if __name__ == "__main__":
    main()
