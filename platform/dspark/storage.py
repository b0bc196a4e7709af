"""Where artefacts lie: a path of this machine, or a URI of an object store that pyarrow or fsspec can open.

`locate` gives a `pathlib.Path` for the one and a `RemotePath` for the other. A store knows neither rename nor locks:
an object is written whole under its final name, and a folder's manifest last of all.
"""

import contextlib
import fnmatch
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from dspark.errors import one_line

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo, FileSystem

LOCAL_SCHEME = "file"


def cache_folder() -> Path:
    """Folder for what is fetched or built once per user: `$DSPARK_HOME`, else `dspark` in the user's cache folder."""
    if home := os.environ.get("DSPARK_HOME"):
        return Path(home).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dspark"


class RemotePath:
    """An object, or the common beginning of several, with the part of `pathlib.Path`'s interface that has a meaning.

    uri: for messages, and to open it again in another process. key: what the file system calls it.
    """

    def __init__(self, filesystem: "FileSystem", key: str, uri: str, query: str = "") -> None:
        self.filesystem = filesystem
        self.key = key
        self._uri = uri
        self._query = query

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> "RemotePath":
        return RemotePath(self.filesystem, self.key.rpartition("/")[0], self._uri.rpartition("/")[0], self._query)

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(self.filesystem, f"{self.key}/{name}", f"{self._uri}/{name}", self._query)

    def __str__(self) -> str:
        return self._uri + (f"?{self._query}" if self._query else "")

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __lt__(self, other: "RemotePath") -> bool:
        return self.key < other.key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def info(self) -> "FileInfo":
        """Kind, size and time of the object."""
        return self.filesystem.get_file_info(self.key)

    def is_file(self) -> bool:
        return bool(self.info().is_file)

    def glob(self, pattern: str) -> list["RemotePath"]:
        """Objects directly below whose names fit the pattern."""
        names = (name for name in sizes_in(self) if fnmatch.fnmatchcase(name, pattern))
        return [self / name for name in sorted(names)]

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Nothing: folders of a store are the names of its objects."""

    def read_bytes(self) -> bytes:
        with self.filesystem.open_input_stream(self.key) as stream:
            return bytes(stream.read())

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def open_stream(self) -> Any:
        """A binary stream over the object."""
        return self.filesystem.open_input_stream(self.key)

    def write_bytes(self, content: bytes) -> None:
        """Write the object whole, over the one that was there."""

        def write() -> None:
            with self.filesystem.open_output_stream(self.key) as stream:
                stream.write(content)

        self._with_folder(write)

    def upload(self, source: Path) -> None:
        """Write a file's content as this object. What fails on the way is removed where it can be."""
        from pyarrow import fs  # heavy, and not needed for local paths

        def copy() -> None:
            local = fs.LocalFileSystem()
            fs.copy_files(str(source), self.key, source_filesystem=local, destination_filesystem=self.filesystem)

        try:
            self._with_folder(copy)
        except BaseException:
            # Closing a stream is what makes an object, so that half of one may be there now.
            with contextlib.suppress(OSError):
                self.unlink(missing_ok=True)
            raise

    def download(self, destination: Path) -> None:
        """Copy the object into a file."""
        from pyarrow import fs  # heavy, and not needed for local paths

        fs.copy_files(
            self.key, str(destination), source_filesystem=self.filesystem, destination_filesystem=fs.LocalFileSystem()
        )

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            self.filesystem.delete_file(self.key)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_tree(self) -> None:
        """Remove all objects below."""
        self.filesystem.delete_dir_contents(self.key, missing_dir_ok=True)

    def _with_folder(self, write: Callable[[], None]) -> None:
        """Write, and once more after making the folder where the file system has real ones."""
        try:
            write()
        except FileNotFoundError:
            self.filesystem.create_dir(self.parent.key, recursive=True)
            write()


Location: TypeAlias = Path | RemotePath


def is_remote(path: "str | Location") -> bool:
    """Whether a path is a URI of somewhere else."""
    scheme, separator, _ = str(path).partition("://")
    return isinstance(path, RemotePath) or (bool(separator) and scheme != LOCAL_SCHEME)


def locate(path: "str | Location") -> Location:
    """The place that a path or URI names. Raises: ValueError for a URI that nothing here can open."""
    if isinstance(path, RemotePath | Path):
        return path
    if not is_remote(path):
        return Path(path.removeprefix(f"{LOCAL_SCHEME}://"))
    uri, _, query = path.partition("?")
    uri = uri.rstrip("/")
    filesystem, key = _open(uri, query)
    return RemotePath(filesystem, key.rstrip("/"), uri, query)


def absolute(path: str) -> str:
    """A path as every process of the cluster understands it: absolute, or a URI as it is."""
    return path if is_remote(path) else str(Path(path.removeprefix(f"{LOCAL_SCHEME}://")).expanduser().resolve())


def remove_tree(folder: Location) -> None:
    """Remove a folder and all in it, if it is there."""
    if isinstance(folder, RemotePath):
        folder.remove_tree()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def sizes_in(folder: Location) -> dict[str, int]:
    """Names and bytes of the files directly in a folder, in one request; none if it does not exist."""
    if isinstance(folder, Path):
        return {path.name: path.stat().st_size for path in folder.glob("*") if path.is_file()}
    from pyarrow.fs import FileSelector  # heavy, and not needed for local paths

    found = folder.filesystem.get_file_info(FileSelector(folder.key, allow_not_found=True))
    return {info.base_name: info.size for info in found if info.is_file}


def _open(uri: str, query: str) -> "tuple[FileSystem, str]":
    """pyarrow's own file system for a scheme, else the one that fsspec has for it."""
    import pyarrow as pa  # heavy, and not needed for local paths
    from pyarrow import fs

    remedy = "use a path, s3://, gs:// or another URI that pyarrow or fsspec knows, and check its credentials"
    try:
        opened: tuple[FileSystem, str] = fs.FileSystem.from_uri(f"{uri}?{query}" if query else uri)
        return opened
    except OSError as error:
        raise ValueError(f"cannot open {uri!r}: {one_line(error)}; {remedy}") from error
    except pa.ArrowInvalid as unknown:
        import fsspec  # comes with datasets; only for what pyarrow has no file system for

        scheme, _, key = uri.partition("://")
        try:
            filesystem = fsspec.filesystem(scheme, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise ValueError(f"cannot open {uri!r}: {one_line(unknown)}; {one_line(error)}; {remedy}") from None
        return fs.PyFileSystem(fs.FSSpecHandler(filesystem)), key
