"""What is asked for, and where output is cut: stop tokens, stop strings and the token limit, on every path."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from dspark.engine.output_text import OutputText
from dspark.engine.sampling import SamplingParams, sampling_problem

INT64 = 2**63

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class GenerationRequest:
    """One completion to make.

    max_tokens: output ends after so many at the latest. stop_ids: any of them ends output and is its last id, without
    text. stop_strings: the text ends before the first one. seed: of sampled output; None draws differently each time.
    choice: tells requests apart that ask for several answers with one seed. verify_length: draft tokens verified per
    step, 0..block_size; None lets the scheduler decide. priority: of smaller ones is served earlier and preempted
    later; among equal ones, first come, first served. continues_prompt: the prompt is raw text that the output's text
    goes on from, so a first word keeps the space before it. output_ids: the beginning of the output, made and shown by
    an engine that is gone; it is read, and the output goes on behind it as if it had been made here.
    Raises: ValueError for an empty stop string, a seed that no int64 holds.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...] = ()
    seed: int | None = None
    choice: int = 0
    verify_length: int | None = None
    priority: int = 0
    continues_prompt: bool = False
    output_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if "" in self.stop_strings:
            raise ValueError(f"stop_strings {list(self.stop_strings)} holds an empty string; leave it out")
        if self.seed is not None and not -INT64 <= self.seed < INT64:
            raise ValueError(f"seed is {self.seed}; use one of -2^63 to 2^63 - 1")


def check_request(
    request: GenerationRequest, *, max_context_tokens: int | None, block_size: int, vocabulary_size: int
) -> None:
    """Raises: ValueError (what, value, remedy) for a request that an engine with these limits can never run."""
    if not request.prompt_ids:
        raise ValueError("the prompt is empty; the target needs at least one token to start from")
    if request.max_tokens < 1:
        raise ValueError(f"max_tokens is {request.max_tokens}; use 1 or more")
    length = len(request.prompt_ids) + request.max_tokens
    if max_context_tokens is not None and length > max_context_tokens:
        raise ValueError(
            f"prompt ({len(request.prompt_ids)} tokens) and max_tokens ({request.max_tokens}) make {length}, over "
            f"the context of {max_context_tokens}; shorten one of them"
        )
    if len(request.output_ids) >= request.max_tokens:
        raise ValueError(f"{len(request.output_ids)} tokens are output already; max_tokens is {request.max_tokens}")
    if not all(0 <= token_id < vocabulary_size for token_id in request.output_ids):
        raise ValueError(f"output_ids hold an id outside of the vocabulary of {vocabulary_size}")
    forced = request.verify_length
    if forced is not None and not 0 <= forced <= block_size:
        raise ValueError(f"verify_length {forced} is outside of the drafter's block; use 0..{block_size}")
    problem = sampling_problem(
        request.sampling, stop_ids=request.stop_ids, max_tokens=request.max_tokens, vocabulary_size=vocabulary_size
    )
    if problem is not None:
        raise ValueError(problem[1])


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
