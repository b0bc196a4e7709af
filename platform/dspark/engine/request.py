"""Where output is cut: stop tokens and the token limit, for every path that emits tokens."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Commit:
    """The tokens that stand of those offered, and why output ends here (None: it goes on)."""

    kept: list[int]
    finish_reason: FinishReason | None


def commit(new_ids: Sequence[int], *, num_generated: int, stop_ids: Collection[int], max_tokens: int) -> Commit:
    """The prefix of `new_ids` that is output, cut at the first stop token (kept, as the last id) or at the limit.

    num_generated: tokens already output before these. A stop token in the last place allowed counts as "stop".
    """
    kept: list[int] = []
    for token_id in new_ids:
        if num_generated + len(kept) >= max_tokens:
            break
        kept.append(token_id)
        if token_id in stop_ids:
            return Commit(kept, "stop")
    is_full = num_generated + len(kept) >= max_tokens
    return Commit(kept, "length" if is_full else None)
