"""Half of the requests cannot be predicted: what leaving them undrafted saves, and whether the others fare as before.

    python benchmarks/skipping.py --prompts prompts/heldout.jsonl --drafter runs/demo/drafter
        [--num-prompts 32] [--tokens 128] [--concurrency 4 16] [--rounds 3] [--temperature 2.0]

Every other request is sampled at --temperature, which makes noise of its text; the rest is greedy. "skipping" drafts
for whom it is expected to pay, "always" for every request in every step; what is verified is decided by confidences
either way. Both answer the same requests in turns. seconds: of drafting, over those of "always"; accepted length:
tokens per drafted step, of the predictable and of the others. The last line of stdout is one JSON object.
"""

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.engine.request import GenerationRequest
from dspark.engine.running import RunningRequest
from dspark.engine.sampling import SamplingParams
from dspark.engine.step import Launched, StepOutput
from dspark.evaluation.load import closed_loop
from served import Subject, parser_of, print_table

SKIPPING, ALWAYS = "skipping", "always"


class Watched:
    """An engine whose drafting is timed, and whose rounds are counted by kind of request."""

    def __init__(self, engine: Engine, *, drafts_always: bool) -> None:
        self.engine = engine
        self.draft_s = 0.0
        self.counted: Counter[str] = Counter()
        policy, step = engine.policy, engine.step
        note = policy.note_step

        def note_step(launched: Launched, step_s: float) -> None:
            self.draft_s += launched.draft_s
            note(launched, step_s)

        def ask_for_all(decoding: Sequence[RunningRequest], *, prefill_tokens: int) -> list[int]:
            del prefill_tokens
            size = policy.block_size
            return [max(0, min(running.room, size)) if running.is_draftable else 0 for running in decoding]

        def counted_step() -> list[StepOutput]:
            outputs = step()
            for output in outputs:
                if output.round is not None and output.num_drafted:
                    kind = kind_of(output.request_id)
                    self.counted[f"{kind} rounds"] += 1
                    self.counted[f"{kind} tokens"] += output.round.num_committed
            return outputs

        policy.note_step = note_step  # type: ignore[method-assign]
        engine.step = counted_step  # type: ignore[method-assign]
        if drafts_always:
            policy.choose = ask_for_all  # type: ignore[method-assign]

    def run(self, requests: Sequence[GenerationRequest], concurrency: int) -> dict[str, float]:
        self.draft_s, self.counted = 0.0, Counter()
        run = closed_loop(self.engine, requests, concurrency=concurrency)
        c = self.counted
        accepted = {k: c[f"{k} tokens"] / max(1, c[f"{k} rounds"]) for k in ("predictable", "noise")}
        return {
            "tokens/s": run.tokens_per_s,
            "draft s": self.draft_s,
            "drafted of noise": c["noise rounds"] / max(1, run.num_decodes),
            **{f"accepted length, {kind}": length for kind, length in accepted.items()},
        }


def kind_of(request_id: str) -> str:
    return "noise" if int(request_id) % 2 else "predictable"


def requests_of(subject: Subject, options: argparse.Namespace) -> list[GenerationRequest]:
    greedy, noise = SamplingParams(temperature=0.0), SamplingParams(temperature=options.temperature, seeded="rejection")
    return [
        GenerationRequest(
            str(i), ids, noise if i % 2 else greedy, options.tokens, subject.loaded.stop_ids, seed=i if i % 2 else None
        )
        for i, ids in enumerate(subject.prompts())
    ]


def main() -> None:
    parser = parser_of(__doc__, num_prompts=32, tokens=128)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=2.0)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    if options.drafter is None:
        parser.error("--drafter: name the folder of a trained drafter")
    subject = Subject(options, options.dtype)
    requests = requests_of(subject, options)
    config = EngineConfig(kv_tokens=32_768, max_running_requests=max(options.concurrency), prefix_cache=False)
    watched = {
        name: Watched(subject.engine(options.drafter, config), drafts_always=name == ALWAYS)
        for name in (SKIPPING, ALWAYS)
    }
    rows = []
    for concurrency in options.concurrency:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in watched}
        for turn in range(options.rounds):
            for name in list(watched)[:: 1 if turn % 2 == 0 else -1]:
                found[name].append(watched[name].run(requests, concurrency))
        base = found[ALWAYS]
        for name, runs in found.items():
            pairs = list(zip(runs, base, strict=True))
            row: dict[str, Any] = {"drafting": f"{name}, {concurrency} at once"}
            row |= {figure: statistics.median(run[figure] for run in runs) for figure in runs[0] if figure != "draft s"}
            row["seconds"] = statistics.median(run["draft s"] / other["draft s"] for run, other in pairs)
            row["of always"] = statistics.median(run["tokens/s"] / other["tokens/s"] for run, other in pairs)
            rows.append(row)
    print_table(rows)
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
