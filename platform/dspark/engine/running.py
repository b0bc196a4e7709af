"""One request while it runs: what it has read and written, where its KV memory lies, what its drafter knows."""

from dataclasses import dataclass, field
from typing import Any

import torch

from dspark.attention.page_pool import PageTable
from dspark.engine.estimates import AcceptanceEstimate
from dspark.engine.lookup import CopyMemory
from dspark.engine.output_text import OutputText
from dspark.engine.request import GenerationRequest


@dataclass
class RunningRequest:
    """table.num_tokens: tokens stored in KV memory. The newest output token, the anchor, is stored by the next step.

    steps_undrafted: decode steps since the request was last drafted for; is_probed: it is drafted for in this step
    only to see whether that pays again. confident_survival: of the present proposal's slots by its confidences alone.
    copies: what lookup knows of it, None where there is no lookup.
    """

    request: GenerationRequest
    table: PageTable
    memory: Any
    text: OutputText | None
    generator: torch.Generator | None
    estimate: AcceptanceEstimate
    copies: CopyMemory | None = None
    output_ids: list[int] = field(default_factory=list)
    steps_undrafted: int = 0
    is_probed: bool = False
    confident_survival: list[float] | None = None

    @property
    def is_prefilled(self) -> bool:
        return self.table.num_tokens >= len(self.request.prompt_ids)

    @property
    def num_unread(self) -> int:
        """Prompt tokens not read yet."""
        return max(0, len(self.request.prompt_ids) - self.table.num_tokens)

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
