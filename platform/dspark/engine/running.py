"""One request while it runs: what it has read and written, where its KV memory lies, what its drafter knows."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch

from dspark.attention.page_pool import PageTable
from dspark.engine.draft_runner import DraftRequest
from dspark.engine.estimates import AcceptanceEstimate
from dspark.engine.logit_rules import LogitRules
from dspark.engine.lookup import CopyMemory
from dspark.engine.noise import stream_key
from dspark.engine.output_text import OutputText
from dspark.engine.request import GenerationRequest

DecodingMode = Literal["greedy", "seeded", "sampled"]


@dataclass
class RunningRequest:
    """table.num_tokens: tokens stored in KV memory. The newest output token, the anchor, is stored by the next step.

    steps_undrafted: decode steps since the request was last drafted for; is_probed: it is drafted for in this step
    only to see whether that pays again. confident_survival: of the present proposal's slots by its confidences alone;
    expected_survival: the same as they are admitted by, whatever it comes from.
    copies: what lookup knows of it, None where there is no lookup. order: its place among all that came; it keeps its
    turn when it has to wait again, which it did num_preemptions times. digests: of its first pages, as the prefix cache
    knows their text; is_awaited: others wait for those it is reading; num_cached: tokens of the prompt found there.
    is_draftable: not once its context is longer than the drafter's; memory is None then. generator:
    None unless it is sampled. rules: made when they are first applied.
    """

    request: GenerationRequest
    table: PageTable
    memory: Any
    text: OutputText | None
    generator: torch.Generator | None
    estimate: AcceptanceEstimate
    copies: CopyMemory | None = None
    rules: LogitRules | None = None
    output_ids: list[int] = field(default_factory=list)
    steps_undrafted: int = 0
    is_probed: bool = False
    confident_survival: list[float] | None = None
    expected_survival: list[float] = field(default_factory=list)
    order: int = 0
    num_preemptions: int = 0
    digests: list[bytes] = field(default_factory=list)
    is_awaited: bool = False
    num_cached: int = 0
    is_draftable: bool = True

    @property
    def num_known(self) -> int:
        """Tokens of the prompt and the output so far."""
        return len(self.request.prompt_ids) + len(self.output_ids)

    @property
    def num_context(self) -> int:
        """Tokens to have in KV memory before the next one is decoded: all but the anchor."""
        return self.num_known - bool(self.output_ids)

    @property
    def is_prefilled(self) -> bool:
        return self.num_unread == 0

    @property
    def num_unread(self) -> int:
        """Tokens to read before the request decodes: its prompt's, after a preemption its output's as well."""
        return max(0, self.num_context - self.table.num_tokens)

    @property
    def is_resumed(self) -> bool:
        """Whether it reads again what was read before: here until it was preempted, or by an engine that is gone."""
        return self.num_preemptions > 0 or bool(self.request.output_ids)

    @property
    def urgency(self) -> tuple[int, int]:
        """The smaller, the earlier its turn: by priority, then first come, first served."""
        return self.request.priority, self.order

    def ids(self, start: int, stop: int) -> list[int]:
        """Tokens start … stop-1 of prompt and output, as far as they are known."""
        first, last = (max(0, place - len(self.request.prompt_ids)) for place in (start, stop))
        return [*self.request.prompt_ids[start:stop], *self.output_ids[first:last]]

    @property
    def anchor_id(self) -> int:
        return self.output_ids[-1]

    @property
    def room(self) -> int:
        """Draft tokens that could still be output beside the target's own token, which every round outputs."""
        return self.request.max_tokens - len(self.output_ids) - 1

    @property
    def is_copied(self) -> bool:
        """Whether this step verifies a copy, in place of the drafter's proposal."""
        return self.copies is not None and self.copies.is_used

    @property
    def is_greedy(self) -> bool:
        return self.request.sampling.temperature == 0

    @cached_property
    def mode(self) -> DecodingMode:
        """How its tokens are decided: seeded by noise of its own, sampled with its generator."""
        if self.is_greedy:
            return "greedy"
        is_seeded = self.request.seed is not None and self.request.sampling.seeded == "invariant"
        return "seeded" if is_seeded else "sampled"

    @cached_property
    def noise_key(self) -> int:
        assert self.request.seed is not None, "only a seeded request has noise of its own"
        return stream_key(self.request.seed, self.request.choice)

    @property
    def next_position(self) -> int:
        """Of the next token to be output, in prompt and output together."""
        return len(self.request.prompt_ids) + len(self.output_ids)

    def past_survival(self, num_tokens: int) -> list[float]:
        """Survival from past rounds, of so many tokens that are drafted, or of the copy."""
        if self.is_copied and self.copies is not None:
            return self.copies.survival()
        return self.estimate.survival(num_tokens)

    def note_turn(self, *, is_drafted: bool) -> None:
        """A step in which the drafter is asked for it, or is not."""
        if is_drafted or not self.is_draftable:
            self.steps_undrafted = 0
        else:
            self.steps_undrafted += 1
            self.estimate.fade()

    def draft_request(self, max_tokens: int) -> DraftRequest:
        """To draft at most so many tokens behind the anchor."""
        return DraftRequest(
            memory=self.memory,
            anchor_id=self.anchor_id,
            max_tokens=max_tokens,
            temperature=self.request.sampling.temperature,
            generator=self.generator,
            noise_key=self.noise_key if self.mode == "seeded" else None,
            position=self.next_position,
        )


def stored_tokens(requests: Sequence[RunningRequest]) -> int:
    """What they have in KV memory, all together."""
    return sum(running.table.num_tokens for running in requests)


def new_generator(request: GenerationRequest, device: torch.device) -> torch.Generator | None:
    """What a request's tokens are drawn with; None for greedy and seeded ones, which draw nothing from one."""
    if request.sampling.temperature == 0 or (request.seed is not None and request.sampling.seeded == "invariant"):
        return None
    generator = torch.Generator(device)
    if request.seed is None:
        generator.seed()
    elif request.output_ids:  # other numbers than those that its output so far was drawn with
        generator.manual_seed(stream_key(stream_key(request.seed, request.choice), len(request.output_ids)))
    else:
        generator.manual_seed(request.seed + request.choice)
    return generator
