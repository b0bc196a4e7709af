"""A folder of files that are written once and never change, bounded in bytes: the oldest make room for new ones."""

import logging
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from dspark.provenance import write_bytes
from dspark.storage import Location, locate, sizes_in

ROUNDS, TEXTS = "rounds", "texts"
SUFFIXES = {ROUNDS: ".parquet", TEXTS: ".jsonl"}
STALE_S = 3600.0  # age from which on a temporary file is one that a crash left behind
_NAME = re.compile(r"(rounds|texts)-(\d{15})-[\w.]+-\d{6}\.(parquet|jsonl)")

log = logging.getLogger("dspark.traffic")


class ShardFolder:
    """For one writer; others may write to the same folder, each under names of its own.

    Before a file is written room is made for it, so that one writer never passes max_bytes; several that write at the
    same moment may pass it by a file each.
    """

    def __init__(self, folder: str, *, writer: str, max_bytes: int) -> None:
        """writer: tells its files from others'."""
        self.place: Location = locate(folder)
        self.num_bytes = 0
        self.num_written = 0
        self.num_removed = 0
        self._writer = re.sub(r"[^\w.]", "_", writer)
        self._max_bytes = max_bytes

    def write(self, kind: str, content: bytes) -> str:
        """Name of the file that holds the content. Raises: OSError; ValueError where it never fits."""
        if len(content) > self._max_bytes:
            raise ValueError(f"{len(content):,} bytes do not fit into max_bytes ({self._max_bytes:,}); raise it")
        if isinstance(self.place, Path):
            self.place.mkdir(mode=0o700, parents=True, exist_ok=True)  # it may hold what users wrote
            _remove_stale(self.place)
        self.num_bytes = self._make_room(self._max_bytes - len(content))
        self.num_written += 1
        name = f"{kind}-{int(time.time() * 1000):015d}-{self._writer}-{self.num_written:06d}{SUFFIXES[kind]}"
        write_bytes(self.place / name, content)
        self.num_bytes += len(content)
        return name

    def _make_room(self, most: int) -> int:
        """Remove the oldest files until the folder holds `most` bytes or fewer; the bytes that it holds then."""
        sizes = {name: size for name, size in sizes_in(self.place).items() if _NAME.fullmatch(name)}
        total = sum(sizes.values())
        for name in sorted(sizes, key=_time_of):
            if total <= most:
                break
            (self.place / name).unlink(missing_ok=True)  # another writer may have been faster
            self.num_removed += 1
            total -= sizes[name]
        return total


def shard_names(folder: Location, kind: str) -> Iterator[str]:
    """Names of the folder's files of a kind, the newest first."""
    names = [name for name in sizes_in(folder) if _NAME.fullmatch(name) and name.startswith(kind)]
    yield from sorted(names, key=_time_of, reverse=True)


def _time_of(name: str) -> tuple[str, str, str]:
    """Milliseconds; a writer's files of the same one by their number."""
    _, milliseconds, _, number = name.split("-")
    return milliseconds, number.partition(".")[0], name


def _remove_stale(folder: Path) -> None:
    for path in folder.glob(".tmp-*"):
        try:
            if time.time() - path.stat().st_mtime > STALE_S:
                os.unlink(path)
        except FileNotFoundError:
            continue
