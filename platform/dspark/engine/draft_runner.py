"""The drafter's side of a step, for many requests at once.

Legend: R requests, G block size, V' draft vocabulary, m captured layers, d hidden size, n new tokens.

    after prefill and after every round    extend(memory, committed ids, features of the stored tokens)
    before a verification                  propose([…]) -> a whole block per request; the engine cuts it
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dspark.attention.page_pool import PageTable
from dspark.drafters.base import Drafter, ReadsTokens
from dspark.drafters.ngram import NGramDrafter
from dspark.speculation.proposal import Proposal


@dataclass(frozen=True)
class DraftRequest:
    """One request to draft for. anchor_id: its last committed token; max_tokens: at most so many draft tokens.

    noise_key: of a seeded request, whose draft tokens are drawn with its noise and without the generator; position:
    of the first token to draft, in prompt and output together. uniforms: numbers in [0, 1) to draw with in place of
    the generator, one per token. top_k: draw from so many most likely draft tokens only, renormalised, so that the
    proposal is small enough to travel; None draws from all.
    """

    memory: Any
    anchor_id: int
    max_tokens: int
    temperature: float
    generator: torch.Generator | None
    noise_key: int | None = None
    position: int = 0
    uniforms: Sequence[float] | None = None
    top_k: int | None = None


class DraftRunner(Protocol):
    """Drafts for the engine. kind: "dspark", "dflash", "ngram", …, as shown to users.

    max_context_tokens: positions it was made for, its block included; None = any. num_reread: features of a context's
    newest tokens that it is given whatever its pages hold already; None = of all tokens, it keeps nothing in pages.
    num_ids_behind: tokens behind a token that what it stores of that one depends on.
    """

    kind: str
    block_size: int
    target_layer_ids: tuple[int, ...]
    has_confidence: bool
    max_context_tokens: int | None
    num_reread: int | None
    num_ids_behind: int

    def new_memory(self, table: PageTable, stored_ids: Sequence[int] = ()) -> Any:
        """What the drafter keeps of one request; `table` says where its pages are, which hold `stored_ids` already."""
        ...

    def num_stored(self, memory: Any) -> int:
        """Tokens of the context that its pages hold for good; whatever else it keeps needs no page."""
        ...

    def store(self, memory: Any) -> None:
        """Store in pages what was put off until the request is drafted for."""
        ...

    def extend(self, memory: Any, committed_ids: Sequence[int], hidden: Tensor | None) -> None:
        """Take note of newly committed ids, and of the features [n, m*d] of tokens that the target has stored.

        The newest committed token has no features yet: it is stored by the next step.
        """
        ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """A proposal per request; it may be shorter than asked for."""
        ...


class SequentialDraftRunner:
    """One request after another through the drafter's own memory: serves any drafter, and is the paged one's twin.

    A drafter draws by itself and knows no request's noise, so that seeded requests get its most likely tokens.
    """

    def __init__(self, drafter: Drafter, *, kind: str = "sequential", has_confidence: bool = False) -> None:
        self.kind = kind
        self.has_confidence = has_confidence
        self.block_size = drafter.block_size
        self.target_layer_ids = drafter.target_layer_ids
        self.max_context_tokens: int | None = None
        self.num_reread: int | None = None
        self.num_ids_behind = 0
        self._drafter = drafter

    def new_memory(self, table: PageTable, stored_ids: Sequence[int] = ()) -> Any:
        assert not stored_ids, "this drafter keeps nothing in pages"
        return self._drafter.new_state()

    def num_stored(self, memory: Any) -> int:
        return 0

    def store(self, memory: Any) -> None:
        """Nothing is put off."""

    def extend(self, memory: Any, committed_ids: Sequence[int], hidden: Tensor | None) -> None:
        if isinstance(self._drafter, ReadsTokens):
            self._drafter.extend_ids(memory, committed_ids)
        if hidden is not None and hidden.shape[0]:
            self._drafter.extend_context(memory, hidden)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [
            self._drafter.propose(
                request.memory,
                request.anchor_id,
                max_tokens=request.max_tokens,
                temperature=request.temperature if request.noise_key is None else 0.0,
                generator=request.generator,
            )
            for request in requests
        ]


class NGramDraftRunner:
    """Prompt lookup: knows the ids alone, costs next to nothing."""

    kind = "ngram"
    has_confidence = False
    target_layer_ids: tuple[int, ...] = ()
    max_context_tokens: int | None = None
    num_reread: int | None = 0
    num_ids_behind = 0

    def __init__(self, drafter: NGramDrafter) -> None:
        self.block_size = drafter.block_size
        self._drafter = drafter

    def new_memory(self, table: PageTable, stored_ids: Sequence[int] = ()) -> Any:
        state = self._drafter.new_state()
        self._drafter.extend_ids(state, stored_ids)
        return state

    def num_stored(self, memory: Any) -> int:
        """All it knows: it needs no page."""
        return int(memory.num_tokens)

    def store(self, memory: Any) -> None:
        """Nothing is put off."""

    def extend(self, memory: Any, committed_ids: Sequence[int], hidden: Tensor | None) -> None:
        self._drafter.extend_ids(memory, committed_ids)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [self._drafter.propose(request.memory, max_tokens=request.max_tokens) for request in requests]
