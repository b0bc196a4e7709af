"""The text of one request's output, cut before the first stop string."""

from collections.abc import Sequence

from dspark.engine.detokenizer import Detokenizer


class OutputText:
    """Takes output tokens in and gives text out: never part of a character, nor what may begin a stop string.

    The text ends before the stop string that is complete first; of two complete at once, before the longer.
    stop_strings: none of them empty. num_unsearched: stop strings are not looked for in the text of so many tokens.
    """

    def __init__(self, detokenizer: Detokenizer, stop_strings: Sequence[str] = (), *, num_unsearched: int = 0) -> None:
        self.is_stopped = False
        self._num_unsearched = num_unsearched
        self._detokenizer = detokenizer
        self._stop_strings = tuple(stop_strings)
        self._ready = ""  # decided, not taken yet
        self._held = ""  # could be the beginning of a stop string

    def extend(self, token_ids: Sequence[int]) -> int:
        """Take tokens in up to the first that completes a stop string; how many that are. Then `is_stopped` says so."""
        assert not self.is_stopped, "the output has ended"
        if not self._stop_strings:
            self._ready += self._detokenizer.append(token_ids)
            return len(token_ids)
        for count, token_id in enumerate(token_ids, start=1):
            piece = self._detokenizer.append([token_id])
            if self._num_unsearched > 0:
                self._num_unsearched -= 1
                self._ready += piece
                continue
            self.is_stopped = self._grow(piece)
            if self.is_stopped:
                return count
        return len(token_ids)

    def take(self) -> str:
        """Text that can be shown now and was not taken before."""
        piece, self._ready = self._ready, ""
        return piece

    def finish(self) -> str:
        """The rest of the text, output having ended."""
        if not self.is_stopped:
            self._ready += self._held + self._detokenizer.flush()
            self._held = ""
        return self.take()

    def _grow(self, piece: str) -> bool:
        """Append text; whether a stop string is complete."""
        text = self._held + piece  # a stop string cannot begin before it
        complete = text + self._detokenizer.pending()
        start = find_stop(complete, self._stop_strings)
        if start is not None:
            self._ready += complete[:start]
            self._held = ""
            return True
        num_ready = len(text) - num_undecided(text, self._stop_strings)
        self._ready += text[:num_ready]
        self._held = text[num_ready:]
        return False


def find_stop(text: str, stop_strings: Sequence[str]) -> int | None:
    """Where the stop string begins that ends first in the text, the longest of those that end there; else None."""
    found = [(start + len(stop), start) for stop in stop_strings if (start := text.find(stop)) >= 0]
    return min(found)[1] if found else None


def num_undecided(text: str, stop_strings: Sequence[str]) -> int:
    """Characters at the text's end that more text could make a stop string of. text: holds no whole one."""
    longest = max(len(stop) for stop in stop_strings) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stop_strings):
            return length
    return 0
