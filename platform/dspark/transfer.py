"""Files on their way to where artefacts lie, whole or not at all, and back into local copies to read from.

Copies of remote objects lie in `<cache folder>/mirror`, named for the content they were made from. They take what its
disk has free; those not used for the longest go first.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dspark.errors import Mismatch, MissingInput, OutOfSpace
from dspark.provenance import file_sha256, fingerprint, folder_lock, temporary_sibling
from dspark.storage import Location, RemotePath, cache_folder, locate

SPARE_BYTES = 1_000_000_000  # of the mirror's disk, left to others


@contextlib.contextmanager
def staged(path: Location) -> Iterator[Path]:
    """A local file to write; when the block ends without an error it becomes `path`, else nothing does."""
    if isinstance(path, RemotePath):
        with tempfile.TemporaryDirectory() as folder:
            temporary = Path(folder) / path.name
            yield temporary
            path.upload(temporary)
        return
    temporary = temporary_sibling(path)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def local_file(path: Location, *, sha256: str | None = None) -> Path:
    """The file itself, or a local copy of the object; made once for equal content, by one process at a time.

    sha256: of the content, if it is known; without it, size and time tell one content from another.
    Raises: MissingInput if there is no such object; Mismatch if its bytes are not those of `sha256`; OutOfSpace.
    """
    if not isinstance(path, RemotePath):
        return path
    info = path.info()
    if not info.is_file:
        raise MissingInput(f"no such object: {path}")
    # Without a time nothing tells an object from its successor of the same size, so that it is fetched every time.
    version = sha256 or (None if info.mtime_ns is None else [info.size, info.mtime_ns])
    folder = cache_folder() / "mirror" / fingerprint([str(path), version or os.urandom(8).hex()])
    copy = folder / path.name
    folder.mkdir(parents=True, exist_ok=True)
    with folder_lock(folder):
        if not copy.is_file():
            _fetch(path, copy, info.size, sha256)
        os.utime(copy)
    return copy


def local_folder(folder: str | Location, names: tuple[str, ...]) -> Path:
    """The folder itself, or a local one with copies of those of the named objects that are there."""
    place = locate(folder)
    if not isinstance(place, RemotePath):
        return place
    copies = {name: local_file(place / name) for name in names if (place / name).is_file()}
    version = fingerprint({name: str(copy) for name, copy in copies.items()})
    joined = cache_folder() / "mirror" / fingerprint([str(place), version])
    joined.mkdir(parents=True, exist_ok=True)
    for name, copy in copies.items():
        with contextlib.suppress(FileExistsError):
            os.link(copy, joined / name)
    return joined


def _fetch(path: RemotePath, copy: Path, size: int, sha256: str | None) -> None:
    _make_room(copy.parent.parent, size, path)
    temporary = temporary_sibling(copy)
    try:
        path.download(temporary)
        if temporary.stat().st_size != size or (sha256 is not None and file_sha256(temporary) != sha256):
            raise Mismatch(f"{path} is corrupt or changed while it was read; make it again with the job that wrote it")
        os.replace(temporary, copy)
    finally:
        temporary.unlink(missing_ok=True)


def _make_room(mirror: Path, size: int, path: RemotePath) -> None:
    """Remove copies not used for the longest until `size` bytes fit. Readers of a removed one keep their bytes."""
    by_use = sorted((file for file in mirror.glob("*/*") if file.is_file()), key=lambda file: file.stat().st_mtime_ns)
    for file in by_use:
        if shutil.disk_usage(mirror).free >= size + SPARE_BYTES:
            return
        shutil.rmtree(file.parent, ignore_errors=True)
    free = shutil.disk_usage(mirror).free
    if free < size + SPARE_BYTES:
        raise OutOfSpace(
            f"a local copy of {path} needs {size:,} bytes and {SPARE_BYTES:,} to spare, but {mirror} has {free:,} "
            "free; set DSPARK_HOME to a folder on a larger disk"
        )
