"""vLLM's side of `against_vllm.py`: runs in vLLM's own environment, one closed loop per line of stdin.

Reads the settings as the first line, then {"concurrency": …, "requests": …} per line, and answers each with one line.
Tokens are what vLLM itself counts; prompts are read within the time, as on our side.
"""

import json
import os
import sys
import time
from collections import deque
from typing import Any, TextIO

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

COUNTED = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted_tokens",
}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # vLLM's own lines go elsewhere
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.readline())
    try:
        serve(settings, answers)
    except Exception as error:  # what vLLM says is the measurement where it refuses
        text = " ".join(str(error).split())
        print(json.dumps({"error": f"{type(error).__name__}: {text}"}), file=answers)
        raise


def serve(settings: dict[str, Any], answers: TextIO) -> None:
    """Load, say so, and run what is asked for until stdin ends."""
    from vllm import LLM, SamplingParams

    speculative = {"speculative_config": settings["speculative"]} if settings["speculative"] else {}
    llm = LLM(
        settings["model"],
        dtype=settings["dtype"],
        max_model_len=2048,
        max_num_seqs=settings["max_running"],
        enable_prefix_caching=False,
        disable_log_stats=False,
        **speculative,
    )
    sampling = SamplingParams(temperature=0, max_tokens=settings["max_tokens"])
    prompts = [{"prompt_token_ids": ids} for ids in settings["prompts"]]
    llm.generate(prompts[:2], SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
    print(json.dumps({"ready": True}), file=answers)
    for number, line in enumerate(sys.stdin):
        asked = json.loads(line)
        before = counters(llm)
        tokens, seconds = closed_loop(
            llm.llm_engine, prompts[: asked["requests"]], sampling, asked["concurrency"], number
        )
        seen = {name: value - before.get(name, 0) for name, value in counters(llm).items()}
        print(json.dumps({"tokens": tokens, "seconds": seconds, **seen}), file=answers)


def counters(llm: Any) -> dict[str, float]:
    """Of speculation, since the start; {} without it."""
    return {COUNTED[metric.name]: metric.value for metric in llm.get_metrics() if metric.name in COUNTED}


def closed_loop(engine: Any, prompts: list[Any], sampling: Any, concurrency: int, run: int) -> tuple[int, float]:
    """Output tokens and seconds of all prompts with at most so many in flight."""
    waiting, running, tokens = deque(enumerate(prompts)), 0, 0
    started = time.perf_counter()
    while waiting or running:
        while waiting and running < concurrency:
            place, prompt = waiting.popleft()
            engine.add_request(f"{run}-{place}", prompt, sampling)
            running += 1
        for output in engine.step():
            if output.finished:
                tokens += len(output.outputs[0].token_ids)
                running -= 1
    return tokens, time.perf_counter() - started


if __name__ == "__main__":
    main()
