"""Seeded requests in float32: is the text the seed's alone, whatever drafts, runs beside it or is preempted?

    python benchmarks/seeds.py --prompts prompts.jsonl --drafter runs/demo/drafter [--num-prompts 100] [--tokens 64]

Each setting answers the same sampled requests; the texts are compared with those without a drafter, one at a time. Of
each difference it is told how far ahead of the second the token was that the seed draws there, as the target alone
computes it: below 1e-4 the two tie within float32's rounding. The last line of stdout is one JSON object; the exit
status is 1 if there is a difference that is no such tie.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

from dspark.engine.config import EngineConfig
from dspark.engine.request import GenerationRequest
from dspark.engine.sampling import SamplingParams
from served import NEAR_TIE, Setting, Subject, first_difference, parser_of, print_table

PARAMS = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_p=0.95),
    SamplingParams(temperature=0.7, top_k=40, min_p=0.02),
    SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.3),
    SamplingParams(temperature=0.9, frequency_penalty=0.4, min_tokens=8),
)
PAGE_SIZE = 16


def main() -> None:
    options = parser_of(__doc__, num_prompts=100, tokens=64).parse_args()
    subject = Subject(options, "float32")
    requests = [
        GenerationRequest(
            str(i),
            ids,
            PARAMS[i % len(PARAMS)],
            options.tokens,
            subject.loaded.stop_ids,
            seed=1000 + i // 2,
            choice=i % 2,
        )
        for i, ids in enumerate(subject.prompts())
    ]
    alone, *others = _settings(requests, options.drafter)
    print(f"{alone.name} …", flush=True)
    truth = [answer.output_ids for answer in subject.run(alone, requests)[0].answers]
    rows: list[dict[str, Any]] = []
    differing: list[tuple[str, GenerationRequest, list[int]]] = []
    for setting in others:
        print(f"{setting.name} …", flush=True)
        run, engine = subject.run(setting, requests)
        places = [first_difference(a.output_ids, b) for a, b in zip(run.answers, truth, strict=True)]
        parted = [(setting.name, requests[i], truth[i][:place]) for i, place in enumerate(places) if place is not None]
        differing += parted
        rows.append(
            {
                "setting": setting.name,
                "equal": f"{len(requests) - len(parted)}/{len(requests)}",
                "preempted": engine.stats.preemptions,
                "cached": engine.stats.prefix_cache_hits,
                "drafted": engine.stats.drafted_tokens,
                "accepted": engine.stats.rounds.accepted_tokens,
                "tokens/s": run.tokens_per_s,
            }
        )
    print_table(rows)
    leads = [(name, one.request_id, len(ids), subject.lead(one, ids)) for name, one, ids in differing]
    for name, number, place, lead in leads:
        kind = "a near-tie" if lead < NEAR_TIE else "NO TIE"
        print(f"{name}: request {number} differs at token {place}, ahead by {lead:.2e}: {kind}")
    ties = sum(lead < NEAR_TIE for *_, lead in leads)
    print(json.dumps({"rows": rows, "differences": len(leads), "near_ties": ties}))
    sys.exit(ties < len(leads))


def _settings(requests: Sequence[GenerationRequest], drafter: str | None) -> list[Setting]:
    """The plainest one first."""
    longest = max(len(one.prompt_ids) + one.max_tokens for one in requests) + PAGE_SIZE
    room = EngineConfig(kv_tokens=17 * longest, prefix_cache=False)
    tight = EngineConfig(kv_tokens=3 * longest, prefix_cache=False)
    settings = [Setting("plain, 1 at once", None, 1, room), Setting("plain, 16 at once", None, 16, room)]
    drafters = ["ngram"] if drafter is None else [drafter, "ngram"]
    for one in drafters:
        name = "n-gram" if one == "ngram" else "drafter"
        settings += [
            Setting(f"{name}, 1 at once", one, 1, room),
            Setting(f"{name}, 16 at once", one, 16, room),
            Setting(f"{name}, preempted", one, 16, tight),
            Setting(f"{name}, shared pages", one, 16, room.with_changes(prefix_cache=True)),
        ]
    return [*settings, Setting("plain, preempted", None, 16, tight)]


if __name__ == "__main__":
    main()
