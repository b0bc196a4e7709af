"""Greedy output of the engine against `generate` of the transformers library, on real prompts, in every way of running.

    python benchmarks/equality.py --drafter runs/demo/drafter --prompts prompts/heldout.jsonl --output runs/equality
        [--count 40] [--tokens 32] [--dtype float32] [--concurrency 16 1]

Speculation off, scheduled, with copying and at every forced length, alone and in company, with the prefix cache (each
prompt twice, the second time from cached pages) and with memory so short that requests are preempted. In float32 all
has to be identical. In bfloat16 two logits that nearly tie may swap when the shape of a product changes: every answer
that parts from `generate` is listed with the gap, in the library's own logits, between its choice and the engine's.
A setting's result is kept as it comes; the same command goes on behind it. Exit code 1 when float32 differs anywhere.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dspark.chat import render_prompt
from dspark.data.prompts import PromptSource, read_prompts
from dspark.drafters.export import read_curves
from dspark.engine.config import EngineConfig
from dspark.engine.drafter_folder import drafter_sha256
from dspark.engine.engine import Engine
from dspark.engine.loading import LoadedEngine, load_engine
from dspark.engine.lookup import LookupConfig
from dspark.engine.request import GenerationRequest
from dspark.engine.sampling import SamplingParams
from dspark.evaluation.load import chat_of, closed_loop
from dspark.speculation.calibration import Calibration
from dspark.targets import TargetConfig, load_target
from served import first_difference

PAGE_SIZE = 16


@dataclass(frozen=True)
class Setting:
    """One way of running. num_rounds: times that all prompts are asked for."""

    name: str
    drafter: str | None
    concurrency: int
    changes: dict[str, Any]
    num_rounds: int = 1
    is_short: bool = False

    @property
    def is_scheduled(self) -> bool:
        return self.drafter is not None and "verify_length" not in self.changes


def settings(drafter: str, block_size: int, concurrency: list[int]) -> Iterator[Setting]:
    """All of them; schedulers never refuse here, so that they are seen at work."""
    scheduled: dict[str, Any] = {"min_gain": 0.0}
    copying = {**scheduled, "lookup": LookupConfig()}
    for number in concurrency:
        yield Setting("off", None, number, {})
        yield Setting("scheduled", drafter, number, scheduled)
        yield Setting("scheduled, copying", drafter, number, copying)
        for length in range(block_size + 1):
            yield Setting(f"length {length}", drafter, number, {"verify_length": length})
        yield Setting(
            "prefix cache", drafter, number, {"verify_length": block_size, "prefix_cache": True}, num_rounds=2
        )
        yield Setting("prefix cache, copying", drafter, number, {**copying, "prefix_cache": True}, num_rounds=2)
        if number > 1:
            yield Setting("preemption", drafter, number, {"verify_length": block_size}, is_short=True)
            yield Setting("preemption, off", None, number, {}, is_short=True)
            changes = {**copying, "prefix_cache": True}
            yield Setting("preemption, copying, prefix cache", drafter, number, changes, num_rounds=2, is_short=True)


class Reference:
    """The library's own answers, and its logits where another choice was made."""

    def __init__(
        self, target: TargetConfig, prompts: list[list[int]], stop_ids: frozenset[int], path: Path, tokens: int
    ):
        self._model = load_target(target)
        self._prompts = prompts
        if not path.exists():
            answers = [self._answer(ids, stop_ids, tokens) for ids in prompts]
            path.write_text(json.dumps(answers))
        self.answers: list[list[int]] = json.loads(path.read_text())

    def _answer(self, ids: list[int], stop_ids: frozenset[int], tokens: int) -> list[int]:
        prompt = torch.tensor([ids])
        options = {"do_sample": False, "max_new_tokens": tokens, "eos_token_id": sorted(stop_ids), "pad_token_id": 0}
        found = self._model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)  # type: ignore[operator]
        answer: list[int] = found[0, len(ids) :].tolist()
        return answer

    @torch.inference_mode()
    def gap(self, place: int, common: list[int], choice: int) -> float:
        """How far the engine's choice is behind the highest logit after the prompt and `common`."""
        logits = self._model(input_ids=torch.tensor([self._prompts[place] + common])).logits[0, -1].float()
        return float(logits.max() - logits[choice])


def compared(answers: list[list[int]], reference: Reference) -> dict[str, Any]:
    """Answers that are identical, and a gap for each that is not."""
    parted = []
    num_rounds = len(answers) // len(reference.answers)
    for i, (own, expected) in enumerate(zip(answers, reference.answers * num_rounds, strict=True)):
        if own == expected:
            continue
        first, place = first_difference(own, expected), i % len(reference.answers)
        assert first is not None
        gap = reference.gap(place, expected[:first], own[first]) if first < min(len(own), len(expected)) else None
        parted.append({"prompt": place, "token": first, "gap": gap})
    return {"identical": len(answers) - len(parted), "of": len(answers), "parted": parted}


