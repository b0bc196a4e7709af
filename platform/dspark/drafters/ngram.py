"""Drafting without a model: what followed the last few tokens when they last stood in prompt or output.

Legend: L tokens known, n length of a match, c position after the earlier match.

    ids     … a b c | x y z … a b c          n = 3: the newest earlier "a b c" is followed by x y z …
                    c               L
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pydantic
import torch

from dspark.config import Config
from dspark.drafters.drafting import check_length
from dspark.speculation.proposal import Proposal


class NGramConfig(Config):
    """How prompt lookup matches."""

    block_size: int = pydantic.Field(7, ge=1)
    """Draft tokens at most."""
    min_match: int = pydantic.Field(2, ge=1)
    """Shortest suffix looked up; a shorter one drafts more often and is wrong more often."""
    max_match: int = pydantic.Field(5, ge=1)
    """Longest suffix looked up, tried first. Costs one index entry per token and length."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "NGramConfig":
        if self.min_match > self.max_match:
            raise ValueError(f"min_match {self.min_match} is above max_match {self.max_match}; swap them")
        return self


@dataclass
class NGramState:
    """ids: all tokens of one request so far. followed_at: n-gram -> position c of the token after its newest place.

    The n-gram at the very end is not in it: nothing follows it yet, and it must not match itself.
    """

    ids: list[int] = field(default_factory=list)
    followed_at: dict[tuple[int, ...], int] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


class NGramDrafter:
    """Prompt lookup. It reads token ids, not target features, and has neither weights nor confidences."""

    target_layer_ids: tuple[int, ...] = ()

    def __init__(self, config: NGramConfig | None = None) -> None:
        self.config = NGramConfig() if config is None else config
        self.block_size = self.config.block_size

    def new_state(self) -> NGramState:
        """Empty memory for one request."""
        return NGramState()

    def extend_ids(self, state: NGramState, ids: Sequence[int]) -> None:
        """Append committed tokens, the anchor included: first the prompt's, then those of every round."""
        lengths = range(self.config.min_match, self.config.max_match + 1)
        for token_id in ids:
            end = len(state.ids)
            for length in lengths[: max(0, end - self.config.min_match + 1)]:
                state.followed_at[tuple(state.ids[end - length :])] = end
            state.ids.append(token_id)

    def propose(self, state: NGramState, max_tokens: int) -> Proposal:
        """The tokens that followed the newest earlier place of the longest suffix that has one; none without a match.

        Each is proposed with certainty (`probs` None: accepted with probability p_t). Where the known tokens run out,
        the copy goes on with its own tokens, as a repetition does. The ids are on the CPU.
        Raises: ValueError unless 0 <= max_tokens <= block_size.
        """
        copied = torch.tensor(self.copy(state, max_tokens), dtype=torch.long)
        return Proposal(copied, probs=None, confidence_logits=None)

    def copy(self, state: NGramState, max_tokens: int) -> list[int]:
        """The ids that `propose` proposes. Raises: ValueError as it does."""
        check_length(max_tokens, self.block_size)
        start = self._match(state)
        if start is None:
            return []
        copied: list[int] = []
        period = len(state.ids) - start
        for k in range(max_tokens):
            copied.append(state.ids[start + k] if k < period else copied[k - period])
        return copied

    def _match(self, state: NGramState) -> int | None:
        for length in range(self.config.max_match, self.config.min_match - 1, -1):
            start = state.followed_at.get(tuple(state.ids[-length:]))
            if start is not None:
                return start
        return None
