"""What a draft replica takes from an engine: a message that does not fit the drafter is refused by name, before any of
it reaches the drafter, where it would end the replica for all engines.

Legend: n tokens of all parts of a message, m*d width of a token's features.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dspark.drafters.checkpoint import from_deepspec
from dspark.engine.draft_messages import ContextPart, DraftAsk, DraftMessage
from dspark.provenance import read_json

STORED_AS = {"float32": "float32", "float16": "float16", "bfloat16": "int16"}  # numpy knows no bfloat16
SIGN, INFINITE_BFLOAT16 = 0x7FFF, 0x7F80  # without the sign, bits from here on are no finite number


@dataclass(frozen=True)
class DraftInputs:
    """Of one drafter: m*d, the target's vocabulary, and draft tokens of a block at most."""

    feature_size: int
    vocabulary_size: int
    block_size: int

    @classmethod
    def of(cls, folder: str | Path) -> "DraftInputs":
        """From a drafter's config.json."""
        config = from_deepspec(read_json(Path(folder) / "config.json"))
        return cls(config.feature_size, config.vocab_size, config.block_size)

    def problem(self, message: DraftMessage) -> str | None:
        """What is wrong with a message and where, or None."""
        return next(self._problems(message), None)

    def _problems(self, message: DraftMessage) -> Iterator[str]:
        yield from self._of_features(message)
        for part in message.parts:
            yield from self._of_part(part)
        for ask in message.asks:
            yield from self._of_ask(ask)

    def _of_features(self, message: DraftMessage) -> Iterator[str]:
        features, expected = message.features, STORED_AS.get(message.dtype)
        num_tokens = sum(part.num_features for part in message.parts)
        if expected is None:
            yield f"features of type {message.dtype!r}; send one of {', '.join(STORED_AS)}"
        elif features.dtype != expected:
            yield f"features of {message.dtype} came as {features.dtype}; send them as {expected}"
        elif features.ndim != 2 or features.shape[0] != num_tokens:
            yield f"features of shape {features.shape}, but the parts speak of {num_tokens} tokens"
        elif num_tokens and features.shape[1] != self.feature_size:
            yield f"features are {features.shape[1]} wide, this drafter's {self.feature_size}"
        elif not is_finite(features):
            yield "features that are not finite numbers"

    def _of_part(self, part: ContextPart) -> Iterator[str]:
        where = f"part of context {part.handle}"
        if part.start < 0 or part.num_features < 0:
            yield f"{where}: start {part.start}, {part.num_features} features; neither is below 0"
        if len(part.token_ids) < part.num_features:
            yield f"{where}: {part.num_features} features for {len(part.token_ids)} token ids; each needs its id"
        yield from self._of_ids(where, part.token_ids)

    def _of_ask(self, ask: DraftAsk) -> Iterator[str]:
        where = f"request for context {ask.handle}"
        yield from self._of_ids(where, (ask.anchor_id,))
        if not 0 <= ask.max_tokens <= self.block_size:
            yield f"{where}: max_tokens {ask.max_tokens}; a block has {self.block_size}"
        if ask.num_context < 0 or ask.position < 0:
            yield f"{where}: num_context {ask.num_context}, position {ask.position}; neither is below 0"
        if not (math.isfinite(ask.temperature) and ask.temperature >= 0):
            yield f"{where}: temperature {ask.temperature}; send a finite one from 0 on"
        if ask.top_k is not None and ask.top_k < 1:
            yield f"{where}: top_k {ask.top_k}; send one from 1 on, or none"
        if ask.uniforms is not None and not _are_uniforms(ask.uniforms, ask.max_tokens):
            yield f"{where}: uniforms must be {ask.max_tokens} numbers from 0 on and below 1"

    def _of_ids(self, where: str, token_ids: tuple[int, ...]) -> Iterator[str]:
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.vocabulary_size):
            yield f"{where}: token ids from {min(token_ids)} to {max(token_ids)} for {self.vocabulary_size} tokens"


def is_finite(features: NDArray[np.generic]) -> bool:
    """Whether all of them are finite. features: floats, or bfloat16's bits as int16."""
    if features.dtype != np.int16:
        return bool(np.isfinite(features.astype(np.float32, copy=False)).all())
    magnitudes = features.view(np.uint16) & np.uint16(SIGN)
    return not magnitudes.size or int(magnitudes.max()) < INFINITE_BFLOAT16


def _are_uniforms(numbers: tuple[float, ...], num_expected: int) -> bool:
    return len(numbers) >= num_expected and all(0 <= number < 1 for number in numbers)
