"""Text of one request as its tokens come in, whole characters only.

    window    ids t_i … t_j, decoded together       run    ids t_j+1 … t_n
    text      [ out already | new | � ]             trailing byte pieces, not decoded yet

The window's older part is out and serves as context: whether a piece begins with a space, and which bytes belong to
one character, depends on what stands before it. Its start moves on, so that a token costs the same however long the
output is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
WINDOW_TOKENS = 32  # a longer window is shortened
CONTEXT_TOKENS = 12  # to this; 12 bytes hold at least 3 characters beside an unfinished one
CONTEXT_CHARACTERS = 3  # a character broken by the window's start ends within three bytes


@dataclass(frozen=True)
class TokenKinds:
    """Ids of a tokenizer that need care when text is made piece by piece; the same for all its requests.

    skipped_ids: special tokens, which have no text. byte_ids: the pieces <0x00> … <0xFF>, of which a whole run is one
    text or, if that is not UTF-8, one replacement character each.
    """

    skipped_ids: frozenset[int]
    byte_ids: frozenset[int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "TokenKinds":
        """Costs microseconds to milliseconds, by the number of special tokens."""
        special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        found: Any = tokenizer.convert_tokens_to_ids(names)  # the id of the unknown token, or None, for a missing name
        token_of = tokenizer.convert_ids_to_tokens
        pieces = {
            token_id
            for name, token_id in zip(names, found, strict=True)
            if token_id is not None and token_of(token_id) == name
        }
        return cls(frozenset(special), frozenset(pieces - special))


class Detokenizer:
    """Turns the output ids of one request into text, piece by piece.

    All pieces with that of `flush` joined are `tokenizer.decode(ids, skip_special_tokens=True)` without the cleanup of
    spaces. A piece never holds half a character; what could still become one is held back.
    prompt_ids: what the output continues, where it is raw text: a tokenizer that drops the space before the first word
    of a text then keeps that of the output. kinds: `TokenKinds.of(tokenizer)`, for many requests to share.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_ids: Sequence[int] = (),
        *,
        kinds: TokenKinds | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._kinds = TokenKinds.of(tokenizer) if kinds is None else kinds
        newest_first = list(islice(self._shown(reversed(prompt_ids)), CONTEXT_TOKENS))
        self._window = newest_first[::-1]
        self._run: list[int] = []
        self._num_out = len(self._decode(self._window))  # characters of the window's text that are out

    def append(self, token_ids: Sequence[int]) -> str:
        """The text that is now certain and was not before."""
        for token_id in self._shown(token_ids):
            self._run.append(token_id)
            if token_id not in self._kinds.byte_ids:
                self._window += self._run
                self._run = []
        text = self._decode(self._window)
        end = len(text) - text.endswith(REPLACEMENT)  # it may be the beginning of a character; those before it are not
        piece = text[self._num_out : end]
        self._num_out = max(self._num_out, end)
        if len(self._window) > WINDOW_TOKENS:
            self._shorten(num_held=len(text) - self._num_out)
        return piece

    def pending(self) -> str:
        """What is held back although it is text as it stands: byte pieces that more of them could still spoil."""
        if not self._run:
            return ""
        text = self._decode(self._window + self._run)[self._num_out :]
        return "" if REPLACEMENT in text else text

    def flush(self) -> str:
        """The rest: what was held back, as the tokenizer decodes it at the end of a text."""
        self._window += self._run
        self._run = []
        text = self._decode(self._window)
        piece = text[self._num_out :]
        self._num_out = len(text)
        return piece

    def _shorten(self, num_held: int) -> None:
        """Forget the window's start, unless too little text would be left to tell how the rest goes on."""
        window = self._window[-CONTEXT_TOKENS:]
        num_out = len(self._decode(window)) - num_held
        if num_out >= CONTEXT_CHARACTERS:
            self._window, self._num_out = window, num_out

    def _shown(self, token_ids: Any) -> Iterator[int]:
        return (token_id for token_id in token_ids if token_id not in self._kinds.skipped_ids)

    def _decode(self, token_ids: list[int]) -> str:
        text: Any = self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)
