"""Drawing draft tokens and putting a reduced vocabulary's probabilities back on target ids."""

import torch
from torch import Tensor


def draw(logits: Tensor, temperature: float, generator: torch.Generator | None) -> tuple[int, Tensor | None]:
    """One draft id and the float32 distribution it was drawn from (None when greedy). logits: [V']."""
    if temperature == 0.0:
        return int(logits.argmax()), None
    probs = torch.softmax(logits.float() / temperature, dim=-1)
    return int(torch.multinomial(probs, 1, generator=generator)), probs


def on_target_ids(probs: list[Tensor], draft_to_target: Tensor, vocab_size: int) -> Tensor:
    """[l, V]: the rows of `probs` ([V'] each) scattered to their target ids; zero elsewhere."""
    rows = torch.stack(probs)
    if rows.shape[-1] == vocab_size:
        return rows
    full = rows.new_zeros(rows.shape[0], vocab_size)
    full[:, draft_to_target] = rows
    return full


def check_length(max_tokens: int, block_size: int) -> None:
    """Raises: ValueError unless 0 <= max_tokens <= block_size."""
    if not 0 <= max_tokens <= block_size:
        raise ValueError(
            f"asked for {max_tokens} draft tokens; the drafter's block holds {block_size}: use 0..{block_size}"
        )
