"""A complete set of answers of random tokens for a tiny target, as jobs/generate.py leaves it."""

from pathlib import Path
from typing import Any

import torch

from dspark.chat import ChatConfig
from dspark.data.answers import AnswerStore
from dspark.data.prompts import Prompt, PromptSet
from dspark.targets import TargetConfig, target_identity


def make_tiny_answers(
    folder: str | Path, target_folder: str | Path, *, ok: int, empty: int = 0, short: int = 0
) -> Path:
    """Write `ok` answers of 20 and more tokens, `empty` ones, and `short` ones of 3 tokens into `folder`."""
    target = TargetConfig(name=str(target_folder), dtype="float32", device="cpu")
    rows = [_row(f"a{n:03d}", 20 + n % 7, seed=n) for n in range(ok)]
    rows += [_row(f"empty{n}", 0, seed=n) | {"status": "empty", "turns": []} for n in range(empty)]
    rows += [_row(f"short{n}", 3, seed=n) for n in range(short)]
    prompts = [Prompt(row["id"], row["domain"], row["split"], row["messages"][:1]) for row in rows]
    request: dict[str, Any] = {"target": target_identity(target), "chat": ChatConfig().model_dump()}
    store = AnswerStore(folder)
    store.write_part(rows, run=store.begin(request))
    store.finish(request, PromptSet(prompts), {"target": target.model_dump()})
    return Path(folder)


def _row(name: str, length: int, *, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 300, (8 + length,), generator=generator).tolist()
    return {
        "id": name,
        "domain": "chat",
        "split": "heldout" if seed % 5 == 4 else "train",
        "status": "ok",
        "error": None,
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}],
        "turns": [{"prompt_ids": ids[:8], "output_ids": ids[8:], "finish_reason": "length"}],
    }
