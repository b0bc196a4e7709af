"""What is asked for, and where output is cut: stop tokens, stop strings and the token limit, on every path."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from dspark.engine.output_text import OutputText
from dspark.engine.sampling import SamplingParams

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class GenerationRequest:
    """One completion to make.

    max_tokens: output ends after so many at the latest. stop_ids: any of them ends output and is its last id, without
    text. stop_strings: the text ends before the first one. seed: of sampled output; None draws differently each time.
    verify_length: draft tokens verified per step, 0..block_size; None lets the scheduler decide.
    Raises: ValueError for an empty stop string.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...] = ()
    seed: int | None = None
    verify_length: int | None = None

    def __post_init__(self) -> None:
        if "" in self.stop_strings:
            raise ValueError(f"stop_strings {list(self.stop_strings)} holds an empty string; leave it out")


@dataclass(frozen=True)
class Commit:
    """The tokens that stand of those offered, why output ends here (None: it goes on), and the text to show now."""

    kept: list[int]
    finish_reason: FinishReason | None
    text: str = ""


def commit(
    new_ids: Sequence[int],
    *,
    num_generated: int,
    stop_ids: Collection[int],
    max_tokens: int,
    text: OutputText | None = None,
) -> Commit:
    """The prefix of `new_ids` that is output: up to the first stop token, stop string or the limit, in this order.

    A stop token is kept as the last id; its text is not shown. A stop string's tokens are kept up to the one that
    completes it; the text ends before it, so that the decoded ids are the text and at most the stop itself. Either in
    the last place allowed counts as "stop".
    num_generated: tokens already output before these. text: the request's text so far, taken further; None: no text.
    """
    kept, finish_reason = _cut_ids(new_ids, max_tokens - num_generated, stop_ids)
    if text is None:
        return Commit(kept, finish_reason)
    shown = kept[:-1] if finish_reason == "stop" else kept
    num_shown = text.extend(shown)
    if text.is_stopped:
        return Commit(kept[:num_shown], "stop", text.take())
    return Commit(kept, finish_reason, text.take() if finish_reason is None else text.finish())


def _cut_ids(
    new_ids: Sequence[int], num_allowed: int, stop_ids: Collection[int]
) -> tuple[list[int], FinishReason | None]:
    kept: list[int] = []
    for token_id in new_ids:
        if len(kept) >= num_allowed:
            break
        kept.append(token_id)
        if token_id in stop_ids:
            return kept, "stop"
    return kept, "length" if len(kept) >= num_allowed else None
