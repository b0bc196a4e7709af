"""Half of the requests cannot be predicted: what leaving them undrafted saves, and whether the others fare as before.

    python benchmarks/skipping.py --prompts prompts/heldout.jsonl --drafter runs/demo/drafter
        [--num-prompts 32] [--tokens 128] [--concurrency 4 16] [--rounds 3] [--temperature 2.0]

Every other request is sampled at --temperature, which makes noise of its text; the rest is greedy. "skipping" drafts
for whom it is expected to pay, "always" for every request in every step, as wide as the same policy drafts whom it
chooses: what is saved comes of those left out, not of shorter blocks. What is verified is decided by confidences either
way. Both answer the same requests in turns.

seconds: of drafting, over those of "always"; of always: tokens/s over those of "always". Of the predictable requests
and of the noise: tokens of a decode step, drafted or not; the share of these steps that were drafted; tokens of a
drafted step (accepted length); slots that such a step drafted. tau of always: tokens of a predictable request's decode
step, over those under "always". The last line of stdout is one JSON object.
"""

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import dspark.engine.policy
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.engine.policy import SpeculationPolicy
from dspark.engine.request import GenerationRequest
from dspark.engine.running import RunningRequest
from dspark.engine.sampling import SamplingParams
from dspark.engine.step import Launched, StepOutput
from dspark.evaluation.load import closed_loop
from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.drafting_choice import DraftingChoice
from dspark.speculation.prefix_scheduler import PrefixScheduler
from served import Subject, parser_of, print_table

SKIPPING, ALWAYS = "skipping", "always"
PREDICTABLE, NOISE = "predictable", "noise"
SHARED = ("prefill_tokens", "context_tokens", "fixed", "capacity", "floor", "weights")  # what both decisions go by


class Watched:
    """An engine whose drafting is timed, and whose decode steps are counted by kind of request."""

    def __init__(self, engine: Engine, *, drafts_always: bool) -> None:
        self.engine = engine
        self.draft_s = 0.0
        self.counted: Counter[str] = Counter()
        step, note = engine.step, engine.policy.note_step

        def note_step(launched: Launched, step_s: float) -> None:
            self.draft_s += launched.draft_s
            note(launched, step_s)

        def counted_step() -> list[StepOutput]:
            outputs = step()
            count_steps(outputs, self.counted)
            return outputs

        engine.policy.note_step = note_step  # type: ignore[method-assign]
        engine.step = counted_step  # type: ignore[method-assign]
        if drafts_always:
            draft_for_all(engine.policy)

    def run(self, requests: Sequence[GenerationRequest], concurrency: int) -> dict[str, float]:
        self.draft_s, self.counted = 0.0, Counter()
        run = closed_loop(self.engine, requests, concurrency=concurrency)
        return {"tokens/s": run.tokens_per_s, "draft s": self.draft_s} | figures(self.counted)


def draft_for_all(policy: SpeculationPolicy) -> None:
    """Have the policy find that drafting pays for everyone; how wide, it says by itself."""
    choose = policy.choose

    def everyone(survival: Sequence[Sequence[float]], curve: CostCurve, **options: Any) -> DraftingChoice:
        drafted = [len(row) > 0 for row in survival]
        shared = {name: options[name] for name in SHARED}
        draft_s = curve.draft_seconds(sum(drafted))
        return DraftingChoice(drafted, PrefixScheduler().allocate(survival, curve, draft_s=draft_s, **shared))

    def choose_all(decoding: Sequence[RunningRequest], *, prefill_tokens: int) -> list[int]:
        with patch.object(dspark.engine.policy, "choose_drafting", everyone):
            return choose(decoding, prefill_tokens=prefill_tokens)

    policy.choose = choose_all  # type: ignore[method-assign]


def count_steps(outputs: Sequence[StepOutput], counted: Counter[str]) -> None:
    """Add a step's decodes: a request's first token comes of reading its prompt and is none."""
    for output in outputs:
        if output.round is None:
            continue
        kind = kind_of(output.request_id)
        counted[f"{kind} steps"] += 1
        counted[f"{kind} tokens"] += output.round.num_committed
        if output.num_drafted:
            counted[f"{kind} drafted steps"] += 1
            counted[f"{kind} drafted tokens"] += output.round.num_committed
            counted[f"{kind} slots"] += output.num_drafted


def figures(counted: Counter[str]) -> dict[str, float]:
    """Of both kinds. Where nothing was drafted its accepted length and its slots are 0."""
    found = {}
    for kind in (PREDICTABLE, NOISE):
        steps, drafted = counted[f"{kind} steps"], counted[f"{kind} drafted steps"]
        found[f"tokens a step, {kind}"] = counted[f"{kind} tokens"] / max(1, steps)
        found[f"drafted, {kind}"] = drafted / max(1, steps)
        found[f"accepted length, {kind}"] = counted[f"{kind} drafted tokens"] / max(1, drafted)
        found[f"slots, {kind}"] = counted[f"{kind} slots"] / max(1, drafted)
    return found


def kind_of(request_id: str) -> str:
    return NOISE if int(request_id) % 2 else PREDICTABLE


def requests_of(subject: Subject, options: argparse.Namespace) -> list[GenerationRequest]:
    greedy, noise = SamplingParams(temperature=0.0), SamplingParams(temperature=options.temperature, seeded="rejection")
    return [
        GenerationRequest(
            str(i), ids, noise if i % 2 else greedy, options.tokens, subject.loaded.stop_ids, seed=i if i % 2 else None
        )
        for i, ids in enumerate(subject.prompts())
    ]


def beside(runs: Sequence[dict[str, float]], base: Sequence[dict[str, float]]) -> dict[str, float]:
    """Medians over the runs, and of the ratios to the runs of the same turns."""
    found = {figure: statistics.median(run[figure] for run in runs) for figure in runs[0]}
    ratios = (("seconds", "draft s"), ("of always", "tokens/s"), ("tau of always", f"tokens a step, {PREDICTABLE}"))
    for name, figure in ratios:
        found[name] = statistics.median(run[figure] / other[figure] for run, other in zip(runs, base, strict=True))
    return found


def columns(row: dict[str, Any], kind: str) -> dict[str, Any]:
    """A row's figures of one kind of request, or those of all."""
    own = [name for name in row if name.rpartition(", ")[2] == kind or (not kind and ", " not in name)]
    return {"drafting": row["drafting"]} | {name: row[name] for name in own}


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
    if any(one.engine.policy.curve is None for one in watched.values()):
        parser.error(f"--drafter: {options.drafter} has no cost curve for this machine and {options.threads} threads")
    rows = []
    for concurrency in options.concurrency:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in watched}
        for turn in range(options.rounds):
            for name in list(watched)[:: 1 if turn % 2 == 0 else -1]:
                found[name].append(watched[name].run(requests, concurrency))
        base = found[ALWAYS]
        for name, runs in found.items():
            rows.append({"drafting": f"{name}, {concurrency} at once"} | beside(runs, base))
    for figures_of_kind in ("", PREDICTABLE, NOISE):
        print_table([columns(row, figures_of_kind) for row in rows])
        print()
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