def scheduled(loaded: LoadedEngine, drafter: str) -> Engine:
    """The engine under its scheduler, by the curve that is there: one of another type decides as well what is run."""
    config = loaded.engine.config.with_changes(verify_length=None)
    curve = read_curves(Path(drafter) / "cost_curve.json")[0]
    calibration = Calibration.load(Path(drafter) / "calibration.json", drafter_sha256=drafter_sha256(drafter))
    drafts = loaded.engine._drafts
    return Engine(loaded.target, drafts, loaded.tokenizer, config=config, curve=curve, calibration=calibration)


def run(
    setting: Setting, engine: Engine, prompts: list[list[int]], stop_ids: frozenset[int], tokens: int
) -> list[list[int]]:
    """Output ids of every prompt, as often as the setting asks for them."""
    answers = []
    for part in range(setting.num_rounds):
        requests = [
            GenerationRequest(f"{part}-{i}", tuple(ids), SamplingParams(temperature=0.0), tokens, stop_ids)
            for i, ids in enumerate(prompts)
        ]
        answers += [a.output_ids for a in closed_loop(engine, requests, concurrency=setting.concurrency).answers]
    return answers


def config_of(setting: Setting, prompts: list[list[int]], tokens: int) -> EngineConfig:
    """Room for all that run at once, or only for the longest request by itself."""
    longest = max(map(len, prompts)) + tokens + 2 * PAGE_SIZE
    kv_tokens = longest if setting.is_short else (setting.concurrency + 2) * longest
    base = {"kv_tokens": kv_tokens, "page_size": PAGE_SIZE, "max_running_requests": setting.concurrency}
    return EngineConfig(**({"prefix_cache": False} | base | setting.changes))


def main() -> int:
    options = parsed()
    output = Path(options.output) / options.dtype
    output.mkdir(parents=True, exist_ok=True)
    target = TargetConfig(name=options.target, dtype=options.dtype, device="cpu")
    first = load_engine(target, options.drafter, config=EngineConfig(verify_length=0), num_threads=options.threads)
    rows = read_prompts([PromptSource(path=options.prompts, split="heldout")], seed=0, heldout_fraction=0.0).prompts
    chosen = rows[:: max(1, len(rows) // options.count)][: options.count]
    chat = chat_of(first, source=options.drafter)
    prompts = [list(render_prompt(first.tokenizer, prompt.opening, chat)) for prompt in chosen]
    reference = Reference(target, prompts, first.stop_ids, output / "reference.json", options.tokens)
    has_failed = False
    for setting in settings(options.drafter, first.engine.block_size, options.concurrency):
        path = output / f"{setting.concurrency} {setting.name}.json"
        if not path.exists():
            config = config_of(setting, prompts, options.tokens)
            loaded = load_engine(target, setting.drafter, config=config, num_threads=options.threads, shared=first)
            engine = scheduled(loaded, options.drafter) if setting.is_scheduled else loaded.engine
            answers = run(setting, engine, prompts, first.stop_ids, options.tokens)
            stats = engine.stats
            counts = {"preemptions": stats.preemptions, "cached tokens": stats.prefix_cache_hits}
            rounds = {"drafted": stats.rounds.rounds, "copied": stats.copies.rounds}
            path.write_text(json.dumps(compared(answers, reference) | counts | rounds))
        result = json.loads(path.read_text())
        print(f"{setting.concurrency:3} {setting.name:34} {line(result)}", flush=True)
        is_preempted, is_cached = result["preemptions"] > 0, result["cached tokens"] > 0
        is_unproved = (setting.is_short and not is_preempted) or (setting.num_rounds > 1 and not is_cached)
        has_failed |= is_unproved or (options.dtype == "float32" and bool(result["parted"]))
    return int(has_failed)


def line(result: dict[str, Any]) -> str:
    gaps = [one["gap"] for one in result["parted"] if one["gap"] is not None]
    worst = f", largest gap {max(gaps):.3f}" if gaps else ""
    seen = ", ".join(f"{result[name]} {name}" for name in ("preemptions", "cached tokens", "drafted", "copied"))
    return f"{result['identical']} of {result['of']}{worst} ({seen})"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--output", required=True, help="a folder: a file per setting")
    parser.add_argument("--target", default="bundled:smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--count", type=int, default=40, help="prompts")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[16, 1])
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
