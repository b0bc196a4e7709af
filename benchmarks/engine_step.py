"""A step of the target on a CPU: our kernels, PyTorch's own on the same pages, and the library's forward pass.

    python benchmarks/engine_step.py [--target bundled:smollm2-135m-instruct] [--requests 1 4 16 64] [--context 200]
                                     [--repeats 9] [--threads 2 | --processor-time] [--drafter runs/demo/drafter]

Every request has its context stored and reads one token, or with --tokens several, as a verification does. All ways
are timed in turn in one process, so what else runs on the machine slows them alike; ratios are medians of the turns'.
On a busy machine --processor-time counts what one thread of this process itself runs.
Then whole engine steps on our kernels: the share of their time outside of the target's and the drafter's forward
passes. The last line of stdout is one JSON object.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

from dspark import native
from dspark.attention.flat_batch import Piece
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.engine.loading import LoadedEngine, load_engine
from dspark.engine.request import GenerationRequest
from dspark.engine.sampling import SamplingParams
from dspark.engine.step_timer import page_tables
from dspark.engine.target_runner import TargetRunner
from dspark.targets import TargetConfig, load_target

PAGE_SIZE = 16
Step = Callable[[int], None]  # of so many requests


class Paged:
    """A runner whose requests all have a context of random tokens."""

    def __init__(self, model: Any, most_requests: int, context: int, tokens: int, *, use_kernels: bool) -> None:
        self._tables = page_tables([context + tokens] * most_requests, PAGE_SIZE)
        num_pages = sum(len(table.pages) for table in self._tables)
        self._runner = TargetRunner(
            model,
            vocabulary_size=model.config.vocab_size,
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            use_kernels=use_kernels,
        )
        generator = torch.Generator().manual_seed(0)
        for memory in (*self._runner.kv_cache.keys, *self._runner.kv_cache.values):
            memory.copy_(torch.randn(memory.shape, generator=generator))
        for table in self._tables:
            table.num_tokens = context
        self._ids = torch.randint(model.config.vocab_size, (tokens,), generator=generator).tolist()

    def __call__(self, num_requests: int) -> None:
        pieces = [Piece(table, self._ids, num_logits=len(self._ids)) for table in self._tables[:num_requests]]
        self._runner.run(self._runner.flatten(pieces)).choices()


class Library:
    """The library's own forward pass over a batch of equal contexts, its cache being cropped after each."""

    def __init__(self, model: Any, context: int, tokens: int) -> None:
        self._model, self._context, self._tokens = model, context, tokens
        self._caches: dict[int, Any] = {}

    @torch.inference_mode()
    def __call__(self, num_requests: int) -> None:
        if num_requests not in self._caches:
            kv_cache = transformers.DynamicCache(config=self._model.config)
            one = torch.zeros(1, self._context, dtype=torch.long)
            self._model(input_ids=one, cache=kv_cache, use_cache=True, logits_to_keep=1)
            kv_cache.batch_repeat_interleave(num_requests)
            self._caches[num_requests] = kv_cache
        kv_cache = self._caches[num_requests]
        ids = torch.zeros(num_requests, self._tokens, dtype=torch.long)
        self._model(input_ids=ids, cache=kv_cache, use_cache=True).logits.argmax(-1).tolist()
        kv_cache.crop(-self._tokens)


def without_kernels(target: TargetConfig) -> Any:
    """The target as it is loaded where the kernels cannot be built."""
    os.environ[native.SWITCH] = "0"
    native.kernels.cache_clear()
    try:
        return load_target(target)
    finally:
        del os.environ[native.SWITCH]
        native.kernels.cache_clear()


def timed_in_turn(
    steps: dict[str, Step], num_requests: int, repeats: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Milliseconds of each step, `repeats` times after two that do not count."""
    seen: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 2):
        for name, step in steps.items():
            started = clock()
            step(num_requests)
            if repeat >= 2:
                seen[name].append(1e3 * (clock() - started))
    return seen


def overhead(
    loaded: LoadedEngine, num_requests: int, context: int, num_steps: int, clock: Callable[[], float]
) -> float:
    """Share of the engine's steps that is spent outside of the target's and the drafter's own calls."""
    engine = loaded.engine
    inside = 0.0

    def clocked(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal inside
            started = clock()
            try:
                return function(*args, **options)
            finally:
                inside += clock() - started

        return call

    engine._target.run = clocked(type(engine._target).run.__get__(engine._target))  # type: ignore[method-assign]
    if engine._drafts is not None:
        engine._drafts.propose = clocked(type(engine._drafts).propose.__get__(engine._drafts))  # type: ignore[method-assign]
    fill(engine, num_requests, context)
    while any(not running.is_prefilled for running in engine._requests.running.values()) or engine.num_waiting:
        engine.step()
    inside, started = 0.0, clock()
    for _ in range(num_steps):
        engine.step()
    share = 1.0 - inside / (clock() - started)
    for i in range(num_requests):
        engine.abort(str(i))
    return share


def fill(engine: Engine, num_requests: int, context: int) -> None:
    """Requests that read a context and then decode greedily for longer than is watched."""
    generator = torch.Generator().manual_seed(0)
    for i in range(num_requests):
        prompt = tuple(torch.randint(1000, 9000, (context,), generator=generator).tolist())
        engine.add(
            GenerationRequest(
                request_id=str(i),
                prompt_ids=prompt,
                sampling=SamplingParams(temperature=0.0),
                max_tokens=512,
                stop_ids=frozenset(),
                seed=None,
            )
        )
    engine.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="bundled:smollm2-135m-instruct")
    parser.add_argument("--drafter")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--processor-time", action="store_true", help="one thread, and its own time only")
    options = parser.parse_args()
    clock = time.thread_time if options.processor_time else time.perf_counter
    if options.processor_time:
        options.threads = 1
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    target = TargetConfig(name=options.target, dtype="bfloat16", device="cpu")
    shape = (max(options.requests), options.context, options.tokens)
    steps: dict[str, Step] = {
        "kernels": Paged(load_target(target), *shape, use_kernels=True),
        "pytorch": Paged(without_kernels(target), *shape, use_kernels=False),
        "library": Library(without_kernels(target), options.context, options.tokens),
    }
    summary: dict[str, Any] = {"context": options.context, "tokens": options.tokens, "threads": options.threads}
    for num_requests in options.requests:
        seen = timed_in_turn(steps, num_requests, options.repeats, clock)
        summary[f"ms_{num_requests}"] = {name: statistics.median(own) for name, own in seen.items()}
        for name, own in seen.items():
            ratios = [slow / fast for fast, slow in zip(seen["kernels"], own, strict=True)]
            print(
                f"{num_requests:3} requests, {name}: {statistics.median(own):7.2f} ms ({min(own):.2f}-{max(own):.2f}), "
                f"{statistics.median(ratios):.2f} x the kernels' ({min(ratios):.2f}-{max(ratios):.2f})"
            )
    settings = EngineConfig(kv_tokens=2 * shape[0] * (options.context + 256), max_running_requests=shape[0])
    loaded = load_engine(target, options.drafter, config=settings, num_threads=options.threads)
    for num_requests in options.requests:
        shares = [overhead(loaded, num_requests, options.context, 20, clock) for _ in range(3)]
        summary[f"overhead_{num_requests}"] = statistics.median(shares)
        print(f"{num_requests:3} requests, outside of forward passes: {[round(100 * share, 1) for share in shares]} %")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
