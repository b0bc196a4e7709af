"""Pages of KV memory found by the text they hold, so that what requests begin with alike is computed once.

Legend: S tokens of a page, b tokens behind a page that its content depends on too.

    page k     tokens k*S … (k+1)*S - 1; found by a digest of tokens 0 … (k+1)*S - 1 + b

What a target stores of a token depends on the tokens up to it: b = 0. EAGLE-3 and MTP store of a token what they make
of the one behind it, too, or of several: b is their number of modules. Only whole pages of committed tokens that both
the target and the drafter have stored are published; rejected tokens never are.
"""

import hashlib
from array import array
from collections.abc import Sequence

from dspark.attention.page_pool import PagePool
from dspark.engine.running import RunningRequest


class PrefixCache:
    """Publishes the pages of running requests and finds those of a new one's text. num_ids_behind: b."""

    def __init__(self, pool: PagePool, *, page_size: int, num_ids_behind: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self._num_ids_behind = num_ids_behind
        self._readers: dict[bytes, RunningRequest] = {}  # of pages nobody has published yet

    def digests(self, ids: Sequence[int], num_tokens: int) -> list[bytes]:
        """Of the whole pages among the first `num_tokens` of a text, as far as enough tokens stand behind them."""
        num_pages = max(0, min(num_tokens, len(ids) - self._num_ids_behind)) // self._page_size
        digests: list[bytes] = []
        for page in range(num_pages):
            start, stop = self._span(page)
            digests.append(_digest(digests[-1] if digests else b"", ids[start:stop]))
        return digests

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """The pages that hold a text's beginning, up to the first that nothing is found for."""
        pages: list[int] = []
        for digest in digests:
            page = self._pool.find(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def announce(self, running: RunningRequest, digests: Sequence[bytes]) -> None:
        """A request begins to read the text of these pages; who is reading it already stays its reader."""
        for digest in digests:
            reader = self._readers.get(digest)
            if reader is None or reader.is_prefilled:
                self._readers[digest] = running

    def withdraw(self, running: RunningRequest) -> None:
        """It reads no more."""
        for digest in [digest for digest, reader in self._readers.items() if reader is running]:
            del self._readers[digest]

    def readers(self, digests: Sequence[bytes]) -> list[RunningRequest]:
        """Of each of these pages, who is reading it, up to the first that nobody reads."""
        readers: list[RunningRequest] = []
        for digest in digests:
            reader = self._readers.get(digest)
            if reader is None or reader.is_prefilled:
                break
            readers.append(reader)
        return readers

    def publish(self, running: RunningRequest, num_stored: int) -> None:
        """Let the whole pages among a request's first `num_stored` tokens be found.

        num_stored: committed tokens that target and drafter have stored for good.
        """
        digests, table = running.digests, running.table
        for page in range(len(digests), num_stored // self._page_size):
            start, stop = self._span(page)
            ids = running.ids(start, stop)
            assert len(ids) == stop - start, "a page is published before the tokens behind it are known"
            digests.append(_digest(digests[-1] if digests else b"", ids))
            self._pool.publish(table.pages[page], digests[-1])
            self._readers.pop(digests[-1], None)

    def _span(self, page: int) -> tuple[int, int]:
        """The tokens that a page's digest adds to that of the page before."""
        return page * self._page_size, (page + 1) * self._page_size + self._num_ids_behind


def _digest(before: bytes, ids: Sequence[int]) -> bytes:
    """Nobody can write a text that is found in place of another: the digest is a cryptographic one."""
    return hashlib.sha256(before + array("q", ids).tobytes()).digest()
