"""How much of an engine's step goes into scheduling: by its local rule, and under a fleet's lease.

    python benchmarks/scheduling_share.py --prompts prompts.jsonl --drafter runs/demo/drafter
                                          [--concurrency 1 4 16 64] [--num-prompts 64] [--tokens 128]

All that decides who is drafted for and what is verified, and all that is learnt from it, over the whole step, drafting
and the target's pass included. Median and 99th percentile of that share over all steps. The last line of stdout is one
JSON object.
"""

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.engine.request import GenerationRequest
from dspark.engine.sampling import SamplingParams
from dspark.evaluation.load import closed_loop
from dspark.speculation.fleet import FREE, Share
from served import Subject, parser_of, print_table

PARTS = ("choose_copies", "choose", "verify_lengths", "learn", "note_step", "prepare", "reserved")
LEASED = Share(max_drafted=48, capacity=256, floor=1, weights={-1: 2.0})


class Watch:
    """Seconds that the engine's policy takes in each step, and those of the step. Parts call no other parts."""

    def __init__(self, engine: Engine) -> None:
        self.shares: list[float] = []
        self._spent = 0.0
        for name in PARTS:
            setattr(engine.policy, name, self._timed(getattr(engine.policy, name)))
        step = engine.step

        def timed_step() -> Any:
            self._spent, started = 0.0, time.perf_counter()
            outputs = step()
            if outputs:
                self.shares.append(self._spent / (time.perf_counter() - started))
            return outputs

        engine.step = timed_step  # type: ignore[method-assign]

    def _timed(self, part: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            found = part(*args, **options)
            self._spent += time.perf_counter() - started
            return found

        return run


def main() -> None:
    parser = parser_of(__doc__, num_prompts=64, tokens=128)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    subject = Subject(options, options.dtype)
    prompts = subject.prompts()
    rows = []
    for concurrency in options.concurrency:
        for name, share in (("local", FREE), ("leased", LEASED)):
            config = EngineConfig(kv_tokens=384 * max(8, concurrency), max_running_requests=concurrency)
            engine = subject.engine(options.drafter, config)
            engine.policy.share = share
            watch = Watch(engine)
            requests = [
                GenerationRequest(str(i), ids, SamplingParams(temperature=0.0), options.tokens, subject.loaded.stop_ids)
                for i, ids in enumerate(prompts[: max(4, concurrency)])
            ]
            closed_loop(engine, requests, concurrency=concurrency)
            median, p99 = np.quantile(watch.shares, [0.5, 0.99]).tolist()
            shares = {"median %": 100 * median, "p99 %": 100 * p99}
            rows.append({"at once": concurrency, "rule": name, "steps": len(watch.shares)} | shares)
    print_table(rows)
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
