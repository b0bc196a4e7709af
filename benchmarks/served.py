"""What the benchmarks of one engine share: prompts from a file, settings that serve them, and where answers part.

Legend: V vocabulary.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from dspark.chat import render_prompt
from dspark.data.prompts import PromptSource, read_prompts
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.engine.loading import LoadedEngine, load_engine
from dspark.engine.logit_rules import LogitRules, penalise
from dspark.engine.noise import gumbel, position_keys, stream_key
from dspark.engine.request import GenerationRequest
from dspark.engine.sampling import filtered_probs
from dspark.evaluation.load import chat_of, closed_loop
from dspark.evaluation.load_run import LoadRun
from dspark.targets import TargetConfig

NEAR_TIE = 1e-4
STATM_RESIDENT = 1


@dataclass(frozen=True)
class Setting:
    """One way to serve the same requests. drafter: a folder, "ngram" or None; concurrency: requests at once."""

    name: str
    drafter: str | None
    concurrency: int
    config: EngineConfig = field(default_factory=EngineConfig)


class Subject:
    """A target on whose weights one setting after another is served."""

    def __init__(self, options: argparse.Namespace, dtype: Any) -> None:
        torch.set_num_threads(options.threads)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._options = options
        self._target = TargetConfig(name=options.target, dtype=dtype, device=options.device)
        self.loaded = self._load(None, EngineConfig(kv_tokens=64))  # to read what it knows; it never steps

    def prompts(self) -> list[tuple[int, ...]]:
        """Ids of as many prompts of the file as asked for, short enough for the target."""
        source = PromptSource(path=self._options.prompts, split="heldout")
        found = read_prompts([source], seed=0, heldout_fraction=0.0, limit=self._options.num_prompts).prompts
        chat = chat_of(self.loaded, source="provenance.json")
        ids = [tuple(render_prompt(self.loaded.tokenizer, prompt.opening, chat)) for prompt in found]
        most = self.loaded.engine.max_context_tokens
        return [one for one in ids if most is None or len(one) + self._options.tokens <= most]

    def engine(self, drafter: str | None, config: EngineConfig) -> Engine:
        return self._load(drafter, config).engine

    def run(self, setting: Setting, requests: Sequence[GenerationRequest]) -> tuple[LoadRun, Engine]:
        """The answers, by an engine of the setting's own, and that engine."""
        engine = self.engine(setting.drafter, setting.config)
        return closed_loop(engine, requests, concurrency=setting.concurrency), engine

    @torch.inference_mode()
    def lead(self, request: GenerationRequest, output_ids: Sequence[int]) -> float:
        """How far the token after these is ahead of the second, in logits, as the target alone computes it.

        No engine may step afterwards: the model takes its attention from the library again.
        """
        model = self.loaded.target.model
        model.set_attn_implementation("sdpa")
        ids = torch.tensor([[*request.prompt_ids, *output_ids]], device=model.device)
        row = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1:].float()
        row = row[:, : self.loaded.target.vocabulary_size]
        first, second = _scores(request, output_ids, row).topk(2).values.tolist()
        return float(first - second)

    def _load(self, drafter: str | None, config: EngineConfig) -> LoadedEngine:
        shared = getattr(self, "loaded", None)
        return load_engine(self._target, drafter, config=config, num_threads=self._options.threads, shared=shared)


def _scores(request: GenerationRequest, output_ids: Sequence[int], row: Tensor) -> Tensor:
    """What the next token is the largest of: [V]. row: [1, V] logits."""
    rules = LogitRules(request, row.device)
    rules.mask_and_bias(row, len(output_ids))
    penalties = rules.penalties(output_ids, [])
    if penalties is not None:
        penalise(row, [(0, penalties)])
    if request.sampling.temperature == 0:
        return row[0]
    assert request.seed is not None, "what is drawn without a seed cannot be worked out again"
    position = len(request.prompt_ids) + len(output_ids)
    keys = position_keys([stream_key(request.seed, request.choice)], [position], row.device)
    noise = gumbel(keys, torch.arange(row.shape[1], device=row.device))[0]
    return filtered_probs(row, request.sampling)[0].double().log() + noise


def first_difference(own: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two answers part; None where they are equal."""
    places = [i for i, (a, b) in enumerate(zip(own, other, strict=False)) if a != b]
    if places:
        return places[0]
    return None if len(own) == len(other) else min(len(own), len(other))


def parser_of(description: str | None, *, num_prompts: int, tokens: int) -> argparse.ArgumentParser:
    """What all take."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, help="JSONL or Parquet with prompt, messages or turns in each row")
    parser.add_argument("--num-prompts", type=int, default=num_prompts)
    parser.add_argument("--tokens", type=int, default=tokens, help="of an answer, at most")
    parser.add_argument("--drafter", help="a folder made by jobs/train.py; without it n-gram speculation")
    parser.add_argument("--target", default="bundled:smollm2-135m-instruct")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    return parser


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Rows of the same keys, in columns."""
    cells = [list(rows[0]), *([_shown(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    for line in cells:
        rest = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        first = line[0].ljust(widths[0])
        print("  ".join([first, *rest]))


def resident_bytes() -> int:
    """Memory of this process that is in use."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[STATM_RESIDENT]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _shown(value: Any) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else str(value)
