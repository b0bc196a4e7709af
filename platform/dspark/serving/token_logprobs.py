"""Log-probabilities of tokens as a client sees them: with text and bytes in place of ids, in OpenAI's two forms."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from dspark.engine.detokenizer import REPLACEMENT
from dspark.engine.step import TokenLogprobs
from dspark.serving.sampling_fields import Wire

LOWEST = -9999.0  # stands for minus infinity, which JSON does not have; OpenAI's and vLLM's number
WORD_START = "▁"  # sentencepiece's space
BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class ShownToken:
    """A token's text and bytes; the text of a part of a character is a replacement character, its bytes are its own."""

    text: str
    raw: bytes
    logprob: float


@dataclass(frozen=True)
class ShownLogprobs:
    """Of one output token: itself, and the most likely ones, best first."""

    own: ShownToken
    top: tuple[ShownToken, ...]


class TokenTexts:
    """What single tokens look like. For the thread that its tokenizer is used in."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._shown: dict[int, tuple[str, bytes]] = {}

    def show(self, logprobs: TokenLogprobs) -> ShownLogprobs:
        """The same with texts for ids."""
        return ShownLogprobs(
            self._token(logprobs.token_id, logprobs.logprob),
            tuple(self._token(token_id, logprob) for token_id, logprob in logprobs.top),
        )

    def _token(self, token_id: int, logprob: float) -> ShownToken:
        if token_id not in self._shown:
            self._shown[token_id] = self._look_up(token_id)
        return ShownToken(*self._shown[token_id], max(logprob, LOWEST))

    def _look_up(self, token_id: int) -> tuple[str, bytes]:
        text = str(self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False))
        piece = str(self._tokenizer.convert_ids_to_tokens(token_id))
        if piece.startswith(WORD_START) and not text.startswith(" "):  # dropped as if it began a text
            text = f" {text}"
        if REPLACEMENT not in text:
            return text, text.encode()
        if (named := BYTE_PIECE.fullmatch(piece)) is not None:
            return text, bytes([int(named[1], 16)])
        if all(character in byte_of() for character in piece):
            return text, bytes(byte_of()[character] for character in piece)
        return text, text.encode()


@functools.cache
def byte_of() -> dict[str, int]:
    """Byte-level BPE's characters: printable Latin-1 stands for itself, the other bytes for those from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


class ChatToken(Wire):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(ChatToken):
    top_logprobs: list[ChatToken]


class ChatLogprobs(Wire):
    """Of a chat's choice, whole or in part."""

    content: list[ChatTokenLogprob]


class TextLogprobs(Wire):
    """Of a completion's choice: one entry per token in each list; offsets in characters of the tokens' texts joined."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


def chat_logprobs(shown: Sequence[ShownLogprobs]) -> ChatLogprobs:
    return ChatLogprobs(
        content=[
            ChatTokenLogprob(**_fields(one.own), top_logprobs=[ChatToken(**_fields(other)) for other in one.top])
            for one in shown
        ]
    )


def text_logprobs(shown: Sequence[ShownLogprobs], *, offset: int) -> TextLogprobs:
    """offset: characters of the tokens before. The token itself is among its `top_logprobs`, as OpenAI has it."""
    offsets = []
    for one in shown:
        offsets.append(offset)
        offset += len(one.own.text)
    return TextLogprobs(
        tokens=[one.own.text for one in shown],
        token_logprobs=[one.own.logprob for one in shown],
        top_logprobs=[_best_by_text([one.own, *one.top]) for one in shown],
        text_offset=offsets,
    )


def _fields(shown: ShownToken) -> dict[str, Any]:
    return {"token": shown.text, "logprob": shown.logprob, "bytes": list(shown.raw)}


def _best_by_text(tokens: Sequence[ShownToken]) -> dict[str, float]:
    """Of several tokens with one text, the most likely."""
    ranked = sorted(tokens, key=lambda token: token.logprob)
    return {token.text: token.logprob for token in ranked}
