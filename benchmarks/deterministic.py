"""Deterministic mode in bfloat16: is every greedy answer the same however it is served, and what does that cost?

    python benchmarks/deterministic.py --prompts prompts.jsonl --drafter runs/demo/drafter
                                       [--num-prompts 60] [--tokens 128] [--concurrency 1 4 16]

Each setting answers the same prompts: with and without speculation, one and several at a time, in the default and in
the deterministic mode. Answers are compared with those of their own mode without speculation, one at a time. With
DSPARK_NATIVE=0 in the environment the same is asked of PyTorch's own products. The last line of stdout is one JSON
object; the exit status is 1 if an answer of the deterministic mode differs.
"""

import json
import sys
from typing import Any

from dspark.engine.config import EngineConfig
from dspark.engine.request import GenerationRequest
from dspark.engine.sampling import SamplingParams
from served import Setting, Subject, first_difference, parser_of, print_table


def main() -> None:
    parser = parser_of(__doc__, num_prompts=60, tokens=128)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    subject = Subject(options, options.dtype)
    greedy = SamplingParams(temperature=0.0)
    requests = [
        GenerationRequest(str(i), ids, greedy, options.tokens, subject.loaded.stop_ids)
        for i, ids in enumerate(subject.prompts())
    ]
    kv_tokens = max(options.concurrency) * (max(len(one.prompt_ids) for one in requests) + options.tokens + 64)
    rows: list[dict[str, Any]] = []
    for is_deterministic in (False, True):  # in this order: the latter leaves a table of angles in the model
        config = EngineConfig(kv_tokens=kv_tokens, prefix_cache=False, deterministic=is_deterministic)
        alone: list[list[int]] = []
        for drafter in (None, options.drafter or "ngram"):
            for concurrency in options.concurrency:
                mode = "deterministic" if is_deterministic else "default"
                name = f"{mode}, {'plain' if drafter is None else 'speculative'}, {concurrency} at once"
                run, _ = subject.run(Setting(name, drafter, concurrency, config), requests)
                answers = [answer.output_ids for answer in run.answers]
                alone = alone or answers
                identical = sum(first_difference(a, b) is None for a, b in zip(answers, alone, strict=True))
                rows.append({"setting": name, "identical": f"{identical}/{len(alone)}", "tokens/s": run.tokens_per_s})
                print(f"{name}: {identical} of {len(alone)}, {run.tokens_per_s:.1f} tokens/s", flush=True)
    half = len(rows) // 2
    for default, own in zip(rows[:half], rows[half:], strict=True):
        default["of default"], own["of default"] = 1.0, own["tokens/s"] / default["tokens/s"]
    print_table(rows)
    print(json.dumps({"rows": rows}))
    sys.exit(any(row["identical"] != f"{len(requests)}/{len(requests)}" for row in rows[half:]))


if __name__ == "__main__":
    main()
