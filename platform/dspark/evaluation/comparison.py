"""Whether greedy output is the library's own, token for token, and how close a call it was where they part."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dspark.attention import paged
from dspark.engine.target import use_own_attention


def compare_with_generate(
    model: Any,
    prompt_ids: list[int],
    output_ids: list[int],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    vocabulary_size: int,
) -> dict[str, Any]:
    """{"identical", "dtype", "position", "top2_gap"}: the last two say where they part, None where they do not.

    Ids from vocabulary_size on are suppressed in the library too.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    with _own_attention(model):
        expected = generate_greedy(
            model, prompt_ids, max_new_tokens=max_new_tokens, stop_ids=stop_ids, vocabulary_size=vocabulary_size
        )
        if expected == output_ids:
            return {"identical": True, "dtype": dtype, "position": None, "top2_gap": None}
        pairs = zip(expected, output_ids, strict=False)
        position = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(output_ids)))
        gap = _top2_gap(model, prompt_ids + output_ids[:position], vocabulary_size)
    return {"identical": False, "dtype": dtype, "position": position, "top2_gap": gap}


@torch.no_grad()
def generate_greedy(
    model: Any, prompt_ids: list[int], *, max_new_tokens: int, stop_ids: Sequence[int], vocabulary_size: int
) -> list[int]:
    """Output ids of the library's `generate`."""
    ids = torch.tensor([prompt_ids], device=model.device)
    padding_ids = list(range(vocabulary_size, model.lm_head.weight.shape[0]))
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(stop_ids),
        pad_token_id=stop_ids[0],
        suppress_tokens=padding_ids or None,
    )
    found: list[int] = output[0, ids.shape[1] :].tolist()
    return found


@contextmanager
def _own_attention(model: Any) -> Iterator[None]:
    """A model that serves an engine is switched back to the library's attention for a while, between two steps."""
    is_paged = model.config._attn_implementation == paged.NAME
    if is_paged:
        use_own_attention(model)
    try:
        yield
    finally:
        if is_paged:
            model.set_attn_implementation(paged.NAME)


@torch.no_grad()
def _top2_gap(model: Any, token_ids: list[int], vocabulary_size: int) -> float:
    """Difference of the two highest logits after the tokens."""
    ids = torch.tensor([token_ids], device=model.device)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1, :vocabulary_size]
    best = logits.float().topk(2).values
    return float(best[0] - best[1])
