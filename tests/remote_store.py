"""A folder that is read and written as an object store is, and a death in the middle of an object."""

from pathlib import Path

import pytest

from dspark.storage import RemotePath


def folder_store(folder: Path) -> str:
    """URI of a folder that is read and written as a store is: through fsspec, not as a path."""
    return f"local://{folder}"


def killed_in_upload(patch: pytest.MonkeyPatch, *, at_name: str, share: float = 0.5) -> None:
    """The process dies while the named object is written, in a store that shows what has come by then."""
    upload = RemotePath.upload

    def interrupted(self: RemotePath, source: Path) -> None:
        if self.name != at_name:
            upload(self, source)
            return
        content = source.read_bytes()
        self.write_bytes(content[: int(len(content) * share)])
        raise KeyboardInterrupt

    patch.setattr(RemotePath, "upload", interrupted)
