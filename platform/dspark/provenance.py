"""Where an artefact comes from: fingerprints of content, git revision, files written whole or not at all."""

import contextlib
import fcntl
import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dspark.errors import Mismatch
from dspark.storage import Location, RemotePath, locate

FINGERPRINT_LENGTH = 16


def fingerprint(content: Any) -> str:
    """16 hex digits that identify a JSON-like value; equal for equal values, whatever the key order."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:FINGERPRINT_LENGTH]


def file_sha256(path: str | Location) -> str:
    """Hex SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    place = locate(path)
    with place.open_stream() if isinstance(place, RemotePath) else open(place, "rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def git_revision() -> str | None:
    """Commit of the checkout this package runs from, with `-dirty` appended; None outside a checkout."""
    folder = Path(__file__).parent
    try:
        revision = _git(folder, "rev-parse", "HEAD")
        return revision + ("-dirty" if _git(folder, "status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def write_json(path: str | Location, content: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never half of it."""
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False)
    write_bytes(path, (text + "\n").encode())


def write_bytes(path: str | Location, content: bytes) -> None:
    """Write a file so that a reader sees the old file or the new one, never half of it."""
    path = locate(path)
    if isinstance(path, RemotePath):
        path.write_bytes(content)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_sibling(path)
    try:
        with open(temporary, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def folder_lock(folder: str | Path) -> Iterator[None]:
    """Only one process of this host at a time; the rest wait. Released by the system when its holder dies."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def temporary_sibling(path: Path) -> Path:
    """A name beside `path` that no other process uses; readers ignore names starting with `.tmp-`."""
    return path.with_name(f".tmp-{os.getpid()}-{os.urandom(4).hex()}-{path.name}")


def read_json(path: str | Location) -> Any:
    """The content of a JSON file."""
    return json.loads(locate(path).read_text(encoding="utf-8"))


def require_same(what: str, expected: dict[str, Any], found: dict[str, Any], *, remedy: str) -> None:
    """Raises: Mismatch naming the first field in which `found` differs from `expected`."""
    for field in sorted(expected.keys() | found.keys()):
        if expected.get(field) != found.get(field):
            raise Mismatch(
                f"{what}: {field} is {found.get(field)!r} but {expected.get(field)!r} is asked for; {remedy}"
            )


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.strip()
