"""Engines on the tiny target, and what the library itself makes of the same prompts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from dspark.engine.config import EngineConfig
from dspark.engine.draft_runner import DraftRunner
from dspark.engine.engine import Engine
from dspark.engine.loading import target_runner
from dspark.engine.request import GenerationRequest
from dspark.engine.sampling import SamplingParams
from dspark.engine.step import StepOutput
from dspark.speculation.cost_curve import CostCurve

VOCABULARY = 320
GREEDY = SamplingParams(temperature=0.0)
PROMPTS = [
    [1, 40, 77, 130, 2, 25, 61],
    [5],
    list(range(30, 75)),
    [9, 9, 9, 12, 200, 14],
    [300, 20, 10, 5],
    [64 + (7 * k) % 200 for k in range(29)],
    [3, 280, 150],
    [111, 112, 113, 114, 115, 116, 117, 118, 119],
]


def load(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config = transformers.GenerationConfig()
    return model


def greedy_continuations(model: Any, prompts: Sequence[Sequence[int]], num_new: int) -> list[list[int]]:
    """The library's own greedy output with nothing to stop it."""
    model.generation_config = transformers.GenerationConfig(pad_token_id=2)
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_new)
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


def make_engine(
    model: Any,
    drafts: DraftRunner | None = None,
    *,
    tokenizer: Any = None,
    curve: CostCurve | None = None,
    calibration: Any = None,
    **settings: Any,
) -> Engine:
    """An engine with small pages and, unless a curve is given, a fixed verify length of the whole block."""
    if curve is None and drafts is not None:
        settings.setdefault("verify_length", drafts.block_size)
    config = EngineConfig(**{"page_size": 4, "kv_tokens": 2048} | settings)
    target = target_runner(model, drafts, config=config, vocabulary_size=VOCABULARY)
    return Engine(target, drafts, tokenizer, config=config, curve=curve, calibration=calibration)


def request(prompt: Sequence[int], name: str = "0", **options: Any) -> GenerationRequest:
    fields: dict[str, Any] = {
        "request_id": name,
        "prompt_ids": tuple(prompt),
        "sampling": GREEDY,
        "max_tokens": 24,
        "stop_ids": frozenset(),
    }
    return GenerationRequest(**fields | options)


def run(engine: Engine, requests: Sequence[GenerationRequest]) -> dict[str, list[StepOutput]]:
    """All outputs by request; pages are checked after every step and all free at the end."""
    for one in requests:
        engine.add(one)
    outputs: dict[str, list[StepOutput]] = {one.request_id: [] for one in requests}
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.check()
    assert engine.num_free_pages == engine.num_pages
    return outputs


def ids_of(outputs: Sequence[StepOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]
